"""Data is put on the disk while the next is computed, and only then is it said to be done."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

from qkv.checkpoint.writer import StreamWriter

SYNC_NBYTES = 16 * 10**6
"""After so many new bytes they are put on the disk: what a crash can lose of a file, twice at most."""


class Syncer:
    """Syncs a file in the background and reports how many pieces of it are surely there.

    Args:
        writer: of the file.
        report: called from another thread, with what `wrote` was given before the sync began.
    """

    def __init__(self, writer: StreamWriter, report: Callable[[int], None]) -> None:
        self._writer, self._report = writer, report
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self._num_pieces = self._unsynced_nbytes = 0

    def wrote(self, num_pieces: int, nbytes: int) -> None:
        """Say that `num_pieces` are written in all, the last of `nbytes`; OSError where a sync has failed."""
        self._num_pieces = num_pieces
        self._unsynced_nbytes += nbytes
        busy = self._pending is not None and not self._pending.done()
        if self._unsynced_nbytes >= SYNC_NBYTES and not busy:
            self._settle()
            self._unsynced_nbytes = 0
            self._pending = self._pool.submit(self._sync, num_pieces)

    def __enter__(self) -> Syncer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._settle()
            elif self._num_pieces:  # stopped, not killed: nothing that is done has to be done again
                with suppress(OSError):
                    self._settle()
                    self._sync(self._num_pieces)
        finally:
            self._pool.shutdown()

    def _sync(self, num_pieces: int) -> None:
        self._writer.sync()
        self._report(num_pieces)

    def _settle(self) -> None:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
