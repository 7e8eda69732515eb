/* The back end for any processor and any group size: decode a row of the weight to fp32, then dot products. */
#include <stdlib.h>

#include "quantize.h"

static void decode_row(const struct qkv_weight *w, ptrdiff_t row, float *to)
{
    for (ptrdiff_t at = 0; at < w->groups; ++at) {
        ptrdiff_t start = at * w->group, left = w->in - start;
        qkv_decode_group(w, row, at, left < w->group ? left : w->group, to + start);
    }
}

/* Sixteen running sums, so that the compiler may keep them in vector registers without reordering anything. */
static float dot(const float *a, const float *b, ptrdiff_t count)
{
    float sums[16] = {0};
    ptrdiff_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    for (int lane = 0; i < count; ++i, ++lane) sums[lane] += a[i] * b[i];
    for (int width = 8; width; width >>= 1)
        for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
    return sums[0];
}

static void linear_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct qkv_linear_job *job = pointer;
    const struct qkv_weight *w = &job->w;
    const float *x = job->px;
    float local[4096];
    float *decoded = w->in <= 4096 ? local : malloc((size_t)w->in * sizeof *decoded);
    if (!decoded) abort();
    for (ptrdiff_t row = begin; row < end; ++row) {
        decode_row(w, row, decoded);
        float bias = job->bias ? qkv_load(job->bias, job->bias_dtype, row) : 0.0f;
        for (ptrdiff_t m = 0; m < job->rows; ++m)
            qkv_store(job->y, job->dtype, m * w->out + row, dot(decoded, x + m * w->in, w->in) + bias);
    }
    if (decoded != local) free(decoded);
}

static ptrdiff_t most_rows(const struct qkv_linear_job *job)
{
    (void)job;
    return 16;
}

static qkv_body linear(struct qkv_linear_job *job)
{
    ptrdiff_t count = job->rows * job->w.in;
    float *x = malloc((size_t)count * sizeof *x + 1); /* never of no bytes */
    if (!x) return NULL;
    for (ptrdiff_t i = 0; i < count; ++i) x[i] = qkv_load(job->x, job->dtype, i);
    job->scratch = job->px = x;
    return linear_rows;
}

static void dequantize_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct qkv_dequantize_job *job = pointer;
    const struct qkv_weight *w = &job->w;
    float values[256];
    struct qkv_weight piece = *w; /* a long group is decoded 256 values at a time */
    for (ptrdiff_t row = begin; row < end; ++row) {
        for (ptrdiff_t at = 0; at < w->groups; ++at) {
            ptrdiff_t start = at * w->group, left = w->in - start;
            ptrdiff_t count = left < w->group ? left : w->group;
            for (ptrdiff_t done = 0; done < count; done += 256) {
                ptrdiff_t now = count - done < 256 ? count - done : 256;
                piece.codes = w->codes + (w->kind == QKV_INT8 ? done : done / 2);
                qkv_decode_group(&piece, row, at, now, values);
                for (ptrdiff_t i = 0; i < now; ++i)
                    qkv_store_weight(job->y, job->dtype, row * w->in + start + done + i, values[i]);
            }
        }
    }
}

static void quantize_rows(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    qkv_quantize_rows(pointer, begin, end, qkv_quantize_group);
}

const struct qkv_ops qkv_portable_ops = {most_rows, linear, dequantize_rows, quantize_rows};
