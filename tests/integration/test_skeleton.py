from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import QkvError
from qkv.integration.settings import Settings
from qkv.integration.skeleton import Chooser, build_skeleton
from tests.helpers import FAMILIES, tensors_in, tiny

Checkpoint = Callable[..., Path]


def with_config(source: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


@pytest.mark.parametrize("family", FAMILIES)
def test_the_skeleton_is_the_model_without_memory(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(*arguments: object, **options: object) -> None:
        pytest.fail("random numbers on the meta device change nothing and take most of the time")

    source, wanted = checkpoint(family), tiny(family).state_dict()
    monkeypatch.setattr(torch.Tensor, "uniform_", drawn)
    model = build_skeleton(source)
    assert all(tensor.device.type == "meta" for tensor in model.parameters())
    assert {n: t.shape for n, t in model.state_dict().items()} == {n: t.shape for n, t in wanted.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("embeddings", [None, "int8"])
def test_by_name_the_same_layers_are_found(
    family: str, embeddings: str | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A model that transformers does not know: layers told by their names, close to what the model would say."""
    if family in ("gpt2", "gpt_oss"):
        pytest.skip("transposed weights cannot be told by name")
    known = Chooser(checkpoint(family), Settings.parse("nf4", embeddings=embeddings))
    odd = with_config(checkpoint(family), tmp_path / "odd", model_type="no_such", architectures=["NoSuch"])
    unknown = Chooser(odd, Settings.parse("nf4", embeddings=embeddings))
    assert unknown.note and not known.note
    for name, tensor in tensors_in(odd).items():
        choices = [c.choose(name, tuple(tensor.shape), tensor.dtype) for c in (known, unknown)]
        assert choices[0].format == choices[1].format, (name, choices)
        assert choices[0].format or (choices[0].reason and choices[1].reason)


def test_code_that_comes_with_a_model_is_never_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for name, changes in (("unknown", {"model_type": "odd", "architectures": ["Odd"]}), ("known", {})):
        auto = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        source = with_config(checkpoint("llama"), tmp_path / name, auto_map=auto, **changes)
        (source / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
        report = quantize_checkpoint(source, tmp_path / f"{name}-out", "int8")
        assert not (tmp_path / "ran").exists() and (tmp_path / f"{name}-out" / "code.py").exists()
        assert bool(report.note) == (name == "unknown")
        assert sum(tensor.dtype == torch.int8 for tensor in tensors_in(tmp_path / f"{name}-out").values()) == 14


@pytest.mark.parametrize("architecture", ["pipeline", "set_seed", "logging", "LlamaConfig", 5, None])
def test_only_a_model_class_is_built(architecture: object, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = with_config(checkpoint("llama"), tmp_path / "odd", architectures=[architecture])
    assert type(build_skeleton(source)).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("known", [True, False])
def test_a_pattern_without_a_match_is_refused(known: bool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    changes = {} if known else {"model_type": "no_such", "architectures": ["NoSuch"]}
    source = with_config(checkpoint("llama"), tmp_path / "src", **changes)
    with pytest.raises(QkvError, match="matches no"):
        quantize_checkpoint(source, tmp_path / "out", "nf4", skip=["no_such"])
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(source, tmp_path / "out", "nf4", skip=["mlp", "layers.0"])
    quantized = {n for n in tensors_in(tmp_path / "out") if n.endswith("_scale")}
    assert quantized == {f"model.layers.1.self_attn.{p}_proj.weight_scale" for p in "qkvo"}
