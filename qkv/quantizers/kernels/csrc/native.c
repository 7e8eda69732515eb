/* The exported functions: choose the back end, prepare the job, run it on torch's threads. */
#include <stdlib.h>
#include <string.h>

#include "native.h"

const float qkv_nf4_levels[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

const float qkv_nf4_midpoints[24] = {
    -0.8480963706970215f, -0.6106328964233398f, -0.4599952697753906f, -0.33967941999435425f,
    -0.23460739850997925f, -0.13791173696517944f, -0.045525018125772476f, 0.03979014977812767f,
    0.120255246758461f, 0.2035212516784668f, 0.2920137643814087f, 0.3893125355243683f,
    0.5016634464263916f, 0.6427869200706482f, 0.8614784479141235f,
};

/* ---- threads ---- */

/* GOMP_parallel of the OpenMP runtime that torch itself uses, handed over by the loader. Asking for it by address
 * instead of linking with OpenMP means that there is never a second pool of threads beside torch's. */
typedef void (*parallel_function)(void (*)(void *), void *, unsigned, unsigned);
static parallel_function run_parallel;

/* What the loader compares with the C files beside it; setup.py computes it from those it compiles. */
#ifndef QKV_STAMP
#define QKV_STAMP 0
#endif
QKV_EXPORT uint64_t qkv_stamp(void) { return QKV_STAMP; }

QKV_EXPORT void qkv_set_parallel(void *function) { memcpy(&run_parallel, &function, sizeof function); }

struct loop {
    qkv_body body;
    void *job;
    ptrdiff_t count, step, next;
};

static void drain(void *pointer)
{
    struct loop *loop = pointer;
    for (;;) {
        ptrdiff_t begin = __atomic_fetch_add(&loop->next, loop->step, __ATOMIC_RELAXED);
        if (begin >= loop->count) return;
        ptrdiff_t end = begin + loop->step;
        loop->body(loop->job, begin, end < loop->count ? end : loop->count);
    }
}

void qkv_for(ptrdiff_t count, ptrdiff_t step, int threads, qkv_body body, void *job)
{
    if (count <= 0) return;
    if (threads < 2 || count <= step || !run_parallel) {
        body(job, 0, count);
        return;
    }
    struct loop loop = {body, job, count, step, 0};
    run_parallel(drain, &loop, (unsigned)threads, 0);
}

/* Four helpings a thread, so that one that was held up does not hold up the others; whole multiples of `unit`. */
static ptrdiff_t helping(ptrdiff_t count, ptrdiff_t unit, int threads)
{
    ptrdiff_t step = (count + 4 * threads - 1) / (4 * threads);
    return (step + unit - 1) / unit * unit;
}

/* Below this many conversions a second thread costs more than it brings. */
static int useful_threads(int threads, ptrdiff_t work) { return work < 65536 ? 1 : threads; }

/* ---- dispatch ---- */

static const struct qkv_ops *ops = &qkv_portable_ops;

static int highest_level(void)
{
#if QKV_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("f16c"))
        return QKV_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return QKV_AVX2;
#endif
    return QKV_PORTABLE;
}

/* Uses the best back end that the processor has and that is no higher than `limit`; returns the one chosen. */
QKV_EXPORT int qkv_set_level(int limit)
{
    int highest = highest_level();
    int level = limit < highest ? limit : highest;
    ops = &qkv_portable_ops;
#if QKV_X86
    if (level == QKV_AVX2) ops = &qkv_avx2_ops;
    if (level == QKV_AVX512) ops = &qkv_avx512_ops;
#endif
    return level;
}

/* ---- the verbs ---- */

static struct qkv_weight weight(const void *codes, const float *scale, const uint8_t *zero, int kind, ptrdiff_t out,
                                ptrdiff_t in, ptrdiff_t group)
{
    struct qkv_weight w = {codes, scale, zero, kind, 0, out, in, group, (in + group - 1) / group, 0};
    w.group_bytes = kind == QKV_INT8 ? group : (group + 1) / 2;
    return w;
}

/* y = x weight^T + bias. `mode`: the dtypes of x and of the bias in two bits each, whether the fast mode may run in the
 * next one, the number of threads above. Returns 0, or 1 when there was no memory for the prepared x. */
QKV_EXPORT int qkv_linear(const struct qkv_weight *w, const void *x, const void *bias, void *y, ptrdiff_t rows, int mode)
{
    struct qkv_linear_job whole = {.w = *w, .x = x, .bias = bias, .y = y, .unit = 8};
    whole.dtype = mode & 3;
    whole.bias_dtype = mode >> 2 & 3;
    whole.fast = mode >> 4 & 1;
    const ptrdiff_t most = ops->most_rows(&whole), size = whole.dtype == QKV_F32 ? 4 : 2;
    for (ptrdiff_t start = 0; start < rows && w->out; start += most) {
        struct qkv_linear_job job = whole;
        job.x = (const char *)x + start * w->in * size;
        job.y = (char *)y + start * w->out * size;
        job.rows = rows - start < most ? rows - start : most;
        /* a multiplication here costs an eighth of a conversion */
        job.threads = useful_threads(mode >> 5, w->out * w->in * (job.rows + 3) / 32);
        qkv_body body = ops->linear(&job);
        if (!body) return 1;
        qkv_for(w->out, helping(w->out, job.unit, job.threads), job.threads, body, &job);
        free(job.scratch);
    }
    return 0;
}

/* y = x w^T + bias in bf16 for one to eight rows of x; returns 1 where the back end in use has no such product. */
QKV_EXPORT int qkv_linear_bf16(const void *w, const void *x, const void *bias, void *y, ptrdiff_t out, ptrdiff_t in,
                               ptrdiff_t rows, int bias_dtype, int threads)
{
#if QKV_X86
    if (ops == &qkv_avx512_ops && rows >= 1 && rows <= 8) {
        struct qkv_float_job job = {w, x, bias, y, bias_dtype, out, in};
        const int used = useful_threads(threads, out * in * (rows + 3) / 32);
        qkv_for(out, helping(out, 8, used), used, qkv_avx512_float(rows), &job);
        return 0;
    }
#endif
    return 1;
}

QKV_EXPORT void qkv_dequantize(const void *codes, const float *scale, const uint8_t *zero, void *y, ptrdiff_t out,
                               ptrdiff_t in, ptrdiff_t group, int kind, int dtype, int threads)
{
    struct qkv_dequantize_job job = {weight(codes, scale, zero, kind, out, in, group), y, dtype};
    int used = useful_threads(threads, out * in);
    qkv_for(out, helping(out, 8, used), used, ops->dequantize, &job);
}

/* Returns 1 when x holds NaN or infinity, otherwise 0. */
QKV_EXPORT int qkv_quantize(const void *x, void *codes, float *scale, uint8_t *zero, ptrdiff_t out, ptrdiff_t in,
                            ptrdiff_t group, int kind, int symmetric, int dtype, int given, int threads)
{
    struct qkv_quantize_job job = {.x = x, .codes = codes, .scale = scale, .zero = zero, .in = in, .group = group};
    job.kind = kind;
    job.symmetric = symmetric;
    job.dtype = dtype;
    job.given = given;
    job.groups = (in + group - 1) / group;
    job.group_bytes = kind == QKV_INT8 ? group : (group + 1) / 2;
    int used = useful_threads(threads, out * in);
    qkv_for(out, helping(out, 8, used), used, ops->quantize, &job);
    return job.not_finite;
}

/* Scales from their 8-bit codes: `values[code] * absmax` of each block of 256, plus the offset, from 0 to `limit`. */
QKV_EXPORT void qkv_decode_scale(const uint8_t *codes, const float *values, const float *absmax, const float *offset,
                                 float limit, float *scale, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; ++i) {
        float value = values[codes[i]] * absmax[i >> 8] + *offset;
        value = value > 0.0f ? value : 0.0f;
        scale[i] = value < limit ? value : limit;
    }
}

