/* Scores of tiles for AVX-512: codes transposed so that lanes are tokens, sixteen at a time. */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"

/* The queries, where no scale is folded into them: a group of channels at a time. */
TARGET static void prepare_groups(struct qkv_worker *w, const struct qkv_side *keys, const struct room *room)
{
    __m512i order = byte_order(keys->codec);
    ptrdiff_t chunk = w->rows * room->count * 64, group = w->key_width / 64 * chunk;
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t g = 0; g < room->key_segments; ++g) {
            struct digits *digits = room->keys + r * room->key_segments + g;
            __m512 most = _mm512_setzero_ps(), sum = most;
            memset(room->folded, 0, (size_t)w->key_width * sizeof(float));
            memcpy(room->folded + g * keys->group, w->queries + r * w->key_width + g * keys->group,
                   (size_t)keys->group * sizeof(float));
            for (ptrdiff_t i = 0; i < w->key_width; i += 16) {
                most = larger(most, _mm512_load_ps(room->folded + i));
                sum = _mm512_add_ps(sum, _mm512_load_ps(room->folded + i));
            }
            cut_digits(room->folded, w->key_width, _mm512_reduce_max_ps(most), room->count, order, center_of(keys->codec),
                       room->key_digits + g * group + r * room->count * 64, chunk, digits);
            digits->step *= w->call->scale;
            digits->sum = _mm512_reduce_add_ps(sum) * w->call->scale;
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

/* The scales of a tile's channels folded into the queries; what zero points add becomes the sum. */
TARGET static void fold_queries(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_KEYS;
    __m512i order = byte_order(side->codec);
    int center = center_of(side->codec);
    load_scales(tile->scale[0], tile->zero[0], side->dim, w->key_width, (float)center, room->scale, room->shift);
    for (ptrdiff_t r = 0; r < w->rows; ++r) {
        __m512 bias = _mm512_setzero_ps(), most = bias;
        for (ptrdiff_t i = 0; i < w->key_width; i += 16) {
            __m512 value = _mm512_mul_ps(_mm512_load_ps(w->queries + r * w->key_width + i), _mm512_load_ps(room->scale + i));
            bias = _mm512_fmadd_ps(value, _mm512_load_ps(room->shift + i), bias); /* NaN where a scale or a query is */
            most = larger(most, value);
            _mm512_store_ps(room->folded + i, value);
        }
        cut_digits(room->folded, w->key_width, _mm512_reduce_max_ps(most), room->count, order, center,
                   room->key_digits + r * room->count * 64, w->rows * room->count * 64, room->keys + r);
        room->keys[r].step *= w->call->scale;
        room->keys[r].sum = _mm512_reduce_add_ps(bias) * w->call->scale;
    }
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
    ptrdiff_t stride, pieces;
    const char *ahead;    /* what to have fetched meanwhile, as many bytes */
    const int8_t *digits; /* of the first row: see struct room */
    ptrdiff_t first, chunk; /* of the pieces among all; bytes to the digits of the next 64 channels */
    const struct digits *init;
    ptrdiff_t segments;
};

/* Products of R rows with sixteen tokens, in units of the last digit. */
INLINE void multiply(const struct stretch *s, __m512 *result, int64_t codec, int R, int count)
{
    const int each = codec == QKV_CODE8 ? 1 : codec == QKV_CODE2 ? 4 : 2, depth = codec == QKV_LEVEL4 ? count : 1;
    __m512i sums[4][3];
    QKV_UNROLL
    for (int r = 0; r < R; ++r)
        QKV_UNROLL
        for (int d = 0; d < count; ++d) sums[r][d] = _mm512_set1_epi32(s->init[r * s->segments].init[d]);
    ptrdiff_t i = 0;
    do {
        const ptrdiff_t channel = (s->first + i) * 16 * each;
        const int8_t *digits = s->digits + channel / 64 * s->chunk + channel % 64;
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
                        __m512i word = word_at(digits + (r * count + d) * 64 + 4 * (j * each + k));
                        QKV_UNROLL
                        for (int e = 0; e < depth; ++e)
                            if (d + e < count) sums[r][d + e] = _mm512_dpbusd_epi32(sums[r][d + e], codes[k][e], word);
                    }
        }
    } while (++i < s->pieces);
    QKV_UNROLL
    for (int r = 0; r < R; ++r) result[r] = joined(sums[r], count, depth);
}

#define MULTIPLY_ROWS(codec, R) \
    case R: \
        if (count == 2) multiply(s, result, codec, R, 2); \
        else multiply(s, result, codec, R, 3); \
        break;

