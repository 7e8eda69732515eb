/* Shared by the AVX-512 files. */
#ifndef QKV_AVX512_H
#define QKV_AVX512_H

#include <immintrin.h>

#include "scalar.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vnni,avx512bf16,fma,f16c")))
#define INLINE QKV_INLINE TARGET

ptrdiff_t qkv_avx512_most_rows(const struct qkv_linear_job *job);
qkv_body qkv_avx512_linear(struct qkv_linear_job *job);
qkv_body qkv_avx512_strips(struct qkv_linear_job *job);
void qkv_order_nibbles(const uint16_t *x, __m512i *to);

/* The sixteen values of a four-bit kind before zero point and scale. */
INLINE __m512 four_bit_levels(const struct qkv_weight *w)
{
    if (w->kind == QKV_NF4) return _mm512_loadu_ps(qkv_nf4_levels);
    __m512 codes = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return w->zero ? codes : _mm512_sub_ps(codes, _mm512_set1_ps(8.0f));
}

/* Those levels in bf16, twice: an index of five bits then ignores its highest one, which belongs to the next code. */
INLINE __m512i qkv_halved_levels(const struct qkv_weight *w)
{
    return _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(four_bit_levels(w)));
}

/* fp32 to bf16 in integers: unlike the instruction it keeps subnormals, as torch does. */
INLINE __m256i qkv_round_bf16(__m512 value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

#endif
