/* AVX-512 (F, BW, DQ, VL, VBMI, VNNI, BF16): products of few rows, which read the canonical codes as they are stored.
 *
 * Codes are unpacked without moving them between 32-bit lanes, and x is put into the order in which they come out,
 * once a call. Groups are multiples of 16, so a lane never holds codes of two groups within a chunk of a row, and
 * the lanes' sums over a chunk are scaled with one multiplication by a vector of scales.
 * Several rows are worked on together, so that a piece of x in a register serves them all; they lie far apart,
 * because one stream a thread reaches only a part of the memory's bandwidth.
 */
#include "native.h"

#if QKV_X86

#include <stdlib.h>

#include "avx512.h"

/* Constants of the compiler's, by which the kernels are specialized. */
struct shape {
    int bits;
    int path;
    int zero; /* has zero points */
    int M;    /* rows of x */
    int R;    /* rows of the weight worked on together */
};
enum { STREAMED_ROWS = 8 }; /* of x, at most, of canonical codes; more are multiplied by strips */

enum {
    EXACT,  /* fp32 products */
    BFLOAT, /* bf16 products; 4 bits: chunks of 128 codes; 8 bits: of 64 */
    WIDE,   /* bf16 products of 8-bit codes in chunks of 128: groups are multiples of 64 */
};

QKV_INLINE int chunk_length(int bits, int path) { return bits == 4 || path == WIDE ? 128 : 64; }

/* Vectors of prepared x a chunk takes. */
QKV_INLINE int chunk_vectors(int bits, int path) { return chunk_length(bits, path) / (path == EXACT ? 16 : 32); }

/* ---- preparing x ---- */

/* `count` elements of x from `from` on as fp32, then zeros up to `padded`. */
TARGET static void load_x(const struct qkv_linear_job *job, ptrdiff_t from, ptrdiff_t count, float *to, int padded)
{
    if (count > padded) count = padded;
    for (int i = 0; i < padded; i += 16) {
        ptrdiff_t left = count - i;
        __mmask16 mask = left >= 16 ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
        __m512 value;
        if (job->dtype == QKV_F32) {
            value = _mm512_maskz_loadu_ps(mask, (const float *)job->x + from + i);
        } else {
            __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)job->x + from + i);
            value = job->dtype == QKV_F16
                        ? _mm512_cvtph_ps(half)
                        : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
        _mm512_store_ps(to + i, value);
    }
}

/* Element `8 lane + vector` (4 bits, the two of a byte exchanged) or `4 lane + vector` to [vector][lane]. */
TARGET static void order_exact(const float *x, float *to, int bits)
{
    int vectors = bits == 4 ? 8 : 4;
    __m512i lanes = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                       _mm512_set1_epi32(vectors));
    for (int v = 0; v < vectors; ++v)
        _mm512_store_ps(to + 16 * v, _mm512_i32gather_ps(lanes, x + (bits == 4 ? v ^ 1 : v), 4));
}

/* Eight elements at a time, in the order in which unpacking the bytes of a vector gives them. */
TARGET static void order_bytes(const uint16_t *x, __m512i *to, int path)
{
    for (int v = 0; v < (path == WIDE ? 4 : 2); ++v) {
        for (int k = 0; k < 4; ++k) {
            int eight = path == WIDE ? k / 2 * 8 + v / 2 * 4 + k % 2 * 2 + v % 2 : k * 2 + v;
            _mm_store_si128((__m128i *)(to + v) + k, _mm_load_si128((const __m128i *)(x + 8 * eight)));
        }
    }
}

TARGET static __m512 lane_sums(const __m512i *ordered, int vectors)
{
    __m512 total = _mm512_setzero_ps();
    for (int v = 0; v < vectors; ++v) {
        __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(ordered[v], 16));
        __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(ordered[v], _mm512_set1_epi32((int)0xffff0000u)));
        total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
    }
    return total;
}

