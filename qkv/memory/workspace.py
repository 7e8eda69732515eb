"""What a step needs beside weights and cache: an estimate from the sizes of the model, stage by stage.

A layer's numbers are gone when the next layer begins, so the most of any one stage counts, not their sum. The
factors are those of transformers' own layers as they were followed storage by storage: the residual and its norms
take four times the hidden size, a gated product three times its wider side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from qkv.cache.attention_torch import QUERY_TILE
from qkv.integration.anatomy import CachedLayer
from qkv.memory.items import Item
from qkv.memory.kv import KvPlan
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import native, native_cpu, torch_int4, torch_int8
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.choose import MANY_ROWS, choose

DEFAULT_CHUNK = 512
"""Tokens of a prompt read at once, where nothing else is asked for."""
KEY_TILE = 512
"""Tokens of the cache that attention over blocks turns into floats at a time."""
TILES = 3
"""Tiles of scores alive at once: scores, probabilities, and what is masked or summed of them."""


@dataclass(frozen=True)
class Workspace:
    """The largest of the steps on the way: reading ``chunk`` tokens of a prompt, and writing one.

    Attributes:
        chunk: tokens of each sequence that are read at once.
        attention_nbytes: keys and values as attention reads them, a layer's copy for the cache, scores, masks.
        products_nbytes: numbers between and inside the products of a layer, and weights while they are floats.
        logits_nbytes: logits of the fed tokens (of the last alone where ``generate`` can ask for that) and their
            float32 copy.
        dequantized_nbytes: the part of ``products_nbytes`` that is weights while they are floats.
    """

    chunk: int
    attention_nbytes: int
    products_nbytes: int
    logits_nbytes: int
    dequantized_nbytes: int

    @property
    def nbytes(self) -> int:
        """The most of the stages."""
        return max(self.attention_nbytes, self.products_nbytes, self.logits_nbytes)


@dataclass(frozen=True)
class Steps:
    """Predicts workspaces of one model.

    Attributes:
        plan: of its cache.
        dtype: it computes in.
        device: it runs on, ``"cpu"`` or ``"cuda"``.
        matrices: format and shape of each kind of quantized matrix, which kernels turn into floats.
    """

    plan: KvPlan
    dtype: torch.dtype
    device: str
    matrices: tuple[tuple[Format, tuple[int, int]], ...]

    def workspace(self, tokens: int, batch: int, chunk: int) -> Workspace:
        """Of the steps up to ``tokens`` tokens in each of ``batch`` sequences: the first, the last, and one token."""
        fed = min(chunk, tokens)
        steps = [self._stages(seen, batch, n) for seen, n in ((fed, fed), (tokens, fed), (tokens, 1))]
        return Workspace(fed, *(max(stage) for stage in zip(*steps, strict=True)))

    def _stages(self, tokens: int, batch: int, fed: int) -> tuple[int, int, int, int]:
        model, size = self.plan.anatomy, self.dtype.itemsize
        rows = batch * fed
        between = 4 * rows * model.hidden * size
        dequantized = max((self._dequantized(*matrix, rows) for matrix in self.matrices), default=0)
        products = between + 3 * rows * model.widest * size + dequantized
        layers = dict.fromkeys(layer for layer in model.layers if layer.shape is not None)
        attention = between + max((self._attention(layer, tokens, batch, fed) for layer in layers), default=0)
        asked = batch if model.last_logits_only else rows
        return attention, products, model.vocab * (asked * size + 4 * batch), dequantized

    def _attention(self, layer: CachedLayer, tokens: int, batch: int, fed: int) -> int:
        model, shape, size = self.plan.anatomy, layer.shape, self.dtype.itemsize
        assert shape is not None
        seen = tokens if shape.window is None else min(tokens, shape.window - 1 + fed)
        if self.plan.is_ours(layer) and seen > fed:
            tile = min(seen, KEY_TILE)
            scores = TILES * model.query_heads * min(fed, QUERY_TILE) * tile
            queries = 4 * fed * model.query_heads * shape.value_dim  # cast, scaled, weighted values, joined
            return 4 * (scores + queries + 2 * tile * shape.heads * (shape.key_dim + shape.value_dim))
        copied = batch * seen * shape.heads * max(shape.key_dim, shape.value_dim) * size
        masked = 1 < fed < seen or seen < tokens
        expanded = batch * seen * model.expanded * size if self._is_expanded(layer, fed, masked) else 0
        packed = batch * seen * model.expanded * size if self._is_packed(fed) else 0
        mask = batch * fed * seen * (1 + size) if masked else 0
        scores = batch * model.query_heads * fed * seen * (2 * size + 4) if model.attention == "eager" else 0
        return max(copied, expanded) + packed + mask + scores

    def _is_packed(self, fed: int) -> bool:
        """Whether torch's fused attention rearranges keys and values for itself: many tokens in 16 bits on a CPU."""
        return self.device == "cpu" and fed > 1 and self.dtype.itemsize == 2 and self.plan.anatomy.attention == "sdpa"

    def _is_expanded(self, layer: CachedLayer, fed: int, masked: bool) -> bool:
        """Whether heads that share keys, or latents, are written out: not for one token, nor without a mask."""
        model = self.plan.anatomy
        assert layer.shape is not None
        if model.latent_width == layer.shape.key_dim or model.attention == "eager":
            return True
        return masked and fed > 1 and layer.shape.heads != model.query_heads

    def _dequantized(self, format: Format, shape: tuple[int, int], rows: int) -> int:
        whole = prod(shape) * self.dtype.itemsize
        backend = choose(Case(format, torch.Size(shape), self.device, self.dtype, min(rows, MANY_ROWS)))
        if backend is native_cpu:
            return min(whole, native_cpu.PANEL_NBYTES) if rows > native.most_rows(self.dtype) else 0
        return 0 if backend in (torch_int4, torch_int8) else whole  # theirs are copies that stay


def quantized_matrices(items: Iterable[Item]) -> tuple[tuple[Format, tuple[int, int]], ...]:
    """The largest quantized matrix of each format; of fused experts, one expert's."""
    largest: dict[str, tuple[int, int]] = {}
    for item in items:
        if item.format is not None and len(item.shape) > 1 and item.role != "embedding":
            rows, columns = item.shape[-2:]
            if rows * columns > prod(largest.get(item.format, (0, 0))):
                largest[item.format] = (rows, columns)
    return tuple((Format.parse(format), shape) for format, shape in largest.items())
