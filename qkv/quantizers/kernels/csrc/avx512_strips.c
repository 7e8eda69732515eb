/* AVX-512 with BF16 and VNNI: products of several rows of x; of interleaved codes, of one too.
 *
 * Two strips of output features are worked on together; their codes are unpacked to registers without their scales and used
 * at once, for a tile of rows of x after the other. Codes of four bits become bf16 levels, exact for integers, zero point
 * included, while those of nf4 are rounded. Those of eight bits become integers of 16, which is cheaper, and x is scaled to
 * 16 bits in segments of up to 64 elements (within 1e-4 of the product; 64 products fit into 32 bits). Sums over a group
 * are scaled in fp32. What a row of x gives does not depend on how many rows there are.
 */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

enum { AHEAD = 2048 }; /* bytes of a strip that are fetched from memory early */

/* ---- unpacking ---- */

/* bf16 of -15 ... 16: what a code less its zero point can be. */
INLINE __m512i difference_table(void)
{
    __attribute__((aligned(64))) uint16_t table[32];
    for (int i = 0; i < 32; ++i) table[i] = (uint16_t)(qkv_bits((float)(i - 15)) >> 16);
    return _mm512_load_si512(table);
}

INLINE __m512i table_of(const struct qkv_weight *w)
{
    return w->kind == QKV_INT8 ? _mm512_setzero_si512() : w->zero ? difference_table() : qkv_halved_levels(w);
}

/* Pair `v` of a unit of 4-bit codes in bf16. */
INLINE __m512i halves(__m512i raw, const int v, __m512i table, __m512i offset, const int zero)
{
    __m512i index = v ? _mm512_srli_epi16(raw, 4 * v) : raw;
    if (zero) index = _mm512_add_epi16(_mm512_and_si512(index, _mm512_set1_epi16(15)), offset);
    return _mm512_permutexvar_epi16(index, table);
}

/* Pair `v` of a unit of 8-bit codes in 16 bits: the first and the third, or the second and the fourth. */
INLINE __m512i words(__m512i raw, const int v, __m512i offset, const int zero)
{
    if (!zero) return _mm512_srai_epi16(v ? raw : _mm512_slli_epi16(raw, 8), 8);
    return _mm512_sub_epi16(v ? _mm512_srli_epi16(raw, 8) : _mm512_and_si512(raw, _mm512_set1_epi16(255)), offset);
}

/* Zero points of a strip in group `g`, twice in 16 bits: what is added to a four-bit code to find it in the table, or taken
 * from one of eight bits. */
INLINE __m512i offset_at(const uint8_t *zero, ptrdiff_t g, const int bits)
{
    __m512i point = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(zero + STRIP * g)));
    if (bits == 4) point = _mm512_sub_epi32(_mm512_set1_epi32(15), point);
    return _mm512_or_si512(point, _mm512_slli_epi32(point, 16));
}

/* ---- a tile of x and two strips ---- */

INLINE __m512i dot(__m512i sum, __m512i pair, __m512i codes, const int bits)
{
    if (bits == 8) return _mm512_dpwssd_epi32(sum, pair, codes);
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)pair, (__m512bh)codes));
}

/* A unit of both strips times the pairs of x that belong to it. */
INLINE void multiply(__m512i left, __m512i right, const int32_t *x, __m512i (*sum)[2], __m512i table,
                     const __m512i *offset, const int M, const int bits, const int zero)
{
    const __m512i raw[2] = {left, right};
    QKV_UNROLL
    for (int v = 0; v < unit_length(bits) / 2; ++v) {
        __m512i codes[2];
        QKV_UNROLL
        for (int i = 0; i < 2; ++i)
            codes[i] = bits == 8 ? words(raw[i], v, offset[i], zero) : halves(raw[i], v, table, offset[i], zero);
        QKV_UNROLL
        for (int m = 0; m < M; ++m) {
            __m512i pair = _mm512_set1_epi32(x[v * M + m]);
            QKV_UNROLL
            for (int i = 0; i < 2; ++i) sum[m][i] = dot(sum[m][i], pair, codes[i], bits);
        }
    }
}

/* Adds the sums over a segment to `total` [M][32], scaled. */
INLINE void scale_up(__m512i (*sum)[2], const float *left, const float *right, const float *factor, __m512 (*total)[2],
                     const int M, const int bits)
{
    QKV_UNROLL
    for (int m = 0; m < M; ++m) {
        QKV_UNROLL
        for (int i = 0; i < 2; ++i) {
            __m512 by = _mm512_loadu_ps(i ? right : left);
            if (bits == 8) by = _mm512_mul_ps(by, _mm512_set1_ps(factor[m]));
            __m512 value = bits == 8 ? _mm512_cvtepi32_ps(sum[m][i]) : _mm512_castsi512_ps(sum[m][i]);
            total[m][i] = _mm512_fmadd_ps(value, by, total[m][i]);
            sum[m][i] = _mm512_setzero_si512();
        }
    }
    __asm__ volatile("" ::: "memory"); /* lest `total` be kept in registers that the loops need */
}

