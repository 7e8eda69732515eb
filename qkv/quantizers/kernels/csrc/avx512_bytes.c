/* AVX-512: products of two to eight rows of x with canonical codes of eight bits.
 *
 * So few rows leave the memory busy: blocks of two strips are transposed in turn, one while the other is multiplied.
 */
#include "native.h"

#if QKV_X86

#include "avx512_products.h"

/* Two strips, `scaled` holding their scales and zero points. */
INLINE void times_x(const struct qkv_linear_job *job, const uint8_t *const (*codes)[STRIP], const struct strip *scaled,
                    __m512 (*total)[2], const int M, const int zero)
{
    const ptrdiff_t bytes = job->w.groups * job->w.group_bytes, blocks = (bytes + 63) / 64;
    const ptrdiff_t whole = job->w.groups > 1 ? group_units(&job->w) : blocks * 16, most = job->segment / 4;
    const __m512i table = _mm512_setzero_si512();
    ptrdiff_t units = most, units_of_group = whole, g = 0;
    __m512i raw[2][2][16]; /* of this block and of the next */
    __m512i sum[TILE_ROWS][2], offset[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    const int32_t *x = job->px;
    const float *factor = job->psum;
    QKV_UNROLL
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
    for (int i = 0; i < 2; ++i) {
        gather_block(codes[i], 0, bytes, raw[0][i]);
        if (zero) offset[i] = offset_at(scaled[i].zero, 0, 8);
    }
    for (ptrdiff_t c = 0; c < blocks; ++c)
        for (int half = 0; half < 2; ++half) {
            for (int i = 8 * half; i < 8 * half + 8; ++i, x += 2 * M) {
                multiply(raw[c & 1][0][i], raw[c & 1][1][i], x, sum, table, offset, M, 8, zero);
                if (--units) continue;
                scale_up(sum, scaled[0].scale + STRIP * g, scaled[1].scale + STRIP * g, factor, total, M, 8);
                factor += TILE_ROWS, units = most;
                if (units_of_group -= most) continue;
                if (++g == job->w.groups) return;
                units_of_group = whole;
                for (int k = 0; zero && k < 2; ++k) offset[k] = offset_at(scaled[k].zero, g, 8);
            }
            if (c + 1 < blocks) gather_block(codes[half], 64 * (c + 1), bytes, raw[~c & 1][half]);
        }
}

INLINE void body(const struct qkv_linear_job *job, ptrdiff_t begin, ptrdiff_t end, const int M, const int zero)
{
    const size_t scales = (size_t)(job->w.groups * STRIP) * sizeof(float);
    char *room = malloc(2 * (scales + scales / 4));
    if (!room) abort();
    for (ptrdiff_t row = begin; row < end; row += 2 * STRIP) {
        const ptrdiff_t rows[2] = {row, row + STRIP < end ? row + STRIP : row};
        const uint8_t *codes[2][STRIP];
        struct strip scaled[2];
        __m512 total[TILE_ROWS][2];
        memset(total, 0, sizeof total);
        for (int i = 0; i < 2; ++i) {
            float *scale = (float *)(room + (size_t)i * scales);
            uint8_t *zeros = (uint8_t *)room + 2 * scales + (size_t)i * (scales / 4);
            qkv_rows_of_strip(&job->w, rows[i], end, codes[i]);
            qkv_gather_scales(&job->w, rows[i], end, 0, job->w.groups, scale, zeros);
            scaled[i] = (struct strip){NULL, scale, zeros};
        }
        times_x(job, (const uint8_t *const(*)[STRIP])codes, scaled, total, M, zero);
        for (int side = 0; side < 2; ++side) finish(job, (const __m512(*)[2])total, side, rows[side], end);
    }
    free(room);
}

#define BYTES(zero, M)                                                                                          \
    TARGET static void bytes_##zero##_##M(void *job, ptrdiff_t begin, ptrdiff_t end)                            \
    {                                                                                                           \
        body(job, begin, end, M, zero);                                                                         \
    }
#define ALL(zero)                                                                                               \
    BYTES(zero, 2)                                                                                              \
    BYTES(zero, 3)                                                                                              \
    BYTES(zero, 4)                                                                                              \
    BYTES(zero, 5)                                                                                              \
    BYTES(zero, 6)                                                                                              \
    BYTES(zero, 7)                                                                                              \
    BYTES(zero, 8)
#define NAMES(zero) {bytes_##zero##_2, bytes_##zero##_3, bytes_##zero##_4, bytes_##zero##_5, bytes_##zero##_6,   \
                     bytes_##zero##_7, bytes_##zero##_8}
ALL(0)
ALL(1)

qkv_body qkv_avx512_bytes(struct qkv_linear_job *job)
{
    static const qkv_body bodies[2][TILE_ROWS - 1] = {NAMES(0), NAMES(1)};
    job->unit = 2 * STRIP;
    return qkv_order_tiles(job) ? bodies[job->w.zero != NULL][job->rows - 2] : NULL;
}

#endif
