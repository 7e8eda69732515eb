"""A model directory that appears whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from types import TracebackType

from qkv.checkpoint.index import INDEX_NAME
from qkv.checkpoint.paths import contains, resolved
from qkv.errors import CheckpointError


class Destination:
    """Builds a directory under a hidden name beside `dst`, and renames it when the block ends without error.

    Any error, Ctrl-C included, removes the hidden directory and leaves `dst` as it was. With `overwrite` the
    old directory is moved aside first, put back if the new one cannot take its place, and deleted last.

    >>> with Destination("out", source_dir=Path("model"), overwrite=False) as folder:  # doctest: +SKIP
    ...     (folder / "config.json").write_text("{}")

    Raises:
        CheckpointError: `dst` exists and may not be replaced, is a file, or overlaps the source. Checked on
            creation, before any work, and because another run may have been quicker, again at the end.
    """

    def __init__(self, dst: str | Path, *, source_dir: Path | None = None, overwrite: bool = False) -> None:
        self._final = resolved(Path(dst))
        self._overwrite = overwrite
        self._partial = self._hidden_name("partial")
        if source_dir is not None:
            _check_apart(self._final, source_dir)
        _check_replaceable(self._final, overwrite)

    def __enter__(self) -> Path:
        try:
            self._partial.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"cannot write in {self._final.parent}: {error.strerror}") from error
        return self._partial

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._publish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)  # gone already where it was published

    def _publish(self) -> None:
        _check_replaceable(self._final, self._overwrite)
        _sync_tree(self._partial)
        if self._final.exists():
            self._replace()
        else:
            self._partial.rename(self._final)
        _sync(self._final.parent)

    def _replace(self) -> None:
        old = self._hidden_name("replaced")
        try:
            self._final.rename(old)
            self._partial.rename(self._final)
        except BaseException:
            if old.exists() and not self._final.exists():
                old.rename(self._final)
            raise
        shutil.rmtree(old, ignore_errors=True)

    def _hidden_name(self, role: str) -> Path:
        return self._final.parent / f".{self._final.name}.{role}-{secrets.token_hex(4)}"


def _check_apart(dst: Path, source_dir: Path) -> None:
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
