/* AVX-512 with BF16 and VNNI: a unit of two strips times the pairs of x that belong to it.
 *
 * Codes of four bits become bf16 levels, exact for integers, zero point included, while those of nf4 are rounded. Those of
 * eight bits become integers of 16, which is cheaper, and x is scaled to 16 bits in segments of up to 64 elements (within
 * 1e-4 of the product; 64 products fit into 32 bits).
 */
#ifndef QKV_AVX512_PRODUCTS_H
#define QKV_AVX512_PRODUCTS_H

#include "avx512_strips.h"

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

/* Rounds the sums of one side and adds the bias. */
TARGET static void finish(const struct qkv_linear_job *job, const __m512 (*total)[2], int side, ptrdiff_t row, ptrdiff_t end)
{
    __attribute__((aligned(64))) float bias[STRIP] = {0};
    const ptrdiff_t held = end - row < STRIP ? end - row : STRIP;
    for (ptrdiff_t r = 0; job->bias && r < held; ++r) bias[r] = qkv_load(job->bias, job->bias_dtype, row + r);
    for (ptrdiff_t m = 0; m < job->rows; ++m) {
        __m512 value = _mm512_add_ps(total[m][side], _mm512_load_ps(bias));
        _mm256_mask_storeu_epi16((uint16_t *)job->y + m * job->w.out + row, (__mmask16)((1u << held) - 1),
                                 (__m256i)_mm512_cvtneps_pbh(value));
    }
}

#endif
