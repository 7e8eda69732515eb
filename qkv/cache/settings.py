"""How a layer's cache is kept: codecs, block size, residual window, retention. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from qkv.cache.codec import Codec
from qkv.cache.retention.base import Retention
from qkv.cache.retention.keep_all import KeepAll
from qkv.cache.rotation import Rotation
from qkv.errors import QkvError

DEFAULT_BLOCK_SIZE = 64
DEFAULT_RESIDUAL = 64


@dataclass(frozen=True)
class LayerSettings:
    """Settings of one layer.

    Args:
        keys: codec of the keys; ``values`` that of the values.
        block_size: tokens of a block: what is encoded, evicted and shared at once.
        residual: newest tokens that stay exact; between ``residual`` and ``residual + block_size - 1`` do.
        retain: what stays at all.
        rotation: the model's rotary angles, where sinks may have to be turned; None: no rotary positions.
        byte_budget: bytes this layer may hold over the whole batch; None: not limited in bytes.
        token_share: this layer's part of a budget in tokens, 1 being the mean.
        offload: keep sealed blocks in host memory; attention fetches a tile of them at a time.

    Raises:
        QkvError: sizes that are no sizes.
    """

    keys: Codec = field(default_factory=lambda: Codec("exact"))
    values: Codec = field(default_factory=lambda: Codec("exact"))
    block_size: int = DEFAULT_BLOCK_SIZE
    residual: int = DEFAULT_RESIDUAL
    retain: Retention = field(default_factory=KeepAll)
    rotation: Rotation | None = None
    byte_budget: int | None = None
    token_share: float = 1.0
    offload: bool = False

    def __post_init__(self) -> None:
        for name, value, least in (("block_size", self.block_size, 1), ("residual", self.residual, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**20:
                raise QkvError(f"{name} {value!r} is not a whole number of tokens from {least} to {2**20:,}")
