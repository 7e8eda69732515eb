"""The target itself, quantized harder, as its own draft."""

from __future__ import annotations

import copy
from typing import Any

from qkv.integration.patch import dequantize_, quantize_
from qkv.quantizers.format import Format
from qkv.quantizers.holder import Holder


def quantized_copy(model: Any, format: str | Format) -> Any:
    """A copy of ``model`` with linear layers in ``format``; everything else is shared with it, not copied.

    Args:
        model: may be quantized already; its layers are then quantized anew from what they stand for.
        format: see :meth:`Format.parse`.

    Raises:
        QkvError: a format that does not exist, or a model without linear layers.
    """
    format = Format.parse(format) if isinstance(format, str) else format
    tensors = [*model.parameters(), *model.buffers()]
    draft = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    if any(isinstance(module, Holder) for module in draft.modules()):
        dequantize_(draft)
    quantize_(draft, format)
    return draft
