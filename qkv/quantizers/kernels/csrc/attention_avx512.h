/* Shared by the AVX-512 files of attention: the room they work in, scales, rows of codes, products. */
#ifndef QKV_ATTENTION_AVX512_H
#define QKV_ATTENTION_AVX512_H

#include "attention.h"
#include "attention_avx512_digits.h"

/* What the ops table does not name: the two halves of a tile. */
void qkv_attention_avx512_prepare(struct qkv_worker *w, const struct qkv_side *keys);
void qkv_attention_avx512_score_codes(struct qkv_worker *w, const struct qkv_tile *tile);
void qkv_attention_avx512_score_exact(struct qkv_worker *w, const struct qkv_tile *tile);
void qkv_attention_avx512_add_codes(struct qkv_worker *w, const struct qkv_tile *tile);
void qkv_attention_avx512_add_exact(struct qkv_worker *w, const struct qkv_tile *tile);

/* ---- the room ---- */

struct room {
    struct digits *keys;   /* [rows / 4, segments] */
    struct digits *values; /* [rows / 4, segments] */
    int8_t *key_digits;    /* [segments, key_width / 64, rows, digits, 64] */
    int8_t *value_digits;  /* [segments, rows, digits, QKV_TILE] */
    uint8_t *codes;        /* rows whose length or number is not a whole number of vectors, padded */
    float *scale, *shift;  /* [segments, QKV_TILE], or [width] */
    float *folded;         /* [4, width or QKV_TILE] */
    uint16_t *halves;      /* [rows, key_width]: bf16 queries */
    ptrdiff_t key_segments, value_segments, widest;
    int count; /* digits */
};

static inline ptrdiff_t segments(const struct qkv_side *side)
{
    return side->codec != QKV_EXACT && side->by_token ? side->dim / side->group : 1;
}

static inline ptrdiff_t furnish(const struct qkv_worker *w, struct room *room, char *at)
{
    const struct qkv_side *side = w->call->side;
    char *first = at;
    room->count = w->call->dtype == QKV_F32 ? 3 : 2;
    room->key_segments = segments(side + QKV_KEYS);
    room->value_segments = segments(side + QKV_VALUES);
    room->widest = w->key_width > w->value_width ? w->key_width : w->value_width;
    ptrdiff_t most = room->key_segments > room->value_segments ? room->key_segments : room->value_segments;
    room->keys = carve(&at, (w->rows + 3) / 4 * room->key_segments * (ptrdiff_t)sizeof(struct digits));
    room->values = carve(&at, (w->rows + 3) / 4 * room->value_segments * (ptrdiff_t)sizeof(struct digits));
    room->key_digits = carve(&at, w->rows * room->key_segments * room->count * w->key_width);
    room->value_digits = carve(&at, w->rows * room->value_segments * room->count * QKV_TILE);
    room->codes = carve(&at, 64 * (room->widest > 96 ? room->widest : 96));
    room->scale = carve(&at, (most * QKV_TILE > room->widest ? most * QKV_TILE : room->widest) * 4);
    room->shift = carve(&at, (most * QKV_TILE > room->widest ? most * QKV_TILE : room->widest) * 4);
    room->folded = carve(&at, (room->widest > QKV_TILE ? room->widest : QKV_TILE) * 16);
    room->halves = carve(&at, w->rows * w->key_width * 2);
    return at - first;
}

/* Rows from `r` on, up to four. */
static inline ptrdiff_t rows_from(const struct qkv_worker *w, ptrdiff_t r) { return w->rows - r < 4 ? w->rows - r : 4; }

static inline struct room furnished(const struct qkv_worker *w)
{
    struct room room;
    furnish(w, &room, w->room);
    return room;
}

/* ---- scales ---- */

INLINE __m512 scales_at(const uint16_t *from, __mmask16 mask)
{
    __m256i halves = _mm256_maskz_loadu_epi16(mask, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m512 zeros_at(const int16_t *from, __mmask16 mask)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(mask, from)));
}