/* ---- the yardstick ---- */

struct read_job {
    const uint64_t *words;
    uint64_t sum;
};

/* 64-byte lines [begin, end) as four streams. */
static void read_lines(void *pointer, ptrdiff_t begin, ptrdiff_t end)
{
    struct read_job *job = pointer;
    ptrdiff_t length = (end - begin) / 4;
    const uint64_t *from = job->words + begin * 8;
    uint64_t sums[4][8] = {{0}};
    for (ptrdiff_t i = 0; i < length * 8; i += 8)
        for (int stream = 0; stream < 4; ++stream)
            for (int lane = 0; lane < 8; ++lane) sums[stream][lane] += from[stream * length * 8 + i + lane];
    uint64_t sum = 0;
    for (int i = 0; i < 32; ++i) sum += sums[i / 8][i % 8];
    for (ptrdiff_t i = length * 32; i < (end - begin) * 8; ++i) sum += from[i];
    __atomic_fetch_add(&job->sum, sum, __ATOMIC_RELAXED);
}

QKV_EXPORT uint64_t qkv_read(const void *from, ptrdiff_t bytes, int threads)
{
    struct read_job job = {from, 0};
    qkv_for(bytes / 64, helping(bytes / 64, 8, threads), threads, read_lines, &job);
    return job.sum;
}
