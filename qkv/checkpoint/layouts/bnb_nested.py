"""The codes that bitsandbytes' CPU library gives scales in 8 bits, for files that are tensor for tensor its own.

It rounds a value from -1 to 1 to one of 65,536 places first and takes the code nearest to that place, so that near 0,
where codes lie closer than places, its codes are not always the nearest to the value.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
from torch import Tensor

from qkv.quantizers.double_quant import dynamic_map, nearest_code

LAST_PLACE: Final = 65535


def code_by_place(scaled: Tensor) -> Tensor:
    """The uint8 codes of float32 values from -1 to 1, of their shape."""
    places = ((scaled + 1) * (LAST_PLACE / 2) + 0.5).floor_().clamp_(0, LAST_PLACE).to(torch.int32)
    return _codes_of_places().to(scaled.device)[places]


@cache
def _codes_of_places() -> Tensor:
    places = torch.arange(LAST_PLACE + 1, dtype=torch.float64) / (LAST_PLACE / 2) - 1
    return nearest_code(places.to(dynamic_map(places.device).dtype))
