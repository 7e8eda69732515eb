"""Budgets as people write them: tokens, a fraction, or bytes with a unit."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from qkv.errors import QkvError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
Kind = Literal["tokens", "fraction", "bytes"]


def parse_bytes(text: str | int) -> int:
    """``"512MB"`` is 512,000,000 and ``"512MiB"`` 536,870,912; a plain int is bytes.

    Raises:
        QkvError: what is not a positive number with a unit.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B\s*", str(text).upper())
    if not isinstance(text, str) or match is None or float(match[1]) <= 0:
        raise QkvError(f"a size in bytes is a number with a unit, such as 512MB or 2GiB; got {text!r}")
    return int(float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2]])


@lru_cache(maxsize=64)
def parse_budget(budget: int | float | str) -> tuple[Kind, float]:
    """Which kind of budget this is, and how much."""
    if isinstance(budget, str):
        return "bytes", parse_bytes(budget)
    if isinstance(budget, int) and not isinstance(budget, bool) and budget > 0:
        return "tokens", budget
    if isinstance(budget, float) and 0 < budget < 1:
        return "fraction", budget
    raise QkvError(f'a budget is a number of tokens, a fraction below 1, or bytes such as "512MB"; got {budget!r}')
