/* AVX-512: products of many rows of x; of interleaved codes, of any number.
 *
 * Two strips of output features are worked on together; their codes are unpacked to registers without their scales and used
 * at once, for a tile of rows of x after the other. What a row of x gives does not depend on how many rows there are.
 */
#include "native.h"

#if QKV_X86

#include "avx512_products.h"

enum { AHEAD = 2048 }; /* bytes of a strip that are fetched from memory early */

/* ---- a tile of x and two strips ---- */

/* Groups [g, stop), whose codes begin at `strips[i].codes`. */
INLINE void times_x(const struct qkv_linear_job *job, const struct strip *strips, ptrdiff_t g, ptrdiff_t stop,
                    const int32_t *x, const float *factor, __m512 (*total)[2], __m512i table, const int M, const int bits,
                    const int zero)
{
    const int unit = unit_length(bits);
    const ptrdiff_t whole = group_units(&job->w), most = bits == 8 ? job->segment / unit : whole;
    const __m512i *left = strips[0].codes, *right = strips[1].codes;
    __m512i sum[TILE_ROWS][2], offset[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    QKV_UNROLL
    for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
    x += g * whole * (unit / 2) * M;
    if (bits == 8) factor += g * (whole / most) * TILE_ROWS;
    for (; g < stop; ++g) {
        for (int i = 0; zero && i < 2; ++i) offset[i] = offset_at(strips[i].zero, g, bits);
        for (ptrdiff_t units = whole; units > 0; units -= most, factor += TILE_ROWS) {
            const __m512i *end = left + (units < most ? units : most);
            for (; left < end; ++left, ++right, x += unit / 2 * M) {
                _mm_prefetch((const char *)left + AHEAD, _MM_HINT_T0);
                _mm_prefetch((const char *)right + AHEAD, _MM_HINT_T0);
                multiply(_mm512_loadu_si512(left), _mm512_loadu_si512(right), x, sum, table, offset, M, bits, zero);
            }
            scale_up(sum, strips[0].scale + STRIP * g, strips[1].scale + STRIP * g, factor, total, M, bits);
        }
    }
}

typedef void (*tile_function)(const struct qkv_linear_job *job, const struct strip *strips, ptrdiff_t g, ptrdiff_t stop,
                              const int32_t *x, const float *factor, __m512 (*total)[2], __m512i table);

#define TILE(bits, zero, M)                                                                                     \
    TARGET static void tile_##bits##zero##_##M(const struct qkv_linear_job *job, const struct strip *strips,    \
                                               ptrdiff_t g, ptrdiff_t stop, const int32_t *x,                   \
                                               const float *factor, __m512 (*total)[2], __m512i table)          \
    {                                                                                                           \
        times_x(job, strips, g, stop, x, factor, total, table, M, bits, zero);                                  \
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

static struct strip interleaved_strip(const struct qkv_weight *w, ptrdiff_t row)
{
    return (struct strip){(const __m512i *)(w->codes + row * w->groups * w->group_bytes), w->scale + row * w->groups,
                          w->zero ? w->zero + row * w->groups : NULL};
}

/* Two strips times all of x, `rows` being where they begin; as many groups at a time as are gathered at once. */
TARGET static void two_strips(const struct qkv_linear_job *job, const ptrdiff_t *rows, ptrdiff_t end, char *room,
                              __m512 (*total)[2])
{
    const struct qkv_weight *w = &job->w;
    const tile_function *tiles = tiles_of(w);
    const __m512i table = table_of(w);
    const ptrdiff_t most = w->interleaved ? w->groups : qkv_gathered_groups(w);
    const size_t bytes = qkv_strip_bytes(w);
    struct strip strips[2];
    memset(total, 0, (size_t)job->rows * sizeof *total);
    for (ptrdiff_t g = 0; g < w->groups; g += most) {
        const ptrdiff_t stop = g + most < w->groups ? g + most : w->groups;
        for (int i = 0; i < 2; ++i)
            strips[i] = w->interleaved ? interleaved_strip(w, rows[i])
                                       : qkv_gather_strip(w, rows[i], end, g, stop, room + (size_t)i * bytes);
        for (ptrdiff_t tile = 0; tile < job->tiles; ++tile) {
            const ptrdiff_t start = tile_start(job, tile), M = tile_start(job, tile + 1) - start;
            tiles[M - 1](job, strips, g, stop, tile_pairs(job, tile), tile_factors(job, tile), total + start, table);
        }
    }
    for (int side = 0; side < 2; ++side) finish(job, (const __m512(*)[2])total, side, rows[side], end);
}

/* Strips in twos: neighbours when they are gathered; otherwise each of the first half with one of the second, because one
 * stream a thread reaches only a part of the memory's bandwidth. Where one is left over it is done twice. */
static void body(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    const struct qkv_linear_job *job = pointer;
    const ptrdiff_t half = job->w.interleaved ? (end - begin + 2 * STRIP - 1) / (2 * STRIP) * STRIP : STRIP;
    const size_t totals = (size_t)job->rows * sizeof(__m512[2]), bytes = job->w.interleaved ? 0 : qkv_strip_bytes(&job->w);
    char *all = malloc(totals + 2 * bytes + 64);
    if (!all) abort();
    char *room = (char *)(((uintptr_t)all + 63) & ~(uintptr_t)63);
    for (ptrdiff_t start = begin; start < end; start += 2 * half)
        for (ptrdiff_t row = start; row < start + half; row += STRIP) {
            const ptrdiff_t rows[2] = {row, row + half < end ? row + half : row};
            two_strips(job, rows, end, room + totals, (__m512(*)[2])room);
        }
    free(all);
}

qkv_body qkv_avx512_strips(struct qkv_linear_job *job)
{
    job->unit = 2 * STRIP;
    return qkv_order_tiles(job) ? body : NULL;
}

#endif
