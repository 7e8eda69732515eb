/* What the back ends of the native library share: the stored layout, the jobs, the table of functions.
 *
 * A weight is [out, in]; its groups run along `in`, `groups` of them a row, each stored in `group_bytes` bytes.
 * Four-bit codes lie two a byte, the first of a pair in the high nibble. The last group of a row may be short:
 * it is stored padded, and what it decodes to past `in` is never used.
 *
 * AVX-512 also takes interleaved weights: of sixteen rows the first four bytes of codes each, then the next four, and so
 * on; the first scale each, then the next, and zero points likewise.
 */
#ifndef QKV_NATIVE_H
#define QKV_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define QKV_EXPORT __declspec(dllexport)
#else
#define QKV_EXPORT __attribute__((visibility("default")))
#endif

#if (defined(__x86_64__) || defined(__amd64__)) && (defined(__GNUC__) || defined(__clang__))
#define QKV_X86 1
#else
#define QKV_X86 0
#endif

#define QKV_INLINE static inline __attribute__((always_inline))
#define QKV_UNROLL _Pragma("GCC unroll 16")

enum qkv_kind { QKV_INT8 = 0, QKV_INT4 = 1, QKV_NF4 = 2 };
enum qkv_dtype { QKV_F32 = 0, QKV_BF16 = 1, QKV_F16 = 2 };
enum qkv_level { QKV_PORTABLE = 0, QKV_AVX2 = 1, QKV_AVX512 = 2 };

struct qkv_weight {
    const uint8_t *codes;
    const float *scale;  /* [out, groups] */
    const uint8_t *zero; /* [out, groups], or NULL when symmetric */
    int kind, interleaved;
    ptrdiff_t out, in, group, groups, group_bytes;
};

/* x [rows, in] times the transposed weight, for as many rows as one pass over the weight serves. */
struct qkv_linear_job {
    struct qkv_weight w;
    const void *x, *bias;
    void *y; /* [rows, out], in x's dtype */
    int dtype, bias_dtype, fast, threads;
    ptrdiff_t rows;

    /* What `linear` makes of x, once a call; the layouts belong to each back end. */
    void *scratch;
    void *px;          /* x in the order in which the codes are unpacked, padded with zeros */
    float *psum;       /* sums of x that zero points multiply; factors */
    int32_t *pattern;  /* [chunks, lanes]: the group of each lane, counted from first[chunk] */
    int32_t *first;    /* [chunks] */
    int needed;        /* scales a chunk takes at most */
    ptrdiff_t chunks, whole; /* chunks of a row; the first `whole` may be read without looking at the row's end */
    ptrdiff_t tiles;         /* of x: rows that are worked on together */
    ptrdiff_t unit;          /* output features that are worked on together */
    int segment;             /* elements of x that share a factor, where x is scaled to 16 bits; 0 where it is not */
};

/* x [rows, in] times the transposed w [out, in], all in bf16. */
struct qkv_float_job {
    const uint16_t *w, *x;
    const void *bias;
    void *y;
    int bias_dtype;
    ptrdiff_t out, in;
};

struct qkv_dequantize_job {
    struct qkv_weight w;
    void *y; /* [out, in] */
    int dtype;
};

struct qkv_quantize_job {
    const void *x; /* [out, in] */
    int dtype, kind, symmetric;
    int given; /* scale and zero are there already, and only the codes are asked for */
    ptrdiff_t in, group, groups, group_bytes;
    uint8_t *codes, *zero;
    float *scale;
    int not_finite; /* set where x holds NaN or infinity */
};

typedef void (*qkv_body)(void *job, ptrdiff_t begin, ptrdiff_t end);

struct qkv_ops {
    /* Rows of x that one pass over the weight serves at most. */
    ptrdiff_t (*most_rows)(const struct qkv_linear_job *job);
    /* Returns the function that computes output features [begin, end), or NULL when out of memory. */
    qkv_body (*linear)(struct qkv_linear_job *job);
    qkv_body dequantize;
    qkv_body quantize;
};

extern const struct qkv_ops qkv_portable_ops;
#if QKV_X86
extern const struct qkv_ops qkv_avx2_ops, qkv_avx512_ops;
qkv_body qkv_avx512_float(ptrdiff_t rows); /* 1 ... 8 */
#endif

extern const float qkv_nf4_levels[16];
extern const float qkv_nf4_midpoints[24]; /* 15, and room for whole vectors to be read at any of them */

/* Runs body over [0, count) on up to `threads` threads of torch's own pool, `step` items at a time. */
void qkv_for(ptrdiff_t count, ptrdiff_t step, int threads, qkv_body body, void *job);

#endif
