/* Values of tiles for AVX-512: codes of four tokens interleaved, so that lanes are channels. */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"

/* Rows of probabilities times the scales of their tokens, cut into digits; what zero points add becomes the bias. */
INLINE void fold_rows(struct qkv_worker *w, const struct room *room, const struct qkv_side *side, ptrdiff_t r, ptrdiff_t g,
                      int R, int count)
{
    const float *weights = w->scores + r * QKV_TILE, *scale = room->scale + g * QKV_TILE, *shift = room->shift + g * QKV_TILE;
    struct digits *digits = room->values + r / 4 * room->value_segments + g;
    __m512 most[4], bias[4];
    QKV_UNROLL
    for (int k = 0; k < 4; ++k) {
        most[k] = bias[k] = _mm512_setzero_ps();
        QKV_UNROLL
        for (int i = 0; k < R && i < QKV_TILE; i += 16) {
            __m512 value = _mm512_load_ps(weights + k * QKV_TILE + i);
            if (side->by_token) {
                value = _mm512_mul_ps(value, _mm512_load_ps(scale + i));
                bias[k] = _mm512_fmadd_ps(value, _mm512_load_ps(shift + i), bias[k]); /* NaN stays */
                _mm512_store_ps(room->folded + k * QKV_TILE + i, value);
            }
            most[k] = larger(most[k], value);
        }
    }
    _mm_storeu_ps(digits->bias, sum_of_four(bias));
    cut(side->by_token ? room->folded : weights, QKV_TILE, QKV_TILE, most_of_four(most), NULL, center_of(side->codec),
        room->value_digits + (g * w->rows + r) * count * QKV_TILE, 0, digits, R, count);
}

TARGET static void fold_probabilities(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_VALUES;
    const int count = room->count;
    if (side->by_token) load_token_scales(tile, QKV_VALUES, room->value_segments, room->scale, room->shift);
    for (ptrdiff_t r = 0; r < w->rows; r += 4)
        for (ptrdiff_t g = 0; g < room->value_segments; ++g)
            FOR_ROWS(fold_rows, rows_from(w, r), w, room, side, r, g)
}

/* Sixteen bytes of four tokens, so that a lane holds a byte of each. */
INLINE __m512i interleaved(const uint8_t *codes, ptrdiff_t stride)
{
    const __m512i words = _mm512_set_epi8(63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58,
                                          42, 26, 10, 57, 41, 25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21,
                                          5, 52, 36, 20, 4, 51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
    return _mm512_permutexvar_epi8(words, four_rows(codes, stride));
}

/* Bytes of a row from which two vectors of codes are made at a time: as `part` says, where there are more. */
QKV_INLINE ptrdiff_t bytes_of_pair(int64_t codec) { return codec == QKV_CODE8 ? 32 : 16; }

/* Two vectors of codes of four tokens: neighbouring bytes, or neighbouring codes of the same bytes. */
INLINE void split_values(const uint8_t *codes, ptrdiff_t stride, int64_t codec, int part, int depth, __m512i to[2][3])
{
    const __m512i nibble = _mm512_set1_epi8(15), crumb = _mm512_set1_epi8(3);
    __m512i bytes = interleaved(codes, stride);
    if (codec == QKV_CODE8) {
        to[0][0] = bytes, to[1][0] = interleaved(codes + 16, stride);
    } else if (codec == QKV_CODE2) {
        to[0][0] = _mm512_and_si512(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(6 - 4 * part)), crumb);
        to[1][0] = _mm512_and_si512(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(4 - 4 * part)), crumb);
    } else {
        look_up(_mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble), codec, depth, to[0]);
        look_up(_mm512_and_si512(bytes, nibble), codec, depth, to[1]);
    }
}

/* What the sums of two vectors of channels need: rows of codes, a tile's tokens of them. */
struct column {
    const uint8_t *codes;
    ptrdiff_t stride, quads; /* quads: tokens, four at a time */
    const char *ahead;       /* what to have fetched meanwhile, as many bytes */
    int part;
    const int8_t *bytes;     /* of the digits of the first row */
    const struct digits *digits;
    const float *scale, *shift, *sums; /* of the channels, and the rows' probabilities'; NULL: they are in the digits */
    float *output;                     /* of the first row */
    ptrdiff_t width;                   /* from one row's output to the next */
    __mmask16 masks[2];                /* the channels to add to */
};

/* Adds a vector of channels to a row's output. */
INLINE void add_row(const struct column *c, __m512 value, int r, int k)
{
    float *to = c->output + r * c->width + 16 * k;
    __m512 bias = _mm512_set1_ps(c->digits->bias[r]);
    if (c->shift) bias = _mm512_mul_ps(_mm512_load_ps(c->shift + 16 * k), _mm512_set1_ps(c->sums[r]));
    value = _mm512_fmadd_ps(value, _mm512_set1_ps(c->digits->step[r]), bias);
    if (c->scale) value = _mm512_mul_ps(value, _mm512_load_ps(c->scale + 16 * k));
    _mm512_mask_storeu_ps(to, c->masks[k], _mm512_add_ps(_mm512_load_ps(to), value));
}

