"""Run as a script, without qkv: what stock transformers, bitsandbytes and compressed-tensors make of directories.

``python stock.py JOBS.json``: ``{"write": [[source, target, options], ...], "load": [[directory, result, run], ...]}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

torch.set_num_threads(1)


def write(source: str, target: str, options: dict[str, Any]) -> None:
    """Quantize with bitsandbytes while loading, and save."""
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=BitsAndBytesConfig(**options))
    model.save_pretrained(target)


def load(directory: str, result: str, run: bool) -> None:
    """Save the float weights that the model computes with, and the logits of a prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    found = {f"weight {name}": floats(module) for name, module in model.named_modules()}
    weights = {name: weight for name, weight in found.items() if weight is not None}
    ids = torch.randint(1, 64, (1, 7), generator=torch.Generator().manual_seed(1))
    if run:
        with torch.no_grad():
            weights["logits"] = model(ids).logits
    for name, module in model.named_modules():  # compressed-tensors unpacks when it first runs
        if hasattr(module, "quantization_scheme"):
            weights[f"weight {name}"] = module.weight.detach()
    experts = {f"weight {n}": p.detach() for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3}
    save_file({k: v.contiguous().clone() for k, v in (weights | experts).items()}, result)


def floats(module: torch.nn.Module) -> torch.Tensor | None:
    """The dequantized weight of a bitsandbytes layer."""
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Linear4bit":
        return blocks(weight)
    if type(module).__name__ == "Linear8bitLt":
        return weight.data * weight.SCB[:, None] / 127  # type: ignore[union-attr, operator, no-any-return]
    return None


def blocks(weight: Any) -> torch.Tensor:
    """As bitsandbytes' portable code, which is right where blocks reach over the ends of rows, its CPU kernel not."""
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_blockwise

    state, absmax = weight.quant_state, weight.quant_state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2) + state.offset
    return _dequantize_4bit_compute(  # type: ignore[no-any-return]
        weight.data.reshape(-1), absmax, state.code, state.blocksize, state.shape, state.dtype
    )


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    for job in jobs.get("write", []):
        write(*job)
    for job in jobs.get("load", []):
        load(*job)
    assert "qkv" not in sys.modules
