/* Attention tiles for any processor. */
#define TARGET
#define INLINE QKV_INLINE

#include "attention_tile.h"

const struct qkv_attention_ops qkv_attention_portable = {room, prepare, scores, cap, weigh, values, finish};
