"""Products with encoded blocks: scales and zero points go into the small operand, codes are only cast."""

from __future__ import annotations

import torch
from torch import Tensor

from qkv.cache.codec import Codec
from qkv.cache.hadamard import spread
from qkv.cache.view import Run
from qkv.quantizers import nf4


def fold_keys(rows: Tensor, run: Run) -> Tensor:
    """Scores ``[heads, rows, blocks * tokens]`` of queries ``[heads, rows, key_dim]`` with a run's keys."""
    codec, codes = run.layout.keys, run.tensors["keys.codes"]
    if codec.is_exact:
        scores = torch.matmul(rows, codes.to(rows.dtype).transpose(-1, -2))
    elif codec.axis == "channel":
        scores = _channel_scores(spread(rows) if codec.is_rotated else rows, run, codec)
    else:
        scores = _token_scores(spread(rows) if codec.is_rotated else rows, run, codec)
    return scores.permute(1, 2, 0, 3).flatten(2)


def fold_values(probabilities: Tensor, run: Run, output: Tensor) -> None:
    """Add ``probabilities [heads, rows, blocks * tokens] @ values`` to ``output [heads, rows, value_dim]``.

    Where the codec is rotated, so is what is added: the caller keeps its output in rotated channels.
    """
    codec, codes = run.layout.values, run.tensors["values.codes"]
    if codec.is_exact:
        output.baddbmm_(probabilities, _by_head(codes, output.dtype))
    elif codec.axis == "channel":
        _add_channel_values(probabilities, run, codec, output)
    elif output.shape[2] % (len(_SHIFTS[codec.bits]) * run.tensors["values.scale"].shape[3]) == 0:
        _add_token_values(probabilities, run, codec, output)
    else:
        output.baddbmm_(probabilities, _token_values(run, codec, output))


