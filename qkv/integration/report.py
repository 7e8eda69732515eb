"""What ``quantize_`` did and did not do, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qkv.integration.select import Kept
from qkv.units import format_bytes


@dataclass(frozen=True)
class PatchedRow:
    """One quantized parameter: bytes before and after, scales included."""

    name: str
    format: str
    before_nbytes: int
    after_nbytes: int


@dataclass(frozen=True)
class PatchReport:
    """The quantized parameters, the modules with matrices that were kept, with the reason, and the parameters that a
    calibration said nothing of."""

    quantized: list[PatchedRow]
    kept: list[Kept]
    uncalibrated: list[str] = field(default_factory=list)

    @property
    def before_nbytes(self) -> int:
        """Bytes of the quantized parameters before."""
        return sum(row.before_nbytes for row in self.quantized)

    @property
    def after_nbytes(self) -> int:
        """Bytes of the quantized parameters now, scales included."""
        return sum(row.after_nbytes for row in self.quantized)

    @property
    def kept_nbytes(self) -> int:
        """Bytes of the matrices that were left as they are."""
        return sum(row.nbytes for row in self.kept)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        totals = {n: getattr(self, n) for n in ("before_nbytes", "after_nbytes", "kept_nbytes")}
        rows = {"quantized": [asdict(r) for r in self.quantized], "kept": [asdict(r) for r in self.kept]}
        return {**rows, "uncalibrated": self.uncalibrated, **totals}

    def __str__(self) -> str:
        formats = ", ".join(sorted({row.format for row in self.quantized}))
        lines = [
            f"{len(self.quantized)} weights quantized to {formats}: "
            f"{format_bytes(self.before_nbytes)} -> {format_bytes(self.after_nbytes)}"
        ]
        reasons: dict[str, list[Kept]] = {}
        for kept in self.kept:
            reasons.setdefault(kept.reason, []).append(kept)
        for reason, rows in reasons.items():
            size = format_bytes(sum(row.nbytes for row in rows))
            names = rows[0].name + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
            lines.append(f"not quantized, {size}: {names} ({reason})")
        lines += uncalibrated_lines(self.uncalibrated)
        return "\n".join(lines)


def uncalibrated_lines(names: Sequence[str]) -> list[str]:
    """A line on the weights whose scales span their groups, for a calibration knows nothing of them; or none."""
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [f"not in the calibration, scales by the largest value: {names[0]}{more}"]
