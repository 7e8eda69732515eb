"""Draft: what a source proposes, a tree of tokens with parents. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qkv.errors import QkvError


@dataclass(frozen=True)
class Draft:
    """Proposed tokens below the last committed one.

    Args:
        tokens: int64 ``[n]``, on any device.
        parents: index of each token's parent, ``-1`` for the last committed token; parents come first.
        log_q: ``[n, vocabulary]``, log-probabilities each token was really drawn from; only the rejection rule
            reads them, and None says that the tokens are a function of the context.
        confidence: tokens before the first drafted one that agreed with where the draft was taken from; 0 where
            that says nothing, as for a model. A length policy may go by it.

    Raises:
        QkvError: parents that are no tree.

    Example:
        >>> Draft.chain([5, 7, 9]).parents
        (-1, 0, 1)
    """

    tokens: Tensor
    parents: tuple[int, ...]
    log_q: Tensor | None = None
    confidence: int = 0

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.is_floating_point():
            raise QkvError(f"drafted tokens are whole numbers [n], not {self.tokens.dtype} {tuple(self.tokens.shape)}")
        if len(self.parents) != self.tokens.shape[0]:
            raise QkvError(f"a draft of {self.tokens.shape[0]} tokens has {len(self.parents)} parents")
        if any(not -1 <= parent < index for index, parent in enumerate(self.parents)):
            raise QkvError(f"parents {self.parents} are no tree: each must come before its child")

    @classmethod
    def chain(cls, tokens: Sequence[int] | Tensor, *, log_q: Tensor | None = None, confidence: int = 0) -> Draft:
        """Tokens one after the other."""
        tensor = tokens if isinstance(tokens, Tensor) else torch.tensor(list(tokens), dtype=torch.long)
        return cls(tensor, tuple(range(-1, tensor.shape[0] - 1)), log_q, confidence)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def is_chain(self) -> bool:
        """Whether no token has a sibling."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @property
    def depths(self) -> tuple[int, ...]:
        """Tokens between each token and the last committed one."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent < 0 else found[parent] + 1)
        return tuple(found)

    def children(self, node: int) -> tuple[int, ...]:
        """Indices of the tokens whose parent is ``node``."""
        return tuple(index for index, parent in enumerate(self.parents) if parent == node)

    def truncate(self, num_tokens: int) -> Draft:
        """The first ``num_tokens`` tokens."""
        if num_tokens >= len(self):
            return self
        log_q = None if self.log_q is None else self.log_q[:num_tokens]
        return Draft(self.tokens[:num_tokens], self.parents[:num_tokens], log_q, self.confidence)
