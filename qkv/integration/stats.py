"""What a generation did and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DecodeStats:
    """Counts over all rows, and seconds.

    ``emitted == accepted + row_steps``: each step of a row emits one token of the target's own, and those of
    the draft that came before it.

    Args:
        drafted: tokens that were proposed and verified.
        accepted: of these, tokens that were emitted and saved a step.
        emitted: tokens generated.
        target_calls: forward passes of the target, prefill included.
        row_steps: steps, counted once for each row that took part; ``steps`` counts each once. The first is the
            prompt's own call, which tells the first token.
        prefill_seconds, draft_seconds, verify_seconds: wall time; verifying includes choosing and committing.
        plain_seconds: wall time and number of the steps without a draft, from which :attr:`speedup` is told.
        drafted_at, accepted_at: the counts by depth below the last committed token.
    """

    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    target_calls: int = 0
    row_steps: int = 0
    steps: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    plain_seconds: tuple[float, int] = (0.0, 0)
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def count(self, drafted: int, emitted: int) -> None:
        """One row's step."""
        self.row_steps += 1
        self.drafted += drafted
        self.accepted += emitted - 1
        self.emitted += emitted
        missing = drafted - len(self.drafted_at)
        self.drafted_at += [0] * missing
        self.accepted_at += [0] * missing
        for depth in range(drafted):
            self.drafted_at[depth] += 1
            self.accepted_at[depth] += depth < emitted - 1

    def time(self, draft_seconds: float, verify_seconds: float, *, is_plain: bool) -> None:
        """One step of the whole batch."""
        self.steps += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        if is_plain:
            seconds, steps = self.plain_seconds
            self.plain_seconds = (seconds + verify_seconds, steps + 1)

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted; 0 if none was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """The same for each depth."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def seconds(self) -> float:
        """Wall time of everything."""
        return self.prefill_seconds + self.draft_seconds + self.verify_seconds

    @property
    def speedup(self) -> float | None:
        """Tokens a second after the prefill against those of this generation's own steps without a draft.

        None where every step had one, or no step was timed.
        """
        seconds, steps = self.plain_seconds
        spent = self.draft_seconds + self.verify_seconds
        if not steps or not spent:
            return None
        rows = self.row_steps / self.steps
        return (self.emitted / rows - 1) * (seconds / steps) / spent

    def __str__(self) -> str:
        rate = self.emitted / self.seconds if self.seconds else 0.0
        speedup = "" if self.speedup is None else f", {self.speedup:.2f}x plain steps"
        return (
            f"{self.emitted} tokens in {self.target_calls} calls and {self.seconds:.2f} s ({rate:.1f}/s{speedup}); "
            f"{self.accepted} of {self.drafted} drafted accepted ({self.acceptance:.0%}); "
            f"prefill {self.prefill_seconds:.2f} s, draft {self.draft_seconds:.2f} s, "
            f"verify {self.verify_seconds:.2f} s"
        )