/* Chunk `c` of row `m` of x: its vectors to job->px, what goes with them to job->psum. */
TARGET static void prepare_chunk(struct qkv_linear_job *job, ptrdiff_t m, ptrdiff_t c, int bits, int path)
{
    int length = chunk_length(bits, path), vectors = chunk_vectors(bits, path);
    ptrdiff_t at = c * job->rows + m, left = job->w.in - c * length, from = m * job->w.in + c * length;
    char *to = (char *)job->px + at * vectors * 64;
    __attribute__((aligned(64))) float values[128];
    if (path == EXACT) {
        load_x(job, from, left, values, length);
        order_exact(values, (float *)to, bits);
        return;
    }
    uint16_t *halves = (uint16_t *)values;
    ptrdiff_t count = left < 0 ? 0 : left < length ? left : length;
    memset(halves + count, 0, (size_t)(length - count) * 2);
    if (count) memcpy(halves, (const uint16_t *)job->x + from, (size_t)count * 2);
    if (bits == 4) qkv_order_nibbles(halves, (__m512i *)to);
    else order_bytes(halves, (__m512i *)to, path);
    if (job->w.zero) _mm512_store_ps(job->psum + at * 16, lane_sums((__m512i *)to, vectors));
}

/* Which scales each chunk needs, and which of them each lane. */
static void plan_groups(struct qkv_linear_job *job, int length)
{
    ptrdiff_t group = job->w.group, first = 0, offset = 0; /* where in group `first` the chunk begins */
    for (ptrdiff_t c = 0; c < job->chunks; ++c) {
        ptrdiff_t at = offset;
        int32_t index = 0;
        for (int lane = 0; lane < 16; ++lane, at += length / 16) {
            if (at >= group && job->w.groups > 1) at -= group, ++index; /* a single one may end within a lane */
            job->pattern[16 * c + lane] = index;
        }
        if (index >= job->needed) job->needed = index + 1;
        job->first[c] = (int32_t)first;
        for (offset += length; offset >= group; offset -= group) ++first;
    }
    ptrdiff_t whole = job->w.groups * group / length;
    while (whole && job->first[whole - 1] + job->needed > job->w.groups) --whole;
    job->whole = whole;
}

static void *carve(char **from, ptrdiff_t bytes)
{
    char *piece = *from;
    *from += (bytes + 63) / 64 * 64;
    return piece;
}

static int allocate(struct qkv_linear_job *job, int vectors)
{
    ptrdiff_t pieces = job->chunks * job->rows, plan = (job->chunks * 4 + 63) / 64 * 64;
    job->scratch = malloc((size_t)(pieces * (vectors * 64 + 64) + job->chunks * 64 + plan + 64));
    if (!job->scratch) return 0;
    char *at = (char *)(((uintptr_t)job->scratch + 63) & ~(uintptr_t)63);
    job->px = carve(&at, pieces * vectors * 64);
    job->psum = carve(&at, pieces * 64);
    job->pattern = carve(&at, job->chunks * 64);
    job->first = carve(&at, job->chunks * 4);
    return 1;
}

/* ---- unpacking ---- */

/* bf16 of the integers 0 ... 127, split into low and high bytes. */
static uint8_t integer_low[128], integer_high[128];

__attribute__((constructor)) static void fill_integers(void)
{
    for (int code = 0; code < 128; ++code) {
        uint16_t half = (uint16_t)(qkv_bits((float)code) >> 16);
        integer_low[code] = (uint8_t)half;
        integer_high[code] = (uint8_t)(half >> 8);
    }
}

/* 128 four-bit codes to four vectors of bf16. `halves` holds the levels twice: an index of five bits then ignores
 * its highest one, which belongs to the next code. */
INLINE void unpack_nibbles_bf16(__m512i raw, __m512i halves, __m512i *to)
{
    to[0] = _mm512_permutexvar_epi16(raw, halves);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), halves);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), halves);
    to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), halves);
}

