/* AVX2: bf16 x times groups of 64 codes in 16-bit integers; everything else by decoding rows to fp32.
 *
 * The integer path scales x to 16 bits, 64 elements at a time (within 1e-4 of the product), and turns four-bit codes
 * into 16-bit levels with byte shuffles. What a row of x gives does not depend on how many rows there are.
 */
#include "native.h"

#if QKV_X86

#include <immintrin.h>
#include <stdlib.h>

#include "quantize.h"

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE QKV_INLINE TARGET

/* ---- decoding ---- */

/* Eight codes of four bits, in order, as lanes of an index. */
INLINE __m256i spread_nibbles(const uint8_t *codes)
{
    int32_t four;
    memcpy(&four, codes, sizeof four);
    return _mm256_srlv_epi32(_mm256_set1_epi32(four), _mm256_set_epi32(24, 28, 16, 20, 8, 12, 0, 4));
}

/* values[index & 15] of each lane. */
INLINE __m256 look_up(__m256i index, __m256 low, __m256 high)
{
    __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
}

INLINE __m256 clamp(__m256 value, float limit)
{
    return _mm256_min_ps(_mm256_max_ps(value, _mm256_set1_ps(-limit)), _mm256_set1_ps(limit));
}

/* As qkv_decode_group, from element `from` (a multiple of 8) of the group on. */
TARGET static void decode_group(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t at, ptrdiff_t from,
                                ptrdiff_t count, float *to)
{
    ptrdiff_t index = row * w->groups + at, i = 0;
    const uint8_t *codes = w->codes + index * w->group_bytes + (w->kind == QKV_INT8 ? from : from / 2);
    if (w->kind == QKV_INT8) {
        __m256 scale = _mm256_set1_ps(w->scale[index]);
        __m256i zero = _mm256_set1_epi32(w->zero ? w->zero[index] : 0);
        for (; i + 8 <= count; i += 8) {
            __m128i raw = _mm_loadl_epi64((const void *)(codes + i));
            __m256i code = w->zero ? _mm256_sub_epi32(_mm256_cvtepu8_epi32(raw), zero) : _mm256_cvtepi8_epi32(raw);
            __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(code), scale);
            _mm256_storeu_ps(to + i, w->zero ? clamp(value, FLT_MAX) : value);
        }
    } else {
        float values[16];
        qkv_values(w, index, values);
        __m256 low = _mm256_loadu_ps(values), high = _mm256_loadu_ps(values + 8);
        for (; i + 8 <= count; i += 8) _mm256_storeu_ps(to + i, look_up(spread_nibbles(codes + i / 2), low, high));
    }
    if (i < count) {
        struct qkv_weight rest = *w;
        rest.codes = w->codes + (w->kind == QKV_INT8 ? from + i : (from + i) / 2);
        qkv_decode_group(&rest, row, at, count - i, to + i);
    }
}

/* ---- decoded rows: fp32, any group size ---- */

enum { DECODED_ROWS = 4 };

/* Products of four decoded rows, `stride` apart, with one row of x. */
TARGET static void dot4(const float *rows, ptrdiff_t stride, const float *x, ptrdiff_t count, float *to)
{
    __m256 sums[4][2];
    for (int r = 0; r < 4; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    ptrdiff_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256 first = _mm256_loadu_ps(x + i), second = _mm256_loadu_ps(x + i + 8);
        QKV_UNROLL
        for (int r = 0; r < 4; ++r) {
            sums[r][0] = _mm256_fmadd_ps(_mm256_loadu_ps(rows + r * stride + i), first, sums[r][0]);
            sums[r][1] = _mm256_fmadd_ps(_mm256_loadu_ps(rows + r * stride + i + 8), second, sums[r][1]);
        }
    }
    for (int r = 0; r < 4; ++r) {
        float lanes[8], total = 0.0f;
        _mm256_storeu_ps(lanes, _mm256_add_ps(sums[r][0], sums[r][1]));
        for (int lane = 0; lane < 8; ++lane) total += lanes[lane];
        for (ptrdiff_t j = i; j < count; ++j) total += rows[r * stride + j] * x[j];
        to[r] = total;
    }
}

