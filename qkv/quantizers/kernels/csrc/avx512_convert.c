/* AVX-512: from codes to floats and back. */
#include "native.h"

#if QKV_X86

#include "avx512.h"
#include "quantize.h"

/* ---- dequantizing ---- */

/* fp32 to bf16 in integers: unlike the instruction it keeps subnormals, as torch does. */
INLINE __m256i to_bf16(__m512 value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

INLINE __m256i to_half(__m512 value, const int dtype)
{
    if (dtype == QKV_BF16) return to_bf16(value);
    value = _mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(-65504.0f)), _mm512_set1_ps(65504.0f));
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE __m512 clamp_finite(__m512 value)
{
    return _mm512_min_ps(_mm512_max_ps(value, _mm512_set1_ps(-FLT_MAX)), _mm512_set1_ps(FLT_MAX));
}

/* Four bits: the sixteen values of a group are computed and rounded once, then looked up. */
INLINE void group4(const uint8_t *codes, __m512 values, void *to, ptrdiff_t count, const int dtype)
{
    __m512i halves = _mm512_setzero_si512();
    if (dtype != QKV_F32) halves = _mm512_broadcast_i64x4(to_half(values, dtype));
    for (ptrdiff_t i = 0; i < count; i += 32) {
        ptrdiff_t left = count - i;
        __mmask16 loaded = left >= 32 ? 0xffff : (__mmask16)((1u << ((left + 1) / 2)) - 1);
        __mmask32 kept = left >= 32 ? 0xffffffffu : (1u << left) - 1;
        __m128i raw = _mm_maskz_loadu_epi8(loaded, codes + i / 2);
        __m128i first = _mm_and_si128(_mm_srli_epi16(raw, 4), _mm_set1_epi8(15));
        __m128i second = _mm_and_si128(raw, _mm_set1_epi8(15));
        __m128i low = _mm_unpacklo_epi8(first, second), high = _mm_unpackhi_epi8(first, second);
        if (dtype == QKV_F32) {
            float *at = (float *)to + i;
            _mm512_mask_storeu_ps(at, (__mmask16)kept, _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(low), values));
            if (left > 16)
                _mm512_mask_storeu_ps(at + 16, (__mmask16)(kept >> 16),
                                      _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(high), values));
        } else {
            __m512i index = _mm512_cvtepu8_epi16(_mm256_set_m128i(high, low));
            _mm512_mask_storeu_epi16((uint16_t *)to + i, kept, _mm512_permutexvar_epi16(index, halves));
        }
    }
}

INLINE void group8(const uint8_t *codes, float scale, const uint8_t *zero, void *to, ptrdiff_t count, const int dtype)
{
    __m512 factor = _mm512_set1_ps(scale);
    for (ptrdiff_t i = 0; i < count; i += 16) {
        __mmask16 kept = count - i >= 16 ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        __m128i raw = _mm_maskz_loadu_epi8(kept, codes + i);
        __m512 value;
        if (zero) {
            __m512i code = _mm512_sub_epi32(_mm512_cvtepu8_epi32(raw), _mm512_set1_epi32(*zero));
            value = clamp_finite(_mm512_mul_ps(_mm512_cvtepi32_ps(code), factor));
        } else {
            value = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(raw)), factor);
        }
        if (dtype == QKV_F32) _mm512_mask_storeu_ps((float *)to + i, kept, value);
        else _mm256_mask_storeu_epi16((uint16_t *)to + i, kept, to_half(value, dtype));
    }
}

INLINE void dequantize_as(const struct qkv_dequantize_job *job, ptrdiff_t begin, ptrdiff_t end, const int dtype)
{
    const struct qkv_weight *w = &job->w;
    const ptrdiff_t size = dtype == QKV_F32 ? 4 : 2;
    for (ptrdiff_t row = begin; row < end; ++row) {
        char *to = (char *)job->y + row * w->in * size;
        for (ptrdiff_t at = 0; at < w->groups; ++at, to += w->group * size) {
            ptrdiff_t index = row * w->groups + at, left = w->in - at * w->group;
            ptrdiff_t count = left < w->group ? left : w->group;
            const uint8_t *codes = w->codes + index * w->group_bytes, *zero = w->zero ? w->zero + index : NULL;
            if (w->kind == QKV_INT8) {
                group8(codes, w->scale[index], zero, to, count, dtype);
                continue;
            }
            __m512 levels = four_bit_levels(w);
            if (zero) levels = _mm512_sub_ps(levels, _mm512_set1_ps((float)*zero));
            __m512 values = _mm512_mul_ps(levels, _mm512_set1_ps(w->scale[index]));
            group4(codes, zero ? clamp_finite(values) : values, to, count, dtype);
        }
    }
}

TARGET static void dequantize(void *job, ptrdiff_t begin, ptrdiff_t end)
{
    int dtype = ((struct qkv_dequantize_job *)job)->dtype;
    if (dtype == QKV_F32) dequantize_as(job, begin, end, QKV_F32);
    else if (dtype == QKV_BF16) dequantize_as(job, begin, end, QKV_BF16);
    else dequantize_as(job, begin, end, QKV_F16);
}

/* ---- quantizing ---- */

