/* Quantizing rows in plain C, for any back end to compile with its own instructions.
 *
 * The arithmetic is the reference's, operation by operation, so that the codes are the same bit for bit: fp32,
 * true division, rounding ties to even, nothing fused.
 */
#ifndef QKV_QUANTIZE_H
#define QKV_QUANTIZE_H

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

QKV_INLINE uint8_t qkv_encode(const struct qkv_rule *rule, float value)
{
    if (rule->nf4) {
        float scaled = qkv_between(value * rule->lift * rule->inverse, -1.0f, 1.0f);
        int code = 0;
        for (int i = 0; i < 15; ++i) code += qkv_nf4_midpoints[i] < scaled;
        return (uint8_t)code;
    }
    float steps = qkv_round(qkv_between(value / rule->divisor, -1024.0f, 1024.0f));
    return (uint8_t)(int)(qkv_between(steps + rule->zero, rule->low, rule->high) + (float)rule->offset);
}

/* One group of `count` values, as fp32 in `values` padded with zeros to an even number beyond the group. */
QKV_INLINE void qkv_quantize_group(struct qkv_quantize_job *job, ptrdiff_t index, const float *values)
{
    float low = 0.0f, high = 0.0f, spoilt = 0.0f;
    for (ptrdiff_t i = 0; i < job->group; ++i) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
        spoilt += values[i] - values[i];
    }
    if (spoilt != 0.0f) __atomic_store_n(&job->not_finite, 1, __ATOMIC_RELAXED);
    struct qkv_rule rule = qkv_rule_of(job, index, low, high);
    uint8_t *codes = job->codes + index * job->group_bytes;
    if (job->kind == QKV_INT8) {
        for (ptrdiff_t i = 0; i < job->group; ++i) codes[i] = qkv_encode(&rule, values[i]);
        return;
    }
    for (ptrdiff_t i = 0; i < job->group; i += 2) {
        uint8_t second = i + 1 < job->group ? qkv_encode(&rule, values[i + 1]) : 0;
        codes[i / 2] = (uint8_t)(qkv_encode(&rule, values[i]) << 4 | second);
    }
}

/* Rows [begin, end); `values` has room for a group. */
QKV_INLINE void qkv_quantize_rows(struct qkv_quantize_job *job, ptrdiff_t begin, ptrdiff_t end, float *values)
{
    for (ptrdiff_t row = begin; row < end; ++row) {
        for (ptrdiff_t at = 0; at < job->groups; ++at) {
            ptrdiff_t start = at * job->group, left = job->in - start;
            for (ptrdiff_t i = 0; i < job->group; ++i)
                values[i] = i < left ? qkv_load(job->x, job->dtype, row * job->in + start + i) : 0.0f;
            qkv_quantize_group(job, row * job->groups + at, values);
        }
    }
}

#endif
