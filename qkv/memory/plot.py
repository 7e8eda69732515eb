"""The memory report as a picture: stacks by format, and memory against context."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from qkv.errors import QkvError, shown
from qkv.memory.compare import Choice, Comparison
from qkv.units import format_bytes

COLOURS: Final = {
    "quantized weights": "#0072B2",
    "scales": "#56B4E9",
    "not quantized": "#999999",
    "KV cache": "#E69F00",
    "a step": "#009E73",
}
"""Okabe and Ito's colours, told apart by all eyes; the parts of a stack from the left."""
LINES: Final = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#E69F00")
MARKERS: Final = "osD^vP"
POINTS: Final = 8
NEAR: Final = 1.6
"""A memory is drawn where it is at most so many times what the panel shows."""
ENDINGS: Final = (".png", ".svg", ".html")


def check_target(path: Path) -> None:
    """Raise where a picture cannot be drawn there, before any work is done.

    Raises:
        QkvError: an ending that is none of a picture's, no such folder, or matplotlib is not installed.
    """
    if path.suffix.lower() not in ENDINGS:
        raise QkvError(f"{shown(str(path))} names no kind of picture; end it in {', '.join(ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise QkvError(f"{path.absolute().parent} is not a folder; make it first")
    if importlib.util.find_spec("matplotlib") is None:
        raise QkvError("pictures need matplotlib: pip install 'qkv[plot]'")


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture: a PNG, an SVG, or one HTML page that holds the picture and the table.

    Raises:
        QkvError: see :func:`check_target`; or a comparison without a context, or whose cache is not known.
    """
    check_target(path)
    if comparison.context is None or not comparison.choices[0].cells:
        raise QkvError(comparison.note or "a picture is drawn for a context; say how many tokens")
    figure = _figure(comparison)
    stream = io.BytesIO()
    if path.suffix.lower() == ".png":
        figure.savefig(stream, format="png", dpi=130)
    else:
        figure.savefig(stream, format="svg", metadata={"Date": None})
    data = stream.getvalue()
    if path.suffix.lower() == ".html":
        data = _page(comparison, data.decode()).encode()
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _figure(comparison: Comparison) -> Any:
    from matplotlib.figure import Figure

    height = 2.6 + 0.42 * len(comparison.choices)
    figure = Figure(figsize=(12, max(4.6, height)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _stacks(left, comparison)
    _curves(right, comparison)
    memory = f"; dotted: {format_bytes(comparison.memory_nbytes)}" if comparison.memory_nbytes else ""
    figure.suptitle(f"{comparison.name}: memory{memory}", fontsize=13, x=0.01, horizontalalignment="left")
    return figure


def _unit(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def _stacks(axis: Any, comparison: Comparison) -> None:
    """One bar a format: codes, scales, what stays, the cache, a step."""
    bars = [(choice, _parts(choice)) for choice in comparison.choices]
    most = max(sum(parts.values()) for _, parts in bars)
    size, unit = _unit(most)
    memory = _near(comparison.memory_nbytes, most)
    for row, (_, parts) in enumerate(bars):
        start = 0.0
        for name, nbytes in parts.items():
            axis.barh(
                row, nbytes / size, left=start, height=0.62, color=COLOURS[name], label=name if row == 0 else None
            )
            start += nbytes / size
        label = axis.text(start + 0.01 * most / size, row, format_bytes(sum(parts.values())), va="center", fontsize=9)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0})
    axis.set_yticks(range(len(bars)), [choice.weights for choice, _ in bars])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.17 * max(most, memory) / size)
    axis.set_xlabel(unit)
    cache = comparison.choices[0].cells[0].cache
    tokens = f"{comparison.batch:,} x {comparison.context or 0:,} tokens"
    axis.set_title(f"weights by format, with {tokens} of {cache} KV cache", fontsize=10)
    if memory:
        axis.axvline(memory / size, color="black", linestyle=":", linewidth=1.2)
    axis.grid(True, axis="x", alpha=0.25)
    axis.set_axisbelow(True)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(COLOURS), frameon=False, fontsize=8.5)


def _near(memory_nbytes: int | None, most: float) -> int:
    """The memory, where it can be drawn without making all else small; else 0."""
    return memory_nbytes if memory_nbytes and memory_nbytes <= NEAR * most else 0


def _parts(choice: Choice) -> dict[str, int]:
    cell = choice.cells[0]
    names = (choice.codes_nbytes, choice.scales_nbytes, choice.plain_nbytes, cell.kv_nbytes, cell.workspace_nbytes)
    return dict(zip(COLOURS, names, strict=True))


def _curves(axis: Any, comparison: Comparison) -> None:
    """Peaks against context: each codec of the cache, with the weights as they are and at their smallest."""
    contexts = _contexts(comparison)
    first = comparison.choices[0]
    least = min(comparison.choices, key=lambda choice: choice.nbytes)
    chosen: Sequence[tuple[Choice, str]] = [(first, "-")] + ([(least, "--")] if least is not first else [])
    peaks = {
        (choice.weights, cache): [forecast.peak_nbytes(tokens, comparison.batch) for tokens in contexts]
        for choice, _ in chosen
        for cache, forecast in choice.forecasts.items()
    }
    most = max(max(values) for values in peaks.values())
    size, unit = _unit(most)
    for choice, style in chosen:
        for index, cache in enumerate(choice.forecasts):
            values = [nbytes / size for nbytes in peaks[choice.weights, cache]]
            look = {"color": LINES[index % len(LINES)], "marker": MARKERS[index % len(MARKERS)], "linestyle": style}
            axis.plot(contexts, values, markersize=4, label=f"{cache} cache, weights {choice.weights}", **look)
    if memory := _near(comparison.memory_nbytes, most):
        axis.axhline(memory / size, color="black", linestyle=":", linewidth=1.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [_short(tokens) for tokens in contexts])
    axis.minorticks_off()
    axis.set_ylim(0, None)
    axis.set_xlabel(f"tokens of context, {comparison.batch:,} sequence{'s' if comparison.batch > 1 else ''}")
    axis.set_ylabel(unit)
    axis.set_title("peak memory against context", fontsize=10)
    axis.grid(True, alpha=0.25)
    axis.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def _contexts(comparison: Comparison) -> list[int]:
    """Powers of two around the context asked for, which is one of them or lies between."""
    top = max(4, (4 * (comparison.context or 1)).bit_length() - 1)
    return [2**power for power in range(max(0, top - POINTS + 1), top + 1)]


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _page(comparison: Comparison, svg: str) -> str:
    """One HTML page that asks nothing of the network."""
    title = escape(f"{comparison.name}: memory")
    picture = svg[svg.index("<svg") :]
    style = "body{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em}svg{width:100%;height:auto}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{style}pre{{overflow-x:auto}}</style></head>\n<body><h1>{title}</h1>\n{picture}\n"
        f"<pre>{escape(str(comparison))}</pre></body></html>\n"
    )
