/* AVX-512: products of up to twelve rows of x, more than are streamed; the codes are unpacked to registers and used at once.
 *
 * Codes of four bits become bf16 levels. Those of eight bits become integers of 16, which is cheaper, and x is scaled to
 * 16 bits in segments of up to 64 elements (within 1e-4 of the product; 64 products fit into 32 bits). What a row of x
 * gives does not depend on how many rows there are.
 */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

/* Pair `v` of a unit of 8-bit codes in 16 bits: the first and the third, or the second and the fourth. */
INLINE __m512i words(__m512i raw, const int v, __m512i offset, const int zero)
{
    if (!zero) return _mm512_srai_epi16(v ? raw : _mm512_slli_epi16(raw, 8), 8);
    return _mm512_sub_epi16(v ? _mm512_srli_epi16(raw, 8) : _mm512_and_si512(raw, _mm512_set1_epi16(255)), offset);
}

INLINE __m512i dot(__m512i sum, __m512i pair, __m512i codes, const int bits)
{
    if (bits == 8) return _mm512_dpwssd_epi32(sum, pair, codes);
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(sum), (__m512bh)pair, (__m512bh)codes));
}

/* A unit of both strips times the pairs of x that belong to it. */
INLINE void multiply(const __m512i *raw, const int32_t *x, __m512i (*sum)[2], __m512i table, const __m512i *offset,
                     const int M, const int bits, const int zero)
{
    QKV_UNROLL
    for (int v = 0; v < unit_length(bits) / 2; ++v) {
        __m512i codes[2];
        QKV_UNROLL
        for (int i = 0; i < 2; ++i)
            codes[i] = bits == 8 ? words(raw[16 * i], v, offset[i], zero)
                                 : unpack(raw[16 * i], v, table, offset[i], bits, zero);
        QKV_UNROLL
        for (int m = 0; m < M; ++m) {
            __m512i pair = _mm512_set1_epi32(x[v * M + m]);
            QKV_UNROLL
            for (int i = 0; i < 2; ++i) sum[m][i] = dot(sum[m][i], pair, codes[i], bits);
        }
    }
}

/* Adds the sums over a segment to `total` [M][32], scaled. */
INLINE void scale_up(__m512i (*sum)[2], const float *scale, const float *factor, float *total, const int M,
                     const int bits)
{
    QKV_UNROLL
    for (int m = 0; m < M; ++m) {
        QKV_UNROLL
        for (int i = 0; i < 2; ++i) {
            __m512 by = _mm512_load_ps(scale + 16 * i), *to = (__m512 *)(total + m * WIDE + 16 * i);
            if (bits == 8) by = _mm512_mul_ps(by, _mm512_set1_ps(factor[m]));
            __m512 value = bits == 8 ? _mm512_cvtepi32_ps(sum[m][i]) : _mm512_castsi512_ps(sum[m][i]);
            *to = _mm512_fmadd_ps(value, by, *to);
            sum[m][i] = _mm512_setzero_si512();
        }
    }
    __asm__ volatile("" ::: "memory"); /* lest `total` be kept in registers that the loops need */
}

