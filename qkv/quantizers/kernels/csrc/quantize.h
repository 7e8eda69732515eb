/* Quantizing rows in plain C, for any back end to compile with its own instructions.
 *
 * The arithmetic is the reference's, operation by operation, so that the codes are the same bit for bit: fp32,
 * true division, rounding ties to even, nothing fused.
 */
#ifndef QKV_QUANTIZE_H
#define QKV_QUANTIZE_H

#include <stdlib.h>

#include "scalar.h"

/* To the nearest whole number, ties to even, for |value| < 2^22. */
QKV_INLINE float qkv_round(float value)
{
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it leaves no bits for a fraction */
    return (value + shift) - shift;
}

QKV_INLINE float qkv_between(float value, float low, float high)
{
    return value < low ? low : value > high ? high : value;
}

/* absmax / qmax, kept normal and small enough that qmax scales are finite. */
QKV_INLINE float qkv_symmetric_scale(float absmax, float qmax)
{
    const float most = (float)((double)FLT_MAX / qmax * (1.0 - 0x1p-22));
    return absmax > 0.0f ? qkv_between(absmax / qmax, FLT_MIN, most) : 0.0f;
}

/* The range in qmax steps, a little less: the zero point may fall half way between two codes. */
QKV_INLINE float qkv_asymmetric_scale(float low, float high, float qmax)
{
    const float shrink = (float)(1.0 - 0x1p-20);
    float scale = (high / qmax - low / qmax) * shrink;
    return high > low ? (scale < FLT_MIN ? FLT_MIN : scale) : 0.0f;
}

QKV_INLINE float qkv_zero_point(float low, float scale, float qmax)
{
    return qkv_round(qkv_between(-low / (scale > 0.0f ? scale : 1.0f), 0.0f, qmax));
}

/* What nf4 multiplies a group by: first `lift`, against divisors too small, then `inverse`. */
QKV_INLINE float qkv_nf4_inverse(float absmax, float *lift)
{
    const float smallest = 1e-38f;
    *lift = absmax < smallest ? 0x1p64f : 1.0f;
    absmax *= *lift;
    return 1.0f / (absmax < smallest ? smallest : absmax);
}

/* How the values of one group become codes. */
struct qkv_rule {
    int nf4;
    float lift, inverse;            /* nf4 */
    float divisor, zero, low, high; /* code = clamp(round(value / divisor) + zero) */
    int offset;                     /* added to the code before it is stored */
};

/* The rule of group `index` whose values lie between `low` <= 0 and `high` >= 0; writes its scale and zero point. */
QKV_INLINE struct qkv_rule qkv_rule_of(const struct qkv_quantize_job *job, ptrdiff_t index, float low, float high)
{
    struct qkv_rule rule = {0};
    float absmax = -low > high ? -low : high, qmax = job->kind == QKV_INT8 ? 127.0f : 7.0f;
    if (job->kind == QKV_NF4) {
        rule.nf4 = 1;
        rule.inverse = qkv_nf4_inverse(absmax, &rule.lift);
        job->scale[index] = absmax;
        return rule;
    }
    if (job->symmetric) {
        if (!job->given) job->scale[index] = qkv_symmetric_scale(absmax, qmax);
        rule.low = -qmax;
        rule.high = qmax;
        rule.offset = job->kind == QKV_INT4 ? 8 : 0;
    } else {
        qmax = 2 * qmax + 1;
        if (!job->given) {
            job->scale[index] = qkv_asymmetric_scale(low, high, qmax);
            job->zero[index] = (uint8_t)qkv_zero_point(low, job->scale[index], qmax);
        }
        rule.zero = job->zero[index];
        rule.high = qmax;
    }
    rule.divisor = job->scale[index] > 0.0f ? job->scale[index] : 1.0f;
    return rule;
}

/* Elements worked on at a time; the last block of a group may be short. */
enum { QKV_BLOCK = 16 };

QKV_INLINE void qkv_encode_steps(const struct qkv_rule *rule, const float *values, uint8_t *codes)
{
    const float divisor = rule->divisor, zero = rule->zero, low = rule->low, high = rule->high;
    const int offset = rule->offset;
    for (int i = 0; i < QKV_BLOCK; ++i) {
        float steps = qkv_round(qkv_between(values[i] / divisor, -1024.0f, 1024.0f)) + zero;
        codes[i] = (uint8_t)((int)qkv_between(steps, low, high) + offset);
    }
}