TARGET static void decoded_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct qkv_linear_job *job = pointer;
    const struct qkv_weight *w = &job->w;
    ptrdiff_t stride = (w->in + 15) / 16 * 16;
    float *decoded = malloc((size_t)(DECODED_ROWS * stride) * sizeof *decoded);
    if (!decoded) abort();
    for (ptrdiff_t row = begin; row < end; row += DECODED_ROWS) {
        ptrdiff_t held = end - row < DECODED_ROWS ? end - row : DECODED_ROWS;
        for (ptrdiff_t r = 0; r < held; ++r)
            for (ptrdiff_t at = 0; at < w->groups; ++at) {
                ptrdiff_t start = at * w->group, left = w->in - start;
                decode_group(w, row + r, at, 0, left < w->group ? left : w->group, decoded + r * stride + start);
            }
        for (ptrdiff_t r = held; r < DECODED_ROWS; ++r) memset(decoded + r * stride, 0, (size_t)stride * sizeof *decoded);
        for (ptrdiff_t m = 0; m < job->rows; ++m) {
            float sums[DECODED_ROWS];
            dot4(decoded, stride, (const float *)job->px + m * w->in, w->in, sums);
            for (ptrdiff_t r = 0; r < held; ++r) {
                float bias = job->bias ? qkv_load(job->bias, job->bias_dtype, row + r) : 0.0f;
                qkv_store(job->y, job->dtype, m * w->out + row + r, sums[r] + bias);
            }
        }
    }
    free(decoded);
}

/* ---- the integer path ---- */

enum { SEGMENT = 64, LEVEL_ONE = 8192 }; /* 64 products of 14 and 16 bits, eight a lane, just fit into 32 bits */

/* Element of a segment that word `i` of vector `v` of prepared x holds. */
QKV_INLINE int element_of(int bits, int v, int i)
{
    return bits == 8 ? 16 * v + i : v / 2 + v % 2 * 16 + i / 8 * 32 + i % 8 * 2;
}

/* A segment of x in 16 bits; its lane sums; the factor back, which NaN and infinity spoil. */
TARGET static void prepare_segment(struct qkv_linear_job *job, ptrdiff_t m, ptrdiff_t segment, int bits)
{
    float values[SEGMENT], absmax = 0.0f, spoilt = 0.0f;
    ptrdiff_t start = segment * SEGMENT, at = segment * job->rows + m;
    for (int i = 0; i < SEGMENT; ++i) {
        values[i] = start + i < job->w.in ? qkv_load(job->x, job->dtype, m * job->w.in + start + i) : 0.0f;
        float size = values[i] < 0 ? -values[i] : values[i];
        absmax = size > absmax ? size : absmax;
        spoilt += values[i] - values[i];
    }
    float inverse = absmax > 1e-30f && absmax <= FLT_MAX ? 32767.0f / absmax : 0.0f;
    int16_t *to = (int16_t *)job->px + at * SEGMENT;
    __m256i sums = _mm256_setzero_si256();
    for (int v = 0; v < 4; ++v) {
        for (int i = 0; i < 16; ++i) to[16 * v + i] = (int16_t)_mm_cvtss_si32(_mm_set_ss(values[element_of(bits, v, i)] * inverse));
        __m256i words = _mm256_load_si256((const __m256i *)to + v);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
    }
    float one = job->w.kind == QKV_NF4 ? (float)LEVEL_ONE : 1.0f;
    _mm256_store_ps(job->psum + at * 16, _mm256_cvtepi32_ps(sums));
    job->psum[at * 16 + 8] = absmax / 32767.0f / one + spoilt;
}

