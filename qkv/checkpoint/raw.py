"""A tensor's bytes, whatever its dtype."""

from __future__ import annotations

import torch


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor, without a copy; 0-d and empty tensors too."""
    # Not view(-1): a contiguous tensor's dimension of size 1 may have any stride; view(dtype) refuses it.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data
