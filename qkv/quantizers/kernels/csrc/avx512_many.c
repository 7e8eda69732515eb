/* AVX-512: products of many rows of x, by panels of unpacked codes that stay in the nearest caches. */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

enum { PANEL_ELEMENTS = 1024 }; /* of a row of the weight, in one panel */

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
                              const float *scale, float *total, ptrdiff_t group, ptrdiff_t from, ptrdiff_t to);

/* Adds elements [from, to) of the rows, which begin in group `group`, to `total` [M][32]. */
INLINE void tile(const struct qkv_linear_job *job, const int32_t *x, const __m512i *panel, const float *scale,
                 float *total, ptrdiff_t group, ptrdiff_t from, ptrdiff_t to, const int M)
{
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
                                const float *scale, float *total, ptrdiff_t group, ptrdiff_t from,              \
                                ptrdiff_t to)                                                                   \
    {                                                                                                           \
        tile(job, x, panel, scale, total, group, from, to, M);                                                  \
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

/* A panel's memory, and where its output features lie. */
struct room {
    void *all;
    struct strip strips[2];
    __m512i *panel;
    float *scale, *total;
    int32_t *offsets;
};

static void make_room(const struct qkv_linear_job *job, struct room *room)
{
    size_t panel = PANEL_ELEMENTS * WIDE * 2, groups = (size_t)(job->w.groups * WIDE) * 4;
    room->all = malloc(panel + 2 * groups + (size_t)(job->rows * WIDE) * 4 + 64);
    if (!room->all) abort();
    char *at = (char *)(((uintptr_t)room->all + 63) & ~(uintptr_t)63);
    room->panel = (__m512i *)at;
    room->scale = (float *)(at + panel);
    room->offsets = (int32_t *)(at + panel + groups);
    room->total = (float *)(at + panel + 2 * groups);
}

INLINE void begin_panel(const struct qkv_linear_job *job, struct room *room, ptrdiff_t row, ptrdiff_t end,
                        const int bits, const int zero)
{
    for (int i = 0; i < 2; ++i) {
        room->strips[i] = strip_at(job, row + 16 * i, end);
        order_scales(job, room->strips + i, room->scale + 16 * i);
        if (zero) order_zeros(job, room->strips + i, room->offsets + 16 * i, bits);
    }
    memset(room->total, 0, (size_t)(job->rows * WIDE) * 4);
}

/* Blocks [c, stop) of a panel. */
INLINE void multiply_panel(const struct qkv_linear_job *job, const struct room *room, ptrdiff_t c, ptrdiff_t stop,
                           __m512i table, const int bits, const int zero)
{
    const struct qkv_weight *w = &job->w;
    const int length = block_length(bits), pairs = length / 2;
    for (ptrdiff_t i = c; i < stop; ++i)
        for (int half = 0; half < 2; ++half)
            unpack_block(job, room->strips + half, i, table, room->offsets + 16 * half,
                         room->panel + (i - c) * length + half, bits, zero);
    ptrdiff_t group = w->groups == 1 ? 0 : c * length / w->group, to = stop * length;
    if (w->groups > 1 && to > w->groups * w->group) to = w->groups * w->group;
    for (ptrdiff_t tile = 0; tile < job->tiles; ++tile) {
        ptrdiff_t start = tile_start(job, tile), M = tile_start(job, tile + 1) - start;
        const int32_t *x = (int32_t *)job->px + start * pairs * job->chunks + c * pairs * M;
        tiles[M - 1](job, x, room->panel, room->scale, room->total + start * WIDE, group, c * length, to);
    }
}

INLINE void panels(const struct qkv_linear_job *job, ptrdiff_t begin, ptrdiff_t end, const int bits, const int zero)
{
    const __m512i table = table_of(&job->w, bits, zero);
    const ptrdiff_t blocks = PANEL_ELEMENTS / block_length(bits);
    struct room room;
    make_room(job, &room);
    for (ptrdiff_t row = begin; row < end; row += WIDE) {
        begin_panel(job, &room, row, end, bits, zero);
        for (ptrdiff_t c = 0; c < job->chunks; c += blocks)
            multiply_panel(job, &room, c, c + blocks < job->chunks ? c + blocks : job->chunks, table, bits, zero);
        finish(job, room.total, row, end - row < WIDE ? end - row : WIDE);
    }
    free(room.all);
}

#define PANEL_KERNEL(bits, zero)                                                                                      \
    TARGET static void panels_##bits##zero(void *job, ptrdiff_t begin, ptrdiff_t end)                           \
    {                                                                                                           \
        panels(job, begin, end, bits, zero);                                                                    \
    }
PANEL_KERNEL(4, 0)
PANEL_KERNEL(4, 1)
PANEL_KERNEL(8, 0)
PANEL_KERNEL(8, 1)

qkv_body qkv_avx512_many(const struct qkv_linear_job *job)
{
    static const qkv_body bodies[2][2] = {{panels_40, panels_41}, {panels_80, panels_81}};
    return bodies[bits_of(job) == 8][job->w.zero != NULL];
}

#endif