/* 64 codes as four vectors of 16-bit levels. */
INLINE void unpack(const uint8_t *codes, __m256i low_bytes, __m256i high_bytes, __m256i *to, const int bits,
                   const int zero)
{
    if (bits == 8) {
        QKV_UNROLL
        for (int v = 0; v < 4; ++v) {
            __m128i raw = _mm_loadu_si128((const __m128i *)codes + v);
            to[v] = zero ? _mm256_cvtepu8_epi16(raw) : _mm256_cvtepi8_epi16(raw);
        }
        return;
    }
    __m256i raw = _mm256_loadu_si256((const __m256i *)codes), nibble = _mm256_set1_epi8(15);
    QKV_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
        __m256i index = _mm256_and_si256(odd ? raw : _mm256_srli_epi16(raw, 4), nibble);
        __m256i low = _mm256_shuffle_epi8(low_bytes, index), high = _mm256_shuffle_epi8(high_bytes, index);
        to[2 * odd] = _mm256_unpacklo_epi8(low, high);
        to[2 * odd + 1] = _mm256_unpackhi_epi8(low, high);
    }
}

INLINE float sum_lanes(__m256 v)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE void integer_tile(const struct qkv_linear_job *job, const ptrdiff_t *row, __m256i low_bytes, __m256i high_bytes,
                         const int R, const int M, const int bits, const int zero)
{
    const struct qkv_weight *w = &job->w;
    const ptrdiff_t row_bytes = w->groups * w->group_bytes, group_segments = w->group / SEGMENT;
    __m256 acc[8];
    QKV_UNROLL
    for (int i = 0; i < 8; ++i) acc[i] = _mm256_setzero_ps();
    const int16_t *x = job->px;
    const float *sums = job->psum;
    ptrdiff_t byte = 0;
    for (ptrdiff_t at = 0; at < w->groups; ++at) {
        for (ptrdiff_t part = 0; part < group_segments; ++part, byte += SEGMENT * bits / 8) {
            QKV_UNROLL
            for (int r = 0; r < R; ++r) {
                const uint8_t *codes = w->codes + row[r] * row_bytes + byte;
                _mm_prefetch((const char *)codes + 512, _MM_HINT_T0);
                __m256i value[4];
                unpack(codes, low_bytes, high_bytes, value, bits, zero);
                float scale = w->scale[row[r] * w->groups + at];
                float point = zero ? (float)w->zero[row[r] * w->groups + at] : 0.0f;
                QKV_UNROLL
                for (int m = 0; m < M; ++m) {
                    const __m256i *piece = (const __m256i *)(x + m * SEGMENT);
                    __m256i whole = _mm256_madd_epi16(value[0], _mm256_load_si256(piece));
                    QKV_UNROLL
                    for (int v = 1; v < 4; ++v)
                        whole = _mm256_add_epi32(whole, _mm256_madd_epi16(value[v], _mm256_load_si256(piece + v)));
                    __m256 sum = _mm256_cvtepi32_ps(whole);
                    if (zero) sum = _mm256_fnmadd_ps(_mm256_set1_ps(point), _mm256_load_ps(sums + 16 * m), sum);
                    __m256 factor = _mm256_set1_ps(scale * sums[16 * m + 8]);
                    acc[r * M + m] = _mm256_fmadd_ps(sum, factor, acc[r * M + m]);
                }
            }
            x += M * SEGMENT;
            sums += M * 16;
        }
    }
    for (int r = 0; r < R; ++r) {
        float bias = job->bias ? qkv_load(job->bias, job->bias_dtype, row[r]) : 0.0f;
        for (int m = 0; m < M; ++m)
            qkv_store(job->y, job->dtype, m * w->out + row[r], sum_lanes(acc[r * M + m]) + bias);
    }
}

/* R rows together, as far apart as they can be; the last rows of a stream may be done twice. */
INLINE void stream(const struct qkv_linear_job *job, ptrdiff_t begin, ptrdiff_t end, const int R, const int M,
                   const int bits, const int zero)
{
    uint8_t low[16], high[16];
    for (int code = 0; code < 16; ++code) {
        float level = job->w.kind == QKV_NF4 ? qkv_nf4_levels[code] * LEVEL_ONE : (float)(code - (zero ? 0 : 8));
        int16_t word = (int16_t)_mm_cvtss_si32(_mm_set_ss(level));
        low[code] = (uint8_t)word;
        high[code] = (uint8_t)(word >> 8);
    }
    __m256i low_bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)low));
    __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)high));
    ptrdiff_t length = (end - begin + R - 1) / R;
    for (ptrdiff_t i = 0; i < length; ++i) {
        ptrdiff_t row[4];
        for (int r = 0; r < R; ++r) row[r] = begin + r * length + i < end ? begin + r * length + i : end - 1;
        integer_tile(job, row, low_bytes, high_bytes, R, M, bits, zero);
    }
}

