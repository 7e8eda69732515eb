"""A subject's table: what was measured, beside what, and how the cost grows."""

from __future__ import annotations

import io
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qkv.bench.timing import Entrant, Measured

Sizes = dict[str, int]


@dataclass(frozen=True)
class Row:
    """One entrant at one size.

    Args:
        name: the entrant.
        sizes: what it was given: ``{"out": 4096, "in": 4096, "rows": 1}``.
        median, fastest: seconds a call.
        speed: of the yardstick's, median over the rounds of the ratio within a round; ``fastest_speed``: ratio
            of the fastest calls, the sounder of the two where others use the machine.
        share: bytes a second over those that plain reading reached in the same run.
        of_ideal: speed over a bf16 product that reads at that bandwidth and costs nothing else.
        numbers: what else there is to say, by heading: ``{"tokens/s": 40.1}``.
    """

    name: str
    sizes: Sizes
    median: float
    fastest: float
    speed: float
    fastest_speed: float
    share: float | None = None
    of_ideal: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """What one subject measured.

    Args:
        subject: ``"linear"`` and so on.
        title: what the rows have in common, for people.
        grows: the size whose growth is of interest.
        rows: the yardstick of each size first.
    """

    subject: str
    title: str
    grows: str
    rows: list[Row]

    def __str__(self) -> str:
        return f"{self.subject}: {self.title}\n{grid(*_lines(self))}\n{self.growth()}".rstrip()

    def growth(self) -> str:
        """Time at each size over that at the smallest, a line an entrant; empty where nothing grew."""
        points = sorted({row.sizes[self.grows] for row in self.rows})
        if len(points) < 2:
            return ""
        lines = []
        for others, name in dict.fromkeys((_others(row, self.grows), row.name) for row in self.rows):
            times = {
                r.sizes[self.grows]: r.median for r in self.rows if (_others(r, self.grows), r.name) == (others, name)
            }
            least = times[min(times)]
            lines.append([others, name, *(f"{times[p] / least:.2f}" if p in times else "" for p in points)])
        return f"\ntime over that of the smallest, by {self.grows}\n" + grid(
            ["", "", *(f"{p:,}" for p in points)], lines
        )

    def to_dict(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Table:
        """Undo :meth:`to_dict`."""
        return cls(found["subject"], found["title"], found["grows"], [Row(**row) for row in found["rows"]])


def rows_of(
    entrants: Sequence[Entrant], measured: Measured, sizes: Sizes, *, numbers: Sequence[dict[str, float]] = ()
) -> list[Row]:
    """A row an entrant; the first is the yardstick, and its bytes those of the ideal read."""
    yardstick = measured.turns[0]
    rows = []
    for index, (entrant, turns) in enumerate(zip(entrants, measured.turns, strict=True)):
        fastest = min(turn.fastest for turn in turns)
        share = of_ideal = None
        if measured.bandwidth and entrant.nbytes:
            share = entrant.nbytes / fastest / measured.bandwidth
            of_ideal = entrants[0].nbytes / measured.bandwidth / fastest
        ratios = [base.median / turn.median for base, turn in zip(yardstick, turns, strict=True)]
        rows.append(
            Row(
                entrant.name,
                sizes,
                statistics.median(turn.median for turn in turns),
                fastest,
                statistics.median(ratios),
                min(turn.fastest for turn in yardstick) / fastest,
                share,
                of_ideal,
                dict(numbers[index]) if numbers else {},
            )
        )
    return rows


def _others(row: Row, grows: str) -> str:
    return ", ".join(f"{value:,} {name}" for name, value in row.sizes.items() if name != grows)


def _lines(table: Table) -> tuple[list[str], list[list[str]]]:
    sizes = list(dict.fromkeys(name for row in table.rows for name in row.sizes))
    numbers = list(dict.fromkeys(name for row in table.rows for name in row.numbers))
    optional = {"share of bandwidth": "share", "x ideal bf16": "of_ideal"}
    shown = {
        name: field for name, field in optional.items() if any(getattr(row, field) is not None for row in table.rows)
    }
    headings = [*sizes, "", "median", "speed", "fastest", "speed", *shown, *numbers]
    lines = []
    for row in table.rows:
        cells = [f"{row.sizes[name]:,}" if name in row.sizes else "" for name in sizes]
        cells += [row.name, format_seconds(row.median), f"{row.speed:.2f}x"]
        cells += [format_seconds(row.fastest), f"{row.fastest_speed:.2f}x"]
        cells += ["" if (v := getattr(row, name)) is None else f"{v:.2f}" for name in shown.values()]
        cells += [f"{row.numbers[name]:,.2f}" if name in row.numbers else "" for name in numbers]
        lines.append(cells)
    return headings, lines


def format_seconds(seconds: float) -> str:
    """``0.0123`` as ``"12.3 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 100 else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def grid(headings: list[str], lines: list[list[str]]) -> str:
    """Columns of text, numbers to the right."""
    from rich.console import Console
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False)
    for index, heading in enumerate(headings):
        texts = all(line[index][:1].isalpha() for line in lines)
        grid.add_column(heading, justify="left" if texts else "right", no_wrap=True)
    for line in lines:
        grid.add_row(*line)
    stream = io.StringIO()
    Console(file=stream, width=200, color_system=None, markup=False).print(grid)
    return "\n".join(line.rstrip() for line in stream.getvalue().rstrip("\n").splitlines())
