/* Scores of tiles for AVX-512: codes transposed so that lanes are tokens, sixteen at a time. */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"

/* Up to four rows' folded queries cut into digits for keys of group `g`; `bias` as the digits keep it. */
INLINE void keep_queries(const struct qkv_worker *w, const struct room *room, int64_t codec, ptrdiff_t r, ptrdiff_t g,
                         const __m512 *most, const __m512 *bias, int R, int count)
{
    ptrdiff_t chunk = w->rows * count * 64;
    struct digits *digits = room->keys + r / 4 * room->key_segments + g;
    const __m128 scale = _mm_set1_ps(w->call->scale);
    cut(room->folded, w->key_width, w->key_width, most_of_four(most), codec == QKV_CODE8 ? NULL : byte_order(codec),
        center_of(codec), room->key_digits + g * (w->key_width / 64) * chunk + r * count * 64, chunk, digits, R, count);
    _mm_storeu_ps(digits->step, _mm_mul_ps(_mm_loadu_ps(digits->step), scale));
    _mm_storeu_ps(digits->bias, _mm_mul_ps(sum_of_four(bias), scale));
}

/* Rows of queries, where no scale is folded into them: the channels of group `g`. */
INLINE void cut_group(const struct qkv_worker *w, const struct room *room, const struct qkv_side *keys, ptrdiff_t r,
                      ptrdiff_t g, int R, int count)
{
    __m512 most[4], sum[4];
    memset(room->folded, 0, (size_t)(R * w->key_width) * sizeof(float));
    QKV_UNROLL
    for (int k = 0; k < 4; ++k) {
        most[k] = sum[k] = _mm512_setzero_ps();
        if (k >= R) continue;
        float *folded = room->folded + k * w->key_width;
        memcpy(folded + g * keys->group, w->queries + (r + k) * w->key_width + g * keys->group,
               (size_t)keys->group * sizeof(float));
        for (ptrdiff_t i = 0; i < w->key_width; i += 16) {
            most[k] = larger(most[k], _mm512_load_ps(folded + i));
            sum[k] = _mm512_add_ps(sum[k], _mm512_load_ps(folded + i));
        }
    }
    keep_queries(w, room, keys->codec, r, g, most, sum, R, count);
}

TARGET void qkv_attention_avx512_prepare(struct qkv_worker *w, const struct qkv_side *keys)
{
    struct room room = furnished(w);
    const int count = room.count;
    if (keys->codec != QKV_EXACT && keys->by_token) {
        for (ptrdiff_t r = 0; r < w->rows; r += 4)
            for (ptrdiff_t g = 0; g < room.key_segments; ++g)
                FOR_ROWS(cut_group, rows_from(w, r), w, &room, keys, r, g)
    } else if (keys->codec == QKV_EXACT && keys->dtype == QKV_BF16 && w->bf16_queries) {
        for (ptrdiff_t i = 0; i < w->rows * w->key_width; ++i) room.halves[i] = qkv_to_bf16(w->queries[i]);
    }
}

/* The scales of a tile's channels folded into rows of queries; what zero points add becomes the bias. */
INLINE void fold_queries(const struct qkv_worker *w, const struct room *room, int64_t codec, ptrdiff_t r, int R, int count)
{
    __m512 most[4], bias[4];
    QKV_UNROLL
    for (int k = 0; k < 4; ++k) most[k] = bias[k] = _mm512_setzero_ps();
    for (ptrdiff_t i = 0; i < w->key_width; i += 16) {
        __m512 scale = _mm512_load_ps(room->scale + i), shift = _mm512_load_ps(room->shift + i);
        QKV_UNROLL
        for (int k = 0; k < R; ++k) {
            __m512 value = _mm512_mul_ps(_mm512_load_ps(w->queries + (r + k) * w->key_width + i), scale);
            bias[k] = _mm512_fmadd_ps(value, shift, bias[k]); /* NaN where a scale or a query is */
            most[k] = larger(most[k], value);
            _mm512_store_ps(room->folded + k * w->key_width + i, value);
        }
    }
    keep_queries(w, room, codec, r, 0, most, bias, R, count);
}

