/* Values of tiles for AVX-512: codes of four tokens interleaved, so that lanes are channels. */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"


/* Probabilities times the scales of their tokens, cut into digits; for each group what its zero points add. */
TARGET static void fold_probabilities(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_VALUES;
    ptrdiff_t groups = room->value_segments;
    __m512i straight = byte_order(QKV_CODE8);
    int center = center_of(side->codec);
    if (side->by_token) load_token_scales(tile, QKV_VALUES, groups, room->scale, room->shift);
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t g = 0; g < groups; ++g) {
            ptrdiff_t at = r * groups + g;
            const float *weights = w->scores + r * QKV_TILE;
            if (side->by_token) {
                __m512 bias = _mm512_setzero_ps();
                for (int i = 0; i < QKV_TILE; i += 16) {
                    __m512 value = _mm512_mul_ps(_mm512_load_ps(weights + i), _mm512_load_ps(room->scale + g * QKV_TILE + i));
                    bias = _mm512_fmadd_ps(value, _mm512_load_ps(room->shift + g * QKV_TILE + i), bias);
                    _mm512_store_ps(room->folded + i, value);
                }
                weights = room->folded;
                room->bias[at] = _mm512_reduce_add_ps(bias);
            }
            cut_digits(weights, QKV_TILE, room->count, straight, center, room->value_digits + at * room->count * QKV_TILE,
                       QKV_TILE, room->values + at);
        }
}

/* Sixteen bytes, from byte `at` on, of every four tokens side by side: lanes are bytes, and hold four tokens' each.
 * What comes out is plane by plane, as multiply reads them. */
INLINE void interleave(const struct qkv_tile *tile, ptrdiff_t at, int64_t codec, int depth, int whole, __m512i *to)
{
    ptrdiff_t last = tile->tokens - 1, stride = tile->stride[QKV_VALUES], left = tile->side[QKV_VALUES].row_bytes - at;
    const uint8_t *codes = tile->codes[QKV_VALUES] + at;
    const char *ahead = (const char *)tile->ahead[QKV_VALUES] + at * tile->tokens;
    const __m512i words = _mm512_set_epi8(63, 47, 31, 15, 62, 46, 30, 14, 61, 45, 29, 13, 60, 44, 28, 12, 59, 43, 27, 11, 58,
                                          42, 26, 10, 57, 41, 25, 9, 56, 40, 24, 8, 55, 39, 23, 7, 54, 38, 22, 6, 53, 37, 21,
                                          5, 52, 36, 20, 4, 51, 35, 19, 3, 50, 34, 18, 2, 49, 33, 17, 1, 48, 32, 16, 0);
    const __mmask16 mask = first_lanes(left);
    for (ptrdiff_t t = 0; t <= last; t += 4, to += depth, ahead += 64) {
        __m128i four[4];
        QKV_UNROLL
        for (int i = 0; i < 4; ++i)
            four[i] = whole ? _mm_loadu_si128((const void *)(codes + (t + i) * stride))
                            : _mm_maskz_loadu_epi8(mask, codes + (t + i < last ? t + i : last) * stride);
        _mm_prefetch(ahead, _MM_HINT_T1);
        __m512i bytes = _mm512_castsi128_si512(four[0]);
        bytes = _mm512_inserti32x4(bytes, four[1], 1);
        bytes = _mm512_inserti32x4(bytes, four[2], 2);
        bytes = _mm512_permutexvar_epi8(words, _mm512_inserti32x4(bytes, four[3], 3));
        store_planes(bytes, codec, depth, to, QKV_TILE / 4 * depth);
    }
}

#define INTERLEAVE(codec, depth) \
    if (whole) interleave(tile, at, codec, depth, 1, to); \
    else interleave(tile, at, codec, depth, 0, to); \
    break;