INLINE __mmask16 first_lanes(ptrdiff_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << (count > 0 ? count : 0)) - 1); }

/* Scales, and centre minus zero points, of `count` channels or tokens side by side. */
TARGET static inline void load_scales(const uint16_t *scale, const int16_t *zero, ptrdiff_t count, ptrdiff_t padded, float center,
                               float *to, float *shift)
{
    for (ptrdiff_t i = 0; i < padded; i += 16) {
        __mmask16 mask = first_lanes(count - i);
        _mm512_store_ps(to + i, scales_at(scale + i, mask));
        __m512 points = zero ? _mm512_sub_ps(_mm512_set1_ps(center), zeros_at(zero + i, mask)) : _mm512_setzero_ps();
        _mm512_store_ps(shift + i, points);
    }
}

/* Pairs of 16-bit numbers, two groups' side by side, as two vectors of 32 bits: bf16 as fp32 and integers as such. */
INLINE __m512 scales_of_pair(__m512i pairs, int second)
{
    return _mm512_castsi512_ps(second ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u))
                                      : _mm512_slli_epi32(pairs, 16));
}

INLINE __m512 zeros_of_pair(__m512i pairs, int second)
{
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(second ? pairs : _mm512_slli_epi32(pairs, 16), 16));
}

INLINE void load_pairs(const uint16_t *scale, const int16_t *zero, ptrdiff_t tokens, float center, float *to, float *shift)
{
    for (ptrdiff_t t = 0; t < QKV_TILE; t += 16) {
        __mmask16 mask = first_lanes(tokens - t);
        __m512i scales = _mm512_maskz_loadu_epi32(mask, scale + 2 * t);
        __m512i zeros = zero ? _mm512_maskz_loadu_epi32(mask, zero + 2 * t) : scales;
        QKV_UNROLL
        for (int g = 0; g < 2; ++g) {
            __m512 points = _mm512_sub_ps(_mm512_set1_ps(center), zeros_of_pair(zeros, g));
            _mm512_store_ps(to + g * QKV_TILE + t, scales_of_pair(scales, g));
            _mm512_store_ps(shift + g * QKV_TILE + t, zero ? points : _mm512_setzero_ps());
        }
    }
}

/* The same of a tile's tokens, a row of QKV_TILE for each of their groups. */
TARGET static inline void load_token_scales(const struct qkv_tile *tile, int part, ptrdiff_t groups, float *to, float *shift)
{
    const uint16_t *scale = tile->scale[part];
    const int16_t *zero = tile->zero[part];
    float center = (float)center_of(tile->side[part].codec);
    if (groups == 1) load_scales(scale, zero, tile->tokens, QKV_TILE, center, to, shift);
    if (groups == 2) load_pairs(scale, zero, tile->tokens, center, to, shift);
    for (ptrdiff_t g = 0; groups > 2 && g < groups; ++g)
        for (ptrdiff_t t = 0; t < QKV_TILE; ++t) {
            int known = t < tile->tokens;
            to[g * QKV_TILE + t] = known ? qkv_from_bf16(scale[t * groups + g]) : 0.0f;
            shift[g * QKV_TILE + t] = known && zero ? center - (float)zero[t * groups + g] : 0.0f;
        }
}

/* ---- unpacking ---- */

/* Sixteen bytes of four rows side by side. */
INLINE __m512i four_rows(const uint8_t *from, ptrdiff_t step)
{
    __m512i bytes = _mm512_castsi128_si512(_mm_loadu_si128((const void *)from));
    bytes = _mm512_inserti32x4(bytes, _mm_loadu_si128((const void *)(from + step)), 1);
    bytes = _mm512_inserti32x4(bytes, _mm_loadu_si128((const void *)(from + 2 * step)), 2);
    return _mm512_inserti32x4(bytes, _mm_loadu_si128((const void *)(from + 3 * step)), 3);
}

