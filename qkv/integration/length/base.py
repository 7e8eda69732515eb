"""Length: the policy that says how many tokens to draft. It can change the speed, never the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from qkv.integration.draft import Draft


@dataclass(frozen=True)
class Outcome:
    """One step, as a policy learns of it.

    Args:
        drafts: number of tokens submitted for each row.
        accepted: of these, how many each row emitted.
        confidences: the drafts' own, a row each.
        verified: tokens the target was called with, a row.
        draft_seconds, verify_seconds: time spent: on a CPU the process's own, else wall time.
    """

    drafts: tuple[int, ...]
    accepted: tuple[int, ...]
    confidences: tuple[int, ...]
    verified: int
    draft_seconds: float
    verify_seconds: float


@runtime_checkable
class Length(Protocol):
    """A policy; one object serves one decoder and may learn across its generations."""

    def budget(self, limit: int) -> int:
        """Tokens to ask the source for, at most ``limit``; asked before anything is drafted."""
        ...

    def keep(self, draft: Draft) -> int:
        """Of a finished draft, the tokens to submit. Not asked about sampled drafts under the rejection rule,
        where dropping a token after seeing it would bias the output."""
        ...

    def update(self, outcome: Outcome) -> None:
        """Learn from a step."""
        ...
