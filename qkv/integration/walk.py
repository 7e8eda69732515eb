"""One row of a generation, and the walk down its draft: choose, emit, stop, or go on to the child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.sampling import CHOICE, DRAFT, choose, reject_or_keep


class Row:
    """A prompt that is being continued: its tokens, its rule, and when it ends.

    Args:
        prompt: int64 ``[tokens]``, without padding.
        processors: a callable of ``ids [1, n]`` and ``scores [1, vocabulary]``, as transformers' are.
        criteria: callables of ``ids [1, n]`` and scores that say where to stop, likewise.
        seed: of the noise; None is greedy.
        max_length: tokens at which the row ends, prompt included.
        eos: tokens that end it.
        accept: ``"coupled"`` or ``"rejection"``.
    """

    def __init__(
        self,
        prompt: Tensor,
        *,
        processors: Callable[[Any, Any], Tensor] | None = None,
        criteria: Sequence[Callable[..., Any]] = (),
        seed: int | None = None,
        max_length: int = 2**31,
        eos: frozenset[int] = frozenset(),
        accept: str = "coupled",
    ) -> None:
        self.ids: list[int] = prompt.tolist()
        self.num_prompt = len(self.ids)
        self.device = prompt.device
        self.processors, self.criteria = processors, criteria
        self.seed, self.max_length, self.eos, self.accept = seed, max_length, eos, accept
        self.is_finished = False
        self._buffer = torch.zeros(1, len(self.ids) + 256, dtype=torch.long, device=self.device)
        self._buffer[0, : len(self.ids)] = prompt

    # --- what sources may ask ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens the row may still emit."""
        return max(0, self.max_length - len(self.ids))

    @property
    def new_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.ids[self.num_prompt :]

    def last(self, num_tokens: int) -> Tensor:
        """The newest tokens, int64 ``[num_tokens]`` on the row's device."""
        return self._buffer[0, len(self.ids) - num_tokens : len(self.ids)]

    def scores(self, logits: Tensor, drafted: Sequence[Tensor] | Tensor) -> Tensor:
        """Processed logits ``[vocabulary]`` after the row's tokens and ``drafted`` ones (each int64 ``[]``)."""
        found = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        if not self.processors:
            return found
        return self.processors(self._prefix(drafted), found[None])[0]

    def propose(self, logits: Tensor, drafted: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """A draft model's next token and, for the rejection rule, its log-probabilities.

        With the coupled rule it is what the target would choose if it had these logits.
        """
        scores = self.scores(logits, drafted)
        position = len(self.ids) + len(drafted)
        if self.accept == "coupled" or self.seed is None:
            return choose(scores, self.seed, position), None
        return choose(scores, self.seed, position, DRAFT), scores.log_softmax(-1)

    # --- what the loop does ------------------------------------------------------------------------------

    def emit(self, token: int) -> None:
        """Append a token and see whether the row ends with it."""
        self._grow(len(self.ids) + 1)
        self._buffer[0, len(self.ids)] = token
        self.ids.append(token)
        self.is_finished = len(self.ids) >= self.max_length or token in self.eos or self._is_stopped()

    def choice(self, logits: Tensor, draft: Draft, depth: int) -> Tensor:
        """The rule's token after ``depth`` tokens of the draft, int64 ``[]``."""
        scores = self.scores(logits[depth], draft.tokens[:depth])
        position = len(self.ids) - self._emitted_of(depth) + depth
        if self.seed is not None and draft.log_q is not None and depth < len(draft):
            return reject_or_keep(scores, draft.tokens[depth], draft.log_q[depth], self.seed, position)
        return choose(scores, self.seed, position, CHOICE)

    def _emitted_of(self, depth: int) -> int:
        return 0

    def _prefix(self, drafted: Sequence[Tensor] | Tensor) -> Tensor:
        length = len(self.ids)
        self._grow(length + len(drafted))
        if len(drafted):
            new = drafted if isinstance(drafted, Tensor) else torch.stack(list(drafted))
            self._buffer[0, length : length + len(drafted)] = new
        return self._buffer[:, : length + len(drafted)]

    def _grow(self, length: int) -> None:
        if length > self._buffer.shape[1]:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, length))

    def _is_stopped(self) -> bool:
        if not self.criteria:
            return False
        ids = torch.tensor([self.ids])
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria)
