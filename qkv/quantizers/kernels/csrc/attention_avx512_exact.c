/* Exact keys and values of tiles for AVX-512: lanes are tokens for scores, and channels for sums. */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"

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
        transpose(x);
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
        transpose(x);
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

TARGET void qkv_attention_avx512_score_exact(struct qkv_worker *w, const struct qkv_tile *tile)
{
    struct room room = furnished(w);
    int halves = tile->side[QKV_KEYS].dtype == QKV_BF16 && w->bf16_queries;
    ptrdiff_t row = halves ? w->key_width / 2 : w->key_width;
    const int32_t *queries = halves ? (const int32_t *)room.halves : (const int32_t *)w->queries;
    __m512i *keys = (__m512i *)room.codes;
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

TARGET void qkv_attention_avx512_add_exact(struct qkv_worker *w, const struct qkv_tile *tile)
{
    int64_t dtype = tile->side[QKV_VALUES].dtype;
    if (dtype == QKV_BF16) add_exact_of(w, tile, QKV_BF16);
    else if (dtype == QKV_F16) add_exact_of(w, tile, QKV_F16);
    else add_exact_of(w, tile, QKV_F32);
}


#endif
