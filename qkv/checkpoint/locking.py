"""One run at a time in a folder."""

from __future__ import annotations

import os
from pathlib import Path

NO_LOCKS = ("ENOSYS", "ENOTSUP", "ENOLCK")
"""File systems without locks, as some clusters mount them: there, two runs at once are the user's to avoid."""


def lock_folder(folder: Path) -> int | None:
    """Make a folder and lock it until the descriptor that is returned is closed, or the process ends, killed too.

    Returns:
        The descriptor; None on a system without such locks (Windows).

    Raises:
        BlockingIOError: another process holds it.
        OSError: the folder cannot be made, or is a link.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        if os.name != "posix":
            return None
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _lock(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        if _is_still(descriptor, folder):
            return descriptor
        os.close(descriptor)  # the run that had it removed it meanwhile


def _lock(descriptor: int) -> None:
    import errno
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in [getattr(errno, name) for name in NO_LOCKS]:
            raise


def _is_still(descriptor: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