TARGET static void fold_all(const struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_KEYS;
    const int count = room->count;
    float center = (float)center_of(side->codec);
    load_scales(tile->scale[QKV_KEYS], tile->zero[QKV_KEYS], side->dim, w->key_width, center, room->scale, room->shift);
    for (ptrdiff_t r = 0; r < w->rows; r += 4) FOR_ROWS(fold_queries, rows_from(w, r), w, room, side->codec, r)
}

/* Codes of a byte `each` apart in its digits' words. */
INLINE void split_keys(__m512i bytes, int64_t codec, int depth, __m512i to[4][3])
{
    const __m512i nibble = _mm512_set1_epi8(15), crumb = _mm512_set1_epi8(3);
    if (codec == QKV_CODE8) {
        to[0][0] = bytes;
    } else if (codec == QKV_CODE2) {
        QKV_UNROLL
        for (int k = 0; k < 4; ++k) to[k][0] = _mm512_and_si512(_mm512_srli_epi16(bytes, 6 - 2 * k), crumb);
    } else {
        look_up(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble), codec, depth, to[0]);
        look_up(_mm512_and_si512(bytes, nibble), codec, depth, to[1]);
    }
}

/* What the products of one group of channels need: pieces of sixteen bytes from `codes` on, of sixteen tokens. */
struct stretch {
    const uint8_t *codes;
    ptrdiff_t stride, first, pieces; /* first: of the pieces of a whole row */
    const char *ahead;               /* what to have fetched meanwhile, as many bytes */
    const int8_t *bytes;             /* of the digits of the first row */
    ptrdiff_t chunk;                 /* from one chunk of those to the next */
    const struct digits *digits;
    const float *scale, *shift;      /* of the tokens; NULL: they are in the digits */
    float *scores;                   /* of the first row */
    int add;                         /* to what is there */
};

/* Scores of R rows for sixteen tokens, as far as these channels make them. */
INLINE void multiply(const struct stretch *s, int64_t codec, int R, int count)
{
    const int each = codec == QKV_CODE8 ? 1 : codec == QKV_CODE2 ? 4 : 2, depth = codec == QKV_LEVEL4 ? count : 1;
    __m512i sums[4][3];
    QKV_UNROLL
    for (int r = 0; r < R; ++r)
        QKV_UNROLL
        for (int d = 0; d < count; ++d) sums[r][d] = _mm512_set1_epi32(s->digits->init[d][r]);
    ptrdiff_t i = 0;
    do {
        const ptrdiff_t channel = (s->first + i) * 16 * each;
        const int8_t *words = s->bytes + channel / 64 * s->chunk + channel % 64;
        __m512i bytes[4];
        sixteen_rows(s->codes + 16 * i, s->stride, bytes);
        QKV_UNROLL
        for (int j = 0; j < 4; ++j) {
            __m512i codes[4][3];
            split_keys(bytes[j], codec, depth, codes);
            _mm_prefetch(s->ahead + 256 * i + 64 * j, _MM_HINT_T1);
            QKV_UNROLL
            for (int k = 0; k < each; ++k)
                QKV_UNROLL
                for (int r = 0; r < R; ++r)
                    QKV_UNROLL
                    for (int d = 0; d < count; ++d) {
                        __m512i word = word_at(words + (r * count + d) * 64 + 4 * (j * each + k));
                        QKV_UNROLL
                        for (int e = 0; e < depth; ++e)
                            if (d + e < count) sums[r][d + e] = _mm512_dpbusd_epi32(sums[r][d + e], codes[k][e], word);
                    }
        }
    } while (++i < s->pieces);
    QKV_UNROLL
    for (int r = 0; r < R; ++r) {
        __m512 bias = _mm512_set1_ps(s->digits->bias[r]), step = _mm512_set1_ps(s->digits->step[r]);
        if (s->shift) bias = _mm512_mul_ps(bias, _mm512_load_ps(s->shift));
        __m512 value = _mm512_fmadd_ps(joined(sums[r], count, depth), step, bias);
        if (s->scale) value = _mm512_mul_ps(value, _mm512_load_ps(s->scale));
        if (s->add) value = _mm512_add_ps(value, _mm512_load_ps(s->scores + r * QKV_TILE));
        _mm512_store_ps(s->scores + r * QKV_TILE, value);
    }
}

