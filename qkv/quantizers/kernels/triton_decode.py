"""A quantized weight as floats: one pass, each value computed in float32 and rounded once."""

import triton
import triton.language as tl

from qkv.quantizers.kernels.triton_codes import decode_tile, rounded


@triton.jit
def decode(
    codes, scale, zero, levels, out, N, K, row_bytes, scale_stride,
    GROUP: tl.constexpr, KIND: tl.constexpr, ASYM: tl.constexpr, FEATURES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """``out[n, k]``, SIZE columns of FEATURES rows a program, all of one group of each row."""
    n = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    start = tl.program_id(1) * SIZE
    table = tl.load(levels + tl.arange(0, 16))
    value = decode_tile(codes, scale, zero, table, n, start, N, row_bytes, scale_stride, GROUP, KIND, ASYM, SIZE)
    k = start + tl.arange(0, SIZE)
    place = out + n[:, None] * K + k[None, :]
    tl.store(place, rounded(value, out.dtype.element_ty), (n < N)[:, None] & (k < K)[None, :])
