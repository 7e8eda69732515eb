"""What a user can get wrong, as exceptions that say so in one clear line."""

from __future__ import annotations

import reprlib


class QkvError(ValueError):
    """A user's mistake: one line naming value, limit and remedy. The CLI prints it and exits 2."""


class CheckpointError(QkvError):
    """A model directory or file that cannot be read, or may not be written, as asked."""


_SHORT = reprlib.Repr()
_SHORT.maxstring = 160
_SHORT.maxother = 80


def shown(value: object) -> str:
    """Return `repr(value)` cut to one short line: names inside a file may be hostile or a megabyte long.

    >>> shown("model.norm.weight")
    "'model.norm.weight'"
    """
    return _SHORT.repr(value)
