"""Groups along the input dimension: pure functions between ``[rows, columns]`` and ``[rows, groups, length]``."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**22
"""Elements worked on at once, so that temporaries stay at some 16 MB an array whatever the tensor."""


def to_groups(rows: Tensor, length: int) -> Tensor:
    """Cut ``[rows, columns]`` into ``[rows, groups, length]``; a short last group is padded with zeros."""
    num_rows, columns = rows.shape
    groups = ceil(columns / length)
    missing = groups * length - columns
    if missing:
        rows = torch.nn.functional.pad(rows, (0, missing))
    return rows.reshape(num_rows, groups, length)


def from_groups(groups: Tensor, columns: int) -> Tensor:
    """Undo :func:`to_groups`: ``[rows, groups, length]`` to ``[rows, columns]``."""
    num_rows = groups.shape[0]
    return groups.reshape(num_rows, groups.shape[1] * groups.shape[2])[:, :columns]


def row_chunks(num_rows: int, columns: int, elements: int | None = None) -> Iterator[slice]:
    """Slices of rows that together cover all of them, each of about ``elements`` (``CHUNK_ELEMENTS``) elements."""
    step = max(1, (elements or CHUNK_ELEMENTS) // max(columns, 1))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
