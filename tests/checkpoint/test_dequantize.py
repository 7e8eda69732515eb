from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import CheckpointError, QkvError
from qkv.integration.patch import dequantize_
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import FAMILIES, assert_same_model, tensors_in

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("text", "embeddings"), [("nf4", None), ("int8:asym:double", "int8")])
def test_names_shapes_and_dtypes_are_those_of_the_source(
    family: str, text: str, embeddings: str | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint(family, dtype=torch.bfloat16)
    quantize_checkpoint(source, tmp_path / "q", text, embeddings=embeddings)
    dequantize_checkpoint(tmp_path / "q", tmp_path / "d")
    first, last = tensors_in(source), tensors_in(tmp_path / "d")
    assert {n: (t.shape, t.dtype) for n, t in first.items()} == {n: (t.shape, t.dtype) for n, t in last.items()}
    configs = [json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "d")]
    assert configs[0] == configs[1]
    assert_same_model(load(tmp_path / "d"), dequantize_(load(tmp_path / "q")))
    changed = [name for name in first if not torch.equal(first[name], last[name])]
    assert changed and all(first[name].dim() > 1 for name in changed)


def test_values_are_those_the_codes_stand_for(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("gpt2")
    quantize_checkpoint(source, tmp_path / "q", "int8:g16", skip="mlp")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "d", max_shard_size="8KB")
    first, last = tensors_in(source), tensors_in(tmp_path / "d")
    for name, tensor in first.items():
        quantized = ".attn.c_" in name and name.endswith("weight")  # Conv1D: groups run down its columns
        want = quantize_tensor(tensor.T, "int8:g16").dequantize().T if quantized else tensor
        assert torch.equal(last[name], want), name
    assert len(list((tmp_path / "d").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "torch.bfloat16"])
def test_a_dtype_can_be_asked_for(dtype: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint("llama"), tmp_path / "q", "nf4")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "d", dtype=dtype)
    want = getattr(torch, dtype.removeprefix("torch."))
    for name, tensor in tensors_in(tmp_path / "d").items():
        assert tensor.dtype == (want if name.endswith("_proj.weight") else torch.float32)


def test_what_cannot_be_undone_is_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to undo"):
        dequantize_checkpoint(checkpoint("llama"), tmp_path / "d")
    quantize_checkpoint(checkpoint("llama"), tmp_path / "q", "nf4")
    for dtype in ("int8", "nonsense", "float33"):
        with pytest.raises(QkvError, match=dtype):
            dequantize_checkpoint(tmp_path / "q", tmp_path / "d", dtype=dtype)
    with pytest.raises(CheckpointError, match="overlap"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "q", overwrite=True)
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "q" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="gptq"):
        dequantize_checkpoint(tmp_path / "q", tmp_path / "d")
    assert not (tmp_path / "d").exists()
