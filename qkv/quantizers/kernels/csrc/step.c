/* What a step of a few tokens takes between its products, in bfloat16. */
#include <math.h>

#include "scalar.h"

enum { LANES = 16 }; /* sums that need not wait for each other */

static float mean_square(const uint16_t *x, ptrdiff_t columns)
{
    float sums[LANES] = {0};
    ptrdiff_t i = 0;
    for (; i + LANES <= columns; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) {
            float value = qkv_from_bf16(x[i + lane]);
            sums[lane] += value * value;
        }
    for (; i < columns; ++i) sums[0] += qkv_from_bf16(x[i]) * qkv_from_bf16(x[i]);
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0] / (float)columns;
}

QKV_INLINE float rounded(float value) { return qkv_from_bf16(qkv_to_bf16(value)); }

/* Root mean square normalisation: y [rows, columns] of x [rows, columns] and a weight [columns]. `offset` is added to the
 * weight; where it is 0, the normalised x is rounded before the weight multiplies it. */
QKV_EXPORT void qkv_rms_norm(const uint16_t *x, const uint16_t *weight, uint16_t *y, ptrdiff_t rows, ptrdiff_t columns,
                             float eps, float offset)
{
    for (; rows > 0; --rows, x += columns, y += columns) {
        float factor = 1.0f / sqrtf(mean_square(x, columns) + eps);
        for (ptrdiff_t i = 0; offset == 0.0f && i < columns; ++i)
            y[i] = qkv_to_bf16(rounded(qkv_from_bf16(x[i]) * factor) * qkv_from_bf16(weight[i]));
        for (ptrdiff_t i = 0; offset != 0.0f && i < columns; ++i)
            y[i] = qkv_to_bf16(qkv_from_bf16(x[i]) * factor * (offset + qkv_from_bf16(weight[i])));
    }
}