#define KERNEL(bits, zero, M, R)                                                                                \
    TARGET static void kernel_##bits##zero##M(void *job, ptrdiff_t begin, ptrdiff_t end)                        \
    {                                                                                                           \
        stream(job, begin, end, R, M, bits, zero);                                                              \
    }
#define KERNELS(bits, zero)                                                                                     \
    KERNEL(bits, zero, 1, 4)                                                                                    \
    KERNEL(bits, zero, 2, 2)                                                                                    \
    KERNEL(bits, zero, 3, 2)                                                                                    \
    KERNEL(bits, zero, 4, 2)
#define NAMES(bits, zero) {kernel_##bits##zero##1, kernel_##bits##zero##2, kernel_##bits##zero##3, kernel_##bits##zero##4}
KERNELS(4, 0)
KERNELS(4, 1)
KERNELS(8, 0)
KERNELS(8, 1)
static const qkv_body kernels[2][2][4] = {{NAMES(4, 0), NAMES(4, 1)}, {NAMES(8, 0), NAMES(8, 1)}};

enum { FAST_ROWS = 4 };

/* ---- the choice ---- */

static int is_integer(const struct qkv_linear_job *job)
{
    return job->fast && job->dtype == QKV_BF16 && job->w.group % SEGMENT == 0;
}

static ptrdiff_t most_rows(const struct qkv_linear_job *job) { return is_integer(job) ? FAST_ROWS : 16; }

static qkv_body integer_linear(struct qkv_linear_job *job)
{
    ptrdiff_t segments = job->w.groups * job->w.group / SEGMENT, pieces = segments * job->rows;
    int bits = job->w.kind == QKV_INT8 ? 8 : 4;
    job->scratch = malloc((size_t)(pieces * (SEGMENT * 2 + 64) + 64));
    if (!job->scratch) return NULL;
    char *at = (char *)(((uintptr_t)job->scratch + 63) & ~(uintptr_t)63);
    job->px = at;
    job->psum = (float *)(at + pieces * SEGMENT * 2);
    for (ptrdiff_t segment = 0; segment < segments; ++segment)
        for (ptrdiff_t m = 0; m < job->rows; ++m) prepare_segment(job, m, segment, bits);
    return kernels[bits == 8][job->w.zero != NULL][job->rows - 1];
}

static qkv_body linear(struct qkv_linear_job *job)
{
    if (is_integer(job)) return integer_linear(job);
    return qkv_portable_ops.linear(job) ? decoded_rows : NULL; /* the same prepared x: plain fp32 */
}

/* ---- dequantizing ---- */

