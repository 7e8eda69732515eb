"""Read a GGUF file through transformers and write it as a plain safetensors directory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from qkv.checkpoint.destination import Destination, locked_folder, partial_of
from qkv.checkpoint.gguf_header import gguf_items, is_gguf
from qkv.errors import CheckpointError, QkvError
from qkv.integration.compat import gguf_options, no_bars_in_pipes
from qkv.integration.skeleton import first_line

COPY: Final = re.compile(r"\d+-\d+|\.\d+-\d+\.partial")
"""Of a file of that size and time, whole or not."""


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
def as_directory(src: str | Path, dst: str | Path, overwrite: bool, restart: bool) -> Iterator[Path]:
    """``src`` itself; of a ``.gguf`` file a dequantized copy beside ``dst``, for the length of a ``with`` block.

    The copy stays as long as unfinished work of ``dst`` does, which goes on from it, and as it is named by the
    file's size and time, from no other.

    Raises:
        CheckpointError: ``dst`` may not be written, said before the copy is made; another run is making it; or as
            :func:`convert_gguf`.
    """
    path = Path(src)
    if not is_gguf(path):
        yield path
        return
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    partial = partial_of(dst)
    holder = partial.with_suffix(".gguf")
    copy = holder / f"{stat.st_size}-{stat.st_mtime_ns}"
    with locked_folder(holder, dst):
        try:
            if restart or not copy.exists():
                Destination(dst, overwrite=overwrite, restart=restart)
                _remove_copies(holder)
                convert_gguf(path, copy)
            yield copy
        finally:
            if not partial.exists():
                _remove_copies(holder)
                holder.rmdir()


def _remove_copies(holder: Path) -> None:
    for path in holder.iterdir():
        if not COPY.fullmatch(path.name):
            raise CheckpointError(f"{holder} is needed to work in and holds {path.name!r}; move it away")
        shutil.rmtree(path)


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
