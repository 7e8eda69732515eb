"""One row of a generation, and the walk down its draft: choose, emit, stop, or go on to the child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qkv.integration.draft import Draft
from qkv.integration.sampling import CHOICE, DRAFT, choose, largest, reads_are_cheap, reject_or_keep
from qkv.integration.upload import upload


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
        self._uploaded = len(self.ids)

    # --- what sources may ask ----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens the row may still emit."""
        return max(0, self.max_length - len(self.ids))

    @property
    def is_plain(self) -> bool:
        """Whether the choice is the largest logit, as it comes from the model."""
        return self.seed is None and not self.processors

    @property
    def new_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self.ids[self.num_prompt :]

    def last(self, num_tokens: int) -> Tensor:
        """The newest tokens, int64 ``[num_tokens]`` on the row's device."""
        return self._uploaded_ids()[0, len(self.ids) - num_tokens : len(self.ids)]

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
        self.ids.append(token)
        self.is_finished = len(self.ids) >= self.max_length or token in self.eos or self._is_stopped()

    def choice(self, logits: Tensor, draft: Draft, path: Sequence[int], child: int | None) -> Tensor:
        """The rule's token after the drafted tokens at indices ``path``, int64 ``[]``; emits nothing.

        Args:
            logits: ``[vocabulary]`` of the target, after the path.
            child: index of the token drafted next, for the rejection rule.
        """
        scores = self.scores(logits, draft.tokens[: len(path)] if draft.is_chain else draft.tokens[list(path)])
        position = len(self.ids) + len(path)
        if self.seed is not None and draft.log_q is not None and child is not None:
            return reject_or_keep(scores, draft.tokens[child], draft.log_q[child], self.seed, position)
        return choose(scores, self.seed, position, CHOICE)

    def _prefix(self, drafted: Sequence[Tensor] | Tensor) -> Tensor:
        length = len(self.ids)
        buffer = self._uploaded_ids(len(drafted))
        if len(drafted):
            new = drafted if isinstance(drafted, Tensor) else torch.stack(list(drafted))
            buffer[0, length : length + len(drafted)] = new
        return buffer[:, : length + len(drafted)]

    def _uploaded_ids(self, more: int = 0) -> Tensor:
        """The buffer with all tokens on the device, and room for some more."""
        length = len(self.ids)
        if length + more > self._buffer.shape[1]:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, length + more))
        if self._uploaded < length:
            self._buffer[0, self._uploaded : length] = upload(self.ids[self._uploaded :], self.device)
            self._uploaded = length
        return self._buffer

    def _is_stopped(self) -> bool:
        if not self.criteria:
            return False
        ids = torch.tensor([self.ids])
        return any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.criteria)


def walk(rows: Sequence[Row], drafts: Sequence[Draft], logits: Tensor) -> list[list[int]]:
    """Emit what the target says along each row's draft; a row stops where its draft was wrong, or where it ends.

    Args:
        logits: ``[rows, 1 + longest draft, vocabulary]``: after the last committed token, and after each drafted one.

    Returns:
        The tokens that each row emitted, at least one.
    """
    is_chain = all(draft.is_chain for draft in drafts)
    if is_chain and (not reads_are_cheap(logits.device) or all(row.is_plain for row in rows)):
        paths = _paths_at_once(rows, drafts, logits)
    else:
        paths = [_path_by_steps(row, draft, part) for row, draft, part in zip(rows, drafts, logits, strict=True)]
    return [_emit(row, path) for row, path in zip(rows, paths, strict=True)]


def _emit(row: Row, path: list[int]) -> list[int]:
    for count, token in enumerate(path, 1):
        row.emit(token)
        if row.is_finished:
            return path[:count]
    return path


def _path_by_steps(row: Row, draft: Draft, logits: Tensor) -> list[int]:
    """Choose, and go on while a child carries the token; positions beyond are never looked at."""
    drafted: list[int] = draft.tokens.tolist()
    nodes: list[int] = []
    path: list[int] = []
    node: int | None = -1
    while node is not None:
        children = draft.children(node)
        child = children[0] if children else None
        token = int(row.choice(logits[node + 1], draft, nodes, child))
        path.append(token)
        node = next((index for index in children if drafted[index] == token), None)
        if node is not None:
            nodes.append(node)
    return path


def _paths_at_once(rows: Sequence[Row], drafts: Sequence[Draft], logits: Tensor) -> list[list[int]]:
    """The same for chains, with one wait for the device: every position is chosen, then all are read."""
    if all(row.is_plain for row in rows):
        chosen = largest(logits)
    else:
        chosen = torch.nn.utils.rnn.pad_sequence(list(map(_choices, rows, drafts, logits)), batch_first=True)
    drafted = torch.cat([draft.tokens for draft in drafts])
    read = torch.cat((chosen.flatten(), drafted)).tolist()
    guesses, paths, width = read[chosen.numel() :], [], chosen.shape[1]
    for number, draft in enumerate(drafts):
        path = read[number * width :][: len(draft) + 1]
        right = [a == b for a, b in zip(path, guesses[: len(draft)], strict=False)]
        paths.append(path[: (right + [False]).index(False) + 1])
        guesses = guesses[len(draft) :]
    return paths


def _choices(row: Row, draft: Draft, logits: Tensor) -> Tensor:
    """The rule's token at every position, int64 ``[1 + draft]``."""
    count = len(draft)
    return torch.stack(
        [row.choice(logits[at], draft, range(at), at if at < count else None) for at in range(count + 1)]
    )
