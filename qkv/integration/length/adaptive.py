"""As many tokens as pay: from measured costs and running acceptance, down to none."""

from __future__ import annotations

from typing import Final

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.length.base import Outcome
from qkv.integration.length.costs import Costs
from qkv.integration.length.record import Record

PROBE: Final = 4
LEAST_WAIT: Final = 8
MOST_WAIT: Final = 64
FREE: Final = 0.02
"""Cost of a drafted token, in steps of one, below which drafting needs no thought."""


class Adaptive:
    """Maximise tokens a second: ``(1 + a_1 + a_1 a_2 + … ) / (v(k + 1) + k d)`` over k, 0 included.

    ``a_i`` is the running acceptance at depth i of drafts of the same confidence, ``v(n)`` the measured cost of
    verifying n tokens, ``d`` that of drafting one. Where no k pays, it probes now and then, at doubling
    distances. Formula: Leviathan et al., arXiv 2211.17192, with v measured in place of 1.

    Args:
        most: tokens a step at most.

    Raises:
        QkvError: ``most`` below 1.
    """

    def __init__(self, most: int = 24) -> None:
        if most < 1:
            raise QkvError(f"an adaptive length of at most {most} tokens never drafts; use source='none'")
        self.most = most
        self.costs = Costs()
        self._records: dict[int, Record] = {}
        self._draft_cost: float | None = None
        self._wait, self._idle = LEAST_WAIT, 0

    def budget(self, limit: int) -> int:
        """Where drafting is nearly free all there may be, else the length that pays by overall acceptance."""
        limit = min(limit, self.most)
        if not self.costs.is_known:
            return 0
        if self._draft_cost is None:
            return min(limit, PROBE)
        if self._draft_cost < FREE:
            return limit
        best = self._record(max(self._records, default=0))
        return self._choose(best, limit, self._draft_cost)

    def keep(self, draft: Draft) -> int:
        """The tokens worth verifying, given what kind of draft it is."""
        if not len(draft) or self._draft_cost is None or self._draft_cost >= FREE:
            return len(draft)
        return self._choose(self._record(draft.confidence), len(draft), 0.0)

    def update(self, outcome: Outcome) -> None:
        """Learn costs and acceptance."""
        self.costs.update(outcome.verified, outcome.verify_seconds)
        one = self.costs.seconds(1)
        longest = max(outcome.drafts, default=0)
        if one and longest:
            cost = outcome.draft_seconds / longest / one
            self._draft_cost = cost if self._draft_cost is None else self._draft_cost + 0.2 * (cost - self._draft_cost)
        if any(outcome.accepted):
            self._wait = max(LEAST_WAIT, self._wait // 2)
        for drafted, accepted, confidence in zip(outcome.drafts, outcome.accepted, outcome.confidences, strict=True):
            if drafted:
                self._record(confidence).update(drafted, accepted)

    def _record(self, confidence: int) -> Record:
        """A source's own word counts until there are counts: 0 says nothing, 1, 2, 3 … ever more."""
        if confidence not in self._records:
            self._records[confidence] = Record(1 - 0.7**confidence if confidence else 0.5)
        return self._records[confidence]

    def _choose(self, record: Record, limit: int, draft_cost: float) -> int:
        best, rate, tokens, survival = 0, 1.0, 1.0, 1.0
        for count, acceptance in enumerate(record.acceptances(limit), 1):
            survival *= acceptance
            tokens += survival
            found = tokens / (self.costs.relative(count + 1) + count * draft_cost)
            if found > rate:
                best, rate = count, found
        return best or (min(limit, PROBE) if limit and self._is_due() else 0)

    def _is_due(self) -> bool:
        """Whether to try although it does not pay; doubles the wait."""
        self._idle += 1
        if self._idle < self._wait:
            return False
        self._idle, self._wait = 0, min(MOST_WAIT, 2 * self._wait)
        return True
