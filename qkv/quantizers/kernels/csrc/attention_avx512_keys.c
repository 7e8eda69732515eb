/* Scores of tiles for AVX-512: codes transposed so that lanes are tokens, sixteen at a time. */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"


/* Sixteen rows of 64 bytes, as 32-bit words, transposed. */
INLINE void transpose16(__m512i *x)
{
    __m512i y[16];
    QKV_UNROLL
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    QKV_UNROLL
    for (int i = 0; i < 16; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
        y[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
        y[8 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        y[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    }
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
        x[4 + i] = _mm512_shuffle_i32x4(y[4 + i], y[12 + i], 0x88);
        x[12 + i] = _mm512_shuffle_i32x4(y[4 + i], y[12 + i], 0xdd);
    }
}

/* Sixteen rows of 32 bytes, two to a vector (t and t + 4 of each eight), to eight vectors. */
INLINE void transpose8(__m512i *x)
{
    __m512i y[8];
    QKV_UNROLL
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    QKV_UNROLL
    for (int i = 0; i < 8; i += 4) {
        x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
        x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
        x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
        x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
    }
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) x[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
    QKV_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = y[i];
}

/* Sixteen tokens from `first` on, transposed; what lies past the tile repeats its last token. */
INLINE void transpose_codes(const struct qkv_tile *tile, ptrdiff_t first, int64_t codec, int depth, int whole, __m512i *to)
{
    ptrdiff_t bytes = tile->side[QKV_KEYS].row_bytes, last = tile->tokens - 1, stride = tile->stride[QKV_KEYS];
    ptrdiff_t step = qkv_codes_a_byte(codec) * depth;
    const uint8_t *codes = tile->codes[QKV_KEYS];
    const char *ahead = (const char *)tile->ahead[QKV_KEYS] + first * stride;
    for (ptrdiff_t at = 0; at < bytes; at += 64) {
        __m512i x[16];
        int words = bytes - at > 32 ? 16 : 8;
        __mmask64 mask = bytes - at >= 64 ? ~0ull : (1ull << (bytes - at)) - 1;
        if (words == 16) {
            QKV_UNROLL
            for (int i = 0; i < 16; ++i) {
                ptrdiff_t token = whole || first + i < last ? first + i : last;
                x[i] = _mm512_maskz_loadu_epi8(mask, codes + token * stride + at);
                _mm_prefetch(ahead + at * 16 + 64 * i, _MM_HINT_T1);
            }
            transpose16(x);
        } else {
            QKV_UNROLL
            for (int i = 0; i < 8; ++i) {
                ptrdiff_t token = first + i % 4 + i / 4 * 8, other = token + 4;
                const uint8_t *low = codes + (whole || token < last ? token : last) * stride + at;
                const uint8_t *high = codes + (whole || other < last ? other : last) * stride + at;
                x[i] = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_maskz_loadu_epi8((__mmask32)mask, low)),
                                          _mm256_maskz_loadu_epi8((__mmask32)mask, high), 1);
                _mm_prefetch(ahead + at * 16 + 64 * i, _MM_HINT_T1);
            }
            transpose8(x);
        }
        for (int i = 0; i < words; ++i, to += step) store_planes(x[i], codec, depth, to, depth);
    }
}

#define TRANSPOSE(codec, depth) \
    if (whole) transpose_codes(tile, first, codec, depth, 1, to); \
    else transpose_codes(tile, first, codec, depth, 0, to); \
    break;

TARGET static void transpose_any(const struct qkv_tile *tile, ptrdiff_t first, int depth, __m512i *to)
{
    int whole = tile->tokens >= first + 16;
    switch (tile->side[QKV_KEYS].codec) {
    case QKV_CODE8: TRANSPOSE(QKV_CODE8, 1)
    case QKV_CODE4: TRANSPOSE(QKV_CODE4, 1)
    case QKV_CODE2: TRANSPOSE(QKV_CODE2, 1)
    default: TRANSPOSE(QKV_LEVEL4, depth)
    }
}

/* The queries, where no scale is folded into them: a group of channels at a time. */
TARGET static void prepare_groups(struct qkv_worker *w, const struct qkv_side *keys, const struct room *room)
{
    __m512i order = byte_order(keys->codec);
    ptrdiff_t plane = w->key_width, row = room->key_segments * room->count * plane;
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t g = 0; g < room->key_segments; ++g) {
            memset(room->folded, 0, (size_t)w->key_width * sizeof(float));
            memcpy(room->folded + g * keys->group, w->queries + r * w->key_width + g * keys->group,
                   (size_t)keys->group * sizeof(float));
            cut_digits(room->folded, w->key_width, room->count, order, center_of(keys->codec),
                       room->key_digits + r * row + g * room->count * plane, plane, room->keys + r * room->key_segments + g);
        }
}

