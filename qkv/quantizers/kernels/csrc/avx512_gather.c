/* AVX-512: canonical rows made into a strip, on the way to being multiplied. */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

enum { GATHERED = 512 }; /* bytes of a row at a time: two strips then stay in the first cache */

static size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }

ptrdiff_t qkv_gathered_groups(const struct qkv_weight *w)
{
    return w->group_bytes < GATHERED ? GATHERED / w->group_bytes : 1;
}

static size_t code_bytes(const struct qkv_weight *w) { return up((size_t)(qkv_gathered_groups(w) * w->group_bytes)) * STRIP; }

static size_t scale_bytes(const struct qkv_weight *w) { return (size_t)(w->groups * STRIP) * sizeof(float); }

size_t qkv_strip_bytes(const struct qkv_weight *w)
{
    return code_bytes(w) + scale_bytes(w) + up(w->zero ? (size_t)(w->groups * STRIP) : 0);
}

/* Up to sixteen scales of each row. */
TARGET static void gather_scales(const float *const *from, ptrdiff_t g, ptrdiff_t held, float *to)
{
    __m512i rows[STRIP];
    for (int r = 0; r < STRIP; ++r)
        rows[r] = _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)((1u << held) - 1), from[r] + g));
    transpose(rows);
    for (ptrdiff_t i = 0; i < held; ++i) _mm512_storeu_si512(to + (g + i) * STRIP, rows[i]);
}

/* The last row before `end` fills what is left of a strip. */
QKV_INLINE ptrdiff_t row_at(ptrdiff_t row, int r, ptrdiff_t end) { return row + r < end ? row + r : end - 1; }

void qkv_gather_scales(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, ptrdiff_t g, ptrdiff_t stop, float *scales,
                       uint8_t *zeros)
{
    const float *scale[STRIP];
    for (int r = 0; r < STRIP; ++r) {
        const ptrdiff_t first = row_at(row, r, end) * w->groups;
        scale[r] = w->scale + first;
        for (ptrdiff_t i = g; w->zero && i < stop; ++i) zeros[i * STRIP + r] = w->zero[first + i];
    }
    for (; g < stop; g += 16) gather_scales(scale, g, stop - g < 16 ? stop - g : 16, scales);
}

void qkv_rows_of_strip(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, const uint8_t **codes)
{
    for (int r = 0; r < STRIP; ++r) codes[r] = w->codes + row_at(row, r, end) * w->groups * w->group_bytes;
}

TARGET struct strip qkv_gather_strip(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, ptrdiff_t g, ptrdiff_t stop,
                                     char *room)
{
    const ptrdiff_t bytes = w->groups * w->group_bytes, to = stop * w->group_bytes;
    const uint8_t *codes[STRIP];
    __m512i *units = (__m512i *)room;
    float *scales = (float *)(room + code_bytes(w));
    uint8_t *zeros = (uint8_t *)scales + scale_bytes(w);
    qkv_rows_of_strip(w, row, end, codes);
    for (ptrdiff_t at = g * w->group_bytes; at < to; at += 64, units += STRIP) gather_block(codes, at, bytes, units);
    qkv_gather_scales(w, row, end, g, stop, scales, zeros);
    return (struct strip){(__m512i *)room, scales, zeros};
}

#endif
