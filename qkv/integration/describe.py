"""Settings that describe a patched model exactly: read off its modules, not remembered."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from qkv.integration.select import output_head, select
from qkv.integration.settings import Settings
from qkv.quantizers.embedding import QuantizedEmbedding
from qkv.quantizers.holder import Holder


def describe(model: nn.Module) -> Settings:
    """Settings under which :func:`qkv.integration.select.select` picks just what is quantized in ``model``.

    Embedding tables are named among the overrides as well, so that the format of every tensor in a file
    can be told without the model.
    """
    holders = {name: module for name, module in model.named_modules() if isinstance(module, Holder)}
    head = output_head(model)
    tables = {n: m.format for n, m in holders.items() if isinstance(m, QuantizedEmbedding) or m is head}
    layers = {name: module.format for name, module in holders.items() if name not in tables}
    default = Counter((layers or tables).values()).most_common(1)[0][0]
    embeddings = next(iter(tables.values()), None)
    skip = tuple(target.name for target in select(model, Settings(default, embeddings=embeddings))[0])
    overrides = tables | {name: format for name, format in layers.items() if format != default}
    longest_first = dict(sorted(overrides.items(), key=lambda item: -len(item[0])))
    return Settings(default, skip, embeddings, longest_first)


def history(model: nn.Module) -> dict[str, Any]:
    """What the quantized parameters were: which ones are stored transposed, and dtypes unlike the model's own.

    ``dequantize_checkpoint`` restores both; names are those of the model's parameters.
    """
    specs = {
        f"{name}.{parameter}": spec
        for name, module in model.named_modules()
        if isinstance(module, Holder)
        for parameter, spec in module.specs.items()
    }
    own = getattr(model, "dtype", None)
    transposed = sorted(name for name, spec in specs.items() if spec.transposed)
    dtypes = {n: str(spec.dtype).removeprefix("torch.") for n, spec in specs.items() if spec.dtype != own}
    return ({"transposed": transposed} if transposed else {}) | ({"dtypes": dtypes} if dtypes else {})
