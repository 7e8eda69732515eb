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
qkv_body qkv_avx512_bytes(struct qkv_linear_job *job);
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

#endif