#define MULTIPLY(codec, name) \
    TARGET static void name(const struct stretch *s, ptrdiff_t rows, int count) { FOR_ROWS(multiply, rows, s, codec) }

MULTIPLY(QKV_CODE8, multiply_code8)
MULTIPLY(QKV_CODE4, multiply_code4)
MULTIPLY(QKV_CODE2, multiply_code2)
MULTIPLY(QKV_LEVEL4, multiply_level4)

typedef void (*multiplier)(const struct stretch *s, ptrdiff_t rows, int count);

static multiplier multiplier_of(int64_t codec)
{
    return codec == QKV_CODE8 ? multiply_code8 : codec == QKV_CODE4 ? multiply_code4
         : codec == QKV_CODE2 ? multiply_code2 : multiply_level4;
}

/* Sixteen tokens from `first` on, whose codes `s` has: group by group, for all rows. */
TARGET static void score_tokens(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room, struct stretch *s,
                                multiplier multiply_any, ptrdiff_t first)
{
    const struct qkv_side *side = tile->side + QKV_KEYS;
    ptrdiff_t segments = room->key_segments, channels = 16 * qkv_codes_a_byte(side->codec); /* of a piece */
    const uint8_t *codes = s->codes;
    for (ptrdiff_t g = 0; g < segments; ++g) {
        ptrdiff_t low = side->by_token ? g * side->group : 0, high = side->by_token ? low + side->group : side->dim;
        s->first = low / channels, s->pieces = (high + channels - 1) / channels - s->first;
        s->codes = codes + 16 * s->first;
        s->ahead = (const char *)tile->ahead[QKV_KEYS] + first * side->row_bytes + 256 * s->first;
        if (side->by_token) s->scale = room->scale + g * QKV_TILE + first, s->shift = room->shift + g * QKV_TILE + first;
        s->add = g > 0;
        for (ptrdiff_t r = 0; r < w->rows; r += 4) {
            s->digits = room->keys + r / 4 * segments + g;
            s->bytes = room->key_digits + g * (w->key_width / 64) * s->chunk + r * room->count * 64;
            s->scores = w->scores + r * QKV_TILE + first;
            multiply_any(s, rows_from(w, r), room->count);
        }
    }
}

TARGET void qkv_attention_avx512_score_codes(struct qkv_worker *w, const struct qkv_tile *tile)
{
    struct room room = furnished(w);
    const struct qkv_side *side = tile->side + QKV_KEYS;
    ptrdiff_t padded = (side->row_bytes + 15) / 16 * 16;
    if (side->by_token) load_token_scales(tile, QKV_KEYS, room.key_segments, room.scale, room.shift);
    else fold_all(w, tile, &room);
    for (ptrdiff_t first = 0; first < tile->tokens; first += 16) {
        struct stretch s = {.stride = tile->stride[QKV_KEYS], .chunk = w->rows * room.count * 64};
        s.codes = tile->codes[QKV_KEYS] + first * s.stride;
        if (padded != side->row_bytes || tile->tokens < first + 16) {
            s.codes = stage(tile, QKV_KEYS, first, 16, side->row_bytes, 0, padded, room.codes);
            s.stride = padded;
        }
        score_tokens(w, tile, &room, &s, multiplier_of(side->codec), first);
    }
}

#endif