INLINE __m128i to_bf16(__m256 value)
{
    __m256i bits = _mm256_castps_si256(value), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i round = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    __m256i halves = _mm256_srli_epi32(_mm256_add_epi32(bits, round), 16);
    __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    halves = _mm256_blendv_epi8(halves, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

TARGET static void store_values(const float *values, ptrdiff_t count, void *to, ptrdiff_t at, int dtype)
{
    ptrdiff_t i = 0;
    for (; dtype != QKV_F32 && i + 8 <= count; i += 8) {
        __m256 value = _mm256_loadu_ps(values + i);
        __m128i halves = dtype == QKV_BF16 ? to_bf16(value) : _mm256_cvtps_ph(clamp(value, 65504.0f), 0);
        _mm_storeu_si128((__m128i *)((uint16_t *)to + at + i), halves);
    }
    for (; i < count; ++i) qkv_store_weight(to, dtype, at + i, values[i]);
}

TARGET static void dequantize_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct qkv_dequantize_job *job = pointer;
    const struct qkv_weight *w = &job->w;
    float values[256]; /* a long group is decoded a piece at a time */
    for (ptrdiff_t row = begin; row < end; ++row) {
        for (ptrdiff_t at = 0; at < w->groups; ++at) {
            ptrdiff_t start = at * w->group, left = w->in - start, count = left < w->group ? left : w->group;
            for (ptrdiff_t done = 0; done < count; done += 256) {
                ptrdiff_t now = count - done < 256 ? count - done : 256, to = row * w->in + start + done;
                float *direct = job->dtype == QKV_F32 ? (float *)job->y + to : values;
                decode_group(w, row, at, done, now, direct);
                if (direct == values) store_values(values, now, job->y, to, job->dtype);
            }
        }
    }
}

/* ---- quantizing ---- */

/* How many midpoints lie below the value: four steps of a binary search, `code` being what is known so far. */
INLINE __m256i nearest_level(__m256 value, const struct qkv_rule *rule)
{
    value = _mm256_mul_ps(_mm256_mul_ps(value, _mm256_set1_ps(rule->lift)), _mm256_set1_ps(rule->inverse));
    __m256i code = _mm256_setzero_si256();
    QKV_UNROLL
    for (int width = 8; width; width /= 2) {
        const float *table = qkv_nf4_midpoints + width - 1;
        __m256 middle = look_up(code, _mm256_loadu_ps(table), _mm256_loadu_ps(table + 8));
        __m256i above = _mm256_castps_si256(_mm256_cmp_ps(middle, value, _CMP_LT_OQ));
        code = _mm256_add_epi32(code, _mm256_and_si256(above, _mm256_set1_epi32(width)));
    }
    return code;
}

INLINE __m256i nearest_step(__m256 value, const struct qkv_rule *rule)
{
    __m256 steps = _mm256_div_ps(value, _mm256_set1_ps(rule->divisor));
    steps = _mm256_round_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    steps = _mm256_add_ps(steps, _mm256_set1_ps(rule->zero));
    steps = _mm256_min_ps(_mm256_max_ps(steps, _mm256_set1_ps(rule->low)), _mm256_set1_ps(rule->high));
    return _mm256_add_epi32(_mm256_cvtps_epi32(steps), _mm256_set1_epi32(rule->offset));
}

/* As qkv_quantize_group. */
TARGET static void quantize_group(struct qkv_quantize_job *job, ptrdiff_t index, const float *values)
{
    __m256 lows = _mm256_setzero_ps(), highs = lows, spoilt = lows;
    for (ptrdiff_t i = 0; i < job->group; i += 8) {
        __m256 value = _mm256_loadu_ps(values + i);
        lows = _mm256_min_ps(lows, value);
        highs = _mm256_max_ps(highs, value);
        spoilt = _mm256_add_ps(spoilt, _mm256_sub_ps(value, value));
    }
    if (_mm256_movemask_ps(_mm256_cmp_ps(spoilt, spoilt, _CMP_UNORD_Q))) {
        __atomic_store_n(&job->not_finite, 1, __ATOMIC_RELAXED);
        return;
    }
    float low[8], high[8];
    _mm256_storeu_ps(low, lows);
    _mm256_storeu_ps(high, highs);
    for (int lane = 1; lane < 8; ++lane) {
        low[0] = low[lane] < low[0] ? low[lane] : low[0];
        high[0] = high[lane] > high[0] ? high[lane] : high[0];
    }
    struct qkv_rule rule = qkv_rule_of(job, index, low[0], high[0]);
    const __m256i byte = _mm256_set1_epi32(255);
    for (ptrdiff_t i = 0; i < job->group; i += QKV_BLOCK) {
        __m256 first = _mm256_loadu_ps(values + i), second = _mm256_loadu_ps(values + i + 8);
        __m256i a = rule.nf4 ? nearest_level(first, &rule) : nearest_step(first, &rule);
        __m256i b = rule.nf4 ? nearest_level(second, &rule) : nearest_step(second, &rule);
        __m256i words = _mm256_packus_epi32(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
        words = _mm256_permute4x64_epi64(words, 0xd8);
        uint8_t codes[QKV_BLOCK];
        _mm_storeu_si128((__m128i *)codes,
                         _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
        qkv_store_codes(job, index, i, codes);
    }
}

TARGET static void quantize_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    qkv_quantize_rows(pointer, begin, end, quantize_group);
}

const struct qkv_ops qkv_avx2_ops = {most_rows, linear, dequantize_rows, quantize_rows};

#endif
