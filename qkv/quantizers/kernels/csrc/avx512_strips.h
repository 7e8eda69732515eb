/* AVX-512: what the files for several rows of x share.
 *
 * Output features are worked on by strips of sixteen, whose codes lie interleaved: 32 bits a lane, so that a lane holds an
 * output feature and no sum has to be added up across lanes.
 */
#ifndef QKV_AVX512_STRIPS_H
#define QKV_AVX512_STRIPS_H

#include <stdlib.h>

#include "avx512.h"

enum {
    STRIP = 16,
    TILE_ROWS = 8 /* rows of x whose sums fit the registers beside the codes of two strips */
};

/* Units of four bytes, scales and zero points of sixteen output features, [units or groups][16]. */
struct strip {
    const __m512i *codes;
    const float *scale;
    const uint8_t *zero;
};

/* Canonical rows as a strip: groups [g, stop) of the rows from `row` on, the last before `end` filling what is left. How
 * many groups are gathered at most, and the memory that they take. */
struct strip qkv_gather_strip(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, ptrdiff_t g, ptrdiff_t stop,
                              char *room);
void qkv_gather_scales(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, ptrdiff_t g, ptrdiff_t stop, float *scales,
                       uint8_t *zeros);
void qkv_rows_of_strip(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, const uint8_t **codes);
ptrdiff_t qkv_gathered_groups(const struct qkv_weight *w);
size_t qkv_strip_bytes(const struct qkv_weight *w);

/* x to job->px and job->psum; 0 when out of memory. */
int qkv_order_tiles(struct qkv_linear_job *job);

QKV_INLINE int bits_of(const struct qkv_weight *w) { return w->kind == QKV_INT8 ? 8 : 4; }

/* A block is 64 bytes of codes, a unit four bytes: so many elements. */
QKV_INLINE int block_length(int bits) { return 512 / bits; }
QKV_INLINE int unit_length(int bits) { return 32 / bits; }

/* Units of a group; those of a row's only one may be rounded up. */
QKV_INLINE ptrdiff_t group_units(const struct qkv_weight *w) { return (w->group_bytes + 3) / 4; }

/* The first row of x in a tile, its pairs in job->px, and its factors in job->psum. */
QKV_INLINE ptrdiff_t tile_start(const struct qkv_linear_job *job, ptrdiff_t tile)
{
    return tile * job->rows / job->tiles;
}

QKV_INLINE int32_t *tile_pairs(const struct qkv_linear_job *job, ptrdiff_t tile)
{
    return (int32_t *)job->px + tile_start(job, tile) * job->chunks * block_length(bits_of(&job->w)) / 2;
}

QKV_INLINE float *tile_factors(const struct qkv_linear_job *job, ptrdiff_t tile)
{
    return job->segment ? job->psum + tile * job->chunks * (64 / job->segment) * TILE_ROWS : NULL;
}

enum { ROW_AHEAD = 1024 }; /* bytes of a row, to the second cache: sixteen rows crowd each other out of the first */

/* Bytes [at, at + 64) of sixteen rows of so many, transposed: `to[i]` holds unit i of each. */
TARGET static __attribute__((noinline, unused)) void gather_block(const uint8_t *const *from, ptrdiff_t at,
                                                                  ptrdiff_t bytes, __m512i *to)
{
    const ptrdiff_t left = bytes - at, next = at + ROW_AHEAD;
    const ptrdiff_t fetch = next < bytes ? next : next + (2 * STRIP - 1) * bytes; /* the rows to come, at the row's end */
    const __mmask64 mask = left >= 64 ? ~0ull : (1ull << left) - 1;
    __m512i rows[STRIP];
    QKV_UNROLL
    for (int r = 0; r < STRIP; ++r) rows[r] = _mm512_maskz_loadu_epi8(mask, from[r] + at);
    QKV_UNROLL
    for (int r = 0; r < STRIP; ++r) _mm_prefetch((const char *)from[r] + fetch, _MM_HINT_T1);
    transpose(rows);
    QKV_UNROLL
    for (int i = 0; i < STRIP; ++i) _mm512_store_si512(to + i, rows[i]);
}

#endif
