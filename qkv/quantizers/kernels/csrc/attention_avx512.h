/* Shared by the AVX-512 files of attention: digits, the room they lie in, scales, unpacked codes, their products. */
#ifndef QKV_ATTENTION_AVX512_H
#define QKV_ATTENTION_AVX512_H

#include "attention.h"
#include "avx512.h"

/* What the ops table does not name: the two halves of a tile. */
void qkv_attention_avx512_prepare(struct qkv_worker *w, const struct qkv_side *keys);
void qkv_attention_avx512_scores(struct qkv_worker *w, const struct qkv_tile *tile);
void qkv_attention_avx512_values(struct qkv_worker *w, const struct qkv_tile *tile);

/* ---- digits ---- */


struct digits {
    float step, sum;    /* value of the last digit's unit; sum of the values */
    int32_t init[3];    /* what centring adds to each digit's products */
};

/* The order in which the bytes of a row of keys come out of transposed codes, for each 64 channels; by codes a byte. */
extern uint8_t qkv_attention_orders[5][64];

INLINE __m512i byte_order(int64_t codec)
{
    return _mm512_loadu_si512(qkv_attention_orders[qkv_codes_a_byte(codec)]);
}

QKV_INLINE int center_of(int64_t codec) { return codec == QKV_CODE4 ? 8 : codec == QKV_CODE2 ? 2 : 128; }

/* x, `width` a multiple of 64, to `count` planes of bytes `plane` apart, the highest digit first. */
INLINE void cut(const float *x, ptrdiff_t width, int count, __m512i order, int center, int8_t *to, ptrdiff_t plane,
                struct digits *digits)
{
    const __m512 sign = _mm512_set1_ps(-0.0f);
    __m512 highest = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < width; i += 16) {
        __m512 value = _mm512_load_ps(x + i);
        highest = _mm512_max_ps(highest, _mm512_andnot_ps(sign, value));
        total = _mm512_add_ps(total, value);
    }
    float most = _mm512_reduce_max_ps(highest), limit = count == 2 ? 32512.0f : 8323072.0f, lift = limit / most;
    if (!(lift < 1e37f)) lift = 0.0f;
    __m512i sums[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    for (ptrdiff_t i = 0; i < width; i += 64) {
        __m512i bytes[3] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
        QKV_UNROLL
        for (int j = 0; j < 4; ++j) {
            __m512i left = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(x + i + 16 * j), _mm512_set1_ps(lift)));
            QKV_UNROLL
            for (int d = count - 1; d >= 0; --d) {
                __m512i digit = d ? _mm512_srai_epi32(_mm512_slli_epi32(left, 24), 24) : left;
                left = _mm512_srai_epi32(_mm512_sub_epi32(left, digit), 8);
                sums[d] = _mm512_add_epi32(sums[d], digit);
                __mmask16 quarter = (__mmask16)(15 << 4 * j); /* not an immediate, which j is only once unrolled */
                bytes[d] = _mm512_mask_broadcast_i32x4(bytes[d], quarter, _mm512_cvtepi32_epi8(digit));
            }
        }
        QKV_UNROLL
        for (int d = 0; d < count; ++d)
            _mm512_store_si512(to + d * plane + i, _mm512_permutexvar_epi8(order, bytes[d]));
    }
    digits->step = lift > 0.0f ? 1.0f / lift : 0.0f;
    digits->sum = _mm512_reduce_add_ps(total);
    QKV_UNROLL
    for (int d = 0; d < count; ++d) digits->init[d] = -center * _mm512_reduce_add_epi32(sums[d]);
}

TARGET static inline void cut_digits(const float *x, ptrdiff_t width, int count, __m512i order, int center, int8_t *to,
                                     ptrdiff_t plane, struct digits *digits)
{
    if (count == 2) cut(x, width, 2, order, center, to, plane, digits);
    else cut(x, width, 3, order, center, to, plane, digits);
}

/* ---- the room ---- */

struct room {
    struct digits *keys;   /* [rows, segments] */
    struct digits *values; /* [rows, segments] */
    int8_t *key_digits;    /* [rows, segments, digits, key_width] */
    int8_t *value_digits;  /* [rows, segments, digits, QKV_TILE] */
    float *bias;           /* [rows, segments]: of values, what zero points add */
    uint8_t *codes;        /* transposed codes, or exact keys, of sixteen tokens; interleaved ones of values */
    float *scale, *shift;  /* [segments, QKV_TILE], or [width] */
    float *folded;         /* [width] */
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
    room->keys = carve(&at, w->rows * room->key_segments * (ptrdiff_t)sizeof(struct digits));
    room->values = carve(&at, w->rows * room->value_segments * (ptrdiff_t)sizeof(struct digits));
    room->key_digits = carve(&at, w->rows * room->key_segments * room->count * w->key_width);
    room->value_digits = carve(&at, w->rows * room->value_segments * room->count * QKV_TILE);
    room->bias = carve(&at, w->rows * room->value_segments * 4);
    room->codes = carve(&at, 64 * (room->widest > 96 ? room->widest : 96));
    room->scale = carve(&at, (most * QKV_TILE > room->widest ? most * QKV_TILE : room->widest) * 4);
    room->shift = carve(&at, (most * QKV_TILE > room->widest ? most * QKV_TILE : room->widest) * 4);
    room->folded = carve(&at, (room->widest > QKV_TILE ? room->widest : QKV_TILE) * 4);
    room->halves = carve(&at, w->rows * w->key_width * 2);
    return at - first;
}

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

