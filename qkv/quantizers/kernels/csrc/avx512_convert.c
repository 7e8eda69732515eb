/* AVX-512: from codes to floats and back. */
#include "native.h"

#if QKV_X86

#include "avx512.h"

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

const struct qkv_ops qkv_avx512_ops = {qkv_avx512_linear, dequantize, NULL};

#endif
