"""A footprint as a table for people."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from qkv.units import format_bytes

if TYPE_CHECKING:
    from qkv.memory.items import Footprint


def table(footprint: Footprint) -> str:
    """Rows by role and format, totals, and what is not quantized; MB and GB are powers of ten."""
    from rich.console import Console
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
    stream = io.StringIO()
    Console(file=stream, width=100, color_system=None).print(out)
    lines = [line.rstrip() for line in stream.getvalue().rstrip().splitlines()]
    if footprint.kv_note:
        lines.append(footprint.kv_note)
    return "\n".join([*lines, *_kept_lines(footprint)])


def _others(footprint: Footprint) -> list[tuple[str, int]]:
    rows = [("buffers", footprint.buffer_nbytes), ("storage no weight uses", footprint.unused_nbytes)]
    rows.append(("copies that kernels keep", footprint.packed_nbytes))
    if footprint.kv_nbytes is not None:
        rows.append(("KV cache", footprint.kv_nbytes))
    rows = [(name, nbytes) for name, nbytes in rows if nbytes]
    return [*rows, ("total", footprint.total_nbytes)] if rows else []


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
