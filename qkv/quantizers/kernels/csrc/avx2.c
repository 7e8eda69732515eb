#include "native.h"
#if QKV_X86
#include "scalar.h"
static qkv_body linear(struct qkv_linear_job *job) { return qkv_portable_ops.linear(job); }
static void dequantize(void *job, ptrdiff_t begin, ptrdiff_t end) { qkv_portable_ops.dequantize(job, begin, end); }
const struct qkv_ops qkv_avx2_ops = {linear, dequantize, NULL};
#endif
