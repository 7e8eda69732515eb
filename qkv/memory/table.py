"""A footprint as a table for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from qkv.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from qkv.memory.compare import Cell, Comparison
    from qkv.memory.items import Footprint

KINDS = {"state": "a state of one size", "none": "no cache of their own"}


def table(footprint: Footprint) -> str:
    """Rows by role and format, totals, and what is not quantized; MB and GB are powers of ten."""
    from rich.table import Table

    out = Table(box=None, pad_edge=False)
    for heading in ("weights", "format", "dtype"):
        out.add_column(heading)
    for heading in ("tensors", "parameters", "bits/weight", "scales", "size"):
        out.add_column(heading, justify="right")
    for row in footprint.rows:
        scales = format_bytes(row.overhead_nbytes) if row.overhead_nbytes else ""
        bits = f"{row.bits_per_weight:.3f}"
        counts = (f"{row.num_tensors:,}", f"{row.num_parameters:,}", bits, scales, format_bytes(row.nbytes))
        out.add_row(row.role, row.format or "-", row.dtype, *counts)
    totals = (f"{footprint.num_parameters:,}", f"{footprint.bits_per_weight:.3f}")
    sizes = (format_bytes(footprint.overhead_nbytes), format_bytes(footprint.weight_nbytes))
    out.add_row("all weights", "", "", f"{sum(r.num_tensors for r in footprint.rows):,}", *totals, *sizes)
    for name, nbytes in _others(footprint):
        out.add_row(name, "", "", "", "", "", "", format_bytes(nbytes))
    lines = _printed(out)
    if footprint.kv_note:
        lines.append(footprint.kv_note)
    return "\n".join([*lines, *_cache_lines(footprint), *_step_lines(footprint), *_kept_lines(footprint)])


def _printed(out: Table) -> list[str]:
    from rich.console import Console

    stream = io.StringIO()
    Console(file=stream, width=100, color_system=None).print(out)
    return [line.rstrip() for line in stream.getvalue().rstrip().splitlines()]


def comparison_table(comparison: Comparison) -> str:
    """Formats of weights as rows, codecs of the cache as columns; and what fits, where a memory was named."""
    first = comparison.choices[0]
    caches = [cell.cache for cell in first.cells]
    headings = [f"peak, {cache} KV" for cache in caches]
    rows = []
    for choice in comparison.choices:
        part = f"{100 * choice.nbytes / max(first.nbytes, 1):.0f}%"
        peaks = [format_bytes(cell.peak_nbytes) for cell in choice.cells]
        rows.append([choice.weights, format_bytes(choice.nbytes), part, f"{choice.bits_per_weight:.2f}", *peaks])
    lines = _grid(["weights", "size", f"of {first.weights}", "bits/weight", *headings], rows)
    if caches:
        sizes = ", ".join(f"{cell.cache} {format_bytes(cell.kv_nbytes)}" for cell in first.cells)
        lines.append(f"KV cache of {comparison.batch} x {comparison.context or 0:,} tokens: {sizes}")
    if caches and comparison.memory_nbytes is not None:
        memory = format_bytes(comparison.memory_nbytes)
        fits = [[choice.weights, *map(_fit, choice.cells)] for choice in comparison.choices]
        lines += ["", f"fits {memory}: longest context at batch {comparison.batch} / largest batch at that context"]
        lines += _grid(["weights", *(f"{cache} KV" for cache in caches)], fits)
    return "\n".join(lines + ([comparison.note] if comparison.note else []))


def _fit(cell: Cell) -> str:
    tokens = "any" if cell.longest_context is None else f"{cell.longest_context:,}"
    return f"{tokens} / {'any' if cell.largest_batch is None else f'{cell.largest_batch:,}'}"


def _grid(headings: list[str], rows: list[list[str]]) -> list[str]:
    from rich.table import Table

    out = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        out.add_column(heading, justify="right" if number else "left")
    for row in rows:
        out.add_row(*row)
    return _printed(out)


def _others(footprint: Footprint) -> list[tuple[str, int]]:
    rows = [("buffers", footprint.buffer_nbytes), ("storage no weight uses", footprint.unused_nbytes)]
    rows.append(("copies that kernels keep", footprint.packed_nbytes))
    if footprint.kv_nbytes is not None:
        rows.append(("KV cache", footprint.kv_nbytes))
    rows = [(name, nbytes) for name, nbytes in rows if nbytes]
    return [*rows, ("total", footprint.total_nbytes)] if rows else []


def _cache_lines(footprint: Footprint) -> list[str]:
    """What each kind of layer keeps."""
    lines = []
    for row in footprint.kv_rows:
        name = ", ".join(part for part in (KINDS.get(row.kind, row.kind), row.heads) if part)
        grows = f", {format_bytes(row.token_nbytes)} a token" if row.token_nbytes else ""
        lines.append(f"  {row.num_layers} layers {name}{grows}: {format_bytes(row.nbytes)}")
    return lines


def _step_lines(footprint: Footprint) -> list[str]:
    """Workspace, peak, and what fits."""
    step, fit, lines = footprint.workspace, footprint.fit, []
    if step is not None and footprint.peak_nbytes is not None:
        stages = (("attention", step.attention_nbytes), ("products", step.products_nbytes))
        parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in (*stages, ("logits", step.logits_nbytes)))
        lines.append(f"workspace of a step, about {format_bytes(step.nbytes)}: the most of {parts}")
        lines.append(f"peak, reading {step.chunk:,} tokens at a time: about {format_bytes(footprint.peak_nbytes)}")
    if fit is not None:
        tokens = "any context" if fit.longest_context is None else f"{fit.longest_context:,} tokens"
        rows = "any number of" if fit.largest_batch is None else f"{fit.largest_batch:,}"
        memory, context = format_bytes(fit.memory_nbytes), footprint.context or 0
        lines.append(f"in {memory} fit {tokens} at batch {footprint.batch}, and {rows} sequences of {context:,} tokens")
    return lines + _measured_lines(footprint)


def _measured_lines(footprint: Footprint) -> list[str]:
    """Measured beside predicted."""
    found = footprint.measured
    if found is None:
        return []
    peak, kv = footprint.peak_nbytes, footprint.kv_nbytes
    off = "" if peak is None else f" (predicted {format_bytes(peak)}, {100 * (peak / found.peak_nbytes - 1):+.1f}%)"
    same = "as predicted" if kv == found.kv_nbytes else "not as predicted" if kv else "not predicted"
    return [
        f"measured by {found.by} in {found.seconds:.1f} s: KV cache {format_bytes(found.kv_nbytes)} ({same}), "
        f"peak {format_bytes(found.peak_nbytes)}{off}"
    ]


def _kept_lines(footprint: Footprint) -> list[str]:
    """Matrices left unquantized, grouped by reason, the largest group first; none where nothing is quantized."""
    if not any(row.format for row in footprint.rows):
        return []
    groups: dict[str, list[tuple[str, int]]] = {}
    for note in footprint.kept:
        groups.setdefault(note.reason, []).append((note.name, note.nbytes))
    lines = []
    for reason, members in sorted(groups.items(), key=lambda item: -sum(n for _, n in item[1])):
        size = format_bytes(sum(nbytes for _, nbytes in members))
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        lines.append(f"not quantized, {size}: {members[0][0]}{more}" + (f" ({reason})" if reason else ""))
    return lines
