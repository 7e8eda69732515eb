/* Attention tiles for AVX-512 (VNNI, BF16): products of stored codes with queries and probabilities in 16 or 24 bits.
 *
 * The small operand is cut into signed digits of 8 bits against its largest value (16 bits; 24 where the queries are
 * fp32), so that codes are multiplied as the unsigned bytes they are: four to a lane and instruction. Codes of keys are
 * transposed so that lanes are tokens, sixteen at a time; codes of values so that lanes are channels. Codes count from
 * the middle of their range, which keeps what the digits round off small. nf4 levels are two bytes each.
 */
#include "native.h"

#if QKV_X86

#include "attention_avx512.h"

uint8_t qkv_attention_levels[3][16], qkv_attention_orders[5][64];

__attribute__((constructor)) static void fill_tables(void)
{
    for (int code = 0; code < 16; ++code) {
        int level = (int)(8388607.0 * qkv_nf4_levels[code] + 8388608.5);
        for (int e = 0; e < 3; ++e) qkv_attention_levels[e][code] = (uint8_t)(level >> (16 - 8 * e));
    }
    for (int each = 1; each <= 4; each *= 2)
        for (int at = 0; at < 64; ++at) {
            int byte = at % 4, plane = at / 4 % each, word = at / 4 / each;
            qkv_attention_orders[each][at] = (uint8_t)(each * (4 * word + byte) + plane);
        }
}

static ptrdiff_t room_bytes(const struct qkv_worker *w)
{
    struct room room;
    char *nowhere = (char *)64;
    return furnish(w, &room, nowhere);
}


/* e^x within 4 units in the last place, 0 below e^-86: the polynomial of least relative error for the part of 2^t past
 * the nearest whole number, whose exponent is added to its bits. Exactly 1 at 0; NaN stays. */
INLINE __m512 exponential(__m512 x)
{
    const __m512 least = _mm512_set1_ps(-125.0f), magic = _mm512_set1_ps(12582912.0f); /* 1.5 * 2^23 */
    __m512 turns = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    __mmask16 counts = _mm512_cmp_ps_mask(turns, least, _CMP_NLT_UQ);
    turns = _mm512_max_ps(least, turns); /* in this order NaN stays */
    __m512 shifted = _mm512_add_ps(turns, magic), part = _mm512_sub_ps(turns, _mm512_sub_ps(shifted, magic));
    __m512 series = _mm512_set1_ps(0.00132647273f);
    series = _mm512_fmadd_ps(series, part, _mm512_set1_ps(0.00967151299f));
    series = _mm512_fmadd_ps(series, part, _mm512_set1_ps(0.0555073358f));
    series = _mm512_fmadd_ps(series, part, _mm512_set1_ps(0.240222424f));
    series = _mm512_fmadd_ps(series, part, _mm512_set1_ps(0.693147004f));
    series = _mm512_fmadd_ps(series, part, _mm512_set1_ps(1.0f));
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(counts, _mm512_castps_si512(series), exponent));
}

TARGET static void cap(struct qkv_worker *w, ptrdiff_t tokens)
{
    const __m512 limit = _mm512_set1_ps(w->call->softcap), twice = _mm512_add_ps(limit, limit);
    const __m512 one = _mm512_set1_ps(1.0f);
    for (ptrdiff_t r = 0; r < w->rows; ++r)
        for (ptrdiff_t t = 0; t < tokens; t += 16) {
            float *score = w->scores + r * QKV_TILE + t;
            __m512 x = _mm512_div_ps(_mm512_load_ps(score), limit);
            __m512 power = exponential(_mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_add_ps(x, x)));
            _mm512_store_ps(score, _mm512_sub_ps(limit, _mm512_div_ps(twice, _mm512_add_ps(power, one))));
        }
}

