"""Many rows of x times a quantized weight: tiles are decoded into registers and multiplied by tensor cores.

The decoded weight is the left operand, which Hopper's tensor cores take from registers; so the product comes
out transposed, ``[features, rows]``, and is stored so.
"""

import triton
import triton.language as tl

from qkv.quantizers.kernels.triton_codes import decode_tile, operand, rounded


@triton.jit
def many_rows(
    x, codes, scale, zero, levels, bias, out,
    M, N, K, row_bytes, scale_stride,
    GROUP: tl.constexpr, KIND: tl.constexpr, ASYM: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``out[m, n] = sum_k x[m, k] * weight[n, k]``, or a part of it in ``float32 out[split, m, n]``.

    Args:
        x: ``[M, K]``. DEPTH: columns at a time, all of one group.
    """
    n = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    table = tl.load(levels + tl.arange(0, 16))
    total = tl.zeros((FEATURES, ROWS), tl.float32)
    for step in range(split, tl.cdiv(K, DEPTH), SPLITS):
        k = step * DEPTH + tl.arange(0, DEPTH)
        part = tl.load(x + m[None, :] * K + k[:, None], (m < M)[None, :] & (k < K)[:, None], other=0.0)
        weight = decode_tile(
            codes, scale, zero, table, n, step * DEPTH, N, row_bytes, scale_stride, GROUP, KIND, ASYM, DEPTH
        )
        total = tl.dot(operand(weight, x.dtype.element_ty), operand(part, x.dtype.element_ty), total)
    if BIAS:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[:, None]
    place = split * M * N + m[None, :] * N + n[:, None]
    tl.store(out + place, rounded(total, out.dtype.element_ty), (m < M)[None, :] & (n < N)[:, None])
