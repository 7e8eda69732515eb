"""Quantizing on a GPU: range, scale, zero point and codes of a group in one pass.

The arithmetic is that of the reference, operation by operation (true division, ties to even, nothing fused), so
that the codes are the same bit for bit.
"""

import triton
import triton.language as tl

from qkv.quantizers.kernels.triton_codes import INT8, NF4


@triton.jit
def whole(value):
    """Rounded to a whole number, ties to even; for magnitudes below 2^22."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def between(value, low, high):
    """Clamped."""
    return tl.minimum(tl.maximum(value, low), high)


@triton.jit
def encode(
    x, codes, scale, zero, midpoints, N, K, groups, group_bytes,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, ASYM: tl.constexpr,
    QMAX: tl.constexpr, TINY: tl.constexpr, LIMIT: tl.constexpr, SHRINK: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """GROUPS groups of ``x [N, K]`` a program; a group that holds NaN or infinity gets a scale that is NaN.

    Args:
        WIDTH: the power of two that holds a group. QMAX: the largest code of a symmetric format, the number
            of steps of another. TINY, LIMIT: bounds of a scale. SHRINK, SMALLEST: see integer.py and nf4.py.
    """
    number = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    real = number < N * groups
    start = (number % groups) * GROUP
    i = tl.arange(0, WIDTH)
    column = start[:, None] + i[None, :]
    inside = real[:, None] & (i < GROUP)[None, :] & (column < K)
    value = tl.load(x + (number // groups)[:, None] * K + column, inside, other=0.0).to(tl.float32)
    low, high = tl.minimum(tl.min(value, 1), 0.0), tl.maximum(tl.max(value, 1), 0.0)
    spoilt = tl.sum(value - value, 1)
    absmax = tl.maximum(-low, high)
    if KIND == NF4:
        step = absmax
        lift = tl.where(absmax < SMALLEST, 18446744073709551616.0, 1.0)
        inverse = tl.div_rn(tl.full((GROUPS,), 1.0, tl.float32), tl.maximum(absmax * lift, SMALLEST))
        scaled = value * lift[:, None] * inverse[:, None]
        code = tl.zeros((GROUPS, WIDTH), tl.int32)
        for j in tl.static_range(15):
            code += (tl.load(midpoints + j) < scaled).to(tl.int32)
    else:
        steps = tl.full((GROUPS,), QMAX, tl.float32)
        if ASYM:
            step = tl.maximum((tl.div_rn(high, steps) - tl.div_rn(low, steps)) * SHRINK, TINY)
            step = tl.where(high > low, step, 0.0)
        else:
            step = tl.where(absmax > 0, between(tl.div_rn(absmax, steps), TINY, LIMIT), 0.0)
        divisor = tl.where(step > 0, step, 1.0)
        quotient = whole(between(tl.div_rn(value, tl.broadcast_to(divisor[:, None], (GROUPS, WIDTH))), -1024.0, 1024.0))
        if ASYM:
            offset = whole(between(tl.div_rn(-low, divisor), 0.0, QMAX))
            tl.store(zero + number, offset.to(tl.uint8), real)
            code = between(quotient + offset[:, None], 0.0, QMAX).to(tl.int32)
        else:
            code = between(quotient, -QMAX, QMAX).to(tl.int32)
            if KIND != INT8:
                code += 8
    tl.store(scale + number, step + spoilt, real)
    if KIND == INT8:
        place = codes + number[:, None] * group_bytes + i[None, :]
        tl.store(place, code.to(codes.dtype.element_ty), real[:, None] & (i < GROUP)[None, :])
    else:
        code = tl.where((i < GROUP)[None, :], code, 0)
        first, second = tl.split(tl.reshape(code, (GROUPS, WIDTH // 2, 2)))
        j = tl.arange(0, WIDTH // 2)
        place = codes + number[:, None] * group_bytes + j[None, :]
        tl.store(place, (first * 16 + second).to(tl.uint8), real[:, None] & (j < group_bytes)[None, :])
