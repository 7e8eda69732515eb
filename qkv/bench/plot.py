"""Pictures: speed against rows, and time against context."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from qkv.bench.table import Row, Table
from qkv.errors import QkvError

PICTURES: Final = {"linear": "speed", "attention": "median"}
"""The subjects that are drawn, and what is drawn of each against the size that grows."""
LABELS: Final = {"speed": "speed over torch's bf16 product", "median": "milliseconds"}


def check() -> None:
    """Raise where pictures cannot be drawn.

    Raises:
        QkvError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise QkvError("pictures need matplotlib: pip install 'qkv[plot]'")


def draw(folder: Path, tables: Sequence[Table], note: str) -> list[Path]:
    """One PNG a subject into ``folder``; returns their paths. ``note``: the conditions, under the picture."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for table in tables:
        if table.subject not in PICTURES:
            continue
        panels = _panels(table)
        figure = Figure(figsize=(5.2 * len(panels) + 2.4, 4.4), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for (title, rows), axis in zip(panels.items(), axes, strict=True):
            _panel(axis, title, rows, table)
        axes[0].set_ylabel(LABELS[PICTURES[table.subject]])
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
        figure.suptitle(table.title, fontsize=10, x=0.02, horizontalalignment="left")
        figure.supxlabel(note, fontsize=6, x=0.02, horizontalalignment="left")
        paths.append(folder / f"{table.subject}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _panels(table: Table) -> dict[str, list[Row]]:
    """The rows by the sizes that do not grow."""
    found: dict[str, list[Row]] = {}
    for row in table.rows:
        others = {name: value for name, value in row.sizes.items() if name != table.grows}
        named = " ".join(others) if len(others) == 1 else ""
        title = f"{' x '.join(f'{value:,}' for value in others.values())} {named}".strip()
        found.setdefault(title, []).append(row)
    return found


def _panel(axis: Any, title: str, rows: list[Row], table: Table) -> None:
    quantity = PICTURES[table.subject]
    for index, name in enumerate(dict.fromkeys(row.name for row in rows)):
        points = sorted((row.sizes[table.grows], getattr(row, quantity)) for row in rows if row.name == name)
        scale = 1e3 if quantity == "median" else 1.0
        values = [value * scale for _, value in points]
        axis.plot([size for size, _ in points], values, label=name, **_style(name, index))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    ticks = sorted({row.sizes[table.grows] for row in rows})
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.yaxis.set_major_formatter(_tick)
    axis.yaxis.set_minor_formatter(_tick)
    axis.grid(True, which="both", alpha=0.25)
    axis.set_xlabel(table.grows)
    axis.set_title(title)


def _tick(value: float, position: int) -> str:
    """Labels at 1, 2, 5, 10, 20, ..."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _style(name: str, index: int) -> dict[str, Any]:
    """Ours in full lines, others dashed."""
    ours = name.split(":")[0].split()[0] in ("int8", "int4", "int2", "nf4", "exact")
    return {"marker": "o", "markersize": 3.5, "linestyle": "-" if ours else "--", "color": f"C{index % 10}"}