/* R rows, tokens in four vectors each. */
INLINE void weigh_rows(struct qkv_worker *w, ptrdiff_t tokens, ptrdiff_t r, int R)
{
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
    __m512 x[4][4], highest[4], sum[4], square[4];
    QKV_UNROLL
    for (int k = 0; k < 4; ++k) {
        highest[k] = lowest, sum[k] = square[k] = _mm512_setzero_ps();
        QKV_UNROLL
        for (int i = 0; k < R && i < 4; ++i) {
            x[k][i] = _mm512_mask_loadu_ps(lowest, first_lanes(tokens - 16 * i), w->scores + (r + k) * QKV_TILE + 16 * i);
            highest[k] = _mm512_max_ps(x[k][i], highest[k]); /* in this order NaN does not pass */
        }
    }
    __m128 before = _mm_load_ps(w->peak + r), peak = _mm_max_ps(most_of_four(highest), before);
    __m128 shrink = _mm512_castps512_ps128(exponential(_mm512_castps128_ps512(_mm_sub_ps(before, peak))));
    _mm_store_ps(w->peak + r, peak);
    QKV_UNROLL
    for (int k = 0; k < R; ++k) {
        __m512 level = _mm512_set1_ps(w->peak[r + k]);
        QKV_UNROLL
        for (int i = 0; i < 4; ++i) {
            __m512 p = exponential(_mm512_sub_ps(x[k][i], level)); /* past the tokens e^-inf, which is 0 */
            sum[k] = _mm512_add_ps(sum[k], p);
            square[k] = _mm512_fmadd_ps(p, p, square[k]);
            _mm512_store_ps(w->scores + (r + k) * QKV_TILE + 16 * i, p);
        }
    }
    __m128 sums = sum_of_four(sum);
    _mm_store_ps(w->shrink + r, shrink);
    _mm_store_ps(w->sum + r, sums);
    _mm_store_ps(w->square + r, sum_of_four(square));
    _mm_store_ps(w->total + r, _mm_fmadd_ps(_mm_load_ps(w->total + r), shrink, sums));
}

TARGET static void weigh(struct qkv_worker *w, ptrdiff_t tokens)
{
    for (ptrdiff_t r = 0; r < w->rows; r += 4) {
        switch (w->rows - r) {
        case 1: weigh_rows(w, tokens, r, 1); break;
        case 2: weigh_rows(w, tokens, r, 2); break;
        case 3: weigh_rows(w, tokens, r, 3); break;
        default: weigh_rows(w, tokens, r, 4);
        }
    }
}

TARGET static void scores(struct qkv_worker *w, const struct qkv_tile *tile)
{
    if (tile->side[QKV_KEYS].codec == QKV_EXACT) qkv_attention_avx512_score_exact(w, tile);
    else qkv_attention_avx512_score_codes(w, tile);
}

TARGET static void values(struct qkv_worker *w, const struct qkv_tile *tile)
{
    for (ptrdiff_t r = 0; r < w->rows; ++r) {
        float *output = w->output + r * w->value_width;
        const __m512 shrink = _mm512_set1_ps(w->shrink[r]);
        for (ptrdiff_t i = 0; w->shrink[r] != 1.0f && i < w->value_width; i += 16)
            _mm512_store_ps(output + i, _mm512_mul_ps(_mm512_load_ps(output + i), shrink));
    }
    if (tile->side[QKV_VALUES].codec == QKV_EXACT) qkv_attention_avx512_add_exact(w, tile);
    else qkv_attention_avx512_add_codes(w, tile);
}

TARGET static void finish(const struct qkv_worker *w, const struct qkv_side *values, float *to)
{
    ptrdiff_t each = values->codec == QKV_EXACT ? 1 : qkv_codes_a_byte(values->codec), dim = values->dim;
    for (ptrdiff_t r = 0; r < w->rows; ++r, to += dim)
        for (ptrdiff_t at = 0; at < w->value_width; at += 16) { /* channels `each` apart, see lane_of */
            ptrdiff_t first = at / (16 * each) * 16 * each + at / 16 % each;
            const float *from = w->output + r * w->value_width + at;
            for (ptrdiff_t lane = 0; lane < 16 && first + lane * each < dim; ++lane) to[first + lane * each] = from[lane];
        }
}

const struct qkv_attention_ops qkv_attention_avx512 = {
    room_bytes, qkv_attention_avx512_prepare, scores, cap, weigh, values, finish,
};

#endif
