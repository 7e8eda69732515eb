from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.checkpoint.calibration import find_calibration, read_texts
from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import QkvError
from qkv.integration.calibrate import calibrate
from qkv.integration.patch import quantize_
from tests.cli.test_main import run
from tests.helpers import FAMILIES, assert_same_model, assert_same_tensors, letters_tokenizer, tensors_in, tiny

Checkpoint = Callable[..., Path]
TEXT = "The sea was very calm that evening, and no one in the boat had spoken for an hour. " * 9


def made(model: Any) -> Any:
    return calibrate(model, letters_tokenizer(), TEXT, samples=3, window=16)


@pytest.fixture
def source(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer."""
    shutil.copytree(checkpoint("llama_tied"), tmp_path / "src")
    letters_tokenizer().save_pretrained(tmp_path / "src")
    return tmp_path / "src"


@pytest.mark.parametrize("family", FAMILIES)
def test_to_quantize_the_files_is_to_patch_the_model(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, calibration = tiny(family), made(tiny(family))
    report = quantize_checkpoint(checkpoint(family), tmp_path / "q", embeddings="int8", calibrate=calibration)
    patched = quantize_(model, "nf4", embeddings="int8", calibration=calibration)
    assert_same_model(model, load(tmp_path / "q"))
    tables = [name for name in report.uncalibrated if "embed" in name or "wte" in name or "wpe" in name]
    assert list(report.uncalibrated) == tables and set(tables) == set(patched.uncalibrated)
    assert ("not in the calibration" in str(report)) == bool(tables)
    plain = quantize_checkpoint(checkpoint(family), tmp_path / "plain", embeddings="int8")
    assert plain.footprint.rows == report.footprint.rows and not plain.uncalibrated


@pytest.mark.parametrize(
    ("layout", "format"), [("bnb", "nf4:g32"), ("compressed-tensors", "int4:g32"), ("compressed-tensors", "int8:g32")]
)
def test_the_scales_found_are_those_of_every_layout(
    layout: str, format: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The same weights as in our own layout, and others than without a calibration."""
    source, calibration = checkpoint("llama"), made(tiny("llama"))
    quantize_checkpoint(source, tmp_path / "ours", format, calibrate=calibration)
    quantize_checkpoint(source, tmp_path / "theirs", format, layout=layout, calibrate=calibration)
    quantize_checkpoint(source, tmp_path / "plain", format, layout=layout)
    for name in ("ours", "theirs", "plain"):
        dequantize_checkpoint(tmp_path / name, tmp_path / f"{name}-floats")
    ours, theirs, plain = (tensors_in(tmp_path / f"{name}-floats") for name in ("ours", "theirs", "plain"))
    for name, tensor in ours.items():
        assert torch.allclose(theirs[name].float(), tensor.float(), rtol=1e-2, atol=1e-3 * float(tensor.abs().max()))
    assert any(not torch.equal(theirs[name], plain[name]) for name in theirs)


def test_from_a_text_from_lines_and_from_a_file(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    (tmp_path / "t.jsonl").write_text("\n" + json.dumps({"text": TEXT}) + "\n")
    saved = tmp_path / "c.safetensors"
    command = ["quantize", source, tmp_path / "a", "--calibrate", tmp_path / "t.txt", "--samples", 2]
    assert run(capsys, *command, "--save-calibration", saved)[0] == 0
    assert run(capsys, "quantize", source, tmp_path / "b", "--calibrate", saved)[0] == 0
    quantize_checkpoint(source, tmp_path / "c", calibrate=tmp_path / "t.jsonl", samples=2)
    first = tensors_in(tmp_path / "a")
    for other in "bc":
        assert_same_tensors(first, tensors_in(tmp_path / other))
    quantize_checkpoint(source, tmp_path / "plain")
    assert any(not torch.equal(first[name], t) for name, t in tensors_in(tmp_path / "plain").items())


def test_a_wrong_calibration_costs_nothing(source: Path, checkpoint: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    wrong = tmp_path / "wrong.safetensors"
    made(tiny("llama_tied", seed=1)).save(wrong)
    status, _, err = run(capsys, "quantize", source, tmp_path / "q", "--calibrate", wrong)
    assert status == 2 and "made with another model" in err and not (tmp_path / "q").exists()
    status, _, err = run(capsys, "quantize", source, tmp_path / "q", "--save-calibration", wrong)
    assert status == 2 and "needs --calibrate" in err
    with pytest.raises(QkvError, match="does not exist"):
        find_calibration(source, tmp_path / "none.txt")
    (tmp_path / "t.txt").write_text(TEXT)
    with pytest.raises(QkvError, match="no tokenizer"):
        find_calibration(checkpoint("llama"), tmp_path / "t.txt")


def test_lines_that_hold_no_text_are_named(tmp_path: Path) -> None:
    path, words = tmp_path / "t.jsonl", letters_tokenizer()
    for line, match in (("{", "line 2 is not valid JSON"), ('{"a": 1}', 'line 2 has no "text"'), ("[]", "line 2 must")):
        path.write_text('{"text": "a"}\n' + line)
        with pytest.raises(QkvError, match=match):
            read_texts(path, words)
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    path.write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    assert read_texts(path, words) == ["hello"]
    path.write_text('{"messages": [1]}')
    with pytest.raises(QkvError, match="chat template refuses"):
        read_texts(path, words)
    (tmp_path / "t.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(QkvError, match="not a UTF-8 text"):
        read_texts(tmp_path / "t.txt", words)


def test_a_model_that_cannot_be_run_cannot_be_calibrated(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "no_such", "architectures": ["NoSuch"]}))
    with pytest.raises(QkvError, match="cannot build and run"):
        quantize_checkpoint(source, tmp_path / "q", calibrate=made(tiny("llama_tied")))
    assert not (tmp_path / "q").exists()