INLINE void times_x(const struct qkv_linear_job *job, const struct strip *strips, const int32_t *x, const float *factor,
                    __m512 (*total)[2], __m512i table, const int M, const int bits, const int zero)
{
    const int unit = unit_length(bits);
    const ptrdiff_t whole = group_units(&job->w), most = bits == 8 ? job->segment / unit : whole;
    const __m512i *left = strips[0].codes, *right = strips[1].codes;
    __m512i sum[TILE_ROWS][2], offset[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    QKV_UNROLL
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
    for (ptrdiff_t g = 0; g < job->w.groups; ++g) {
        for (int i = 0; zero && i < 2; ++i) offset[i] = offset_at(strips[i].zero, g, bits);
        for (ptrdiff_t units = whole; units > 0; units -= most, factor += TILE_ROWS) {
            const __m512i *stop = left + (units < most ? units : most);
            for (; left < stop; ++left, ++right, x += unit / 2 * M) {
                _mm_prefetch((const char *)left + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)right + AHEAD, _MM_HINT_T0);
                multiply(_mm512_loadu_si512(left), _mm512_loadu_si512(right), x, sum, table, offset, M, bits, zero);
            }
            scale_up(sum, strips[0].scale + STRIP * g, strips[1].scale + STRIP * g, factor, total, M, bits);
        }
    }
}

typedef void (*tile_function)(const struct qkv_linear_job *job, const struct strip *strips, const int32_t *x,
                              const float *factor, __m512 (*total)[2], __m512i table);

#define TILE(bits, zero, M)                                                                                     \
    TARGET static void tile_##bits##zero##_##M(const struct qkv_linear_job *job, const struct strip *strips,    \
                                               const int32_t *x, const float *factor, __m512 (*total)[2],       \
                                               __m512i table)                                                   \
    {                                                                                                           \
        times_x(job, strips, x, factor, total, table, M, bits, zero);                                           \
    }
#define TILES(bits, zero)                                                                                       \
    TILE(bits, zero, 1)                                                                                         \
    TILE(bits, zero, 2)                                                                                         \
    TILE(bits, zero, 3)                                                                                         \
    TILE(bits, zero, 4)                                                                                         \
    TILE(bits, zero, 5)                                                                                         \
    TILE(bits, zero, 6)                                                                                         \
    TILE(bits, zero, 7)                                                                                         \
    TILE(bits, zero, 8)                                                                                         \
    static const tile_function tiles_##bits##zero[TILE_ROWS] = {                                                \
        tile_##bits##zero##_1, tile_##bits##zero##_2, tile_##bits##zero##_3, tile_##bits##zero##_4,             \
        tile_##bits##zero##_5, tile_##bits##zero##_6, tile_##bits##zero##_7, tile_##bits##zero##_8};
TILES(4, 0)
TILES(4, 1)
TILES(8, 0)
TILES(8, 1)

static const tile_function *tiles_of(const struct qkv_weight *w)
{
    static const tile_function *const tiles[2][2] = {{tiles_40, tiles_41}, {tiles_80, tiles_81}};
    return tiles[w->kind == QKV_INT8][w->zero != NULL];
}

/* ---- output features [begin, end) ---- */

/* Rounds the sums of a tile and adds the bias. */
TARGET static void finish(const struct qkv_linear_job *job, const __m512 (*total)[2], int side, ptrdiff_t row,
                          ptrdiff_t held, ptrdiff_t start, ptrdiff_t M)
{
    __attribute__((aligned(64))) float bias[STRIP] = {0};
    const __mmask16 mask = held >= STRIP ? 0xffff : (__mmask16)((1u << held) - 1);
    for (ptrdiff_t r = 0; job->bias && r < held && r < STRIP; ++r) bias[r] = qkv_load(job->bias, job->bias_dtype, row + r);
    for (ptrdiff_t m = 0; m < M; ++m) {
        __m512 value = _mm512_add_ps(total[m][side], _mm512_load_ps(bias));
        _mm256_mask_storeu_epi16((uint16_t *)job->y + (start + m) * job->w.out + row, mask,
                                 (__m256i)_mm512_cvtneps_pbh(value));
    }
}

static struct strip strip_at(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, char *room)
{
    if (!w->interleaved) return qkv_gather_strip(w, row, end, room);
    return (struct strip){(const __m512i *)(w->codes + row * w->groups * w->group_bytes), w->scale + row * w->groups,
                          w->zero ? w->zero + row * w->groups : NULL};
}

/* Strip after strip of the first half, each with one of the second half (a middle one is done twice): they lie apart
 * because one stream a thread reaches only a part of the memory's bandwidth. */
TARGET static void body(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    const struct qkv_linear_job *job = pointer;
    const tile_function *tiles = tiles_of(&job->w);
    const __m512i table = table_of(&job->w);
    const ptrdiff_t half = (end - begin + 2 * STRIP - 1) / (2 * STRIP) * STRIP;
    const size_t bytes = job->w.interleaved ? 0 : qkv_strip_bytes(&job->w);
    char *all = malloc(2 * bytes + 64);
    if (!all) abort();
    char *room = (char *)(((uintptr_t)all + 63) & ~(uintptr_t)63);
    for (ptrdiff_t row = begin; row < begin + half; row += STRIP) {
        const ptrdiff_t rows[2] = {row, row + half < end ? row + half : row};
        const struct strip strips[2] = {strip_at(&job->w, rows[0], end, room), strip_at(&job->w, rows[1], end, room + bytes)};
        for (ptrdiff_t tile = 0; tile < job->tiles; ++tile) {
            const ptrdiff_t start = tile_start(job, tile), M = tile_start(job, tile + 1) - start;
            __m512 total[TILE_ROWS][2];
            for (int m = 0; m < M; ++m) total[m][0] = total[m][1] = _mm512_setzero_ps();
            tiles[M - 1](job, strips, tile_pairs(job, tile), tile_factors(job, tile), total, table);
            for (int side = 0; side < 2; ++side)
                finish(job, (const __m512(*)[2])total, side, rows[side], end - rows[side], start, M);
        }
    }
    free(all);
}

qkv_body qkv_avx512_strips(struct qkv_linear_job *job)
{
    job->unit = 2 * STRIP;
    return qkv_order_tiles(job) ? body : NULL;
}

#endif
