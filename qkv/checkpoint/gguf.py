"""Read a GGUF file through transformers and write it as a plain safetensors directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.destination import Destination
from qkv.errors import QkvError
from qkv.integration.compat import gguf_options, no_bars_in_pipes


def convert_gguf(path: str | Path, dst: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Dequantize a ``.gguf`` file into a model directory with its tokenizer.

    Raises:
        QkvError: the package ``gguf`` is missing.
        CheckpointError: ``dst`` exists.
    """
    path = Path(path)
    try:
        import gguf  # noqa: F401 - transformers reads through it
    except ImportError:
        raise QkvError("reading GGUF needs the package gguf: pip install gguf") from None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with Destination(dst) as folder, no_bars_in_pipes():
        options: dict[str, Any] = {"gguf_file": path.name}
        model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options, **gguf_options())
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(path.parent, **options).save_pretrained(folder)
