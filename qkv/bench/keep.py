"""Tables kept in a file, and what moved since another file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from qkv.bench.table import Row, Table, format_seconds, grid
from qkv.errors import QkvError

NOISE: Final = 0.1
"""Speeds that differ by less are not said to have moved: a shared machine moves them by so much."""


def save(path: Path, machine: dict[str, Any], tables: Sequence[Table]) -> None:
    """Write the tables with their conditions; the file appears whole."""
    text = json.dumps({"machine": machine, "tables": [table.to_dict() for table in tables]}, indent=1) + "\n"
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[Table]]:
    """Undo :func:`save`.

    Raises:
        QkvError: not such a file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["machine"]), [Table.from_dict(table) for table in found["tables"]]
    except FileNotFoundError as error:
        raise QkvError(f"{path} is not there; write it first with --json {path}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise QkvError(f"{path} is no file of measurements that --json wrote") from error


def moved(before: tuple[dict[str, Any], list[Table]], machine: dict[str, Any], tables: Sequence[Table]) -> str:
    """The rows whose speed over the yardstick moved by more than the noise, the largest first."""
    old = {_key(table, row): row for table in before[1] for row in table.rows}
    pairs = [(table, row, old[_key(table, row)]) for table in tables for row in table.rows if _key(table, row) in old]
    found = sorted(pairs, key=lambda pair: -abs(_change(pair[2], pair[1])))
    lines = [
        [table.subject, _at(row), row.name, f"{then.speed:.2f}x", f"{row.speed:.2f}x", f"{_change(then, row):+.0%}"]
        + [format_seconds(then.median), format_seconds(row.median)]
        for table, row, then in found
        if abs(_change(then, row)) > NOISE
    ]
    said = [f"of {len(pairs)} rows that both have, {len(lines)} moved by more than {NOISE:.0%}"]
    if changed := [name for name in machine if machine[name] != before[0].get(name)]:
        said.append("the conditions differ: " + ", ".join(f"{n} {before[0].get(n)} -> {machine[n]}" for n in changed))
    if lines:
        said.append(grid(["", "", "", "speed then", "now", "", "median then", "now"], lines))
    return "\n".join(said)


def _key(table: Table, row: Row) -> tuple[object, ...]:
    return (table.subject, row.name, *sorted(row.sizes.items()))


def _change(then: Row, now: Row) -> float:
    return now.speed / then.speed - 1


def _at(row: Row) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in row.sizes.items())
