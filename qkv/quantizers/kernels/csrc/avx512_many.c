/* AVX-512: products of many rows of x, by panels of unpacked codes that stay in the nearest caches. */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

#ifndef PE
#define PE 256
#endif
enum { PANEL_ELEMENTS = PE }; /* of a row of the weight, in one panel */

/* Block `c` of a strip, to every other vector of `to`; `offsets` [group][32]. */
INLINE void unpack_block(const struct qkv_linear_job *job, const struct strip *strip, ptrdiff_t c, __m512i table,
                         const int32_t *offsets, __m512i *to, const int bits, const int zero)
{
    const struct qkv_weight *w = &job->w;
    const int unit = unit_length(bits);
    __m512i raw[16];
    load_block(job, strip, c, raw);
    ptrdiff_t group = c * block_length(bits) / w->group, until = (group + 1) * w->group - c * block_length(bits);
    QKV_UNROLL
    for (int i = 0; i < 16; ++i, to += unit) {
        __m512i offset = _mm512_setzero_si512();
        if (zero) {
            if (i * unit >= until && group + 1 < w->groups) ++group, until += w->group;
            offset = _mm512_load_si512(offsets + group * WIDE);
            if (bits == 8) offset = _mm512_and_si512(offset, _mm512_set1_epi32(0xffff));
        }
        QKV_UNROLL
        for (int v = 0; v < unit / 2; ++v)
            _mm512_store_si512(to + 2 * v, unpack(raw[i], v, table, offset, bits, zero));
    }
}

/* ---- a tile: M rows of x and 32 output features ---- */

typedef void (*tile_function)(const struct qkv_linear_job *job, const int32_t *x, const __m512i *panel,
                              const float *scale, float *total, ptrdiff_t from, ptrdiff_t to);

/* Adds elements [from, to) of the rows to `total` [M][32]. */
INLINE void tile(const struct qkv_linear_job *job, const int32_t *x, const __m512i *panel, const float *scale,
                 float *total, ptrdiff_t from, ptrdiff_t to, const int M)
{
    ptrdiff_t group = from / job->w.group;
    for (ptrdiff_t at = from; at < to; ++group) {
        ptrdiff_t end = group + 1 < job->w.groups ? (group + 1) * job->w.group : to;
        if (end > to) end = to;
        __m512 sum[TILE_ROWS][2];
        QKV_UNROLL
        for (int m = 0; m < M; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_ps();
        for (; at < end; at += 2, x += M, panel += 2) {
            __m512bh left = (__m512bh)panel[0], right = (__m512bh)panel[1];
            QKV_UNROLL
            for (int m = 0; m < M; ++m) {
                __m512bh pair = (__m512bh)_mm512_set1_epi32(x[m]);
                sum[m][0] = _mm512_dpbf16_ps(sum[m][0], pair, left);
                sum[m][1] = _mm512_dpbf16_ps(sum[m][1], pair, right);
            }
        }
        QKV_UNROLL
        for (int i = 0; i < 2; ++i) {
            __m512 factor = _mm512_load_ps(scale + group * WIDE + 16 * i);
            QKV_UNROLL
            for (int m = 0; m < M; ++m) {
                float *sums = total + m * WIDE + 16 * i;
                _mm512_store_ps(sums, _mm512_fmadd_ps(sum[m][i], factor, _mm512_load_ps(sums)));
            }
        }
        __asm__ volatile("" ::: "memory"); /* lest the sums of all groups be kept on the stack */
    }
}

#define TILE(M)                                                                                                 \
    TARGET static void tile_##M(const struct qkv_linear_job *job, const int32_t *x, const __m512i *panel,       \
                                const float *scale, float *total, ptrdiff_t from, ptrdiff_t to)                 \
    {                                                                                                           \
        tile(job, x, panel, scale, total, from, to, M);                                                         \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)
TILE(7)
TILE(8)
TILE(9)
TILE(10)
TILE(11)
TILE(12)
static const tile_function tiles[] = {tile_1, tile_2, tile_3, tile_4,  tile_5,  tile_6,
                                      tile_7, tile_8, tile_9, tile_10, tile_11, tile_12};

/* ---- output features [begin, end) ---- */

struct room {
    void *all;
    __m512i *panel;
    float *scale, *total;
    int32_t *offsets;
};

static struct room make_room(const struct qkv_linear_job *job)
{
    size_t panel = PANEL_ELEMENTS * WIDE * 2, groups = (size_t)(job->w.groups * WIDE) * 4;
    size_t total = (size_t)(job->rows * WIDE) * 4, zeros = job->w.zero ? groups : 0;
    char *all = malloc(panel + groups + total + zeros + 64);
    if (!all) abort();
    char *at = (char *)(((uintptr_t)all + 63) & ~(uintptr_t)63);
    return (struct room){all, (__m512i *)at, (float *)(at + panel), (float *)(at + panel + groups),
                         (int32_t *)(at + panel + groups + total)};
}

INLINE void panels(struct qkv_linear_job *job, ptrdiff_t begin, ptrdiff_t end, const int bits, const int zero)
{
    const struct qkv_weight *w = &job->w;
    const int length = block_length(bits), pairs = length / 2, blocks = PANEL_ELEMENTS / length;
    const __m512i table = table_of(w, bits, zero);
    struct room room = make_room(job);
    for (ptrdiff_t row = begin; row < end; row += WIDE) {
        struct strip strips[2] = {strip_at(job, row, end), strip_at(job, row + 16, end)};
        for (int i = 0; i < 2; ++i) {
            order_scales(job, strips + i, room.scale + 16 * i);
            if (zero) order_zeros(job, strips + i, room.offsets + 16 * i, bits);
        }
        memset(room.total, 0, (size_t)(job->rows * WIDE) * 4);
        for (ptrdiff_t c = 0; c < job->chunks; c += blocks) {
            ptrdiff_t stop = c + blocks < job->chunks ? c + blocks : job->chunks, to = stop * length;
            for (ptrdiff_t i = c; i < stop; ++i)
                for (int half = 0; half < 2; ++half)
                    unpack_block(job, strips + half, i, table, room.offsets + 16 * half,
                                 room.panel + (i - c) * length + half, bits, zero);
            if (w->groups > 1 && to > w->groups * w->group) to = w->groups * w->group;
            for (ptrdiff_t tile = 0; tile < job->tiles; ++tile) {
                ptrdiff_t start = tile_start(job, tile), M = tile_start(job, tile + 1) - start;
                const int32_t *x = (int32_t *)job->px + start * pairs * job->chunks + c * pairs * M;
                tiles[M - 1](job, x, room.panel, room.scale, room.total + start * WIDE, c * length, to);
            }
        }
        finish(job, room.total, row, end - row < WIDE ? end - row : WIDE);
    }
    free(room.all);
}

#define PANELS(bits, zero)                                                                                      \
    TARGET static void panels_##bits##zero(void *job, ptrdiff_t begin, ptrdiff_t end)                           \
    {                                                                                                           \
        panels(job, begin, end, bits, zero);                                                                    \
    }
PANELS(4, 0)
PANELS(4, 1)
PANELS(8, 0)
PANELS(8, 1)

qkv_body qkv_avx512_many(const struct qkv_linear_job *job)
{
    static const qkv_body bodies[2][2] = {{panels_40, panels_41}, {panels_80, panels_81}};
    return bodies[bits_of(job) == 8][job->w.zero != NULL];
}

#endif
