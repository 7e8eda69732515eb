/* Attention of a few queries over the blocks of one row: what the back ends share.
 *
 * Work is cut into items, each one key/value head and a range of blocks, so that one long row keeps every thread busy.
 * An item walks its blocks a tile at a time and keeps an online softmax for its rows, which are the queries of the
 * head's group; a last step merges the items. The cut does not depend on the number of threads, nor does the result.
 */
#ifndef QKV_ATTENTION_H
#define QKV_ATTENTION_H

#include "scalar.h"

enum qkv_codec { QKV_EXACT = 0, QKV_CODE8 = 1, QKV_CODE4 = 2, QKV_CODE2 = 3, QKV_LEVEL4 = 4 };
enum qkv_part { QKV_KEYS = 0, QKV_VALUES = 1 };
enum { QKV_TILE = 64, QKV_QUERIES = 16 }; /* tokens of a tile, and of a call, at most */

/* Keys or values as the blocks store them. The first code of a byte lies in its highest bits. */
struct qkv_side {
    int64_t codec, dtype; /* dtype: of exact ones */
    int64_t by_token;     /* a scale a token, over `group` channels; otherwise a scale a channel, over `group` tokens */
    int64_t rotated;      /* codes are of channels after a Hadamard rotation */
    int64_t dim, group, row_bytes;
};

/* Blocks side by side in one slab: [blocks, heads, tokens, ...] of codes, bf16 scales and int16 zero points. */
struct qkv_run {
    const uint8_t *codes[2];
    const uint16_t *scale[2];
    const int16_t *zero[2]; /* NULL where a codec has none */
    int64_t blocks, tokens;
};

/* Exact keys and values, [heads, tokens, dim]; strides in elements, channels side by side. */
struct qkv_exact {
    const void *data[2];
    int64_t head_stride[2], token_stride[2];
    int64_t tokens, dtype;
};

/* The call. Mirrored field for field by the ctypes structure that fills it. */
struct qkv_attention {
    struct qkv_side side[2];
    const struct qkv_run *runs;
    const int64_t *starts; /* position of each block's first token */
    int64_t num_runs, num_blocks;
    struct qkv_exact anchors, tail; /* anchors: seen by every query */
    const void *queries;            /* [heads * group, tokens, key dim] */
    const float *anchor_queries;    /* the same turned for the anchors, float32 and contiguous; NULL: as they are */
    void *output;                   /* [tokens, heads * group, value dim], of the queries' dtype */
    int64_t query_head_stride, query_token_stride, dtype;
    int64_t heads, group, tokens;
    const int64_t *positions;  /* [tokens] */
    const uint8_t *open_mask;  /* [tokens, open]: which open tokens each query sees; NULL: the causal ones */
    const float *sink_logits;  /* [heads * group], or NULL */
    float *mass, *focus;       /* [tokens, blocks and those to be of the tail], or NULL */
    float *room;               /* qkv_attention_room(call) floats */
    int64_t tail_start, num_open, hidden, sinks, reach, block_size; /* reach: 0 for all */
    float scale, softcap;      /* softcap: 0 for none */
    int64_t threads, level; /* level: of the back end, one that the processor has */
};

/* Up to QKV_TILE tokens of one head, within one group of tokens of each side. */
struct qkv_tile {
    struct qkv_side side[2];
    const uint8_t *codes[2]; /* of the first token */
    ptrdiff_t stride[2];     /* bytes from a token to the next */
    const uint16_t *scale[2];
    const int16_t *zero[2];
    const uint8_t *ahead[2]; /* where the next tile's codes lie, to be fetched meanwhile; or this one's */
    ptrdiff_t tokens;
};

/* What one thread works in. Rows are the queries of a group, [group, tokens]. */
struct qkv_worker {
    const struct qkv_attention *call;
    ptrdiff_t rows, key_width, value_width; /* widths: dims rounded up to 64 channels */
    float *queries;                         /* [rows, key_width], zeros past the end */
    int bf16_queries;                       /* they are bfloat16 values as they came */
    float *scores;                          /* [rows, QKV_TILE]: scores, then probabilities with zeros past the end */
    float *peak, *total, *shrink;           /* [rows]: the online softmax */
    float *sum, *square;                    /* [rows]: of the tile's probabilities */
    float *output;                          /* [rows, value_width], channels in the back end's own order */
    void *room;                             /* the back end's own */
};

struct qkv_attention_ops {
    /* Bytes of the back end's own room. */
    ptrdiff_t (*room)(const struct qkv_worker *w);
    /* Makes of the queries what the scores with such keys take. */
    void (*prepare)(struct qkv_worker *w, const struct qkv_side *keys);
    /* Scaled scores of a tile; what lies past its tokens is never read. */
    void (*scores)(struct qkv_worker *w, const struct qkv_tile *tile);
    /* softcap * tanh(score / softcap). */
    void (*cap)(struct qkv_worker *w, ptrdiff_t tokens);
    /* Probabilities against the new peak, their sums, and how much what went before shrinks. */
    void (*weigh)(struct qkv_worker *w, ptrdiff_t tokens);
    /* Shrinks the output and adds the tile's values. */
    void (*values)(struct qkv_worker *w, const struct qkv_tile *tile);
    /* Row by row the output in the order of the channels, [rows, value dim]. */
    void (*finish)(const struct qkv_worker *w, const struct qkv_side *values, float *to);
};

extern const struct qkv_attention_ops qkv_attention_portable;
#if QKV_X86
extern const struct qkv_attention_ops qkv_attention_avx2, qkv_attention_avx512;
#endif

QKV_INLINE int qkv_codes_a_byte(int64_t codec) { return codec == QKV_CODE8 ? 1 : codec == QKV_CODE2 ? 4 : 2; }

/* The next piece of memory, on lines of 64 bytes. */
static inline void *carve(char **from, ptrdiff_t bytes)
{
    char *piece = *from;
    *from += (bytes + 63) / 64 * 64;
    return piece;
}

/* e^x by Taylor's series about the nearest power of two, within 2 units in the last place; 0 for minus infinity. */
QKV_INLINE float qkv_exp(float x)
{
    x = x < -104.0f ? -104.0f : x > 88.0f ? 88.0f : x;
    float turns = x * 1.44269504f, shifted = turns + 12582912.0f, whole = shifted - 12582912.0f; /* 1.5 * 2^23 */
    float r = x - whole * 0.693145752f - whole * 1.42860677e-6f; /* ln 2 in two parts */
    float series = 1.0f / 5040;
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    int32_t exponent = (int32_t)qkv_bits(shifted) - 0x4b400000, half = exponent >> 1;
    if (x != x) return x;
    return series * qkv_float((uint32_t)(half + 127) << 23) * qkv_float((uint32_t)(exponent - half + 127) << 23);
}

#endif
