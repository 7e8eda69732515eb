from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.read import stored_weights
from qkv.checkpoint.source import Source
from qkv.errors import QkvError
from qkv.memory.footprint import footprint
from qkv.quantizers.format import Format
from tests.helpers import FAMILIES, tensors_in

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_told_with_its_float_shape(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint(family)
    report = quantize_checkpoint(source, tmp_path / "q", "nf4:g24", embeddings="int8:row")
    floats = {name: tuple(tensor.shape) for name, tensor in tensors_in(source).items()}
    stored = stored_weights(Source.open(tmp_path / "q"))
    assert {s.name: s.shape[:-2] + s.shape[:-3:-1] if s.transposed else s.shape for s in stored} == floats
    assert sum(s.nbytes for s in stored) == report.footprint.weight_nbytes
    formats = {s.format for s in stored if s.format and "experts" not in s.name}
    assert formats == {Format("nf4", 24), Format("int8", "row")}


@pytest.fixture
def quantized(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    quantize_checkpoint(checkpoint("llama", intermediate_size=33), tmp_path / "q", "nf4:double")
    return tmp_path / "q"


NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("change", [None, "dtype", "shape"])
@pytest.mark.parametrize("suffix", ["", "_scale", "_scale_absmax", "_scale_offset", "_shape"])
def test_parts_that_do_not_fit_are_refused_by_name(suffix: str, change: str | None, quantized: Path) -> None:
    if (suffix, change) == ("_shape", None):
        pytest.skip("without it nothing tells that the last code of a row is padding")
    state = tensors_in(quantized)
    part = state.pop(NAME + suffix)
    if change == "dtype":
        state[NAME + suffix] = part.to(torch.int16)
    elif change == "shape":
        state[NAME + suffix] = torch.stack([part, part])
    save_file(state, quantized / "model.safetensors")
    for read in (lambda: footprint(quantized), lambda: dequantize_checkpoint(quantized, quantized.parent / "d")):
        with pytest.raises(QkvError) as caught:
            read()
        assert "\n" not in str(caught.value) and NAME in str(caught.value)
    assert not (quantized.parent / "d").exists()


@pytest.mark.parametrize("shape", [[32, 32], [31, 33], [32, 35], [32, -33], [33], [32, 33, 1], []])
def test_a_stored_shape_must_fit_its_codes(shape: list[int], quantized: Path) -> None:
    state = tensors_in(quantized)
    state[f"{NAME}_shape"] = torch.tensor(shape, dtype=torch.int64)
    save_file(state, quantized / "model.safetensors")
    with pytest.raises(QkvError):
        footprint(quantized)


@pytest.mark.parametrize(
    "change",
    [
        {"format": None},
        {"format": 7},
        {"format": "nf5"},
        {"format": "int8"},
        {"skip": 5},
        {"skip": [5]},
        {"overrides": {"a": 5}},
        {"overrides": 5},
        {"dtypes": []},
        {"dtypes": {NAME: 5}},
        {"dtypes": {NAME: "int8"}},
        {"transposed": 5},
        {"embeddings": 3},
        {"format_version": 2},
        {"format_version": "x"},
    ],
    ids=str,
)
def test_a_malformed_config_is_one_clear_line(change: dict[str, Any], quantized: Path) -> None:
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= change
    path.write_text(json.dumps(config))
    for read in (lambda: footprint(quantized), lambda: dequantize_checkpoint(quantized, quantized.parent / "d")):
        with pytest.raises(QkvError) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert not (quantized.parent / "d").exists()


@pytest.mark.parametrize("method", ["qkv", ["qkv"], {"quant_method": ["x"]}, {"bits": 4}, {"quant_method": None}])
def test_a_config_of_no_known_kind_is_refused(method: Any, quantized: Path) -> None:
    path = quantized / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = method
    path.write_text(json.dumps(config))
    with pytest.raises(QkvError):
        footprint(quantized)


def test_weights_whose_names_end_in_scale_are_only_themselves(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A float model with `x` and `x_scale` of its own is read as it is."""
    shutil.copytree(checkpoint("llama"), tmp_path / "src")
    state = tensors_in(tmp_path / "src") | {"model.a": torch.ones(3), "model.a_scale": torch.ones(3)}
    save_file(state, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    names = {stored.name for stored in stored_weights(Source.open(tmp_path / "src"))}
    assert names == set(state)
    quantize_checkpoint(tmp_path / "src", tmp_path / "q", "nf4")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "d")
    assert set(tensors_in(tmp_path / "d")) == set(state)