/* Adds the sums of the tokens' codes to the outputs of R rows. */
INLINE void gather(const struct column *c, int64_t codec, int R, int count)
{
    const int depth = codec == QKV_LEVEL4 ? count : 1;
    __m512i sums[4][2][3];
    QKV_UNROLL
    for (int r = 0; r < R; ++r)
        QKV_UNROLL
        for (int d = 0; d < count; ++d) sums[r][0][d] = sums[r][1][d] = _mm512_set1_epi32(c->digits->init[d][r]);
    ptrdiff_t i = 0;
    do {
        __m512i codes[2][3];
        split_values(c->codes + 4 * i * c->stride, c->stride, codec, c->part, depth, codes);
        _mm_prefetch(c->ahead + 4 * i * bytes_of_pair(codec), _MM_HINT_T1);
        if (codec == QKV_CODE8) _mm_prefetch(c->ahead + 4 * i * bytes_of_pair(codec) + 64, _MM_HINT_T1);
        QKV_UNROLL
        for (int r = 0; r < R; ++r)
            QKV_UNROLL
            for (int d = 0; d < count; ++d) {
                __m512i word = word_at(c->bytes + (r * count + d) * QKV_TILE + 4 * i);
                QKV_UNROLL
                for (int k = 0; k < 2; ++k)
                    QKV_UNROLL
                    for (int e = 0; e < depth; ++e)
                        if (d + e < count) sums[r][k][d + e] = _mm512_dpbusd_epi32(sums[r][k][d + e], codes[k][e], word);
            }
    } while (++i < c->quads);
    QKV_UNROLL
    for (int r = 0; r < R; ++r)
        QKV_UNROLL
        for (int k = 0; k < 2; ++k) add_row(c, joined(sums[r][k], count, depth), r, k);
}

#define GATHER(codec, name) \
    TARGET static void name(const struct column *c, ptrdiff_t rows, int count) { FOR_ROWS(gather, rows, c, codec) }

GATHER(QKV_CODE8, gather_code8)
GATHER(QKV_CODE4, gather_code4)
GATHER(QKV_CODE2, gather_code2)
GATHER(QKV_LEVEL4, gather_level4)

typedef void (*gatherer)(const struct column *c, ptrdiff_t rows, int count);

static gatherer gatherer_of(int64_t codec)
{
    return codec == QKV_CODE8 ? gather_code8 : codec == QKV_CODE4 ? gather_code4
         : codec == QKV_CODE2 ? gather_code2 : gather_level4;
}

/* Lanes of a plane that belong to group `g`: channel `first + step * lane`. */
INLINE __mmask16 lanes_of(ptrdiff_t g, ptrdiff_t group, ptrdiff_t first, ptrdiff_t step)
{
    ptrdiff_t low = (g * group - first + step - 1), high = (g + 1) * group - first + step - 1;
    low = low < 0 ? 0 : low / step;
    high = high < 0 ? 0 : high / step;
    return (__mmask16)(first_lanes(high) & ~first_lanes(low));
}

/* A channel's scale to where the channel's output is. */
TARGET static void order_scales(const struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_VALUES;
    ptrdiff_t each = qkv_codes_a_byte(side->codec);
    memset(room->scale, 0, (size_t)w->value_width * sizeof(float));
    memset(room->shift, 0, (size_t)w->value_width * sizeof(float));
    for (ptrdiff_t i = 0; i < side->dim; ++i) {
        room->scale[lane_of(i, each)] = qkv_from_bf16(tile->scale[QKV_VALUES][i]);
        if (tile->zero[QKV_VALUES])
            room->shift[lane_of(i, each)] = (float)(center_of(side->codec) - tile->zero[QKV_VALUES][i]);
    }
}

/* Adds the channels of a column, the first from byte `at`, to the outputs of all rows, group by group. */
TARGET static void add_column(struct qkv_worker *w, const struct qkv_side *side, const struct room *room, struct column *c,
                              ptrdiff_t at)
{
    ptrdiff_t each = qkv_codes_a_byte(side->codec), groups = room->value_segments, lane = at * each + 32 * c->part;
    ptrdiff_t group = side->by_token ? side->group : side->dim;
    ptrdiff_t first = at * each + 2 * c->part, next = each == 1 ? 16 : 1, last = first + 15 * each + next;
    gatherer gather_any = gatherer_of(side->codec);
    if (!side->by_token) c->scale = room->scale + lane, c->shift = room->shift + lane;
    for (ptrdiff_t g = first / group; g <= last / group && g < groups; ++g) {
        c->masks[0] = lanes_of(g, group, first, each), c->masks[1] = lanes_of(g, group, first + next, each);
        for (ptrdiff_t r = 0; r < w->rows; r += 4) {
            c->bytes = room->value_digits + (g * w->rows + r) * room->count * QKV_TILE;
            c->digits = room->values + r / 4 * groups + g, c->sums = w->sum + r;
            c->output = w->output + r * w->value_width + lane;
            gather_any(c, rows_from(w, r), room->count);
        }
    }
}

TARGET void qkv_attention_avx512_add_codes(struct qkv_worker *w, const struct qkv_tile *tile)
{
    struct room room = furnished(w);
    const struct qkv_side *side = tile->side + QKV_VALUES;
    ptrdiff_t bytes = bytes_of_pair(side->codec), quads = (tile->tokens + 3) / 4;
    fold_probabilities(w, tile, &room);
    if (!side->by_token) order_scales(w, tile, &room);
    for (ptrdiff_t at = 0; at < side->row_bytes; at += bytes) {
        struct column c = {.stride = tile->stride[QKV_VALUES], .quads = quads, .width = w->value_width};
        c.codes = tile->codes[QKV_VALUES] + at, c.ahead = (const char *)tile->ahead[QKV_VALUES] + at * tile->tokens;
        if (tile->tokens % 4 || at + bytes > side->row_bytes) {
            c.codes = stage(tile, QKV_VALUES, 0, 4 * quads, side->row_bytes, at, bytes, room.codes);
            c.stride = bytes;
        }
        for (c.part = 0; c.part < (side->codec == QKV_CODE2 ? 2 : 1); ++c.part) add_column(w, side, &room, &c, at);
    }
}

#endif