/* Sixteen bytes of sixteen rows as four vectors: a lane is a row, and holds four bytes. */
INLINE void sixteen_rows(const uint8_t *from, ptrdiff_t stride, __m512i *to)
{
    __m512i x[4], y[4];
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = four_rows(from + i * stride, 4 * stride);
    y[0] = _mm512_unpacklo_epi32(x[0], x[1]), y[1] = _mm512_unpacklo_epi32(x[2], x[3]);
    y[2] = _mm512_unpackhi_epi32(x[0], x[1]), y[3] = _mm512_unpackhi_epi32(x[2], x[3]);
    to[0] = _mm512_unpacklo_epi64(y[0], y[1]), to[1] = _mm512_unpackhi_epi64(y[0], y[1]);
    to[2] = _mm512_unpacklo_epi64(y[2], y[3]), to[3] = _mm512_unpackhi_epi64(y[2], y[3]);
}

/* Bytes [at, at + width) of rows from `first` on, as far as there are any, to rows of `width` bytes: zeros past a row's
 * end, and the last row again past it. */
TARGET static inline const uint8_t *stage(const struct qkv_tile *tile, int part, ptrdiff_t first, ptrdiff_t rows,
                                          ptrdiff_t row_bytes, ptrdiff_t at, ptrdiff_t width, uint8_t *to)
{
    ptrdiff_t last = tile->tokens - 1;
    for (ptrdiff_t i = 0; i < rows; ++i) {
        const uint8_t *from = tile->codes[part] + (first + i < last ? first + i : last) * tile->stride[part];
        for (ptrdiff_t j = 0; j < width; j += 16) {
            ptrdiff_t left = row_bytes - at - j;
            __mmask16 mask = left >= 16 ? 0xffff : (__mmask16)((1u << (left > 0 ? left : 0)) - 1);
            _mm_store_si128((void *)(to + i * width + j), _mm_maskz_loadu_epi8(mask, from + at + j));
        }
    }
    return to;
}

/* The levels of nf4 in three bytes, the highest first: 8388607 level + 8388608. */
extern uint8_t qkv_attention_levels[3][16];

/* Codes of four bits to their bytes, `depth` of them for nf4. */
INLINE void look_up(__m512i codes, int64_t codec, int depth, __m512i *to)
{
    if (codec != QKV_LEVEL4) to[0] = codes;
    else QKV_UNROLL for (int e = 0; e < depth; ++e)
        to[e] = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)qkv_attention_levels[e])), codes);
}

INLINE __m512 load_floats(const void *from, int64_t dtype, __mmask16 mask)
{
    if (dtype == QKV_F32) return _mm512_maskz_loadu_ps(mask, from);
    __m256i halves = _mm256_maskz_loadu_epi16(mask, from);
    if (dtype == QKV_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Where channel `i` lies in the output of such values. */
QKV_INLINE ptrdiff_t lane_of(ptrdiff_t i, ptrdiff_t each) { return i / (16 * each) * 16 * each + i % each * 16 + i / each % 16; }

/* ---- products ---- */

/* Bytes of an unpacked code. */
QKV_INLINE int depth_of(int64_t codec, const struct room *room) { return codec == QKV_LEVEL4 ? room->count : 1; }

/* A row's digits' products as one number, in units of the last digit. Of codes in several bytes, what weighs less than
 * that digit is left out. */
INLINE __m512 joined(const __m512i *sums, int count, int depth)
{
    __m512 value = _mm512_cvtepi32_ps(sums[0]);
    QKV_UNROLL
    for (int d = 1; d < count; ++d) value = _mm512_fmadd_ps(value, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sums[d]));
    float unit = depth == 2 ? 256.0f / 32767.99609375f : 65536.0f / 8388607.0f;
    return depth == 1 ? value : _mm512_mul_ps(value, _mm512_set1_ps(unit));
}

INLINE __m512i word_at(const int8_t *digits)
{
    int32_t word;
    memcpy(&word, digits, sizeof word);
    return _mm512_set1_epi32(word);
}

#endif
