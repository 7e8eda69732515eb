/* Attention tiles compiled for AVX2. */
#include "native.h"

#if QKV_X86

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE QKV_INLINE TARGET

#include "attention_tile.h"

const struct qkv_attention_ops qkv_attention_avx2 = {room, prepare, scores, cap, weigh, values, finish};

#endif
