"""Settings that describe a patched model exactly: read off its modules, not remembered."""

from __future__ import annotations

from collections import Counter

from torch import nn

from qkv.integration.select import Settings, output_head, select
from qkv.quantizers.embedding import QuantizedEmbedding
from qkv.quantizers.holder import Holder


def describe(model: nn.Module) -> Settings:
    """Settings under which :func:`qkv.integration.select.select` picks just what is quantized in ``model``."""
    holders = {name: module for name, module in model.named_modules() if isinstance(module, Holder)}
    head = output_head(model)
    tables = {n: m.format for n, m in holders.items() if isinstance(m, QuantizedEmbedding) or m is head}
    layers = {name: module.format for name, module in holders.items() if name not in tables}
    default = Counter((layers or tables).values()).most_common(1)[0][0]
    embeddings = next(iter(tables.values()), None)
    skip = tuple(target.name for target in select(model, Settings(default, embeddings=embeddings))[0])
    expected = {name: embeddings if name in tables else default for name in holders}
    overrides = {name: module.format for name, module in holders.items() if module.format != expected[name]}
    longest_first = dict(sorted(overrides.items(), key=lambda item: -len(item[0])))
    return Settings(default, skip, embeddings, longest_first)
