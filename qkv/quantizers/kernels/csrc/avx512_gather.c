/* AVX-512: canonical rows made into a strip, on the way to being multiplied. */
#include "native.h"

#if QKV_X86

#include "avx512_strips.h"

enum { AHEAD = 1024 }; /* bytes of a row, to the second cache: sixteen rows crowd each other out of the first */

static size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }

static size_t code_bytes(const struct qkv_weight *w) { return up((size_t)(w->groups * w->group_bytes)) * STRIP; }

static size_t scale_bytes(const struct qkv_weight *w) { return (size_t)(w->groups * STRIP) * sizeof(float); }

size_t qkv_strip_bytes(const struct qkv_weight *w)
{
    return code_bytes(w) + scale_bytes(w) + up(w->zero ? (size_t)(w->groups * STRIP) : 0);
}

/* 64 bytes of each row. */
TARGET static void gather_block(const uint8_t *const *from, ptrdiff_t at, ptrdiff_t bytes, __m512i *to)
{
    const ptrdiff_t left = bytes - at, next = at + AHEAD;
    const ptrdiff_t fetch = next < bytes ? next : next + (STRIP - 1) * bytes; /* the rows to come, at the row's end */
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

/* Up to sixteen scales of each row. */
TARGET static void gather_scales(const float *const *from, ptrdiff_t g, ptrdiff_t held, float *to)
{
    __m512i rows[STRIP];
    for (int r = 0; r < STRIP; ++r)
        rows[r] = _mm512_castps_si512(_mm512_maskz_loadu_ps((__mmask16)((1u << held) - 1), from[r] + g));
    transpose(rows);
    for (ptrdiff_t i = 0; i < held; ++i) _mm512_store_si512(to + (g + i) * STRIP, rows[i]);
}

TARGET struct strip qkv_gather_strip(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t end, char *room)
{
    const ptrdiff_t bytes = w->groups * w->group_bytes;
    const uint8_t *codes[STRIP];
    const float *scale[STRIP];
    __m512i *units = (__m512i *)room;
    float *scales = (float *)(room + code_bytes(w));
    uint8_t *zeros = (uint8_t *)scales + scale_bytes(w);
    for (int r = 0; r < STRIP; ++r) {
        const ptrdiff_t at = row + r < end ? row + r : end - 1;
        codes[r] = w->codes + at * bytes;
        scale[r] = w->scale + at * w->groups;
        for (ptrdiff_t g = 0; w->zero && g < w->groups; ++g) zeros[g * STRIP + r] = w->zero[at * w->groups + g];
    }
    for (ptrdiff_t at = 0; at < bytes; at += 64) gather_block(codes, at, bytes, units + at / 4);
    for (ptrdiff_t g = 0; g < w->groups; g += 16) gather_scales(scale, g, w->groups - g < 16 ? w->groups - g : 16, scales);
    return (struct strip){units, scales, zeros};
}

#endif
