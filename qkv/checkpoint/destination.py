"""A model directory that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from qkv.checkpoint.index import INDEX_NAME
from qkv.checkpoint.journal import Journal, differences
from qkv.checkpoint.locking import lock_folder
from qkv.checkpoint.paths import contains, resolved
from qkv.errors import CheckpointError

RESUMABLE = (OSError, KeyboardInterrupt, SystemExit, MemoryError)
"""What stops a run that could go on later: a full disk, Ctrl-C, a signal."""
_JOURNAL, _MODEL, _REPLACED = "journal", "model", "replaced"
_OURS = {_JOURNAL, f"{_JOURNAL}.new", _MODEL, _REPLACED}


class Destination:
    """Builds a directory in a hidden folder beside `dst`, and renames it when the block ends without error.

    The hidden folder `.NAME.partial` holds the `model` as far as it is, and a `journal` of what is surely on
    the disk. A run with an `identity` that was killed, or stopped by one of `RESUMABLE`, leaves it there, and a
    run with the same identity finds it again. Any other error removes it; `dst` is as it was in every case.
    With `overwrite` the old directory is moved aside first, put back if the new one cannot take its place, and
    deleted last. While it works it holds a lock, which a killed run gives back.

    >>> with Destination("out", source_dir=Path("model"), overwrite=False) as folder:  # doctest: +SKIP
    ...     (folder / "config.json").write_text("{}")

    Args:
        dst: the directory to make.
        source_dir: what it is made from, which it may not overlap.
        overwrite: replace `dst` if it is a model directory.
        identity: source and settings as JSON, which decide every byte; empty: nothing can be resumed.
        restart: throw away what an earlier run left.

    Raises:
        CheckpointError: `dst` exists and may not be replaced, is a file, or overlaps the source. Checked on
            creation, before any work, and because another run may have been quicker, again at the end. And
            on entering: another run is writing it, or has left work of another identity.
    """

    journal: Journal
    """Of this run, once the block has begun."""
    is_published: bool
    """Whether an earlier run of the same identity was killed after the last rename: nothing is left to do."""

    def __init__(
        self,
        dst: str | Path,
        *,
        source_dir: Path | None = None,
        overwrite: bool = False,
        identity: Mapping[str, Any] | None = None,
        restart: bool = False,
    ) -> None:
        self._final = resolved(Path(dst))
        self._overwrite, self._restart = overwrite, restart
        self._identity = dict(identity or {})
        self._partial = partial_of(dst)
        self._lock = ExitStack()
        if source_dir is not None:
            check_apart(self._final, source_dir)
        if not self._find_published():
            _check_replaceable(self._final, overwrite)

    def __enter__(self) -> Path:
        with ExitStack() as lock:
            lock.enter_context(locked_folder(self._partial, self._final))
            try:
                self.is_published = self._find_published()
                self.journal = self._open_journal()
                if not self.is_published:
                    (self._partial / _MODEL).mkdir(exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"cannot write in {self._final.parent}: {error.strerror}") from error
            self._lock = lock.pop_all()
        return self._partial / _MODEL

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        except BaseException as late:
            error = late
            raise
        finally:
            if not (self._identity and isinstance(error, RESUMABLE)):
                self._remove()
            self._lock.close()

    def keeps_after(self, error: BaseException) -> Path | None:
        """The folder that stays after an error, for a later run to go on with."""
        return self._partial if self._identity and isinstance(error, RESUMABLE) else None

    def _find_published(self) -> bool:
        if self._restart or (self._partial / _MODEL).exists() or not self._final.is_dir():
            return False
        found = Journal.read(self._partial / _JOURNAL)
        return found is not None and found.complete and bool(found.identity) and found.identity == self._identity

    def _open_journal(self) -> Journal:
        path = self._partial / _JOURNAL
        self._restore()
        found = None if self._restart else Journal.read(path)
        if found is not None and found.identity == self._identity != {}:
            return found
        if found is not None and found.identity:
            raise CheckpointError(
                f"{self._partial} holds the unfinished work of another run ({_first(found, self._identity)}); finish "
                "that one, or begin anew with --restart"
            )
        self._remove_contents()
        return Journal.create(path, self._identity)

    def _publish(self) -> None:
        if self.is_published:
            return
        model = self._partial / _MODEL
        _check_replaceable(self._final, self._overwrite)
        _sync_tree(model)
        self.journal.record(complete=True)
        if self._final.exists():
            self._replace(model)
        else:
            model.rename(self._final)
        _sync(self._final.parent)

    def _replace(self, model: Path) -> None:
        try:
            self._final.rename(self._partial / _REPLACED)
            model.rename(self._final)
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        """Put the old directory back where the new one did not take its place."""
        replaced = self._partial / _REPLACED
        if replaced.exists() and not self._final.exists():
            replaced.rename(self._final)

    def _remove(self) -> None:
        self._restore()
        for name in (_MODEL, _REPLACED):
            shutil.rmtree(self._partial / name, ignore_errors=True)
        shutil.rmtree(self._partial, ignore_errors=True)

    def _remove_contents(self) -> None:
        names = {path.name for path in self._partial.iterdir()}
        if names - _OURS:
            raise CheckpointError(
                f"{self._partial} is needed to work in and holds {sorted(names - _OURS)[0]!r}, which no run left "
                "there; move it away"
            )
        (self._partial / _JOURNAL).unlink(missing_ok=True)  # first: without it, what remains is no one's work
        for name in (_MODEL, _REPLACED):
            shutil.rmtree(self._partial / name, ignore_errors=True)


def partial_of(dst: str | Path) -> Path:
    """Where work on ``dst`` waits that is not finished."""
    final = resolved(Path(dst))
    return final.parent / f".{final.name}.partial"


@contextmanager
def locked_folder(folder: Path, dst: str | Path) -> Iterator[None]:
    """A folder for the work on ``dst`` of this run alone, made where it is missing.

    Raises:
        CheckpointError: another run has it, or it cannot be made.
    """
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise CheckpointError(f"another run is writing {dst} just now; wait for it, or stop it") from None
    except OSError as error:
        raise CheckpointError(f"cannot write in {folder.parent}: {error.strerror}") from error
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _first(found: Journal, identity: Mapping[str, Any]) -> str:
    return next(iter(differences(found.identity, identity)), "the same settings")


def check_apart(dst: Path, source_dir: Path) -> None:
    """Raise where writing the one would change the other."""
    if contains(source_dir, dst) or contains(dst, source_dir):
        raise CheckpointError(f"{dst} and the source {source_dir} overlap; choose a destination apart from the source")


def _check_replaceable(dst: Path, overwrite: bool) -> None:
    if not dst.exists():
        return
    if not dst.is_dir():
        raise CheckpointError(f"{dst} exists and is not a directory; choose another destination")
    if not overwrite:
        raise CheckpointError(f"{dst} exists already; choose another destination, or pass overwrite (--overwrite)")
    if any(dst.iterdir()) and not _looks_like_model(dst):
        raise CheckpointError(
            f"{dst} does not look like a model directory (config.json, *.safetensors) and is not replaced; "
            "choose another destination, or delete it yourself"
        )


def _looks_like_model(directory: Path) -> bool:
    weights = [*directory.glob("*.safetensors"), *directory.glob(INDEX_NAME)]
    return (directory / "config.json").is_file() and bool(weights)


def _sync_tree(directory: Path) -> None:
    """Put files and folders on the disk, so that a crash after the rename cannot leave an empty model."""
    for path in directory.rglob("*"):
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    if os.name != "posix":  # elsewhere neither a folder nor a file opened for reading can be synced
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
