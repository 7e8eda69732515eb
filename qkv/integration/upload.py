"""Small tensors of token ids on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """int64 ``[n]`` on ``device``; from pinned memory, so that the host waits for nothing the device still does."""
    found = values if isinstance(values, Tensor) else torch.tensor(list(values), dtype=torch.long)
    if found.device == device or device.type == "cpu":
        return found.to(device)
    return found.pin_memory().to(device, non_blocking=True)
