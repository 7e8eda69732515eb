"""As many tokens as pay: from measured costs and running acceptance, down to none."""

from __future__ import annotations

from collections import deque
from math import inf
from statistics import median_low
from typing import Final

from qkv.errors import QkvError
from qkv.integration.draft import Draft
from qkv.integration.length.base import Outcome
from qkv.integration.length.costs import Costs
from qkv.integration.length.record import Record
from qkv.integration.length.worth import Worth

BLOCKS: Final = (4, 8, 12, 16, 24, 32, 48, 64)
"""Tokens of a verify call, the last committed one included, that nearly free drafts are cut to: few sizes, so that
each is measured soon and kernels see few shapes."""
PROBE: Final = 3
LEAST_WAIT: Final = 8
MOST_WAIT: Final = 64
GROWTH: Final = 3
LATELY: Final = 3
"""A draft is at most ``PROBE`` and ``GROWTH`` times what was accepted of the best of the newest ones, or as long as the
match it was found by: the record knows first tokens well and overrates later ones, which are seldom tried where copying
fails."""
FREE: Final = 0.02
"""Cost of a drafted token, in steps of one, below which drafting needs no thought."""


class Adaptive:
    """As few seconds as may be for the whole text: of all k, 0 included, that with the largest

    ``(1 + a_1 + a_1 a_2 + … ) - r (v(k + 1) + k d) + a_1 … a_{k+1} h``

    ``a_i`` is the running acceptance at depth i of drafts of the same confidence, ``v(n)`` the measured cost of
    verifying n tokens, ``d`` that of drafting one, both medians in steps of one token; ``r`` the tokens that the cost
    of such a step buys on this text, and ``h`` the value of the choice that comes next where all were right: a Markov
    decision process of average reward, whose values are learnt on the way. So a doubtful draft stays short where
    copying is quick, since what is cut off is drafted again with more confidence. Where no k pays, it probes
    now and then, at doubling distances. The expected number of tokens: Leviathan et al., arXiv 2211.17192.

    Args:
        most: tokens a step at most.

    Raises:
        QkvError: ``most`` below 1.
    """

    def __init__(self, most: int = BLOCKS[-1] - 1) -> None:
        if most < 1:
            raise QkvError(f"an adaptive length of at most {most} tokens never drafts; use source='none'")
        self.most = most
        self.costs = Costs()
        self._record, self._worth = Record(), Worth()
        self._draft_costs: deque[float] = deque(maxlen=5)
        self._confidence = 0
        self._lately: deque[int] = deque(maxlen=LATELY)
        self._wait, self._idle = LEAST_WAIT, 0

    def budget(self, limit: int) -> int:
        """Where drafting is nearly free all there may be, else the length that pays by what was accepted so far."""
        limit = min(limit, self.most)
        if not self._draft_costs:
            return min(limit, PROBE)
        if self._is_free:
            return limit
        return self._choose(self._confidence, limit, median_low(self._draft_costs))

    def keep(self, draft: Draft) -> int:
        """The tokens worth verifying, given what kind of draft it is."""
        if not len(draft) or not self._is_free:
            return len(draft)
        return self._choose(draft.confidence, self._within_reach(draft), 0.0)

    def update(self, outcome: Outcome) -> None:
        """Learn costs and acceptance."""
        self.costs.update(outcome.verified, outcome.verify_seconds)
        longest = max(outcome.drafts, default=0)
        if longest and self.costs.one:
            self._draft_costs.append(outcome.draft_seconds / longest / self.costs.one)
        cost = self.costs.relative(outcome.verified) + outcome.draft_seconds / (self.costs.one or 1.0)
        self._worth.update(1 + sum(outcome.accepted) / len(outcome.accepted), cost)
        if longest:
            self._lately.append(max(outcome.accepted))
        if any(outcome.accepted):
            self._wait = max(LEAST_WAIT, self._wait // 2)
        for drafted, accepted, confidence in zip(outcome.drafts, outcome.accepted, outcome.confidences, strict=True):
            if drafted:
                self._record.update(confidence, drafted, accepted)
                self._confidence = confidence

    @property
    def _is_free(self) -> bool:
        return bool(self._draft_costs) and median_low(self._draft_costs) < FREE

    def _within_reach(self, draft: Draft) -> int:
        reach = max(draft.confidence, PROBE + GROWTH * max(self._lately, default=0))
        return len(draft) if len(draft) <= reach else max(block for block in BLOCKS if block <= reach + 1) - 1

    def _choose(self, confidence: int, limit: int, draft_cost: float) -> int:
        best, value, tokens, survival = 0, -inf, 0.0, 1.0
        for count, acceptance in enumerate(self._record.acceptances(confidence, limit + 1)):
            tokens += survival
            survival *= acceptance
            if draft_cost < FREE and count and count + 1 not in BLOCKS and count < limit:
                continue
            found = tokens - self._worth.rate * (self.costs.relative(count + 1) + count * draft_cost)
            if confidence and count:  # what was not tried is worth less than the values say
                found += survival * self._worth.ahead(confidence + count + 1)
            if found > value:
                best, value = count, found
        self._worth.remember(confidence, value)
        return best or (min(limit, PROBE) if limit and self._is_due() else 0)

    def _is_due(self) -> bool:
        """Whether to try although it does not pay; doubles the wait."""
        self._idle += 1
        if self._idle < self._wait:
            return False
        self._idle, self._wait = 0, min(MOST_WAIT, 2 * self._wait)
        return True
