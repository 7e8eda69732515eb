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

/* Sixteen rows of sixteen words of 32 bits, transposed. */
INLINE void transpose(__m512i *rows)
{
    __m512i a[16], b[16];
    QKV_UNROLL
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    QKV_UNROLL
    for (int i = 0; i < 16; i += 4) {
        QKV_UNROLL
        for (int k = 0; k < 2; ++k) {
            b[i + 2 * k] = _mm512_unpacklo_epi64(a[i + k], a[i + k + 2]);
            b[i + 2 * k + 1] = _mm512_unpackhi_epi64(a[i + k], a[i + k + 2]);
        }
    }
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) {
        __m512i even_low = _mm512_shuffle_i64x2(b[i], b[i + 4], 0x88), odd_low = _mm512_shuffle_i64x2(b[i], b[i + 4], 0xdd);
        __m512i even_high = _mm512_shuffle_i64x2(b[i + 8], b[i + 12], 0x88);
        __m512i odd_high = _mm512_shuffle_i64x2(b[i + 8], b[i + 12], 0xdd);
        rows[i] = _mm512_shuffle_i64x2(even_low, even_high, 0x88);
        rows[i + 4] = _mm512_shuffle_i64x2(odd_low, odd_high, 0x88);
        rows[i + 8] = _mm512_shuffle_i64x2(even_low, even_high, 0xdd);
        rows[i + 12] = _mm512_shuffle_i64x2(odd_low, odd_high, 0xdd);
    }
}

#endif
