"""A progress bar on a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any


class Progress:
    """``with Progress("quantizing", 210) as progress: progress.advance("layers.0.q_proj")``.

    Args:
        title: what is being done.
        total: how much of it there is, in the units that ``advance`` counts.
    """

    def __init__(self, title: str, total: int) -> None:
        self._title, self._total = title, total
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                TextColumn("[dim]{task.fields[item]}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, item="")
        return self

    def advance(self, item: str = "", amount: int = 1) -> None:
        """Count ``amount`` more as done; ``item`` names what is being worked on."""
        if self._bar is not None:
            self._bar.update(self._task, advance=amount, item=item)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
