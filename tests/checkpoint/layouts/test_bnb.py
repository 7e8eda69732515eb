from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.layouts import LAYOUTS, layout_named
from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.read import stored_weights
from qkv.checkpoint.source import Source
from qkv.errors import CheckpointError, QkvError
from qkv.memory.footprint import footprint
from qkv.quantizers.format import Format
from tests.helpers import tensors_in

Checkpoint = Callable[..., Path]
NAME: Final = "model.layers.0.mlp.down_proj.weight"
STATE: Final = f"{NAME}.quant_state.bitsandbytes__nf4"


@pytest.fixture
def written(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    quantize_checkpoint(checkpoint("llama"), tmp_path / "q", "nf4:g32:double", layout="bnb")
    return tmp_path / "q"


def check_refused(directory: Path, words: str) -> None:
    for read in (load, footprint, lambda path: dequantize_checkpoint(path, directory.parent / "d")):
        with pytest.raises(CheckpointError, match=words) as caught:
            read(directory)
        assert "\n" not in str(caught.value)
    assert not (directory.parent / "d").exists()


@pytest.mark.parametrize("part", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
@pytest.mark.parametrize("change", ["missing", "dtype", "shape"])
def test_parts_that_do_not_fit_are_refused_by_name(part: str, change: str, written: Path) -> None:
    state = tensors_in(written)
    found = state.pop(f"{NAME}.{part}")
    if change != "missing":
        state[f"{NAME}.{part}"] = found.to(torch.int16) if change == "dtype" else torch.stack((found, found))
    save_file(state, written / "model.safetensors", metadata={"format": "pt"})
    check_refused(written, f"{NAME}.{part}")


@pytest.mark.parametrize(
    "change",
    [
        {"quant_type": "fp4"},
        {"blocksize": 60},
        {"blocksize": "64"},
        {"blocksize": True},
        {"shape": [32]},
        {"shape": [32, -64]},
        {"shape": [32, 2**50]},
        {"shape": [32, 66]},
        {"dtype": "int8"},
        {"nested_blocksize": 64},
        {"nested_offset": "x"},
        None,
    ],
    ids=str,
)
def test_a_malformed_state_is_refused(change: dict[str, Any] | None, written: Path) -> None:
    state = tensors_in(written)
    found = json.loads(bytes(state[STATE]))
    text = b"{" if change is None else json.dumps(found | change).encode()
    state[STATE] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(state, written / "model.safetensors", metadata={"format": "pt"})
    check_refused(written, NAME)


def test_other_codes_are_refused(written: Path) -> None:
    state = tensors_in(written)
    for name in [name for name in state if "quant_state" in name]:
        state[name.replace("nf4", "fp4")] = state.pop(name)
    save_file(state, written / "model.safetensors", metadata={"format": "pt"})
    check_refused(written, "FP4")


def test_levels_of_their_own_are_refused(written: Path) -> None:
    state = tensors_in(written)
    state[f"{NAME}.quant_map"] = state[f"{NAME}.quant_map"].clone().fill_(0.5)
    save_file(state, written / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="levels of NF4"):
        load(written)


def test_nested_scales_that_ours_cannot_hold_are_read_as_floats(written: Path) -> None:
    """A scale that decodes below 0, which our own layout clamps: the values are kept, 8 bits are not."""
    state = tensors_in(written)
    found = json.loads(bytes(state[STATE]))
    state[STATE] = torch.tensor(list(json.dumps(found | {"nested_offset": -0.01}).encode()), dtype=torch.uint8)
    save_file(state, written / "model.safetensors", metadata={"format": "pt"})
    source = Source.open(written)
    stored = next(s for s in stored_weights(source) if s.name == NAME)
    assert stored.layout is not None
    weight = stored.layout.decode(stored, source)
    nested = state[f"{NAME}.nested_quant_map"][state[f"{NAME}.absmax"].int()] * state[f"{NAME}.nested_absmax"][0] - 0.01
    assert weight.format == Format("nf4", 32) and torch.equal(weight.scale.flatten(), nested)
    assert bool((nested < 0).any())
    model: Any = load(written)
    assert model.model.layers[0].mlp.down_proj.specs["weight"].format == Format("nf4", 32)
    assert model.model.layers[0].mlp.up_proj.specs["weight"].format == Format("nf4", 32, double_quant=True)


def test_codes_stored_as_other_dtypes_are_the_same_bytes(written: Path) -> None:
    """``bnb_4bit_quant_storage``, for FSDP."""
    before = load(written)
    state = tensors_in(written)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        state[name] = state[name].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    save_file(state, written / "model.safetensors", metadata={"format": "pt"})
    after = load(written)
    assert all(torch.equal(a, b) for a, b in zip(before.buffers(), after.buffers(), strict=True))


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("int8", {}, "int8:row"),
        ("int4", {}, "compressed-tensors"),
        ("nf4:g100", {}, "blocks of 32, 64"),
        ("nf4:row", {}, "blocks of 32, 64"),
        ("nf4", {"overrides": {"mlp": "int8:row"}}, "not both"),
        ("nf4", {"embeddings": "int8"}, "embeddings"),
        ("nf4", {"layout": "awq"}, "unknown layout 'awq'; choose from qkv, bnb, compressed-tensors"),
    ],
)
def test_what_bitsandbytes_does_not_load_is_refused(
    text: str, options: dict[str, Any], words: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pytest.raises(QkvError, match=words):
        quantize_checkpoint(checkpoint("llama"), tmp_path / "q", text, **{"layout": "bnb", **options})
    assert not (tmp_path / "q").exists()


def test_values_beyond_float16_are_refused_in_int8(tmp_path: Path, checkpoint: Checkpoint) -> None:
    source = tmp_path / "src"
    source.mkdir()
    state = tensors_in(checkpoint("llama"))
    state[NAME] = state[NAME] * 1e6
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text((checkpoint("llama") / "config.json").read_text())
    with pytest.raises(QkvError, match=f"{NAME} holds.*65504"):
        quantize_checkpoint(source, tmp_path / "q", "int8:row", layout="bnb")
    quantize_checkpoint(source, tmp_path / "q", "nf4", layout="bnb")


def test_experts_stay_and_are_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    report = quantize_checkpoint(checkpoint("qwen3_moe"), tmp_path / "q", "nf4", layout="bnb")
    reasons = {note.reason for note in report.footprint.kept if "experts" in note.name}
    assert reasons == {"bitsandbytes and transformers leave fused experts in 16 bits"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_smollm2_has_the_same_codes_in_every_layout(name: str, smollm2: Path, tmp_path: Path) -> None:
    """So its accuracy is that of our own layout; of int4 that with scales in bfloat16."""
    text = "int4" if name == "compressed-tensors" else "nf4"
    report = quantize_checkpoint(smollm2, tmp_path / "q", text, layout=name)
    with Source.open(tmp_path / "q") as source, Source.open(smollm2) as floats:
        for stored in (s for s in stored_weights(source) if s.format):
            weight = layout_named(name).decode(stored, source)
            assert weight.format == Format.parse(text) and weight.dtype == torch.bfloat16
            value = floats.read(stored.name)
            scale = value.reshape(value.shape[0], -1, 64).abs().amax(-1).float()
            wanted = (scale / 7).bfloat16().float() if text == "int4" else scale
            assert torch.equal(weight.scale, wanted), stored.name
    assert footprint(tmp_path / "q").weight_nbytes == report.footprint.weight_nbytes