/* Thirty-two output features. */
INLINE void strips_times_x(const struct qkv_linear_job *job, const struct strip *strips, const float *scale,
                           const int32_t *offsets, float *total, __m512i table, const int M, const int bits,
                           const int zero)
{
    const int unit = unit_length(bits);
    __m512i raw[2][32]; /* of this block and of the next */
    __m512i sum[TILE_ROWS][2], offset[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    QKV_UNROLL
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
    const int32_t *x = job->px;
    const float *factor = job->psum;
    const ptrdiff_t whole = job->w.groups > 1 ? job->w.group / unit : job->chunks * 16; /* units of a group */
    const ptrdiff_t most = bits == 8 ? job->segment / unit : whole;
    ptrdiff_t units = most, group_units = whole, groups = job->w.groups;
    for (int i = 0; i < 2; ++i) {
        load_block(job, strips + i, 0, raw[0] + 16 * i);
        if (zero) offset[i] = _mm512_load_si512(offsets + 16 * i);
    }
    for (ptrdiff_t c = 0; c < job->chunks; ++c) {
        for (int half = 0; half < 2; ++half) {
            for (int i = 8 * half; i < 8 * half + 8; ++i, x += unit / 2 * M) {
                multiply(raw[c & 1] + i, x, sum, table, offset, M, bits, zero);
                if (--units) continue;
                scale_up(sum, scale, factor, total, M, bits);
                factor += TILE_ROWS, units = most;
                if (group_units -= most) continue;
                if (!--groups) return;
                scale += WIDE, offsets += WIDE, group_units = whole;
                for (int k = 0; zero && k < 2; ++k) offset[k] = _mm512_load_si512(offsets + 16 * k);
            }
            if (c + 1 < job->chunks) load_block(job, strips + half, c + 1, raw[~c & 1] + 16 * half);
        }
    }
}

INLINE void few(const struct qkv_linear_job *job, ptrdiff_t begin, ptrdiff_t end, const int M, const int bits,
                const int zero)
{
    const __m512i table = table_of(&job->w, bits, zero);
    const size_t groups = (size_t)(job->w.groups * WIDE) * 4;
    char *room = malloc(2 * groups + 64);
    if (!room) abort();
    float *scale = (float *)(((uintptr_t)room + 63) & ~(uintptr_t)63);
    int32_t *offsets = (int32_t *)((char *)scale + groups);
    for (ptrdiff_t row = begin; row < end; row += WIDE) {
        __attribute__((aligned(64))) float total[TILE_ROWS * WIDE] = {0};
        struct strip strips[2] = {strip_at(job, row, end), strip_at(job, row + 16, end)};
        for (int i = 0; i < 2; ++i) {
            order_scales(job, strips + i, scale + 16 * i);
            if (zero) order_zeros(job, strips + i, offsets + 16 * i, bits);
        }
        strips_times_x(job, strips, scale, offsets, total, table, M, bits, zero);
        finish(job, total, row, end - row < WIDE ? end - row : WIDE);
    }
    free(room);
}

#define FEW(bits, zero, M)                                                                                      \
    TARGET static void few_##bits##zero##_##M(void *job, ptrdiff_t begin, ptrdiff_t end)                        \
    {                                                                                                           \
        few(job, begin, end, M, bits, zero);                                                                    \
    }
#define FROM_NINE(bits, zero)                                                                                   \
    FEW(bits, zero, 9)                                                                                          \
    FEW(bits, zero, 10)                                                                                         \
    FEW(bits, zero, 11)                                                                                         \
    FEW(bits, zero, 12)
#define FROM_TWO(bits, zero)                                                                                    \
    FEW(bits, zero, 2)                                                                                          \
    FEW(bits, zero, 3)                                                                                          \
    FEW(bits, zero, 4)                                                                                          \
    FEW(bits, zero, 5)                                                                                          \
    FEW(bits, zero, 6)                                                                                          \
    FEW(bits, zero, 7)                                                                                          \
    FEW(bits, zero, 8)                                                                                          \
    FROM_NINE(bits, zero)
#define NINE(name) name##9, name##10, name##11, name##12
#define TWO(name) name##2, name##3, name##4, name##5, name##6, name##7, name##8, NINE(name)
FROM_NINE(4, 0)
FROM_NINE(4, 1)
FROM_TWO(8, 0)
FROM_TWO(8, 1)

qkv_body qkv_avx512_few(const struct qkv_linear_job *job)
{
    static const qkv_body four[2][4] = {{NINE(few_40_)}, {NINE(few_41_)}};
    static const qkv_body eight[2][11] = {{TWO(few_80_)}, {TWO(few_81_)}};
    int zero = job->w.zero != NULL;
    return bits_of(job) == 8 ? eight[zero][job->rows - 2] : four[zero][job->rows - 9];
}

#endif
