"""Rotary positions of keys that are already rotated: moving one by ``delta`` is one more rotation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.errors import QkvError


@dataclass(frozen=True)
class Rotation:
    """How the model turns positions into angles (rotate-half convention, arXiv 2104.09864).

    Args:
        frequencies: ``float32 [rotary_dim / 2]``, radians a position.
        trained_positions: positions the model was trained on; beyond them a far key is read as noise.
        refused: why keys of this model cannot be turned; empty where they can.

    Raises:
        QkvError: on :meth:`move` where ``refused`` says why.
    """

    frequencies: tuple[float, ...]
    trained_positions: int
    refused: str = ""

    def move(self, x: Tensor, delta: Tensor) -> Tensor:
        """Rotate ``[..., tokens, dim]`` by ``delta`` positions, ``[tokens]``; dims past the rotary stay."""
        if self.refused:
            raise QkvError(
                f"sinks cannot be turned: {self.refused}; use Window(..., rerotate=False), or stay within "
                f"{self.trained_positions:,} positions"
            )
        frequencies = torch.tensor(self.frequencies, dtype=torch.float64, device=x.device)
        angles = delta.to(torch.float64)[:, None] * frequencies
        cos, sin = angles.cos().to(_wide(x)), angles.sin().to(_wide(x))
        half = len(self.frequencies)
        first, second, rest = x[..., :half].to(cos), x[..., half : 2 * half].to(cos), x[..., 2 * half :]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*(part.to(x.dtype) for part in turned), rest), dim=-1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