TARGET void qkv_attention_avx512_prepare(struct qkv_worker *w, const struct qkv_side *keys)
{
    struct room room = furnished(w);
    if (keys->codec != QKV_EXACT && keys->by_token) {
        prepare_groups(w, keys, &room);
    } else if (keys->codec == QKV_EXACT && keys->dtype == QKV_BF16 && w->bf16_queries) {
        for (ptrdiff_t i = 0; i < w->rows * w->key_width; ++i) room.halves[i] = qkv_to_bf16(w->queries[i]);
    }
}

/* The scales of a tile's channels folded into the queries. */
TARGET static void fold_queries(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_KEYS;
    __m512i order = byte_order(side->codec);
    int center = center_of(side->codec);
    load_scales(tile->scale[0], tile->zero[0], side->dim, w->key_width, (float)center, room->scale, room->shift);
    for (ptrdiff_t r = 0; r < w->rows; ++r) {
        __m512 bias = _mm512_setzero_ps();
        for (ptrdiff_t i = 0; i < w->key_width; i += 16) {
            __m512 value = _mm512_mul_ps(_mm512_load_ps(w->queries + r * w->key_width + i), _mm512_load_ps(room->scale + i));
            bias = _mm512_fmadd_ps(value, _mm512_load_ps(room->shift + i), bias);
            _mm512_store_ps(room->folded + i, value);
        }
        cut_digits(room->folded, w->key_width, room->count, order, center,
                   room->key_digits + r * room->count * w->key_width, w->key_width, room->keys + r);
        float total = room->keys[r].sum; /* NaN where a scale or a query is, which the digits would hide */
        room->keys[r].sum = _mm512_reduce_add_ps(bias) + (total - total);
    }
}

TARGET static void score_codes(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_KEYS;
    ptrdiff_t segments = room->key_segments, plane = w->key_width, row = segments * room->count * plane;
    ptrdiff_t words = qkv_codes_a_byte(side->codec), wide = 4 * words; /* of a packed word; channels of one */
    int depth = depth_of(side->codec, room);
    if (side->by_token) load_token_scales(tile, QKV_KEYS, segments, room->scale, room->shift);
    else fold_queries(w, tile, room);
    for (ptrdiff_t first = 0; first < tile->tokens; first += 16) {
        transpose_any(tile, first, depth, (__m512i *)room->codes);
        for (ptrdiff_t g = 0; g < segments; ++g) {
            ptrdiff_t low = side->by_token ? g * side->group : 0, high = side->by_token ? low + side->group : side->dim;
            ptrdiff_t from = low / wide * words, to = (high + wide - 1) / wide * words;
            for (ptrdiff_t r = 0; r < w->rows; r += 4) {
                __m512 found[4];
                ptrdiff_t rows = w->rows - r < 4 ? w->rows - r : 4;
                const struct digits *digits = room->keys + r * segments + g;
                multiply_rows((const __m512i *)room->codes, from, to, room->key_digits + r * row + g * room->count * plane,
                              row, plane, digits, segments, found, rows, room->count, depth);
                for (ptrdiff_t i = 0; i < rows; ++i) {
                    float *score = w->scores + (r + i) * QKV_TILE + first;
                    __m512 value = _mm512_mul_ps(found[i], _mm512_set1_ps(digits[i * segments].step));
                    __m512 sum = _mm512_set1_ps(digits[i * segments].sum);
                    if (side->by_token) {
                        const float *shift = room->shift + g * QKV_TILE + first;
                        value = _mm512_fmadd_ps(sum, _mm512_load_ps(shift), value);
                        value = _mm512_mul_ps(value, _mm512_load_ps(room->scale + g * QKV_TILE + first));
                        value = _mm512_add_ps(value, _mm512_sub_ps(sum, sum));
                    } else {
                        value = _mm512_add_ps(value, sum);
                    }
                    value = _mm512_mul_ps(value, _mm512_set1_ps(w->call->scale));
                    if (g) value = _mm512_add_ps(value, _mm512_load_ps(score));
                    _mm512_store_ps(score, value);
                }
            }
        }
    }
}

/* ---- exact keys ---- */

/* Sixteen tokens of 32 channels each way of a bf16 pair, transposed; returns the words. */
INLINE ptrdiff_t transpose_halves(const struct qkv_tile *tile, ptrdiff_t first, __m512i *to)
{
    ptrdiff_t dim = tile->side[QKV_KEYS].dim, last = tile->tokens - 1;
    for (ptrdiff_t at = 0; at < dim; at += 32) {
        __m512i x[16];
        __mmask32 mask = dim - at >= 32 ? ~0u : (1u << (dim - at)) - 1;
        QKV_UNROLL
        for (int i = 0; i < 16; ++i) {
            ptrdiff_t from = (first + i < last ? first + i : last) * tile->stride[QKV_KEYS] + 2 * at;
            x[i] = _mm512_maskz_loadu_epi16(mask, tile->codes[QKV_KEYS] + from);
            _mm_prefetch((const char *)tile->ahead[QKV_KEYS] + from, _MM_HINT_T1);
        }
        transpose16(x);
        QKV_UNROLL
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + at / 2 + i, x[i]);
    }
    return (dim + 1) / 2;
}

