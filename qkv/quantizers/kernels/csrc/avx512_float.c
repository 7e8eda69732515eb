/* AVX-512 with BF16: products of up to eight rows of x with a bfloat16 weight, summed in fp32.
 *
 * Rows of the weight are worked on together that lie far apart, because one stream a thread reaches only a part of the
 * memory's bandwidth.
 */
#include "native.h"

#if QKV_X86

#include "avx512.h"

INLINE __m512bh load(const uint16_t *from, ptrdiff_t left)
{
    return (__m512bh)(left >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << left) - 1, from));
}

/* Features [begin, end), R at a time for M rows of x. */
INLINE void stream(const struct qkv_float_job *job, ptrdiff_t begin, ptrdiff_t end, const int M, const int R)
{
    const ptrdiff_t length = (end - begin + R - 1) / R, in = job->in;
    for (ptrdiff_t i = 0; i < length; ++i) {
        const uint16_t *w[4];
        ptrdiff_t row[4];
        __m512 sum[4][8];
        QKV_UNROLL
        for (int r = 0; r < R; ++r) {
            row[r] = begin + r * length + i < end ? begin + r * length + i : end - 1; /* done twice */
            w[r] = job->w + row[r] * in;
            QKV_UNROLL
            for (int m = 0; m < M; ++m) sum[r][m] = _mm512_setzero_ps();
        }
        for (ptrdiff_t k = 0; k < in; k += 32) {
            __m512bh codes[4];
            QKV_UNROLL
            for (int r = 0; r < R; ++r) codes[r] = load(w[r] + k, in - k);
            QKV_UNROLL
            for (int m = 0; m < M; ++m) {
                const __m512bh x = load(job->x + m * in + k, in - k);
                QKV_UNROLL
                for (int r = 0; r < R; ++r) sum[r][m] = _mm512_dpbf16_ps(sum[r][m], codes[r], x);
            }
        }
        QKV_UNROLL
        for (int r = 0; r < R; ++r) {
            const float bias = job->bias ? qkv_load(job->bias, job->bias_dtype, row[r]) : 0.0f;
            QKV_UNROLL
            for (int m = 0; m < M; ++m)
                qkv_store(job->y, QKV_BF16, m * job->out + row[r], _mm512_reduce_add_ps(sum[r][m]) + bias);
        }
    }
}

#define STREAM(M, R)                                                                                            \
    TARGET static void stream_##M(void *job, ptrdiff_t begin, ptrdiff_t end) { stream(job, begin, end, M, R); }
STREAM(1, 4)
STREAM(2, 4)
STREAM(3, 4)
STREAM(4, 4)
STREAM(5, 2)
STREAM(6, 2)
STREAM(7, 2)
STREAM(8, 2)

qkv_body qkv_avx512_float(ptrdiff_t rows)
{
    static const qkv_body bodies[] = {stream_1, stream_2, stream_3, stream_4, stream_5, stream_6, stream_7, stream_8};
    return bodies[rows - 1];
}

#endif