def _channel_scores(rows: Tensor, run: Run, codec: Codec) -> Tensor:
    """Scores ``[blocks, heads, rows, tokens]``: a scale a channel, over groups of tokens."""
    codes, scale = run.tensors["keys.codes"], run.tensors["keys.scale"].to(rows.dtype)
    blocks, heads, tokens, width = codes.shape
    groups, dim = scale.shape[2:]
    folded = (rows[None, :, None] * scale[:, :, :, None]).reshape(blocks * heads * groups, -1, dim)
    codes = codes.view(blocks * heads * groups, tokens // groups, width)
    scores = _plane_products(folded, codes, codec)
    if "keys.zero" in run.tensors:
        shift = torch.matmul(rows, (scale * run.tensors["keys.zero"]).transpose(-1, -2))
        scores.sub_(shift.transpose(2, 3).reshape(blocks * heads * groups, -1, 1))
    scores = scores.view(blocks, heads, groups, -1, tokens // groups)
    return scores[:, :, 0] if groups == 1 else scores.transpose(2, 3).flatten(3)


def _plane_products(folded: Tensor, codes: Tensor, codec: Codec) -> Tensor:
    """``folded [batch, rows, dim]`` times codes ``[batch, tokens, bytes]``, plane by plane."""
    step = len(_SHIFTS[codec.bits])
    total = None
    for i in range(step):
        part = folded[..., i::step]
        plane = code_plane(codes, codec, i, folded.dtype)[..., : part.shape[-1]].transpose(1, 2)
        total = torch.bmm(part, plane) if total is None else total.baddbmm_(part, plane)
    assert total is not None
    return total


def _token_scores(rows: Tensor, run: Run, codec: Codec) -> Tensor:
    """Scores ``[blocks, heads, rows, tokens]``: a scale a token, over groups of channels."""
    scale = run.tensors["keys.scale"].to(rows.dtype)
    keys = _unpacked(run.tensors["keys.codes"], codec, rows.shape[-1], rows.dtype)
    keys = keys.view(*keys.shape[:3], scale.shape[3], -1)
    if "keys.zero" in run.tensors:
        keys = keys - run.tensors["keys.zero"].to(rows.dtype)[..., None]
    return torch.matmul(rows, (keys * scale[..., None]).flatten(-2).transpose(-1, -2))


def _add_token_values(probabilities: Tensor, run: Run, codec: Codec, output: Tensor) -> None:
    """A scale a token, over groups of channels; a byte's codes never cross a group."""
    heads, rows, dim = output.shape
    scale = _by_group(run.tensors["values.scale"], output.dtype)
    groups, tokens = scale.shape[1:]
    weighted = (probabilities[:, None] * scale[:, :, None]).reshape(heads * groups, rows, tokens)
    planes = len(_SHIFTS[codec.bits])
    target = output.view(heads, rows, groups, dim // groups // planes, planes)
    codes = run.tensors["values.codes"]
    codes = codes.view(*codes.shape[:3], groups, -1).permute(1, 3, 0, 2, 4)
    for i in range(planes):
        plane = code_plane(codes, codec, i, output.dtype).view(heads * groups, tokens, -1)
        if groups == planes == 1:
            output.baddbmm_(weighted, plane)
            continue
        product = torch.bmm(weighted, plane)
        target[..., i] += product.view(heads, groups, rows, -1).transpose(1, 2)
    if "values.zero" in run.tensors:
        zero = _by_group(run.tensors["values.zero"], output.dtype).view(heads * groups, 1, tokens)
        shift = weighted.mul_(zero).sum(-1).view(heads, groups, rows).transpose(1, 2)
        output.view(heads, rows, groups, -1).sub_(shift[..., None])


def _token_values(run: Run, codec: Codec, output: Tensor) -> Tensor:
    """The same decoded, ``[heads, tokens, value_dim]``, for widths that bytes do not divide."""
    scale = run.tensors["values.scale"].to(output.dtype)
    values = _unpacked(run.tensors["values.codes"], codec, output.shape[2], output.dtype)
    values = values.reshape(*values.shape[:3], scale.shape[3], -1)
    if "values.zero" in run.tensors:
        values = values - run.tensors["values.zero"].to(output.dtype)[..., None]
    return _by_head((values * scale[..., None]).flatten(3), output.dtype)


def _add_channel_values(probabilities: Tensor, run: Run, codec: Codec, output: Tensor) -> None:
    """A scale a channel, over groups of tokens."""
    scale, codes = run.tensors["values.scale"].to(output.dtype), run.tensors["values.codes"]
    blocks, heads, tokens, _ = codes.shape
    groups = scale.shape[2]
    parts = probabilities.view(heads, -1, blocks, groups, tokens // groups).permute(2, 0, 3, 1, 4)
    values = _unpacked(codes, codec, output.shape[2], output.dtype)
    values = values.reshape(blocks, heads, groups, tokens // groups, -1)
    product = torch.matmul(parts, values)
    if "values.zero" in run.tensors:
        zero = run.tensors["values.zero"].to(output.dtype)
        product = product - parts.sum(-1, keepdim=True) * zero[..., None, :]
    output.add_((product * scale[..., None, :]).sum((0, 2)))


_SHIFTS = {8: (0,), 4: (4, 0), 2: (6, 4, 2, 0)}


def code_plane(codes: Tensor, codec: Codec, plane: int, dtype: torch.dtype) -> Tensor:
    """One code of each byte as float, contiguous in the order of the view: channels ``plane, plane + n, …``.

    The codes of a byte are never interleaved again: the small operand is taken apart instead.
    """
    shift = _SHIFTS[codec.bits][plane]
    if codec.bits != 8:
        codes = codes >> shift if shift == 8 - codec.bits else (codes >> shift) & (2**codec.bits - 1)
    if codec.name == "nf4":
        return nf4.levels(codes.device).to(dtype)[codes.int()].contiguous()
    return torch.empty(codes.shape, dtype=dtype, device=codes.device).copy_(codes)


def _unpacked(codes: Tensor, codec: Codec, dim: int, dtype: torch.dtype) -> Tensor:
    """All codes as float, ``[..., dim]``."""
    planes = [code_plane(codes, codec, i, dtype) for i in range(len(_SHIFTS[codec.bits]))]
    return planes[0] if len(planes) == 1 else torch.stack(planes, -1).flatten(-2)[..., :dim]


def _by_head(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``[blocks, heads, tokens, n]`` to contiguous ``[heads, blocks * tokens, n]``."""
    blocks, heads, tokens, width = stored.shape
    out = torch.empty(heads, blocks * tokens, width, dtype=dtype, device=stored.device)
    out.view(heads, blocks, tokens, width).copy_(stored.transpose(0, 1))
    return out


def _by_group(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """``[blocks, heads, tokens, groups]`` to contiguous ``[heads, groups, blocks * tokens]``."""
    blocks, heads, tokens, groups = stored.shape
    out = torch.empty(heads, groups, blocks, tokens, dtype=dtype, device=stored.device)
    return out.copy_(stored.permute(1, 3, 0, 2)).view(heads, groups, blocks * tokens)
