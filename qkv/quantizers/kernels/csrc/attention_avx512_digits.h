/* Queries and probabilities as digits of 8 bits, four rows at a time, for the AVX-512 files of attention. */
#ifndef QKV_ATTENTION_AVX512_DIGITS_H
#define QKV_ATTENTION_AVX512_DIGITS_H

#include "attention.h"
#include "avx512.h"

/* Of four rows, or as many as there are: value of the last digit's unit; what is added to the products, in the end and,
 * for centring, to each digit's. */
struct digits {
    float step[4], bias[4];
    int32_t init[3][4];
};

/* The order in which the bytes of a row of keys come out of transposed codes, for each 64 channels; by codes a byte. */
extern uint8_t qkv_attention_orders[5][64];

static inline const uint8_t *byte_order(int64_t codec) { return qkv_attention_orders[qkv_codes_a_byte(codec)]; }

QKV_INLINE int center_of(int64_t codec) { return codec == QKV_CODE4 ? 8 : codec == QKV_CODE2 ? 2 : 128; }

INLINE __m512 larger(__m512 highest, __m512 x) { return _mm512_max_ps(highest, _mm512_abs_ps(x)); }

/* What `combine` makes of the lanes of each of four vectors. */
#define OF_FOUR(name, combine, combine256, combine128) \
    INLINE __m128 name(const __m512 *x) \
    { \
        __m512 a = combine(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1])); \
        __m512 b = combine(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3])); \
        __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b); \
        __m512 all = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d))); \
        __m256 half = combine256(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1)); \
        return combine128(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)); \
    }

OF_FOUR(sum_of_four, _mm512_add_ps, _mm256_add_ps, _mm_add_ps)
OF_FOUR(most_of_four, _mm512_max_ps, _mm256_max_ps, _mm_max_ps)

INLINE __m128i whole_sum_of_four(const __m512i *x)
{
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti32x8_epi32(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* What R rows `stride` apart, `width` numbers each, a multiple of 64, become: the digits of 64 numbers after another,
 * the highest first; the next row's follow, and those of the next 64 numbers are `chunk` bytes on. Row by row the
 * numbers are at most `most` large. `order`: NULL to keep theirs. */
INLINE void cut(const float *x, ptrdiff_t stride, ptrdiff_t width, __m128 most, const uint8_t *order, int center, int8_t *to,
                ptrdiff_t chunk, struct digits *digits, int R, int count)
{
    const __m128 limit = _mm_set1_ps(count == 2 ? 32512.0f : 8323072.0f);
    const __m512i ones = _mm512_set1_epi8(1), half = _mm512_set1_epi8((char)128), lifted = _mm512_set1_epi32(0x808080);
    const __m512i every_fourth = _mm512_set_epi8(
        0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 124, 120, 116, 112, 108,
        104, 100, 96, 92, 88, 84, 80, 76, 72, 68, 64, 60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
    __m128 lift = _mm_div_ps(limit, most);
    __mmask8 small = _mm_cmp_ps_mask(lift, _mm_set1_ps(1e37f), _CMP_LT_OQ);
    float lifts[4];
    _mm_storeu_ps(lifts, _mm_maskz_mov_ps(small, lift));
    _mm_storeu_ps(digits->step, _mm_maskz_div_ps(small, most, limit));
    __m512i sums[3][4];
    QKV_UNROLL
    for (int d = 0; d < count; ++d)
        QKV_UNROLL
        for (int r = 0; r < 4; ++r) sums[d][r] = _mm512_setzero_si512();
    for (ptrdiff_t i = 0; i < width; i += 64)
        QKV_UNROLL
        for (int r = 0; r < R; ++r) {
            __m512i whole[4]; /* each digit a byte, 128 too large */
            __m512 factor = _mm512_set1_ps(lifts[r]);
            QKV_UNROLL
            for (int j = 0; j < 4; ++j) {
                __m512 value = _mm512_mul_ps(_mm512_load_ps(x + r * stride + i + 16 * j), factor);
                whole[j] = _mm512_add_epi32(_mm512_cvtps_epi32(value), lifted);
            }
            QKV_UNROLL
            for (int d = 0; d < count; ++d) {
                __m512i pick = _mm512_add_epi8(every_fourth, _mm512_set1_epi8((char)(count - 1 - d)));
                __m512i low = _mm512_permutex2var_epi8(whole[0], pick, whole[1]);
                __m512i high = _mm512_permutex2var_epi8(whole[2], pick, whole[3]);
                __m512i bytes = _mm512_xor_si512(_mm512_shuffle_i64x2(low, high, 0x44), half);
                sums[d][r] = _mm512_dpbusd_epi32(sums[d][r], ones, bytes);
                if (order) bytes = _mm512_permutexvar_epi8(_mm512_loadu_si512(order), bytes);
                _mm512_store_si512(to + i / 64 * chunk + (r * count + d) * 64, bytes);
            }
        }
    QKV_UNROLL
    for (int d = 0; d < count; ++d)
        _mm_storeu_si128((void *)digits->init[d], _mm_mullo_epi32(whole_sum_of_four(sums[d]), _mm_set1_epi32(-center)));
}

/* name(..., R, count) with both known to the compiler, for up to four rows. */
#define CASE_OF_ROWS(name, R, ...) \
    case R: \
        if (count == 2) name(__VA_ARGS__, R, 2); \
        else name(__VA_ARGS__, R, 3); \
        break;

#define FOR_ROWS(name, rows, ...) \
    switch (rows) { \
        CASE_OF_ROWS(name, 1, __VA_ARGS__) \
        CASE_OF_ROWS(name, 2, __VA_ARGS__) \
        CASE_OF_ROWS(name, 3, __VA_ARGS__) \
        CASE_OF_ROWS(name, 4, __VA_ARGS__) \
    }

#endif
