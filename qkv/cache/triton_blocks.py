"""Attention over int8 and int4 blocks on a GPU: a program walks a share of one row's blocks with an online softmax.

Scales are folded as in :mod:`qkv.cache.fold`: a key scale a channel goes into the query, its zero point is one
number a block; a value scale a token goes into the probabilities. Scales of several groups a token are
multiplied into the elements instead. Codes are whole numbers up to 255, exact in bfloat16. Two codes a byte are
two planes, the even channels and the odd ones: the small operand is taken apart and nothing is interleaved.
"""

import triton
import triton.language as tl

from qkv.quantizers.kernels.triton_codes import operand

COLUMNS = tl.constexpr(9)
"""Of the table of runs: addresses of codes, scales and zero points (keys before values), blocks, their tokens, and
the number of the first block."""


@triton.jit
def plane_of(pair, PLANE: tl.constexpr, PLANES: tl.constexpr):
    """Codes as float32: all bytes, or their high nibbles (plane 0), or their low ones (plane 1)."""
    if PLANES == 1:
        code = pair
    elif PLANE == 0:
        code = pair >> 4
    else:
        code = pair & 15
    return code.to(tl.float32)


@triton.jit
def shifted(code, scale, zero, t, channel, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """``(code - zero) * scale`` with scales ``[tokens, GROUPS]`` over GROUP channels each."""
    at = t[:, None] * GROUPS + (channel // GROUP)[None, :]
    return (code - tl.load(zero + at).to(tl.float32)) * tl.load(scale + at).to(tl.float32)


@triton.jit
def plane_scores(
    query, pair, scale, zero, t, i,
    PLANE: tl.constexpr, PLANES: tl.constexpr, BY_CHANNEL: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores ``[rows, tokens]`` that the channels of one plane contribute."""
    code, channel = plane_of(pair, PLANE, PLANES), i * PLANES + PLANE
    if BY_CHANNEL:
        folded = operand(query * tl.load(scale + channel).to(tl.float32)[None, :], DTYPE)
        shift = tl.sum(folded.to(tl.float32) * tl.load(zero + channel).to(tl.float32)[None, :], 1)
        return tl.dot(folded, tl.trans(operand(code, DTYPE)), input_precision=PRECISION) - shift[:, None]
    key = shifted(code, scale, zero, t, channel, GROUPS, GROUP)
    return tl.dot(operand(query, DTYPE), tl.trans(operand(key, DTYPE)), input_precision=PRECISION)


@triton.jit
def add_plane(
    total, probability, pair, scale, zero, t, i,
    PLANE: tl.constexpr, PLANES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``total + probability @ values`` for the channels of one plane, ``[rows, channels]``."""
    code, channel = plane_of(pair, PLANE, PLANES), i * PLANES + PLANE
    if GROUPS == 1:
        folded = operand(probability * tl.load(scale + t).to(tl.float32)[None, :], DTYPE)
        shift = tl.sum(folded.to(tl.float32) * tl.load(zero + t).to(tl.float32)[None, :], 1)
        return tl.dot(folded, operand(code, DTYPE), total, input_precision=PRECISION) - shift[:, None]
    value = shifted(code, scale, zero, t, channel, GROUPS, GROUP)
    return tl.dot(operand(probability, DTYPE), operand(value, DTYPE), total, input_precision=PRECISION)


@triton.jit
def address(runs, run, COLUMN: tl.constexpr, offset, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from the table of runs, ``offset`` elements on."""
    pointer = tl.load(runs + run * COLUMNS + COLUMN).to(tl.pointer_type(DTYPE)) + offset
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def walk(
    queries, runs, first_run, starts, positions,
    peaks, totals, outputs, mass, norms, mass_peaks,
    rows, tokens, hidden, reach, softcap, num_blocks,
    HEADS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PLANES: tl.constexpr, BY_CHANNEL: tl.constexpr,
    KEY_GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PLANES: tl.constexpr, VALUE_GROUPS: tl.constexpr,
    MASKED: tl.constexpr, REACHES: tl.constexpr, CAPPED: tl.constexpr, OBSERVED: tl.constexpr,
    ALIGNED: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Peak, denominator and weighted values of ROWS rows of one head over the runs ``split, split + SPLITS, ...``.

    Args:
        queries: float32 ``[batch, HEADS, rows, KEY_DIM]``, scaled, rotated as the keys are.
        runs: int64 ``[runs, COLUMNS]``. first_run: int32 ``[batch + 1]``, where each batch row's begin.
        starts: int64, position of each block; positions: int64 ``[tokens]``, of the queries (MASKED).
        peaks, totals: float32 ``[SPLITS, batch, HEADS, rows]``; outputs: ``[..., VALUE_DIM]``.
        mass, norms, mass_peaks: float32 ``[HEADS, rows, num_blocks]`` (OBSERVED, a batch of one): sum and
            length of each block's probabilities, and the maximum that they are relative to.
    """
    tile, pair, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = pair // HEADS, pair % HEADS
    r, t = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    real = r < rows
    i, j = tl.arange(0, KEY_DIM // KEY_PLANES), tl.arange(0, VALUE_DIM // VALUE_PLANES)
    row = (pair.to(tl.int64) * rows + r) * KEY_DIM
    place = row[:, None] + (i * KEY_PLANES)[None, :]
    query = tl.load(queries + place, real[:, None], other=0.0)
    other_query = query
    if KEY_PLANES == 2:
        other_query = tl.load(queries + place + 1, real[:, None], other=0.0)
    peak = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    output = tl.zeros((ROWS, VALUE_DIM // VALUE_PLANES), tl.float32)
    other_output = tl.zeros((ROWS, VALUE_DIM // VALUE_PLANES), tl.float32)
    KEY_GROUP: tl.constexpr = KEY_DIM // KEY_GROUPS
    VALUE_GROUP: tl.constexpr = VALUE_DIM // VALUE_GROUPS
    KEY_SCALES: tl.constexpr = KEY_DIM if BY_CHANNEL else TOKENS * KEY_GROUPS
    for run in range(tl.load(first_run + batch) + split, tl.load(first_run + batch + 1), SPLITS):
        count, number = tl.load(runs + run * COLUMNS + 6), tl.load(runs + run * COLUMNS + 8)
        for b in range(count):
            at = b * HEADS + head
            codes = address(runs, run, 0, at * (TOKENS * KEY_DIM // KEY_PLANES), tl.uint8, ALIGNED)
            scale = address(runs, run, 2, at * KEY_SCALES, tl.bfloat16, ALIGNED)
            zero = address(runs, run, 4, at * KEY_SCALES, tl.int16, ALIGNED)
            bytes = tl.load(codes + t[:, None] * (KEY_DIM // KEY_PLANES) + i[None, :])
            scores = plane_scores(
                query, bytes, scale, zero, t, i, 0, KEY_PLANES, BY_CHANNEL, KEY_GROUPS, KEY_GROUP, DTYPE, PRECISION
            )
            if KEY_PLANES == 2:
                scores += plane_scores(
                    other_query, bytes, scale, zero, t, i, 1, 2, BY_CHANNEL, KEY_GROUPS, KEY_GROUP, DTYPE, PRECISION
                )
            if CAPPED:
                scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
            if MASKED:
                key = tl.load(starts + number + b) + t
                seen = (key >= hidden)[None, :] & real[:, None]
                if REACHES:
                    seen = seen & (key[None, :] > (tl.load(positions + r % tokens) - reach)[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shrink = tl.exp(peak - new_peak)
            probability = tl.exp(scores - new_peak[:, None])
            peak, summed = new_peak, tl.sum(probability, 1)
            total = total * shrink + summed
            if OBSERVED:
                seen_at = (head * rows + r).to(tl.int64) * num_blocks + number + b
                tl.store(mass + seen_at, summed, real)
                tl.store(norms + seen_at, tl.sqrt(tl.sum(probability * probability, 1)), real)
                tl.store(mass_peaks + seen_at, peak, real)
            codes = address(runs, run, 1, at * (TOKENS * VALUE_DIM // VALUE_PLANES), tl.uint8, ALIGNED)
            scale = address(runs, run, 3, at * (TOKENS * VALUE_GROUPS), tl.bfloat16, ALIGNED)
            zero = address(runs, run, 5, at * (TOKENS * VALUE_GROUPS), tl.int16, ALIGNED)
            bytes = tl.load(codes + t[:, None] * (VALUE_DIM // VALUE_PLANES) + j[None, :])
            output = add_plane(
                output * shrink[:, None], probability, bytes, scale, zero, t, j, 0, VALUE_PLANES, VALUE_GROUPS,
                VALUE_GROUP, DTYPE, PRECISION,
            )  # fmt: skip
            if VALUE_PLANES == 2:
                other_output = add_plane(
                    other_output * shrink[:, None], probability, bytes, scale, zero, t, j, 1, 2, VALUE_GROUPS,
                    VALUE_GROUP, DTYPE, PRECISION,
                )  # fmt: skip
    batches = tl.num_programs(1)
    where = (split * batches + pair).to(tl.int64) * rows + r
    tl.store(peaks + where, peak, real)
    tl.store(totals + where, total, real)
    place = where[:, None] * VALUE_DIM + (j * VALUE_PLANES)[None, :]
    tl.store(outputs + place, output, real[:, None])
    if VALUE_PLANES == 2:
        tl.store(outputs + place + 1, other_output, real[:, None])


@triton.jit
def join(
    peaks, totals, outputs, peak, total, output, rows,
    SPLITS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The splits of :func:`walk` as one, for one of ``rows`` rows a program; WIDTH: a power of two from DIM on."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    highest = tl.load(peaks + row)
    for split in range(1, SPLITS):
        highest = tl.maximum(highest, tl.load(peaks + split * rows + row))
    summed, gathered = 0.0, tl.zeros((WIDTH,), tl.float32)
    for split in range(SPLITS):
        factor = tl.exp(tl.load(peaks + split * rows + row) - highest)
        summed += factor * tl.load(totals + split * rows + row)
        gathered += factor * tl.load(outputs + (split * rows + row) * DIM + i, i < DIM, other=0.0)
    tl.store(peak + row, highest)
    tl.store(total + row, summed)
    tl.store(output + row * DIM + i, gathered, i < DIM)
