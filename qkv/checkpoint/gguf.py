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
from qkv.checkpoint.gguf_header import gguf_items, is_gguf
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
    _check_package()
    gguf_items(path)  # says what is wrong with it
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
    if not is_gguf(src):
        yield src
        return
    Destination(dst, overwrite=overwrite)
    copy = Path(dst).absolute().parent / f".{Path(dst).name}.gguf-{secrets.token_hex(4)}"
    try:
        convert_gguf(src, copy)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def gguf_config(path: Path) -> dict[str, Any]:
    """The model's config as transformers makes it of a GGUF file's metadata, no tensor read.

    Raises:
        QkvError: the package ``gguf`` is missing, or transformers does not know such a model.
    """
    from transformers import AutoConfig

    _check_package()
    try:
        return dict(AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict())
    except Exception as error:  # transformers raises anything for a file that it does not understand
        raise CheckpointError(f"transformers cannot read {path}: {first_line(error)}") from error


def _check_package() -> None:
    try:
        import gguf  # noqa: F401 - transformers reads through it
    except ImportError:
        raise QkvError("reading GGUF needs the package gguf: pip install gguf") from None


def _read(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options, **gguf_options())
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, AutoTokenizer.from_pretrained(path.parent, **options)