/* 64 signed codes to two vectors of bf16: magnitude by tables, then the sign; -128 is not in the tables. */
INLINE void unpack_bytes_bf16(__m512i raw, __m512i *to)
{
    const __m512i sign = _mm512_set1_epi8((char)0x80), lowest = _mm512_set1_epi8((char)0xc3); /* of bf16 -128 */
    __m512i size = _mm512_abs_epi8(raw);
    __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(integer_low), size, _mm512_loadu_si512(integer_low + 64));
    __m512i high =
        _mm512_permutex2var_epi8(_mm512_loadu_si512(integer_high), size, _mm512_loadu_si512(integer_high + 64));
    high = _mm512_ternarylogic_epi32(high, raw, sign, 0xf8); /* high | (raw & sign) */
    high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(raw, sign), lowest);
    to[0] = _mm512_unpacklo_epi8(low, high);
    to[1] = _mm512_unpackhi_epi8(low, high);
}

INLINE __m512 unpack_exact(__m512i raw, __m512 levels, const int bits, const int v)
{
    if (bits == 4) return _mm512_permutexvar_ps(_mm512_srli_epi32(raw, 4 * v), levels);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(raw, 24 - 8 * v), 24));
}

/* ---- one tile: R output features for M rows of x ---- */

/* Where the R rows of the weight begin. */
struct rows {
    const uint8_t *codes[4], *zero[4];
    const float *scale[4];
};

/* What is the same for all rows of the weight in one chunk. */
struct chunk {
    int whole;                   /* a constant of the compiler's: no need of the first two masks */
    __mmask64 mask, mask_second; /* which codes exist, and which of the second 64 bytes of a wide chunk */
    __mmask16 held;              /* which scales to load */
    ptrdiff_t byte, first;
    __m512i pattern; /* the scale of each lane */
};

INLINE __mmask64 first_bits(ptrdiff_t count) { return count >= 64 ? ~0ull : count <= 0 ? 0 : (1ull << count) - 1; }

INLINE struct chunk chunk_at(const struct qkv_linear_job *job, ptrdiff_t c, const int whole, const struct shape s)
{
    const struct qkv_weight *w = &job->w;
    const ptrdiff_t bytes = chunk_length(s.bits, s.path) * s.bits / 8, left = w->groups * w->group_bytes - c * bytes;
    struct chunk chunk = {.whole = whole, .byte = c * bytes, .first = job->first[c]};
    chunk.pattern = _mm512_load_si512(job->pattern + 16 * c);
    chunk.mask = first_bits(left);
    chunk.mask_second = first_bits(left - 64);
    chunk.held = (__mmask16)first_bits(whole ? job->needed : w->groups - chunk.first);
    return chunk;
}

/* What to fetch from memory early: this far ahead the stream of a row is read next. */
#define AHEAD 512

/* 64 bytes of codes, as signed numbers where a byte is a code; `second` for the other half of a wide chunk. */
INLINE __m512i load_codes(const struct rows *rows, int r, const struct chunk *chunk, const int second,
                          const struct shape s)
{
    const uint8_t *at = rows->codes[r] + chunk->byte + 64 * second;
    _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0);
    __m512i raw = chunk->whole ? _mm512_loadu_si512(at)
                               : _mm512_maskz_loadu_epi8(second ? chunk->mask_second : chunk->mask, at);
    return s.bits == 8 && s.zero ? _mm512_xor_si512(raw, _mm512_set1_epi8((char)0x80)) : raw;
}

INLINE __m512 load_scale(const struct rows *rows, int r, const struct chunk *chunk)
{
    return _mm512_permutexvar_ps(chunk->pattern, _mm512_maskz_loadu_ps(chunk->held, rows->scale[r] + chunk->first));
}

INLINE __m512 load_zero(const struct rows *rows, int r, const struct chunk *chunk, const struct shape s)
{
    if (!s.zero) return _mm512_setzero_ps();
    __m512i point = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(chunk->held, rows->zero[r] + chunk->first));
    if (s.bits == 8) point = _mm512_sub_epi32(point, _mm512_set1_epi32(128));
    return _mm512_permutexvar_ps(chunk->pattern, _mm512_cvtepi32_ps(point));
}

INLINE __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

