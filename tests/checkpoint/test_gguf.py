from __future__ import annotations

from pathlib import Path

import pytest

from qkv.checkpoint.gguf import convert_gguf
from qkv.checkpoint.quantize import quantize_checkpoint
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