/* Sixteen elements of x from `at` on as fp32; zero where `mask` is. */
INLINE __m512 load16(const void *x, ptrdiff_t at, __mmask16 mask, const int dtype)
{
    if (dtype == QKV_F32) return _mm512_maskz_loadu_ps(mask, (const float *)x + at);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + at);
    if (dtype == QKV_F16) return _mm512_cvtph_ps(half);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __mmask16 first16(ptrdiff_t count)
{
    return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* How many midpoints lie below the value: four steps of a binary search, `code` being what is known so far. */
INLINE __m512i nearest_level(__m512 value, const struct qkv_rule *rule)
{
    value = _mm512_mul_ps(_mm512_mul_ps(value, _mm512_set1_ps(rule->lift)), _mm512_set1_ps(rule->inverse));
    __m512i code = _mm512_setzero_si512();
    QKV_UNROLL
    for (int width = 8; width; width /= 2) {
        __m512 middle = _mm512_permutexvar_ps(code, _mm512_loadu_ps(qkv_nf4_midpoints + width - 1));
        __mmask16 above = _mm512_cmp_ps_mask(middle, value, _CMP_LT_OQ);
        code = _mm512_mask_add_epi32(code, above, code, _mm512_set1_epi32(width));
    }
    return code;
}

INLINE __m512i encode16(__m512 value, const struct qkv_rule *rule, const int nf4)
{
    if (nf4) return nearest_level(value, rule);
    __m512 steps = _mm512_div_ps(value, _mm512_set1_ps(rule->divisor));
    steps = _mm512_roundscale_ps(steps, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    steps = _mm512_add_ps(steps, _mm512_set1_ps(rule->zero));
    steps = _mm512_min_ps(_mm512_max_ps(steps, _mm512_set1_ps(rule->low)), _mm512_set1_ps(rule->high));
    return _mm512_add_epi32(_mm512_cvtps_epi32(steps), _mm512_set1_epi32(rule->offset));
}

/* 32 codes from element `at` of x on, `count` of them real, `room` of them in the group, two a byte. */
INLINE void encode_pairs(const void *x, ptrdiff_t at, ptrdiff_t count, ptrdiff_t room, uint8_t *to,
                         const struct qkv_rule *rule, const int dtype, const int nf4)
{
    __m512i first = encode16(load16(x, at, first16(count), dtype), rule, nf4);
    __m512i second = encode16(load16(x, at + 16, first16(count - 16), dtype), rule, nf4);
    __m256i codes = _mm256_set_m128i(_mm512_maskz_cvtepi32_epi8(first16(room - 16), second),
                                     _mm512_maskz_cvtepi32_epi8(first16(room), first));
    __m256i pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0110)); /* 16 first + second */
    _mm_mask_storeu_epi8(to, first16((room + 1) / 2), _mm256_cvtepi16_epi8(pairs));
}

INLINE void quantize_group(struct qkv_quantize_job *job, ptrdiff_t index, ptrdiff_t start, ptrdiff_t count,
                           const int dtype, const int kind)
{
    __m512 low = _mm512_setzero_ps(), high = low;
    __mmask16 spoilt = 0;
    for (ptrdiff_t i = 0; i < count; i += 16) {
        __m512 value = load16(job->x, start + i, first16(count - i), dtype);
        spoilt |= _mm512_fpclass_ps_mask(value, 0x99); /* NaN, infinity */
        low = _mm512_min_ps(low, value);
        high = _mm512_max_ps(high, value);
    }
    if (spoilt) __atomic_store_n(&job->not_finite, 1, __ATOMIC_RELAXED);
    struct qkv_rule rule = qkv_rule_of(job, index, _mm512_reduce_min_ps(low), _mm512_reduce_max_ps(high));
    uint8_t *codes = job->codes + index * job->group_bytes;
    if (kind == QKV_INT8) {
        for (ptrdiff_t i = 0; i < job->group; i += 16) {
            __m512i code = encode16(load16(job->x, start + i, first16(count - i), dtype), &rule, 0);
            _mm_mask_storeu_epi8(codes + i, first16(job->group - i), _mm512_cvtepi32_epi8(code));
        }
    } else {
        for (ptrdiff_t i = 0; i < job->group; i += 32)
            encode_pairs(job->x, start + i, count - i, job->group - i, codes + i / 2, &rule, dtype, kind == QKV_NF4);
    }
}

INLINE void quantize_as(struct qkv_quantize_job *job, ptrdiff_t begin, ptrdiff_t end, const int dtype, const int kind)
{
    for (ptrdiff_t row = begin; row < end; ++row) {
        for (ptrdiff_t at = 0; at < job->groups; ++at) {
            ptrdiff_t start = at * job->group, left = job->in - start;
            ptrdiff_t count = left < job->group ? left : job->group;
            quantize_group(job, row * job->groups + at, row * job->in + start, count, dtype, kind);
        }
    }
}

TARGET static void quantize(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct qkv_quantize_job *job = pointer;
#define FOR_KIND(dtype)                                                                 \
    if (job->kind == QKV_INT8) quantize_as(job, begin, end, dtype, QKV_INT8);           \
    else if (job->kind == QKV_INT4) quantize_as(job, begin, end, dtype, QKV_INT4);      \
    else quantize_as(job, begin, end, dtype, QKV_NF4);
    if (job->dtype == QKV_F32) {
        FOR_KIND(QKV_F32)
    } else if (job->dtype == QKV_BF16) {
        FOR_KIND(QKV_BF16)
    } else {
        FOR_KIND(QKV_F16)
    }
}

const struct qkv_ops qkv_avx512_ops = {qkv_avx512_most_rows, qkv_avx512_linear, dequantize, quantize};

#endif