INLINE void chunk_exact(const struct rows *rows, const struct chunk *chunk, const char *x, __m512 levels, __m512 *acc,
                        const struct shape s)
{
    const int vectors = chunk_vectors(s.bits, EXACT);
    __m512i raw[4];
    __m512 zero[4], sum[16];
    QKV_UNROLL
    for (int r = 0; r < s.R; ++r) {
        raw[r] = load_codes(rows, r, chunk, 0, s);
        zero[r] = load_zero(rows, r, chunk, s);
    }
    QKV_UNROLL
    for (int v = 0; v < vectors; ++v) {
        __m512 value[4];
        QKV_UNROLL
        for (int r = 0; r < s.R; ++r) {
            value[r] = unpack_exact(raw[r], levels, s.bits, v);
            if (s.zero) value[r] = _mm512_sub_ps(value[r], zero[r]);
        }
        QKV_UNROLL
        for (int m = 0; m < s.M; ++m) {
            __m512 piece = _mm512_load_ps((const float *)(x + 64 * (m * vectors + v)));
            QKV_UNROLL
            for (int r = 0; r < s.R; ++r) {
                __m512 *to = sum + r * s.M + m;
                *to = v ? _mm512_fmadd_ps(value[r], piece, *to) : _mm512_mul_ps(value[r], piece);
            }
        }
    }
    QKV_UNROLL
    for (int r = 0; r < s.R; ++r) {
        __m512 scale = load_scale(rows, r, chunk);
        QKV_UNROLL
        for (int m = 0; m < s.M; ++m) acc[r * s.M + m] = _mm512_fmadd_ps(sum[r * s.M + m], scale, acc[r * s.M + m]);
    }
}

INLINE void chunk_bf16(const struct rows *rows, const struct chunk *chunk, const char *x, const float *x_sum,
                       __m512i halves, __m512 *acc, const struct shape s)
{
    const int vectors = chunk_vectors(s.bits, s.path);
    __m512i value[4][4];
    __m512 scale[4], zero[4];
    QKV_UNROLL
    for (int r = 0; r < s.R; ++r) {
        __m512i raw = load_codes(rows, r, chunk, 0, s);
        scale[r] = load_scale(rows, r, chunk);
        zero[r] = load_zero(rows, r, chunk, s);
        if (s.bits == 4) {
            unpack_nibbles_bf16(raw, halves, value[r]);
        } else if (s.path == WIDE) { /* lanes 0-7 hold the first 64 codes, lanes 8-15 the second */
            __m512i second = load_codes(rows, r, chunk, 1, s);
            unpack_bytes_bf16(_mm512_shuffle_i64x2(raw, second, 0x44), value[r]);
            unpack_bytes_bf16(_mm512_shuffle_i64x2(raw, second, 0xee), value[r] + 2);
        } else {
            unpack_bytes_bf16(raw, value[r]);
        }
    }
    QKV_UNROLL
    for (int m = 0; m < s.M; ++m) {
        __m512 sum[4];
        QKV_UNROLL
        for (int v = 0; v < vectors; ++v) {
            __m512i piece = _mm512_load_si512(x + 64 * (m * vectors + v));
            QKV_UNROLL
            for (int r = 0; r < s.R; ++r) sum[r] = dot_bf16(v ? sum[r] : _mm512_setzero_ps(), value[r][v], piece);
        }
        QKV_UNROLL
        for (int r = 0; r < s.R; ++r) {
            if (s.zero) sum[r] = _mm512_fnmadd_ps(zero[r], _mm512_load_ps(x_sum + 16 * m), sum[r]);
            acc[r * s.M + m] = _mm512_fmadd_ps(sum[r], scale[r], acc[r * s.M + m]);
        }
    }
}

/* Sums of the lanes of four vectors. */
INLINE __m128 reduce4(const __m512 *v)
{
    __m128 folded[4];
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) {
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v[i]), _mm512_extractf32x8_ps(v[i], 1));
        folded[i] = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }
    return _mm_hadd_ps(_mm_hadd_ps(folded[0], folded[1]), _mm_hadd_ps(folded[2], folded[3]));
}

