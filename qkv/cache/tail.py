"""The open tail: the newest tokens of every row, exact, in frame columns (right-aligned over the batch)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Tail:
    """Keys and values ``[batch, heads, columns, dim]``; a row shorter than the widest has unread columns at
    its left. Tensors are replaced, never written, so that forks may share them.

    Args:
        keys: the first columns, of the model's dtype; ``values`` likewise.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values

    @property
    def columns(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held."""
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add columns at the right."""
        if self.columns:
            keys = torch.cat((self.keys, keys), dim=2)
            values = torch.cat((self.values, values), dim=2)
        self.keys, self.values = keys, values

    def cut(self, columns: int) -> None:
        """Forget the newest columns."""
        if columns:
            self._slice(slice(None, self.columns - columns))

    def trim(self, columns: int) -> None:
        """Keep the newest ``columns`` columns, in storages of their own size."""
        self._slice(slice(self.columns - columns, None))

    def keep(self, num_open: int, kept: Sequence[Sequence[int]]) -> None:
        """Of the ``num_open`` newest columns keep those named for each row, right-aligned again."""
        width = max(len(row) for row in kept)
        closed = self.columns - num_open
        columns = []
        for row in kept:
            shift = width - len(row)
            left = [max(c - shift, 0) for c in range(closed + shift)]
            columns.append(left + [closed + i for i in row])
        index = torch.tensor(columns, dtype=torch.long, device=self.keys.device)
        self.keys, self.values = _gather(self.keys, index), _gather(self.values, index)

    def prepend(self, row: int, keys: Tensor, values: Tensor, first: int) -> None:
        """Write tokens ``[heads, tokens, dim]`` of a row before its own columns, which begin at ``first``."""
        missing = keys.shape[1] - first
        if missing > 0:
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, missing, 0))
            self.values = torch.nn.functional.pad(self.values, (0, 0, missing, 0))
            first += missing
        else:
            self.keys, self.values = self.keys.clone(), self.values.clone()
        self.keys[row, :, first - keys.shape[1] : first] = keys
        self.values[row, :, first - keys.shape[1] : first] = values

    def select(self, rows: Tensor) -> Tail:
        """A tail of other rows of this one, ``long [rows]``."""
        rows = rows.to(self.keys.device)
        return Tail(self.keys.index_select(0, rows), self.values.index_select(0, rows))

    def _slice(self, columns: slice) -> None:
        self.keys, self.values = _owned(self.keys[:, :, columns]), _owned(self.values[:, :, columns])


def _owned(view: Tensor) -> Tensor:
    """The same values in a storage that holds nothing else."""
    if view.untyped_storage().nbytes() == view.numel() * view.element_size() and view.is_contiguous():
        return view
    return view.clone(memory_format=torch.contiguous_format)


def _gather(x: Tensor, columns: Tensor) -> Tensor:
    index = columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)
