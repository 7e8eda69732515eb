"""One row of x times a quantized weight: each program takes a few output features and a share of the columns.

The codes of a chunk are multiplied with x as they are and summed; the scale multiplies the sum. On one row
nothing is reused, so that the time is that of reading the codes.
"""

import triton
import triton.language as tl

from qkv.quantizers.kernels.triton_codes import INT8, rounded, value_of


@triton.jit
def byte_products(word, even, odd, offset, table, KIND: tl.constexpr, ASYM: tl.constexpr):
    """Words of four bytes times x, the eight products of a word added; the first code of a byte is its high nibble.

    Args:
        word: ``[features, chunks, words]``. even, odd: every other element of x, ``[chunks, words, 2, 2]``.
        offset: ``[features, chunks]``.
    """
    even0, even1 = tl.split(even)
    even00, even01 = tl.split(even0)
    even10, even11 = tl.split(even1)
    odd0, odd1 = tl.split(odd)
    odd00, odd01 = tl.split(odd0)
    odd10, odd11 = tl.split(odd1)
    total = nibble_products(word, even00, offset, table, 4, KIND, ASYM)
    total += nibble_products(word, odd00, offset, table, 0, KIND, ASYM)
    total += nibble_products(word, even10, offset, table, 12, KIND, ASYM)
    total += nibble_products(word, odd10, offset, table, 8, KIND, ASYM)
    total += nibble_products(word, even01, offset, table, 20, KIND, ASYM)
    total += nibble_products(word, odd01, offset, table, 16, KIND, ASYM)
    total += nibble_products(word, even11, offset, table, 28, KIND, ASYM)
    total += nibble_products(word, odd11, offset, table, 24, KIND, ASYM)
    return total


@triton.jit
def nibble_products(word, part, offset, table, SHIFT: tl.constexpr, KIND: tl.constexpr, ASYM: tl.constexpr):
    """One nibble of each word times x ``part [chunks, words]``."""
    value = value_of((word >> SHIFT) & 15, table, KIND, ASYM)
    if ASYM:
        value -= offset[:, :, None]
    return value * part[None, :, :]


@triton.jit
def few_rows(
    x, codes, scale, zero, levels, bias, out,
    N, K, row_bytes, scale_stride,
    GROUP: tl.constexpr, KIND: tl.constexpr, ASYM: tl.constexpr, BIAS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FEATURES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """``out[n] = sum_k x[k] * weight[n, k]``, or a part of it in ``float32 out[split, n]``.

    Args:
        x: ``[K]``. scale, zero: rows of ``scale_stride`` (0: one for all).
        codes: of 4 bits, on addresses that are multiples of 4, as ``row_bytes`` is.
        CHUNK: elements that are summed before they are scaled; divides a group. CHUNKS: of them at a time.
    """
    n = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    split = tl.program_id(1)
    real = n < N
    table = tl.load(levels + tl.arange(0, 16))
    total = tl.zeros((FEATURES, CHUNKS), tl.float32)
    for step in range(split, tl.cdiv(K, CHUNK * CHUNKS), SPLITS):
        chunk = step * CHUNKS + tl.arange(0, CHUNKS)
        k = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        part = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        index = n[:, None] * scale_stride + (chunk * CHUNK // GROUP)[None, :]
        inside = real[:, None] & (chunk * CHUNK < K)[None, :]
        factor = tl.load(scale + index, inside, other=0.0)
        offset = tl.zeros((FEATURES, CHUNKS), tl.float32)
        if ASYM:
            offset = tl.load(zero + index, inside, other=0).to(tl.float32)
        if KIND == INT8:
            found = tl.load(
                codes + n[:, None, None] * row_bytes + k[None, :, :],
                real[:, None, None] & (k < row_bytes)[None, :, :],
                other=0,
            )
            products = (value_of(found, table, KIND, ASYM) - offset[:, :, None]) * part[None, :, :]
        else:
            at = chunk[:, None] * (CHUNK // 8) + tl.arange(0, CHUNK // 8)[None, :]
            word = tl.load(
                codes.to(tl.pointer_type(tl.uint32)) + n[:, None, None] * (row_bytes // 4) + at[None, :, :],
                real[:, None, None] & (at < row_bytes // 4)[None, :, :],
                other=0,
            )
            even, odd = tl.split(tl.reshape(part, (CHUNKS, CHUNK // 8, 2, 2, 2)))
            products = byte_products(word, even, odd, offset, table, KIND, ASYM)
        total += tl.sum(products, 2) * factor
    result = tl.sum(total, 1)
    if BIAS:
        result += tl.load(bias + n, real, other=0.0).to(tl.float32)
    tl.store(out + split * N + n, rounded(result, out.dtype.element_ty), real)


@triton.jit
def add_parts(parts, bias, out, M, N, SPLITS: tl.constexpr, BIAS: tl.constexpr, SIZE: tl.constexpr):
    """``out[m, n]``: the sum of ``float32 parts[split, m, n]``, always in the same order, and the bias."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    real = at < M * N
    total = tl.zeros((SIZE,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(parts + split * M * N + at, real, other=0.0)
    if BIAS:
        total += tl.load(bias + at % N, real, other=0.0).to(tl.float32)
    tl.store(out + at, rounded(total, out.dtype.element_ty), real)
