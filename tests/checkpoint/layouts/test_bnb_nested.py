from __future__ import annotations

import torch

from qkv.checkpoint.layouts.bnb_nested import code_by_place
from qkv.quantizers.double_quant import dynamic_map, nearest_code


def test_codes_are_those_of_the_library() -> None:
    """Random values, values close to 0, and those on both sides of every border between two places."""
    from bitsandbytes import functional

    values = [torch.rand(50_000) * 2 - 1, (torch.rand(50_000) * 2 - 1) * 1e-4]
    borders = ((torch.arange(65535, dtype=torch.float64) + 0.5) / 32767.5 - 1).float()
    values += [borders * (1 + sign * 1e-6) for sign in (-1, 1)]
    scaled = torch.cat(values).clamp(-1, 1)
    blocks = torch.cat([scaled, torch.zeros(-len(scaled) % 255)]).reshape(-1, 255)
    blocks = torch.cat([torch.ones(len(blocks), 1), blocks], 1)  # 1 in each: the values are their own ratios
    codes, state = functional.quantize_blockwise(
        blocks.flatten(), code=dynamic_map(scaled.device).clone(), blocksize=256
    )
    assert bool((state.absmax == 1).all())
    found = code_by_place(blocks).flatten()
    assert float((found != codes).float().mean()) < 1e-4  # a border itself is a matter of the last bit
    inner = torch.cat(
        [torch.ones(len(blocks), 1, dtype=torch.bool), torch.zeros_like(blocks[:, 1:], dtype=torch.bool)], 1
    )
    whole = (blocks + 1) * 32767.5
    off_border = ((whole - whole.floor() - 0.5).abs() > 0.02) | inner
    assert torch.equal(found[off_border.flatten()], codes[off_border.flatten()])
    assert bool((found.int() - nearest_code(blocks).flatten().int()).abs().max() > 1)  # not the nearest near 0