INLINE ptrdiff_t transpose_floats(const struct qkv_tile *tile, ptrdiff_t first, __m512i *to)
{
    const struct qkv_side *side = tile->side + QKV_KEYS;
    ptrdiff_t dim = side->dim, last = tile->tokens - 1, size = side->dtype == QKV_F32 ? 4 : 2;
    for (ptrdiff_t at = 0; at < dim; at += 16) {
        __m512i x[16];
        QKV_UNROLL
        for (int i = 0; i < 16; ++i) {
            ptrdiff_t from = (first + i < last ? first + i : last) * tile->stride[QKV_KEYS] + size * at;
            const uint8_t *keys = tile->codes[QKV_KEYS] + from;
            x[i] = _mm512_castps_si512(load_floats(keys, side->dtype, first_lanes(dim - at)));
            _mm_prefetch((const char *)tile->ahead[QKV_KEYS] + from, _MM_HINT_T1);
        }
        transpose16(x);
        QKV_UNROLL
        for (int i = 0; i < 16; ++i) _mm512_store_si512(to + at + i, x[i]);
    }
    return dim;
}

/* Two sums a row, so that one addition need not wait for the other. */
INLINE void multiply_exact(const __m512i *keys, ptrdiff_t words, const void *queries, ptrdiff_t row, __m512 *result, int R,
                           int halves)
{
    __m512 sums[4][2];
    QKV_UNROLL
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < words; i += 2) /* widths are padded with zeros, of queries */
        QKV_UNROLL
        for (int half = 0; half < 2; ++half) {
            __m512i key = _mm512_load_si512(keys + i + half);
            QKV_UNROLL
            for (int r = 0; r < R; ++r) {
                __m512i word = _mm512_set1_epi32(((const int32_t *)queries)[r * row + i + half]);
                sums[r][half] = halves ? _mm512_dpbf16_ps(sums[r][half], (__m512bh)key, (__m512bh)word)
                                       : _mm512_fmadd_ps(_mm512_castsi512_ps(key), _mm512_castsi512_ps(word), sums[r][half]);
            }
        }
    QKV_UNROLL
    for (int r = 0; r < R; ++r) result[r] = _mm512_add_ps(sums[r][0], sums[r][1]);
}

#define MULTIPLY_EXACT(R) \
    case R: \
        if (halves) multiply_exact(keys, words, queries, row, result, R, 1); \
        else multiply_exact(keys, words, queries, row, result, R, 0); \
        break;

TARGET static void multiply_exact_rows(const __m512i *keys, ptrdiff_t words, const void *queries, ptrdiff_t row,
                                       __m512 *result, ptrdiff_t rows, int halves)
{
    switch (rows) {
        MULTIPLY_EXACT(1)
        MULTIPLY_EXACT(2)
        MULTIPLY_EXACT(3)
        MULTIPLY_EXACT(4)
    }
}

TARGET static void score_exact(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    int halves = tile->side[QKV_KEYS].dtype == QKV_BF16 && w->bf16_queries;
    ptrdiff_t row = halves ? w->key_width / 2 : w->key_width;
    const int32_t *queries = halves ? (const int32_t *)room->halves : (const int32_t *)w->queries;
    __m512i *keys = (__m512i *)room->codes;
    for (ptrdiff_t first = 0; first < tile->tokens; first += 16) {
        ptrdiff_t words = halves ? transpose_halves(tile, first, keys) : transpose_floats(tile, first, keys);
        for (ptrdiff_t r = 0; r < w->rows; r += 4) {
            __m512 found[4];
            ptrdiff_t rows = w->rows - r < 4 ? w->rows - r : 4;
            multiply_exact_rows(keys, words, queries + r * row, row, found, rows, halves);
            for (ptrdiff_t i = 0; i < rows; ++i)
                _mm512_store_ps(w->scores + (r + i) * QKV_TILE + first,
                                _mm512_mul_ps(found[i], _mm512_set1_ps(w->call->scale)));
        }
    }
}

TARGET void qkv_attention_avx512_scores(struct qkv_worker *w, const struct qkv_tile *tile)
{
    struct room room = furnished(w);
    if (tile->side[QKV_KEYS].codec == QKV_EXACT) score_exact(w, tile, &room);
    else score_codes(w, tile, &room);
}

#endif
