"""QuantizedEmbedding: the drop-in for ``nn.Embedding``, which unpacks only the rows it looks up."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from qkv.quantizers.holder import Holder
from qkv.quantizers.kernels import dequantize
from qkv.quantizers.tensor import QuantizedTensor


class QuantizedEmbedding(Holder, nn.Embedding):
    """A table ``[num_embeddings, embedding_dim]`` in a quantized format; an output head may share it."""

    def forward(self, input: Tensor) -> Tensor:
        """Rows of ids ``[...]`` as ``[..., embedding_dim]`` in the dtype of the float table."""
        rows = select_rows(self.quantized(), input.reshape(-1))
        return dequantize(rows, rows.dtype).reshape(*input.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.specs['weight'].format}"


class QuantizedScaledEmbedding(QuantizedEmbedding):
    """The same for embeddings that multiply what they look up by ``embed_scale`` (Gemma)."""

    embed_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Rows of ids ``[...]`` times ``embed_scale``."""
        rows = super().forward(input)
        scale = self.embed_scale
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def select_rows(weight: QuantizedTensor, ids: Tensor) -> QuantizedTensor:
    """The rows ``ids`` of a 2-D weight, still quantized; second-level scales are decoded."""
    scale = weight.float_scale()
    shared = weight.format.group_size == "tensor"
    return QuantizedTensor(
        replace(weight.format, double_quant=False),
        (ids.shape[0], weight.shape[1]),
        weight.dtype,
        weight.codes.index_select(0, ids),
        scale if shared else scale.index_select(0, ids),
        weight.zero if weight.zero is None or shared else weight.zero.index_select(0, ids),
    )
