/* Attention tiles in plain C: a token is decoded to fp32 once and serves all rows. Included by each back end that is
 * compiled from it, with TARGET set to what its processor has. */
#include "attention.h"

#define LANES 16 /* running sums, so that the compiler may keep them in vector registers without reordering anything */

/* ---- decoding ---- */

INLINE void add_codes(const uint8_t *codes, ptrdiff_t dim, int64_t codec, float *to)
{
    if (codec == QKV_CODE8) {
        for (ptrdiff_t i = 0; i < dim; ++i) to[i] = (float)codes[i];
    } else if (codec == QKV_CODE2) {
        for (ptrdiff_t i = 0; i < dim; ++i) to[i] = (float)(codes[i >> 2] >> (6 - 2 * (i & 3)) & 3);
    } else {
        for (ptrdiff_t i = 0; i + 1 < dim; i += 2) to[i] = (float)(codes[i >> 1] >> 4), to[i + 1] = (float)(codes[i >> 1] & 15);
        if (dim & 1) to[dim - 1] = (float)(codes[dim >> 1] >> 4);
    }
}

/* Token `t` of a tile as fp32, one multiplication a value. */
TARGET static void decode_token(const struct qkv_tile *tile, int part, ptrdiff_t t, float *to)
{
    const struct qkv_side *side = tile->side + part;
    const uint8_t *codes = tile->codes[part] + t * tile->stride[part];
    const uint16_t *scale = tile->scale[part];
    const int16_t *zero = tile->zero[part];
    ptrdiff_t dim = side->dim;
    if (side->codec == QKV_EXACT) {
        if (side->dtype == QKV_BF16) for (ptrdiff_t i = 0; i < dim; ++i) to[i] = qkv_from_bf16(((const uint16_t *)codes)[i]);
        else for (ptrdiff_t i = 0; i < dim; ++i) to[i] = qkv_load(codes, (int)side->dtype, i);
        return;
    }
    if (side->codec == QKV_LEVEL4) {
        for (ptrdiff_t i = 0; i < dim; ++i) to[i] = qkv_nf4_levels[codes[i >> 1] >> (i & 1 ? 0 : 4) & 15];
    } else {
        add_codes(codes, dim, side->codec, to);
    }
    if (!side->by_token) {
        for (ptrdiff_t i = 0; zero && i < dim; ++i) to[i] -= (float)zero[i];
        for (ptrdiff_t i = 0; i < dim; ++i) to[i] *= qkv_from_bf16(scale[i]);
        return;
    }
    ptrdiff_t groups = dim / side->group;
    for (ptrdiff_t g = 0; g < groups; ++g) {
        float shift = zero ? (float)zero[t * groups + g] : 0.0f, factor = qkv_from_bf16(scale[t * groups + g]);
        for (ptrdiff_t i = g * side->group; i < (g + 1) * side->group; ++i) to[i] = (to[i] - shift) * factor;
    }
}

INLINE void clear_end(float *x, ptrdiff_t dim)
{
    for (ptrdiff_t i = dim; i % LANES; ++i) x[i] = 0.0f;
}

/* ---- the verbs ---- */

TARGET static ptrdiff_t room(const struct qkv_worker *w)
{
    return (w->key_width > w->value_width ? w->key_width : w->value_width) * (ptrdiff_t)sizeof(float);
}

TARGET static void prepare(struct qkv_worker *w, const struct qkv_side *keys)
{
    (void)w, (void)keys;
}

/* Both padded with zeros to whole lanes. */
TARGET static float dot(const float *a, const float *b, ptrdiff_t count)
{
    float sums[LANES] = {0};
    for (ptrdiff_t i = 0; i < count; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    for (int width = LANES / 2; width; width >>= 1)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return sums[0];
}

TARGET static void scores(struct qkv_worker *w, const struct qkv_tile *tile)
{
    float *token = w->room;
    ptrdiff_t dim = tile->side[QKV_KEYS].dim;
    for (ptrdiff_t t = 0; t < tile->tokens; ++t) {
        decode_token(tile, QKV_KEYS, t, token);
        clear_end(token, dim);
        for (ptrdiff_t r = 0; r < w->rows; ++r)
            w->scores[r * QKV_TILE + t] = dot(w->queries + r * w->key_width, token, dim) * w->call->scale;
    }
}

TARGET static void cap(struct qkv_worker *w, ptrdiff_t tokens)
{
    float limit = w->call->softcap;
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t t = 0; t < tokens; ++t) {
            float *score = w->scores + r * QKV_TILE + t;
            *score = limit - 2.0f * limit / (qkv_exp(2.0f * *score / limit) + 1.0f);
        }
}

TARGET static void weigh(struct qkv_worker *w, ptrdiff_t tokens)
{
    for (ptrdiff_t r = 0; r < w->rows; ++r) {
        float *scores = w->scores + r * QKV_TILE, peak = w->peak[r], sum = 0.0f, square = 0.0f;
        for (ptrdiff_t t = 0; t < tokens; ++t) peak = scores[t] > peak ? scores[t] : peak;
        for (ptrdiff_t t = 0; t < tokens; ++t) scores[t] = qkv_exp(scores[t] - peak);
        for (ptrdiff_t t = 0; t < tokens; ++t) sum += scores[t], square += scores[t] * scores[t];
        for (ptrdiff_t t = tokens; t < QKV_TILE; ++t) scores[t] = 0.0f;
        w->shrink[r] = qkv_exp(w->peak[r] - peak);
        w->total[r] = w->total[r] * w->shrink[r] + sum;
        w->peak[r] = peak, w->sum[r] = sum, w->square[r] = square;
    }
}

TARGET static void add_scaled(float *to, const float *x, float factor, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) to[i + lane] += x[i + lane] * factor;
}

TARGET static void values(struct qkv_worker *w, const struct qkv_tile *tile)
{
    float *token = w->room;
    ptrdiff_t dim = tile->side[QKV_VALUES].dim;
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t i = 0; w->shrink[r] != 1.0f && i < dim; ++i) w->output[r * w->value_width + i] *= w->shrink[r];
    for (ptrdiff_t t = 0; t < tile->tokens; ++t) {
        decode_token(tile, QKV_VALUES, t, token);
        clear_end(token, dim);
        for (ptrdiff_t r = 0; r < w->rows; ++r)
            add_scaled(w->output + r * w->value_width, token, w->scores[r * QKV_TILE + t], dim);
    }
}

TARGET static void finish(const struct qkv_worker *w, const struct qkv_side *values, float *to)
{
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        memcpy(to + r * values->dim, w->output + r * w->value_width, (size_t)values->dim * sizeof *to);
}
