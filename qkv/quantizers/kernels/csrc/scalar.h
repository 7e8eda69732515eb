/* Number formats and the decoding of one group, in plain C: the meaning every back end must agree with. */
#ifndef QKV_SCALAR_H
#define QKV_SCALAR_H

#include <float.h>
#include <string.h>

#include "native.h"

QKV_INLINE uint32_t qkv_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

QKV_INLINE float qkv_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

QKV_INLINE float qkv_from_bf16(uint16_t half) { return qkv_float((uint32_t)half << 16); }

/* Round to nearest, ties to even; a NaN stays one. */
QKV_INLINE uint16_t qkv_to_bf16(float value)
{
    uint32_t bits = qkv_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

QKV_INLINE float qkv_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return qkv_float(sign | 0x7f800000u | (rest << 13)); /* infinity, NaN */
    if (rest >= 0x0400u) return qkv_float(sign | ((rest << 13) + 0x38000000u));
    return qkv_float(sign | qkv_bits((float)rest * 0x1p-24f)); /* subnormal or zero */
}

QKV_INLINE uint16_t qkv_to_f16(float value)
{
    uint32_t bits = qkv_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds beyond the largest: infinity */
    if (rest < 0x38800000u) { /* subnormal: let the addition of 0.5 do the rounding, at a step of 2^-24 */
        return (uint16_t)(sign | (qkv_bits(qkv_float(rest) + 0.5f) - qkv_bits(0.5f)));
    }
    return (uint16_t)(sign | ((rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13));
}

QKV_INLINE float qkv_load(const void *from, int dtype, ptrdiff_t at)
{
    if (dtype == QKV_F32) return ((const float *)from)[at];
    uint16_t half;
    memcpy(&half, (const uint16_t *)from + at, sizeof half);
    return dtype == QKV_BF16 ? qkv_from_bf16(half) : qkv_from_f16(half);
}

QKV_INLINE void qkv_store(void *to, int dtype, ptrdiff_t at, float value)
{
    if (dtype == QKV_F32) ((float *)to)[at] = value;
    else ((uint16_t *)to)[at] = dtype == QKV_BF16 ? qkv_to_bf16(value) : qkv_to_f16(value);
}

/* A decoded weight as `dtype`: what exceeds the range of float16 becomes its largest value, not infinity. */
QKV_INLINE void qkv_store_weight(void *to, int dtype, ptrdiff_t at, float value)
{
    if (dtype == QKV_F16) value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
    qkv_store(to, dtype, at, value);
}

/* With a zero point a code can stand for more than the range it came from: never for infinity. */
QKV_INLINE float qkv_finite(float value)
{
    return value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value;
}

/* The sixteen values that the four-bit codes of group `index` stand for. */
QKV_INLINE void qkv_values(const struct qkv_weight *w, ptrdiff_t index, float *values)
{
    int zero = w->zero ? w->zero[index] : 8;
    float scale = w->scale[index];
    for (int code = 0; code < 16; ++code) {
        float level = w->kind == QKV_NF4 ? qkv_nf4_levels[code] : (float)(code - zero);
        values[code] = w->zero ? qkv_finite(level * scale) : level * scale;
    }
}

/* Group `at` of `row` as fp32: its first `count` values. One multiplication a value, as the reference does. */
QKV_INLINE void qkv_decode_group(const struct qkv_weight *w, ptrdiff_t row, ptrdiff_t at, ptrdiff_t count, float *to)
{
    ptrdiff_t index = row * w->groups + at;
    const uint8_t *codes = w->codes + index * w->group_bytes;
    float scale = w->scale[index];
    if (w->kind == QKV_INT8) {
        if (w->zero) {
            int zero = w->zero[index];
            for (ptrdiff_t i = 0; i < count; ++i) to[i] = qkv_finite((float)(codes[i] - zero) * scale);
        } else {
            for (ptrdiff_t i = 0; i < count; ++i) to[i] = (float)(int8_t)codes[i] * scale;
        }
        return;
    }
    float values[16];
    qkv_values(w, index, values);
    for (ptrdiff_t i = 0; i < count; ++i) to[i] = values[i & 1 ? codes[i >> 1] & 15 : codes[i >> 1] >> 4];
}

#endif
