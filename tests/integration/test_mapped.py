from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qkv.integration.mapped import detach_from_files
from qkv.integration.patch import quantize_
from tests.helpers import logits, tiny

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def mapped(path: Path) -> bool:
    gc.collect()
    return str(path) in Path("/proc/self/maps").read_text()


def mapped_tensor(path: Path, value: torch.Tensor) -> torch.Tensor:
    path.write_bytes(value.numpy().tobytes())
    return torch.from_file(str(path), shared=False, size=value.numel(), dtype=value.dtype).reshape(value.shape)


def test_what_is_kept_does_not_keep_the_file(tmp_path: Path) -> None:
    """facts: resident 743 -> 594 MB only after the unquantized rest was copied out of the map."""
    transformers = pytest.importorskip("transformers")
    for family, embeddings in (("llama", None), ("llama_tied", None), ("gemma3", "int8"), ("gpt2", None)):
        path = tmp_path / family
        tiny(family, hidden_size=256, vocab_size=2000).save_pretrained(path) if family != "gpt2" else tiny(
            family, n_embd=256, vocab_size=2000
        ).save_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
        assert mapped(path), "from_pretrained maps its file: else this test tests nothing"
        want = {n: p.clone() for n, p in model.named_parameters() if p.dim() == 1}
        quantize_(model, "nf4", embeddings=embeddings)
        assert not mapped(path)
        assert all(torch.equal(p, want[n]) for n, p in model.named_parameters() if n in want)
        del model
        import qkv

        model = transformers.AutoModelForCausalLM.from_pretrained(path, quantization_config=qkv.QkvConfig("nf4"))
        assert not mapped(path)
        model.save_pretrained(tmp_path / f"{family}-q")
        want_logits = logits(model)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{family}-q")
        assert not mapped(tmp_path / f"{family}-q") and torch.equal(logits(model), want_logits)


def test_ties_views_and_strides_survive(tmp_path: Path) -> None:
    x = torch.randn(32, 48)
    model: Any = nn.Module()
    whole = mapped_tensor(tmp_path / "f", x)
    model.a = nn.Parameter(whole)
    model.b = nn.Parameter(whole)
    model.c = nn.Parameter(whole.T)
    model.register_buffer("d", whole[4:8])
    model.e = nn.Parameter(torch.ones(3))
    own = model.e.data_ptr()
    del whole
    assert mapped(tmp_path / "f")
    detach_from_files(model)
    assert not mapped(tmp_path / "f")
    assert torch.equal(model.a, x) and torch.equal(model.b, x) and torch.equal(model.d, x[4:8])
    assert torch.equal(model.c, x.T)
    assert model.a.data_ptr() == model.b.data_ptr() and model.e.data_ptr() == own


def test_a_model_in_memory_is_left_alone() -> None:
    model = tiny("llama")
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    assert detach_from_files(model) == 0
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before