/* The levels of nf4 in three bytes, the highest first: 8388607 level + 8388608. */
extern uint8_t qkv_attention_levels[3][16];

/* Packed bytes to vectors for each code of a byte, `depth` of them for nf4, `next` apart. */
INLINE void store_planes(__m512i bytes, int64_t codec, int depth, __m512i *to, ptrdiff_t next)
{
    const __m512i nibble = _mm512_set1_epi8(15), crumb = _mm512_set1_epi8(3);
    if (codec == QKV_CODE8) {
        _mm512_store_si512(to, bytes);
        return;
    }
    if (codec == QKV_CODE2) {
        QKV_UNROLL
        for (int k = 0; k < 4; ++k)
            _mm512_store_si512(to + k * next, _mm512_and_si512(_mm512_srli_epi16(bytes, 6 - 2 * k), crumb));
        return;
    }
    __m512i codes[2] = {_mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble), _mm512_and_si512(bytes, nibble)};
    for (int k = 0; k < 2; ++k) {
        if (codec == QKV_CODE4) _mm512_store_si512(to + k * next, codes[k]);
        else for (int e = 0; e < depth; ++e) {
            __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)qkv_attention_levels[e]));
            _mm512_store_si512(to + k * next + e, _mm512_shuffle_epi8(table, codes[k]));
        }
    }
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

/* Products of unpacked codes [from, to), in words, with R rows of digits: values in units of the last digit. Of codes
 * in several bytes, what weighs less than that digit is left out. */
INLINE void multiply(const __m512i *codes, ptrdiff_t from, ptrdiff_t to, const int8_t *digits, ptrdiff_t row,
                     ptrdiff_t plane, const struct digits *init, ptrdiff_t segments, __m512 *result, int R, int count,
                     int depth)
{
    __m512i sums[12];
    QKV_UNROLL
    for (int r = 0; r < R; ++r)
        QKV_UNROLL
        for (int d = 0; d < count; ++d) sums[count * r + d] = _mm512_set1_epi32(init[r * segments].init[d]);
    for (ptrdiff_t i = from; i < to; ++i) {
        __m512i code[3];
        QKV_UNROLL
        for (int e = 0; e < depth; ++e) code[e] = _mm512_load_si512(codes + depth * i + e);
        QKV_UNROLL
        for (int r = 0; r < R; ++r)
            QKV_UNROLL
            for (int d = 0; d < count; ++d) {
                int32_t word;
                memcpy(&word, digits + r * row + d * plane + 4 * i, sizeof word);
                __m512i small = _mm512_set1_epi32(word);
                QKV_UNROLL
                for (int e = 0; e < depth; ++e)
                    if (d + e < count)
                        sums[count * r + d + e] = _mm512_dpbusd_epi32(sums[count * r + d + e], code[e], small);
            }
    }
    QKV_UNROLL
    for (int r = 0; r < R; ++r) {
        __m512 value = _mm512_cvtepi32_ps(sums[count * r]);
        QKV_UNROLL
        for (int d = 1; d < count; ++d)
            value = _mm512_fmadd_ps(value, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(sums[count * r + d]));
        float unit = depth == 1 ? 1.0f : depth == 2 ? 256.0f / 32767.99609375f : 65536.0f / 8388607.0f;
        result[r] = depth == 1 ? value : _mm512_mul_ps(value, _mm512_set1_ps(unit));
    }
}

#define MULTIPLY(R) \
    case R: \
        if (count == 2 && depth == 1) multiply(codes, from, to, digits, row, plane, init, segments, result, R, 2, 1); \
        else if (count == 2) multiply(codes, from, to, digits, row, plane, init, segments, result, R, 2, 2); \
        else if (depth == 1) multiply(codes, from, to, digits, row, plane, init, segments, result, R, 3, 1); \
        else multiply(codes, from, to, digits, row, plane, init, segments, result, R, 3, 3); \
        break;

/* As multiply, for 1 to 4 rows. */
TARGET static inline void multiply_rows(const __m512i *codes, ptrdiff_t from, ptrdiff_t to, const int8_t *digits,
                                        ptrdiff_t row, ptrdiff_t plane, const struct digits *init, ptrdiff_t segments,
                                        __m512 *result, ptrdiff_t rows, int count, int depth)
{
    switch (rows) {
        MULTIPLY(1)
        MULTIPLY(2)
        MULTIPLY(3)
        MULTIPLY(4)
    }
}

#endif
