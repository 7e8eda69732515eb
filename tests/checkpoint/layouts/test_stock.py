"""The oracles: bitsandbytes' and compressed-tensors' own loaders on what is written here, ours on what they write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.integration.patch import dequantize_
from qkv.memory.footprint import footprint
from qkv.quantizers.holder import Holder
from tests.helpers import TOLERANCES, assert_same_model, assert_same_tensors, logits, tensor_nbytes_in, tensors_in

Checkpoint = Callable[..., Path]
WIDE: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 128}
RAGGED: Final = "ragged"
"""96 inputs: blocks of 64 reach over the ends of rows, which bitsandbytes loads and its CPU kernels do not run."""
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", WIDE),
    RAGGED: ("llama", {**WIDE, "intermediate_size": 96}),
    "tied": ("llama_tied", {**WIDE, "dtype": torch.float16}),
    "gemma3": ("gemma3", {**WIDE, "head_dim": 32, "dtype": torch.bfloat16}),
    "gpt2": ("gpt2", {"n_embd": 64}),
    "moe": ("qwen3_moe", {**WIDE, "head_dim": 16, "moe_intermediate_size": 64}),
}
BNB: Final = {"nf4": "nf4", "nf4d": "nf4:double", "int8": "int8:row"}
CT: Final = {"w4": "int4:g32", "w8": "int8:g32", "w4row": "int4:row", "mixed": "int8:g32"}
THEIRS: Final[dict[str, dict[str, Any]]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4d": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
WRITTEN: Final = (RAGGED, "gpt2", "moe")
CASES: Final = [(m, f) for m in MODELS for f in (*BNB, *CT) if not (m == "gpt2" and f in CT)]


@pytest.fixture(scope="module")
def stock(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``MODEL-FORMAT`` written here, ``theirs-MODEL-FORMAT`` by bitsandbytes, and what stock loaders make of it."""
    root = tmp_path_factory.mktemp("stock")
    for model, format in CASES:
        family, changes = MODELS[model]
        options: dict[str, Any] = {"overrides": {"self_attn": "int4:g32"}} if format == "mixed" else {}
        layout = "bnb" if format in BNB else "compressed-tensors"
        shard = "20KB" if model == "tied" else "5GB"
        text = (BNB | CT)[format]
        target = root / f"{model}-{format}"
        quantize_checkpoint(checkpoint(family, **changes), target, text, layout=layout, max_shard_size=shard, **options)
    theirs = [(m, f) for m in WRITTEN for f in BNB]
    jobs = {
        "write": [
            (str(checkpoint(MODELS[m][0], **MODELS[m][1])), str(root / f"theirs-{m}-{f}"), THEIRS[f]) for m, f in theirs
        ],
        "load": [(str(root / f"{m}-{f}"), str(root / f"{m}-{f}.safetensors"), runs(m, f)) for m, f in CASES],
    }
    (root / "jobs.json").write_text(json.dumps(jobs))
    script = Path(__file__).with_name("stock.py")
    result = subprocess.run([sys.executable, script, root / "jobs.json"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return root


def runs(model: str, format: str) -> bool:
    """Whether stock libraries run it on any CPU."""
    return model != RAGGED or not format.startswith("nf4")


def float_weights(model: Any) -> dict[str, Tensor]:
    """The float weights of the quantized modules, as the formats' own libraries have them: never transposed."""
    return {
        f"weight {name}": module.quantized().dequantize()
        for name, module in model.named_modules()
        if isinstance(module, Holder) and "weight" in module.specs
    }


def rounding(weight: Tensor) -> float:
    """Two roundings, of float32 and of the weight's dtype."""
    return torch.finfo(weight.dtype).eps + 2 * torch.finfo(torch.float32).eps


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / other.float().abs().max())


@pytest.mark.parametrize(("model", "format"), CASES)
def test_stock_loaders_read_the_same_numbers(model: str, format: str, stock: Path) -> None:
    found = load_file(stock / f"{model}-{format}.safetensors")
    ours = load(stock / f"{model}-{format}")
    weights = float_weights(ours)
    assert weights.keys() <= found.keys() and weights
    for name, weight in weights.items():
        if format == "int8":  # the product of a code and its scale is rounded twice, in another order
            torch.testing.assert_close(weight.float(), found[name].float(), rtol=rounding(weight), atol=0)
        else:
            assert torch.equal(weight, found[name]), name
    tolerance = TOLERANCES["stock_logits"][format if format in BNB else ours.dtype]
    assert not runs(model, format) or relative(logits(ours), found["logits"]) <= tolerance
    if model == "moe" and format in CT:
        plain = dequantize_(ours)
        for name in (n for n in found if ".experts." in n):
            assert torch.equal(plain.state_dict()[name.removeprefix("weight ")], found[name]), name


@pytest.mark.parametrize("model", WRITTEN)
@pytest.mark.parametrize("format", BNB)
def test_the_files_are_those_that_bitsandbytes_writes(model: str, format: str, stock: Path) -> None:
    ours, theirs = tensors_in(stock / f"{model}-{format}"), tensors_in(stock / f"theirs-{model}-{format}")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if format == "nf4d" and "quant_state" in name:
            assert json.loads(bytes(tensor)) == json.loads(bytes(ours[name]))
        else:
            assert tensor.dtype == ours[name].dtype and torch.equal(tensor, ours[name]), name
    folders = (stock / f"{model}-{format}", stock / f"theirs-{model}-{format}")
    configs = [json.loads((folder / "config.json").read_text()) for folder in folders]
    first, second = (config["quantization_config"] for config in configs)
    free = {"llm_int8_skip_modules", "bnb_4bit_compute_dtype"}
    assert first.keys() == second.keys() and all(first[k] == second[k] for k in first.keys() - free)


@pytest.mark.parametrize("model", WRITTEN)
@pytest.mark.parametrize("format", BNB)
def test_what_bitsandbytes_wrote_is_read(model: str, format: str, stock: Path, tmp_path: Path) -> None:
    check_reading(stock / f"theirs-{model}-{format}", tmp_path)


@pytest.mark.parametrize(("model", "format"), CASES)
def test_what_was_written_is_read(model: str, format: str, stock: Path, tmp_path: Path) -> None:
    check_reading(stock / f"{model}-{format}", tmp_path)


def check_reading(directory: Path, scratch: Path) -> None:
    """Report, load, dequantize, and save in our own layout, all of the same numbers."""
    told = footprint(directory)
    assert told.weight_nbytes == tensor_nbytes_in(directory)
    model = load(directory)
    assert footprint(model).num_parameters == told.num_parameters
    dequantize_checkpoint(directory, scratch / "floats")
    model.save_pretrained(scratch / "saved")
    assert json.loads((scratch / "saved" / "config.json").read_text())["quantization_config"]["quant_method"] == "qkv"
    assert_same_model(model, load(scratch / "saved"))
    dequantize_checkpoint(scratch / "saved", scratch / "again")
    assert_same_tensors(tensors_in(scratch / "floats"), tensors_in(scratch / "again"))
    assert_same_tensors(dequantize_(model).state_dict(), load(scratch / "floats").state_dict())


def test_mixed_precision_is_several_groups(stock: Path) -> None:
    config: Mapping[str, Any] = json.loads((stock / "llama-mixed" / "config.json").read_text())["quantization_config"]
    groups = {group["weights"]["num_bits"]: group["targets"] for group in config["config_groups"].values()}
    assert len(groups[4]) == 8 and len(groups[8]) == 6 and "Linear" not in groups[4] + groups[8]
    assert config["ignore"] == ["lm_head"]
