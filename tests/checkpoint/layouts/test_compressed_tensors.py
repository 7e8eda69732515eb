from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import CheckpointError, QkvError
from qkv.memory.footprint import footprint
from tests.helpers import TOLERANCES, logits, tensors_in

Checkpoint = Callable[..., Path]
WIDE: Final[dict[str, Any]] = {"hidden_size": 64, "intermediate_size": 96, "dtype": torch.bfloat16}
NAME: Final = "model.layers.0.mlp.down_proj.weight"
SCHEMES: Final[dict[str, dict[str, Any]]] = {
    "w4": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "w4 asymmetric": {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False},
    "w8": {"num_bits": 8, "strategy": "channel"},
    "w8 asymmetric": {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
}


def theirs(source: Path, target: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """A directory whose linear weights compressed-tensors packed; returns the floats it unpacks them to."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options), format="pack-quantized")
    state, floats = tensors_in(source), {}
    for name in [name for name in state if name.endswith("_proj.weight")]:
        weight = state.pop(name)
        size = options.get("group_size") or weight.shape[1]
        groups = weight.reshape(weight.shape[0], -1, size)
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = PackedQuantizationCompressor.compress(parts, scheme)
        floats[name] = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
        state |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in packed.items()}
    target.mkdir()
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme.model_dump(mode="json")},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config))
    return floats


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_compressed_tensors_packed_is_read_exactly(scheme: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Codes down to -8 and -128 and zero points, bit for bit; and through the kernels of packed layers."""
    floats = theirs(checkpoint("llama", **WIDE), tmp_path / "q", SCHEMES[scheme])
    dequantize_checkpoint(tmp_path / "q", tmp_path / "d")
    found = tensors_in(tmp_path / "d")
    for name, weight in floats.items():
        assert torch.equal(found[name], weight), name
    packed, plain = logits(load(tmp_path / "q")), logits(load(tmp_path / "d"))
    assert float((packed - plain).abs().max()) <= TOLERANCES["stock_logits"][torch.bfloat16] * float(plain.abs().max())
    assert footprint(tmp_path / "q").weight_nbytes < footprint(tmp_path / "d").weight_nbytes


@pytest.fixture
def packed(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    quantize_checkpoint(checkpoint("llama", **WIDE), tmp_path / "q", "int4:g32", layout="compressed-tensors")
    return tmp_path / "q"


def check_refused(directory: Path, words: str) -> None:
    for read in (load, footprint, lambda path: dequantize_checkpoint(path, directory.parent / "d")):
        with pytest.raises(CheckpointError, match=words) as caught:
            read(directory)
        assert "\n" not in str(caught.value)
    assert not (directory.parent / "d").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "float-quantized"}, "format.*float-quantized"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"input_activations": {"num_bits": 8}}, "input_activations"),
        ({"weights": {"num_bits": 3}}, "num_bits.*3"),
        ({"weights": {"type": "float"}}, "float"),
        ({"weights": {"actorder": "group"}}, "actorder.*group"),
        ({"weights": {"strategy": "block"}}, "strategy.*block"),
        ({"weights": {"group_size": 0}}, "group_size"),
        ({"weights": {"group_size": 64}}, "fit none of int4:g64"),
        ({"weights": {"symmetric": False}}, "fit none of int4:g32:asym"),
        ({"weights": None}, "config group"),
    ],
    ids=str,
)
def test_schemes_without_a_counterpart_are_refused_by_name(change: dict[str, Any], words: str, packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    weights = change.pop("weights", {})
    group |= change
    group["weights"] = None if weights is None else group["weights"] | weights
    (packed / "config.json").write_text(json.dumps(config))
    check_refused(packed, words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sparsity_config", {"format": "sparse-24-bitmask"}),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("transform_config", {"a": 1}),
        ("config_groups", {}),
        ("config_groups", 5),
        ("config_groups", {"group_0": 5}),
    ],
    ids=str,
)
def test_what_else_a_config_says_is_not_passed_over(key: str, value: Any, packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"][key] = value
    (packed / "config.json").write_text(json.dumps(config))
    check_refused(packed, "config.group" if key == "config_groups" else key)


@pytest.mark.parametrize("change", ["no scale", "no packed", "dtype", "shape", "order"])
def test_tensors_that_do_not_fit_are_refused(change: str, packed: Path) -> None:
    state = tensors_in(packed)
    if change == "order":
        state[f"{NAME}_g_idx"] = torch.zeros(96, dtype=torch.int32)
    elif change in ("no scale", "no packed"):
        del state[NAME + change.replace("no ", "_")]
    else:
        scale = state[f"{NAME}_scale"]
        state[f"{NAME}_scale"] = scale.int() if change == "dtype" else torch.cat((scale, scale))
    save_file(state, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError):
        load(packed)


@pytest.mark.parametrize(
    ("family", "text", "options", "words"),
    [
        ("llama", "nf4", {}, "layout bnb"),
        ("llama", "int4:g32:asym", {}, "asymmetric"),
        ("llama", "int8:g32:double", {}, "double"),
        ("llama", "int4:g16", {}, "vLLM take 32, 64, 128"),
        ("llama", "int4:g32", {"embeddings": "int8"}, "embeddings"),
        ("llama", "int4:g64", {}, "96 inputs.*int4:g32"),
        ("llama", "int4:g32", {"overrides": {"q_proj": "int8:g32"}}, "q_proj.*one format"),
        ("llama", "int4:g32", {"skip": "up_proj"}, "up_proj.*keep"),
        ("qwen3_moe", "int4:g32", {"overrides": {"layers.0.mlp": "int8:g32"}}, "experts"),
        ("gpt2", "int4:g32", {}, "Conv1D"),
    ],
)
def test_what_servers_do_not_load_is_refused(
    family: str, text: str, options: dict[str, Any], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    changes = {} if family == "gpt2" else {**WIDE, "moe_intermediate_size": 64} if "moe" in family else WIDE
    with pytest.raises(QkvError, match=words):
        quantize_checkpoint(checkpoint(family, **changes), tmp_path / "q", text, layout="compressed-tensors", **options)
    assert not (tmp_path / "q").exists()