#define MULTIPLY(codec, name) \
    TARGET static void multiply_##name(const struct stretch *s, __m512 *result, ptrdiff_t rows, int count) \
    { \
        switch (rows) { \
            MULTIPLY_ROWS(codec, 1) \
            MULTIPLY_ROWS(codec, 2) \
            MULTIPLY_ROWS(codec, 3) \
            MULTIPLY_ROWS(codec, 4) \
        } \
    }

MULTIPLY(QKV_CODE8, code8)
MULTIPLY(QKV_CODE4, code4)
MULTIPLY(QKV_CODE2, code2)
MULTIPLY(QKV_LEVEL4, level4)

typedef void (*multiplier)(const struct stretch *s, __m512 *result, ptrdiff_t rows, int count);

static multiplier multiplier_of(int64_t codec)
{
    return codec == QKV_CODE8 ? multiply_code8 : codec == QKV_CODE4 ? multiply_code4
         : codec == QKV_CODE2 ? multiply_code2 : multiply_level4;
}

/* Adds the scores of group `g` for up to four rows and sixteen tokens. */
TARGET static void score_group(struct qkv_worker *w, const struct qkv_side *side, const struct room *room,
                               struct stretch *s, multiplier multiply_any, ptrdiff_t first, ptrdiff_t r, ptrdiff_t g)
{
    ptrdiff_t rows = w->rows - r < 4 ? w->rows - r : 4, segments = room->key_segments;
    const struct digits *digits = room->keys + r * segments + g;
    __m512 found[4];
    s->init = digits, s->segments = segments;
    multiply_any(s, found, rows, room->count);
    for (ptrdiff_t i = 0; i < rows; ++i) {
        float *score = w->scores + (r + i) * QKV_TILE + first;
        __m512 step = _mm512_set1_ps(digits[i * segments].step), sum = _mm512_set1_ps(digits[i * segments].sum);
        if (side->by_token) {
            sum = _mm512_mul_ps(sum, _mm512_load_ps(room->shift + g * QKV_TILE + first));
            __m512 value = _mm512_fmadd_ps(found[i], step, sum);
            sum = g ? _mm512_load_ps(score) : _mm512_setzero_ps();
            _mm512_store_ps(score, _mm512_fmadd_ps(value, _mm512_load_ps(room->scale + g * QKV_TILE + first), sum));
        } else {
            _mm512_store_ps(score, _mm512_fmadd_ps(found[i], step, sum));
        }
    }
}

TARGET void qkv_attention_avx512_score_codes(struct qkv_worker *w, const struct qkv_tile *tile)
{
    struct room room = furnished(w);
    const struct qkv_side *side = tile->side + QKV_KEYS;
    ptrdiff_t segments = room.key_segments, each = qkv_codes_a_byte(side->codec);
    ptrdiff_t padded = (side->row_bytes + 15) / 16 * 16, channels = 16 * each; /* of a piece */
    struct stretch s = {.chunk = w->rows * room.count * 64};
    multiplier multiply_any = multiplier_of(side->codec);
    if (side->by_token) load_token_scales(tile, QKV_KEYS, segments, room.scale, room.shift);
    else fold_queries(w, tile, &room);
    for (ptrdiff_t first = 0; first < tile->tokens; first += 16) {
        const uint8_t *codes = tile->codes[QKV_KEYS] + first * tile->stride[QKV_KEYS];
        s.stride = tile->stride[QKV_KEYS];
        if (padded != side->row_bytes || tile->tokens < first + 16) {
            codes = stage(tile, QKV_KEYS, first, 16, side->row_bytes, 0, padded, room.codes);
            s.stride = padded;
        }
        for (ptrdiff_t g = 0; g < segments; ++g) {
            ptrdiff_t low = side->by_token ? g * side->group : 0, high = side->by_token ? low + side->group : side->dim;
            ptrdiff_t piece = low / channels;
            s.codes = codes + 16 * piece, s.first = piece, s.pieces = (high + channels - 1) / channels - piece;
            s.ahead = (const char *)tile->ahead[QKV_KEYS] + first * side->row_bytes + 256 * piece;
            for (ptrdiff_t r = 0; r < w->rows; r += 4) {
                s.digits = room.key_digits + g * (w->key_width / 64) * s.chunk + r * room.count * 64;
                score_group(w, side, &room, &s, multiply_any, first, r, g);
            }
        }
    }
}

#endif
