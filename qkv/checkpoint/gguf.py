"""Read a GGUF file through transformers and write it as a plain safetensors directory."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.destination import Destination
from qkv.errors import CheckpointError, QkvError
from qkv.integration.compat import gguf_options, no_bars_in_pipes
from qkv.integration.skeleton import first_line


def convert_gguf(path: str | Path, dst: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Dequantize a ``.gguf`` file into a model directory with its tokenizer; the whole model is in memory meanwhile.

    Raises:
        QkvError: the package ``gguf`` is missing.
        CheckpointError: ``dst`` exists, or ``path`` is no GGUF file that transformers can read.
    """
    path = Path(path)
    try:
        import gguf  # noqa: F401 - transformers reads through it
    except ImportError:
        raise QkvError("reading GGUF needs the package gguf: pip install gguf") from None
    _check_magic(path)
    with Destination(dst) as folder, no_bars_in_pipes():
        try:
            model, tokenizer = _read(path, dtype)
        except Exception as error:  # transformers raises anything for a file that it does not understand
            raise CheckpointError(f"transformers cannot read {path}: {first_line(error)}") from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def as_directory(src: str | Path, dst: str | Path, overwrite: bool) -> Iterator[Path]:
    """``src`` itself; of a ``.gguf`` file a dequantized copy beside ``dst``, for the length of a ``with`` block.

    Raises:
        CheckpointError: ``dst`` may not be written, said before the copy is made; or as :func:`convert_gguf`.
    """
    src = Path(src)
    if src.suffix.lower() != ".gguf":
        yield src
        return
    Destination(dst, overwrite=overwrite)
    copy = Path(dst).absolute().parent / f".{Path(dst).name}.gguf-{secrets.token_hex(4)}"
    try:
        convert_gguf(src, copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with GGUF")


def _read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options, **gguf_options())
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, AutoTokenizer.from_pretrained(path.parent, **options)
