"""``measure``: the subjects one after another, each a table, kept in a file as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from qkv.bench import attention, decode, keep, linear, load, machine, plot, quantize
from qkv.bench.plan import Plan
from qkv.bench.table import Table
from qkv.errors import QkvError

SUBJECTS: Final[dict[str, Callable[[Plan, Callable[[str], object]], Table]]] = {
    "linear": linear.table,
    "attention": attention.table,
    "quantize": quantize.table,
    "load": load.table,
    "decode": decode.table,
}
"""What is measured, by name."""


def measure(
    plan: Plan,
    subjects: Sequence[str] = (),
    *,
    keep_in: Path | None = None,
    compare: Path | None = None,
    pictures: Path | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Iterator[str]:
    """Text to print, a piece as soon as it is known: conditions, a table a subject, what moved.

    Args:
        plan: the sizes.
        subjects: names from :data:`SUBJECTS`; all of them if none is given.
        keep_in: a file for the tables, written again after each.
        compare: such a file of another time.
        pictures: a folder for pictures.
        say: told what is being measured.

    Raises:
        QkvError: an unknown subject; a file that cannot be read or written; all before anything is measured.
    """
    for name in subjects:
        if name not in SUBJECTS:
            raise QkvError(f"{name!r} is no subject; choose from {', '.join(SUBJECTS)}")
    before = None if compare is None else keep.read(compare)
    if keep_in is not None and not keep_in.parent.is_dir():
        raise QkvError(f"{keep_in.parent} is no directory; make it first")
    if pictures is not None:
        plot.check()
    return _measure(plan, subjects or list(SUBJECTS), keep_in, before, pictures, say)


def _measure(
    plan: Plan,
    subjects: Sequence[str],
    keep_in: Path | None,
    before: tuple[dict[str, Any], list[Table]] | None,
    pictures: Path | None,
    say: Callable[[str], object],
) -> Iterator[str]:
    here = machine.describe()
    yield machine.conditions(here) + f"\nmedians of {plan.rounds} rounds in turn"
    tables: list[Table] = []
    for name in subjects:
        tables.append(SUBJECTS[name](plan, lambda text, name=name: say(f"{name}: {text}")))  # type: ignore[misc]
        if keep_in is not None:
            keep.save(keep_in, here, tables)
        yield f"\n{tables[-1]}"
    if before is not None:
        yield "\n" + keep.moved(before, here, tables)
    if pictures is not None:
        for path in plot.draw(pictures, tables, machine.conditions(here)):
            yield f"drawn: {path}"