INLINE void finish(const struct qkv_linear_job *job, const ptrdiff_t *row, const __m512 *acc, const struct shape s)
{
    float result[16];
    QKV_UNROLL
    for (int i = 0; i < s.R * s.M; i += 4) _mm_storeu_ps(result + i, reduce4(acc + i));
    QKV_UNROLL
    for (int r = 0; r < s.R; ++r) {
        float bias = job->bias ? qkv_load(job->bias, job->bias_dtype, row[r]) : 0.0f;
        QKV_UNROLL
        for (int m = 0; m < s.M; ++m)
            qkv_store(job->y, job->dtype, m * job->w.out + row[r], result[r * s.M + m] + bias);
    }
}

INLINE void chunk_any(const struct qkv_linear_job *job, const struct rows *rows, ptrdiff_t c, const int whole,
                      __m512 levels, __m512i halves, __m512 *acc, const struct shape s)
{
    const struct chunk chunk = chunk_at(job, c, whole, s);
    const char *x = (const char *)job->px + c * s.M * 64 * chunk_vectors(s.bits, s.path);
    if (s.path == EXACT) chunk_exact(rows, &chunk, x, levels, acc, s);
    else chunk_bf16(rows, &chunk, x, job->psum + c * s.M * 16, halves, acc, s);
}

INLINE void tile(const struct qkv_linear_job *job, const ptrdiff_t *row, const struct shape s)
{
    const struct qkv_weight *w = &job->w;
    struct rows rows;
    QKV_UNROLL
    for (int r = 0; r < s.R; ++r) {
        rows.codes[r] = w->codes + row[r] * w->groups * w->group_bytes;
        rows.scale[r] = w->scale + row[r] * w->groups;
        rows.zero[r] = s.zero ? w->zero + row[r] * w->groups : NULL;
    }
    __m512 acc[16];
    QKV_UNROLL
    for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
    const __m512 levels = s.bits == 4 ? four_bit_levels(w) : _mm512_setzero_ps();
    const __m512i halves = qkv_halved_levels(w);
    ptrdiff_t c = 0;
    for (; c < job->whole; ++c) chunk_any(job, &rows, c, 1, levels, halves, acc, s);
    for (; c < job->chunks; ++c) chunk_any(job, &rows, c, 0, levels, halves, acc, s);
    finish(job, row, acc, s);
}

/* R streams through [begin, end), as far apart as they can be; the last rows of a stream may be done twice. */
INLINE void stream(const struct qkv_linear_job *job, ptrdiff_t begin, ptrdiff_t end, const struct shape s)
{
    ptrdiff_t length = (end - begin + s.R - 1) / s.R;
    for (ptrdiff_t i = 0; i < length; ++i) {
        ptrdiff_t row[4];
        for (int r = 0; r < s.R; ++r) row[r] = begin + r * length + i < end ? begin + r * length + i : end - 1;
        tile(job, row, s);
    }
}

/* ---- the table of kernels ---- */

#define KERNEL(bits, path, zero, M, R)                                                                          \
    TARGET static void kernel_##bits##path##zero##M(void *job, ptrdiff_t begin, ptrdiff_t end)                  \
    {                                                                                                           \
        stream(job, begin, end, (struct shape){bits, path, zero, M, R});                                        \
    }
#define EXACT_KERNELS(bits, zero)                                                                               \
    KERNEL(bits, EXACT, zero, 1, 4)                                                                             \
    KERNEL(bits, EXACT, zero, 2, 2)                                                                             \
    KERNEL(bits, EXACT, zero, 3, 2)                                                                             \
    KERNEL(bits, EXACT, zero, 4, 2)                                                                             \
    static const qkv_body kernels_##bits##EXACT##zero[] = {                                                     \
        kernel_##bits##EXACT##zero##1, kernel_##bits##EXACT##zero##2, kernel_##bits##EXACT##zero##3,            \
        kernel_##bits##EXACT##zero##4};
#define BYTE_KERNELS(path, zero)                                                                                \
    KERNEL(8, path, zero, 1, 4)                                                                                 \
    static const qkv_body kernels_8##path##zero[] = {kernel_8##path##zero##1};