TARGET static void interleave_any(const struct qkv_tile *tile, ptrdiff_t at, int depth, __m512i *to)
{
    int whole = tile->tokens % 4 == 0 && tile->side[QKV_VALUES].row_bytes >= at + 16;
    switch (tile->side[QKV_VALUES].codec) {
    case QKV_CODE8: INTERLEAVE(QKV_CODE8, 1)
    case QKV_CODE4: INTERLEAVE(QKV_CODE4, 1)
    case QKV_CODE2: INTERLEAVE(QKV_CODE2, 1)
    default: INTERLEAVE(QKV_LEVEL4, depth)
    }
}

/* Lanes of a plane that belong to group `g`: channel `first + step * lane`. */
INLINE __mmask16 lanes_of(ptrdiff_t g, ptrdiff_t group, ptrdiff_t first, ptrdiff_t step)
{
    ptrdiff_t low = (g * group - first + step - 1), high = (g + 1) * group - first + step - 1;
    low = low < 0 ? 0 : low / step;
    high = high < 0 ? 0 : high / step;
    return (__mmask16)(first_lanes(high) & ~first_lanes(low));
}

/* Adds a plane's sixteen channels to the rows' outputs at lane `lane`. */
TARGET static void add_plane(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room, const __m512i *codes,
                             ptrdiff_t first, ptrdiff_t step, ptrdiff_t lane)
{
    const struct qkv_side *side = tile->side + QKV_VALUES;
    ptrdiff_t groups = room->value_segments, group = side->by_token ? side->group : side->dim;
    ptrdiff_t words = (tile->tokens + 3) / 4, row = groups * room->count * QKV_TILE;
    ptrdiff_t last = (first + 15 * step) / group;
    int depth = depth_of(side->codec, room);
    __m512 scale = _mm512_set1_ps(1.0f), shift = _mm512_setzero_ps();
    if (!side->by_token) scale = _mm512_load_ps(room->scale + lane), shift = _mm512_load_ps(room->shift + lane);
    for (ptrdiff_t g = first / group; g <= last && g < groups; ++g) {
        __mmask16 mask = lanes_of(g, group, first, step);
        for (ptrdiff_t r = 0; r < w->rows; r += 4) {
            __m512 found[4];
            ptrdiff_t rows = w->rows - r < 4 ? w->rows - r : 4, at = r * groups + g;
            multiply_rows(codes, 0, words, room->value_digits + at * room->count * QKV_TILE, row, QKV_TILE,
                          room->values + at, groups, found, rows, room->count, depth);
            for (ptrdiff_t i = 0; i < rows; ++i) {
                float *to = w->output + (r + i) * w->value_width + lane;
                __m512 value = _mm512_mul_ps(found[i], _mm512_set1_ps(room->values[at + i * groups].step));
                if (side->by_token) {
                    value = _mm512_add_ps(value, _mm512_set1_ps(room->bias[at + i * groups]));
                } else {
                    value = _mm512_fmadd_ps(shift, _mm512_set1_ps(w->sum[r + i]), value);
                    value = _mm512_mul_ps(value, scale);
                }
                _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(_mm512_load_ps(to), value));
            }
        }
    }
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

TARGET static void add_codes(struct qkv_worker *w, const struct qkv_tile *tile, const struct room *room)
{
    const struct qkv_side *side = tile->side + QKV_VALUES;
    ptrdiff_t each = qkv_codes_a_byte(side->codec);
    fold_probabilities(w, tile, room);
    if (!side->by_token) order_scales(w, tile, room);
    int depth = depth_of(side->codec, room);
    for (ptrdiff_t at = 0; at < side->row_bytes; at += 16) {
        const __m512i *codes = (const __m512i *)room->codes;
        interleave_any(tile, at, depth, (__m512i *)room->codes);
        for (ptrdiff_t p = 0; p < each && at * each + p < side->dim; ++p)
            add_plane(w, tile, room, codes + p * QKV_TILE / 4 * depth, at * each + p, each, at * each + 16 * p);
    }
}

