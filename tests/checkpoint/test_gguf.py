from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qkv.checkpoint import gguf
from qkv.checkpoint.gguf import convert_gguf
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.writer import StreamWriter
from qkv.demo import packaged_gguf
from qkv.errors import CheckpointError
from tests.helpers import assert_same_tensors, tensors_in


def test_a_gguf_file_is_a_source(smollm2: Path, tmp_path: Path) -> None:
    """Dequantized through transformers, then quantized; the copy in between is gone."""
    quantize_checkpoint(packaged_gguf(), tmp_path / "q", "nf4", layout="bnb")
    assert [path.name for path in tmp_path.iterdir()] == ["q"]
    quantize_checkpoint(smollm2, tmp_path / "r", "nf4", layout="bnb")
    assert_same_tensors(tensors_in(tmp_path / "q"), tensors_in(tmp_path / "r"))
    assert (tmp_path / "q" / "tokenizer.json").is_file()


@pytest.mark.parametrize("content", [None, b"", b"GGUX", b"GGUF", b"GGUF\3\0\0\0" + bytes(16), b"GGUF" + b"\xff" * 64])
def test_a_file_that_is_no_gguf_is_told_in_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    for make in (lambda: quantize_checkpoint(path, tmp_path / "q"), lambda: convert_gguf(path, tmp_path / "q")):
        with pytest.raises(CheckpointError, match=r"m\.gguf") as caught:
            make()
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ([] if content is None else ["m.gguf"])


def test_a_taken_destination_is_told_before_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "q").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        quantize_checkpoint(tmp_path / "m.gguf", tmp_path / "q")


@pytest.fixture
def conversions(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where files were converted to, each in no time: to a copy of a small checkpoint."""
    made: list[Path] = []

    def convert(path: Path, dst: Path) -> None:
        made.append(dst)
        shutil.copytree(checkpoint("llama"), dst, copy_function=shutil.copy)

    monkeypatch.setattr(gguf, "convert_gguf", convert)
    return made


def killed_while_writing(path: Path, dst: Path) -> None:
    """In a process of its own, which dies once three pieces are written."""
    child = os.fork()
    if child == 0:
        steps, put = iter(range(100)), StreamWriter._put

        def dying(*arguments: object) -> None:
            if next(steps) == 3:
                os._exit(9)
            put(*arguments)  # type: ignore[arg-type]

        StreamWriter._put = dying  # type: ignore[method-assign,assignment]
        quantize_checkpoint(path, dst, "int8")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def test_a_killed_run_goes_on_from_the_copy_it_had_made(tmp_path: Path, conversions: list[Path]) -> None:
    path, dst = tmp_path / "m.gguf", tmp_path / "q"
    path.write_bytes(b"GGUF")
    quantize_checkpoint(path, tmp_path / "undisturbed", "int8")
    assert len(conversions) == 1
    killed_while_writing(path, dst)
    assert {p.name for p in tmp_path.iterdir()} > {".q.partial", ".q.gguf"}
    with pytest.raises(CheckpointError, match="unfinished work of another run"):
        quantize_checkpoint(path, dst, "nf4")
    quantize_checkpoint(path, dst, "int8")
    assert len(conversions) == 1, "converted again"
    assert_same_tensors(tensors_in(dst), tensors_in(tmp_path / "undisturbed"))
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_a_file_that_changed_is_converted_anew(tmp_path: Path, conversions: list[Path]) -> None:
    path, dst = tmp_path / "m.gguf", tmp_path / "q"
    path.write_bytes(b"GGUF")
    killed_while_writing(path, dst)
    path.write_bytes(b"GGUF2")
    with pytest.raises(CheckpointError, match="unfinished work of another run"):
        quantize_checkpoint(path, dst, "int8")
    quantize_checkpoint(path, dst, "int8", restart=True)
    assert len(conversions) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "q"]


def test_two_runs_do_not_share_a_copy(tmp_path: Path, conversions: list[Path]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with gguf.as_directory(path, tmp_path / "q", False, False) as copy:
        with pytest.raises(CheckpointError, match="another run is writing"):
            quantize_checkpoint(path, tmp_path / "q", "int8")
        assert copy.is_dir()


def test_what_no_run_left_is_not_removed(tmp_path: Path, conversions: list[Path]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    (tmp_path / ".q.gguf" / "precious").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="precious"):
        quantize_checkpoint(path, tmp_path / "q", "int8")
    assert (tmp_path / ".q.gguf" / "precious").is_dir()