#define NIBBLE_KERNELS(path, zero)                                                                              \
    KERNEL(4, path, zero, 1, 4)                                                                                 \
    KERNEL(4, path, zero, 2, 4)                                                                                 \
    KERNEL(4, path, zero, 3, 2)                                                                                 \
    KERNEL(4, path, zero, 4, 2)                                                                                 \
    KERNEL(4, path, zero, 5, 2)                                                                                 \
    KERNEL(4, path, zero, 6, 2)                                                                                 \
    KERNEL(4, path, zero, 7, 2)                                                                                 \
    KERNEL(4, path, zero, 8, 2)                                                                                 \
    static const qkv_body kernels_4##path##zero[] = {                                                           \
        kernel_4##path##zero##1, kernel_4##path##zero##2, kernel_4##path##zero##3, kernel_4##path##zero##4,     \
        kernel_4##path##zero##5, kernel_4##path##zero##6, kernel_4##path##zero##7, kernel_4##path##zero##8};
EXACT_KERNELS(4, 0)
EXACT_KERNELS(4, 1)
EXACT_KERNELS(8, 0)
EXACT_KERNELS(8, 1)
NIBBLE_KERNELS(BFLOAT, 0)
NIBBLE_KERNELS(BFLOAT, 1)
BYTE_KERNELS(BFLOAT, 0)
BYTE_KERNELS(BFLOAT, 1)
BYTE_KERNELS(WIDE, 0)
BYTE_KERNELS(WIDE, 1)

static qkv_body choose(int bits, int path, int zero, ptrdiff_t rows)
{
    static const qkv_body *const four[2][2] = {{kernels_4EXACT0, kernels_4EXACT1}, {kernels_4BFLOAT0, kernels_4BFLOAT1}};
    static const qkv_body *const eight[3][2] = {
        {kernels_8EXACT0, kernels_8EXACT1}, {kernels_8BFLOAT0, kernels_8BFLOAT1}, {kernels_8WIDE0, kernels_8WIDE1}};
    return (bits == 4 ? four[path][zero] : eight[path][zero])[rows - 1];
}

static int is_fast(const struct qkv_linear_job *job) { return job->fast && job->dtype == QKV_BF16; }

/* A lane must not hold codes of two groups. */
static int is_aligned(const struct qkv_linear_job *job) { return job->w.group % 16 == 0 || job->w.groups == 1; }

/* x in fp32 for more rows than four does not fit the nearest cache; in bf16, the copy of x is kept below 8 MB. */
ptrdiff_t qkv_avx512_most_rows(const struct qkv_linear_job *job)
{
    if (!is_aligned(job)) return qkv_avx2_ops.most_rows(job);
    ptrdiff_t fitting = ((ptrdiff_t)4 << 20) / (job->w.in + 1);
    return !is_fast(job) ? 4 : fitting > 16 ? fitting : 16;
}

qkv_body qkv_avx512_linear(struct qkv_linear_job *job)
{
    if (!is_aligned(job)) return qkv_avx2_ops.linear(job);
    int bits = job->w.kind == QKV_INT8 ? 8 : 4;
    if (job->w.interleaved || (is_fast(job) && job->rows > STREAMED_ROWS)) return qkv_avx512_strips(job);
    if (is_fast(job) && bits == 8 && job->rows > 1) return qkv_avx512_bytes(job);
    int path = !is_fast(job) ? EXACT : bits == 8 && job->w.group % 64 == 0 ? WIDE : BFLOAT;
    int length = chunk_length(bits, path);
    job->chunks = (job->w.groups * job->w.group + length - 1) / length;
    if (!allocate(job, chunk_vectors(bits, path))) return NULL;
    for (ptrdiff_t c = 0; c < job->chunks; ++c)
        for (ptrdiff_t m = 0; m < job->rows; ++m) prepare_chunk(job, m, c, bits, path);
    plan_groups(job, length);
    return choose(bits, path, job->w.zero != NULL, job->rows);
}

#endif