/* Sixteen channels of R rows at a time. */
INLINE void add_exact_rows(struct qkv_worker *w, const struct qkv_tile *tile, ptrdiff_t at, ptrdiff_t r, __mmask16 mask,
                           int64_t dtype, int R)
{
    const uint8_t *values = tile->codes[QKV_VALUES] + at * (dtype == QKV_F32 ? 4 : 2);
    ptrdiff_t stride = tile->stride[QKV_VALUES];
    __m512 sums[4][2];
    QKV_UNROLL
    for (int i = 0; i < R; ++i) {
        sums[i][0] = _mm512_load_ps(w->output + (r + i) * w->value_width + at);
        sums[i][1] = _mm512_setzero_ps();
    }
    ptrdiff_t t = 0;
    for (; t + 2 <= tile->tokens; t += 2)
        QKV_UNROLL
        for (int half = 0; half < 2; ++half) {
            __m512 value = load_floats(values + (t + half) * stride, dtype, mask);
            QKV_UNROLL
            for (int i = 0; i < R; ++i) {
                __m512 weight = _mm512_set1_ps(w->scores[(r + i) * QKV_TILE + t + half]);
                sums[i][half] = _mm512_fmadd_ps(value, weight, sums[i][half]);
            }
        }
    if (t < tile->tokens) { /* into the first sums, as if a pair with a weightless token */
        __m512 value = load_floats(values + t * stride, dtype, mask);
        QKV_UNROLL
        for (int i = 0; i < R; ++i)
            sums[i][0] = _mm512_fmadd_ps(value, _mm512_set1_ps(w->scores[(r + i) * QKV_TILE + t]), sums[i][0]);
    }
    QKV_UNROLL
    for (int i = 0; i < R; ++i)
        _mm512_store_ps(w->output + (r + i) * w->value_width + at, _mm512_add_ps(sums[i][0], sums[i][1]));
}

INLINE void add_exact_of(struct qkv_worker *w, const struct qkv_tile *tile, int64_t dtype)
{
    ptrdiff_t dim = tile->side[QKV_VALUES].dim;
    for (ptrdiff_t at = 0; at < dim; at += 16) {
        __mmask16 mask = first_lanes(dim - at);
        ptrdiff_t r = 0;
        for (; r + 4 <= w->rows; r += 4) add_exact_rows(w, tile, at, r, mask, dtype, 4);
        if (w->rows - r == 3) add_exact_rows(w, tile, at, r, mask, dtype, 3);
        if (w->rows - r == 2) add_exact_rows(w, tile, at, r, mask, dtype, 2);
        if (w->rows - r == 1) add_exact_rows(w, tile, at, r, mask, dtype, 1);
    }
}

TARGET static void add_exact(struct qkv_worker *w, const struct qkv_tile *tile)
{
    int64_t dtype = tile->side[QKV_VALUES].dtype;
    if (dtype == QKV_BF16) add_exact_of(w, tile, QKV_BF16);
    else if (dtype == QKV_F16) add_exact_of(w, tile, QKV_F16);
    else add_exact_of(w, tile, QKV_F32);
}

TARGET void qkv_attention_avx512_values(struct qkv_worker *w, const struct qkv_tile *tile)
{
    struct room room = furnished(w);
    for (ptrdiff_t r = 0; r < w->rows; ++r) {
        float *output = w->output + r * w->value_width;
        const __m512 shrink = _mm512_set1_ps(w->shrink[r]);
        for (ptrdiff_t i = 0; w->shrink[r] != 1.0f && i < w->value_width; i += 16)
            _mm512_store_ps(output + i, _mm512_mul_ps(_mm512_load_ps(output + i), shrink));
    }
    if (tile->side[QKV_VALUES].codec == QKV_EXACT) add_exact(w, tile);
    else add_codes(w, tile, &room);
}

#endif
