"""A tensor's bytes, whatever its dtype."""

from __future__ import annotations

import torch


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, without a copy; 0-d and empty tensors too."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