/* The code is the number of midpoints below the value. */
QKV_INLINE void qkv_encode_levels(const struct qkv_rule *rule, const float *values, uint8_t *codes)
{
    float scaled[QKV_BLOCK];
    int32_t below[QKV_BLOCK] = {0};
    for (int i = 0; i < QKV_BLOCK; ++i) scaled[i] = values[i] * rule->lift * rule->inverse;
    for (int j = 0; j < 15; ++j)
        for (int i = 0; i < QKV_BLOCK; ++i) below[i] += qkv_nf4_midpoints[j] < scaled[i];
    for (int i = 0; i < QKV_BLOCK; ++i) codes[i] = (uint8_t)below[i];
}

/* A block of codes to place `at` of group `index`. */
QKV_INLINE void qkv_store_codes(struct qkv_quantize_job *job, ptrdiff_t index, ptrdiff_t at, uint8_t *codes)
{
    uint8_t *to = job->codes + index * job->group_bytes;
    ptrdiff_t left = job->group - at, count = left < QKV_BLOCK ? left : QKV_BLOCK;
    if (job->kind == QKV_INT8) {
        memcpy(to + at, codes, (size_t)count);
        return;
    }
    if (count % 2) codes[count] = 0;
    for (ptrdiff_t i = 0; i < count; i += 2) to[(at + i) / 2] = (uint8_t)(codes[i] << 4 | codes[i + 1]);
}

/* `count` elements of x from `at` on as fp32, padded with zeros up to `padded`. */
QKV_INLINE void qkv_load_many(const void *x, int dtype, ptrdiff_t at, ptrdiff_t count, ptrdiff_t padded, float *to)
{
    if (dtype == QKV_F32) {
        memcpy(to, (const float *)x + at, (size_t)count * sizeof *to);
    } else if (dtype == QKV_BF16) {
        const uint16_t *from = (const uint16_t *)x + at;
        for (ptrdiff_t i = 0; i < count; ++i) to[i] = qkv_from_bf16(from[i]);
    } else {
        for (ptrdiff_t i = 0; i < count; ++i) to[i] = qkv_load(x, QKV_F16, at + i);
    }
    memset(to + count, 0, (size_t)(padded - count) * sizeof *to);
}

/* Group `index`: its `values`, zeros after them up to a whole number of blocks. */
QKV_INLINE void qkv_quantize_group(struct qkv_quantize_job *job, ptrdiff_t index, const float *values)
{
    float lows[QKV_BLOCK] = {0}, highs[QKV_BLOCK] = {0}, spoilt[QKV_BLOCK] = {0}, low = 0.0f, high = 0.0f, bad = 0.0f;
    for (ptrdiff_t i = 0; i < job->group; i += QKV_BLOCK) {
        for (int j = 0; j < QKV_BLOCK; ++j) {
            float value = values[i + j];
            lows[j] = value < lows[j] ? value : lows[j];
            highs[j] = value > highs[j] ? value : highs[j];
            spoilt[j] += value - value; /* NaN for NaN and infinity */
        }
    }
    for (int j = 0; j < QKV_BLOCK; ++j) {
        low = lows[j] < low ? lows[j] : low;
        high = highs[j] > high ? highs[j] : high;
        bad += spoilt[j];
    }
    if (bad != 0.0f) {
        __atomic_store_n(&job->not_finite, 1, __ATOMIC_RELAXED);
        return;
    }
    struct qkv_rule rule = qkv_rule_of(job, index, low, high);
    for (ptrdiff_t i = 0; i < job->group; i += QKV_BLOCK) {
        uint8_t codes[QKV_BLOCK];
        if (rule.nf4) qkv_encode_levels(&rule, values + i, codes);
        else qkv_encode_steps(&rule, values + i, codes);
        qkv_store_codes(job, index, i, codes);
    }
}

/* Rows [begin, end), `group` being qkv_quantize_group or what does the same. */
QKV_INLINE void qkv_quantize_rows(struct qkv_quantize_job *job, ptrdiff_t begin, ptrdiff_t end,
                                  void (*group)(struct qkv_quantize_job *, ptrdiff_t, const float *))
{
    ptrdiff_t padded = (job->group + QKV_BLOCK - 1) / QKV_BLOCK * QKV_BLOCK;
    float local[1024], *values = padded <= 1024 ? local : malloc((size_t)padded * sizeof *values);
    if (!values) abort();
    for (ptrdiff_t row = begin; row < end; ++row) {
        for (ptrdiff_t at = 0; at < job->groups; ++at) {
            ptrdiff_t start = at * job->group, left = job->in - start;
            ptrdiff_t count = left < job->group ? left : job->group;
            qkv_load_many(job->x, job->dtype, row * job->in + start, count, padded, values);
            group(job, row * job->groups + at, values);
        }
    }
    if (values != local) free(values);
}

#endif
