"""``load``: a checkpoint as a model that is ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.foreign import load_foreign
from qkv.checkpoint.layouts import LAYOUTS
from qkv.checkpoint.read import layout_of, stored_weights
from qkv.checkpoint.source import Source
from qkv.dtypes import dtype_named
from qkv.errors import QkvError
from qkv.integration.compat import no_bars_in_pipes


def load(path: str | Path, *, dtype: str | torch.dtype = "auto", **options: Any) -> Any:
    """Load a directory, quantized or float, as a transformers model in evaluation mode.

    Quantized weights stay packed: our own, those of bitsandbytes (NF4, INT8) and of compressed-tensors
    (``pack-quantized``). The files are checked first, so that damage is told in one line.

    Args:
        path: a model directory, or the id of a model on a hub.
        dtype: of everything that is not quantized; what the checkpoint says by default.
        **options: for ``AutoModelForCausalLM.from_pretrained``, ``device_map`` for example.

    Raises:
        CheckpointError: a directory that is damaged, unsafe, or quantized in a way that cannot be read here.
        QkvError: neither a directory nor a model that a hub has.
    """
    from transformers import AutoModelForCausalLM

    import qkv.integration.hf_quantizer  # noqa: F401 - registers the format

    if isinstance(dtype, str) and dtype != "auto":
        dtype = dtype_named(dtype)
    if Path(path).exists():
        source = Source.open(path)
        source.require_config()
        if layout_of(source) not in (None, LAYOUTS["qkv"]):
            with no_bars_in_pipes():
                return load_foreign(source, stored_weights(source), dtype, options).eval()
    try:
        with no_bars_in_pipes():
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, **options)
    except OSError as error:
        if Path(path).exists():
            raise
        raise QkvError(f"{path} is no directory and cannot be had from a hub: {str(error).splitlines()[0]}") from error
    return model.eval()


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer beside a model.

    Raises:
        QkvError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise QkvError(f"{path} has no tokenizer that loads ({reason}); copy the original model's files") from error
