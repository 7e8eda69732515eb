"""What the Triton kernels share: from stored codes to values, on the device.

A row of codes is contiguous: element ``k`` of an 8-bit row is byte ``k``, of a 4-bit row a nibble of byte
``k // 2``, the first of a pair in the high one. That holds wherever groups have an even length.
"""

import triton
import triton.language as tl

from qkv.quantizers.kernels.triton_live import interpreted

INT8 = tl.constexpr(0)
INT4 = tl.constexpr(1)
NF4 = tl.constexpr(2)
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def value_of(code, table, KIND: tl.constexpr, ASYM: tl.constexpr):
    """The value of a code before zero point and scale, as float32; ``table``: the 16 levels.

    A gather reads the table from shared memory; loading by address instead takes four instructions more each.
    """
    if KIND == NF4:
        value = tl.reshape(tl.gather(table, tl.reshape(code.to(tl.int32), (code.numel,)), 0), code.shape)
    elif KIND == INT4 and not ASYM:
        value = code.to(tl.float32) - 8.0
    else:
        value = code.to(tl.float32)
    return value


@triton.jit
def decode_tile(
    codes, scale, zero, table, n, start, N, row_bytes, scale_stride,
    GROUP: tl.constexpr, KIND: tl.constexpr, ASYM: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Values ``float32 [len(n), SIZE]`` of rows ``n`` from element ``start`` on, all of one group of each row.

    Beyond the last row or byte they are those of code 0: multiply them by nothing, or store them nowhere.
    """
    real = n < N
    if KIND == INT8:
        at = start + tl.arange(0, SIZE)
        code = tl.load(codes + n[:, None] * row_bytes + at[None, :], real[:, None] & (at < row_bytes)[None, :], other=0)
    else:
        at = start // 2 + tl.arange(0, SIZE // 2)
        pair = tl.load(codes + n[:, None] * row_bytes + at[None, :], real[:, None] & (at < row_bytes)[None, :], other=0)
        code = tl.reshape(tl.join(pair >> 4, pair & 15), (n.shape[0], SIZE))
    index = n * scale_stride + start // GROUP
    factor = tl.load(scale + index, real, other=0.0)
    value = value_of(code, table, KIND, ASYM)
    if ASYM:
        offset = tl.load(zero + index, real, other=0).to(tl.float32)
        value = (value - offset[:, None]) * factor[:, None]
        return tl.minimum(tl.maximum(value, -3.4028234663852886e38), 3.4028234663852886e38)
    return value * factor[:, None]


@triton.jit
def rounded(value, DTYPE: tl.constexpr):
    """Float32 rounded to ``DTYPE``, ties to even; what exceeds float16's range becomes its largest value."""
    if DTYPE == tl.float16:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    if DTYPE == tl.bfloat16 and INTERPRETED:  # the interpreter cuts off instead of rounding
        bits = value.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
    return value.to(DTYPE)


@triton.jit
def operand(value, DTYPE: tl.constexpr):
    """A factor of a product in ``DTYPE``; the interpreter multiplies in float32, for it garbles bfloat16."""
    if value.dtype != DTYPE:
        value = rounded(value, DTYPE)
    if INTERPRETED:
        value = value.to(tl.float32)
    return value
