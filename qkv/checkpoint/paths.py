"""Which paths belong to a model: the question behind every file that is opened, copied or replaced."""

from __future__ import annotations

from pathlib import Path

from qkv.errors import CheckpointError, shown


def resolved(path: Path) -> Path:
    """Return the real path behind all links, which need not exist; CheckpointError for links in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circle, before Python 3.13
        raise CheckpointError(f"cannot follow {path}: {error}") from error


def model_home(directory: Path) -> Path:
    """Return the real folder that a model's files may not leave.

    It is the directory itself, or in a hub cache, where `snapshots/<revision>/` links to `../../blobs/`, the
    `models--<owner>--<name>` folder above it.
    """
    real = resolved(directory)
    for folder in (real, *real.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            return repository
    return real


def is_inside(path: Path, home: Path) -> bool:
    """Say whether the real file behind `path` lies in the real folder `home`."""
    return resolved(path).is_relative_to(home)


def check_inside(path: Path, home: Path) -> None:
    """Refuse a file whose links leave the model's folder: a model may not read its user's other files."""
    if not is_inside(path, home):
        raise CheckpointError(f"{path} is a link out of the model's folder {home}; put the file itself there")


def contains(outer: Path, inner: Path) -> bool:
    """Say whether `inner` is `outer` or lies in it, through links, bind mounts and letter case too."""
    outer, inner = resolved(outer), resolved(inner)
    return any(_same(outer, folder) for folder in (inner, *inner.parents))


def check_plain_name(name: str, where: str) -> None:
    """Refuse a file name that could lead out of the folder it is listed in, by its text alone."""
    if not name.isprintable() or "\\" in name or ":" in name or len(name.encode()) > 255:
        raise CheckpointError(f"{where} names the file {shown(name)}, which is not a plain file name")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise CheckpointError(f"{where} names the file {shown(name)}, which is not inside the model's folder")


def _same(first: Path, second: Path) -> bool:
    if first == second:
        return True
    return first.exists() and second.exists() and first.samefile(second)
