"""``merge_checkpoint``: parts that several machines wrote, joined to one model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from qkv.checkpoint.auxiliary import copy_auxiliary
from qkv.checkpoint.destination import Destination, check_apart
from qkv.checkpoint.header import TensorEntry, read_header
from qkv.checkpoint.index import write_index
from qkv.checkpoint.parts import Part, check_complete, read_part
from qkv.checkpoint.paths import check_inside, model_home
from qkv.checkpoint.weight_files import PART_NAME
from qkv.errors import CheckpointError, shown


def merge_checkpoint(parts: Sequence[str | Path], dst: str | Path, *, overwrite: bool = False) -> None:
    """Join the parts of one model that runs with ``shard="1/N"`` … ``"N/N"`` wrote; the same bytes as one run's.

    Their files are linked where the file system can (no copy, no more room taken), else copied. The parts stay
    as they are and may be deleted afterwards.

    Args:
        parts: the folders of all parts, in any order.
        dst: the directory to make; it appears whole or not at all.
        overwrite: replace ``dst`` if it is a model directory.

    Raises:
        CheckpointError: a part that is missing, there twice, damaged, or of another run.
    """
    found = [read_part(Path(part)) for part in parts]
    check_complete(found)
    entries = _entries(found)
    for part in found:
        check_apart(Path(dst), part.path)
    first = found[0]
    with Destination(dst, overwrite=overwrite) as folder:
        copy_auxiliary(first.path, folder)
        (folder / PART_NAME).unlink()
        shutil.copyfile(first.path / "config.json", folder / "config.json")
        for part in found:
            for name in part.own_files:
                _link_or_copy(part.path / name, folder / name)
        if len(first.files) > 1:
            weight_map = {name: entry.path.name for name, entry in entries.items()}
            write_index(folder, weight_map, sum(entry.nbytes for entry in entries.values()))


def _entries(parts: Sequence[Part]) -> dict[str, TensorEntry]:
    """All tensors of all parts, their files checked."""
    merged: dict[str, TensorEntry] = {}
    for part in parts:
        for name in (*part.own_files, "config.json"):
            check_inside(part.path / name, model_home(part.path))
            if not (part.path / name).is_file():
                raise CheckpointError(f"{part.path} lacks {name}; write part {part} again")
        for name in part.own_files:
            entries, _ = read_header(part.path / name)
            for tensor in entries.keys() & merged.keys():
                raise CheckpointError(f"{shown(tensor)} is in both {merged[tensor].path} and {part.path / name}")
            merged |= entries
    return merged


def _link_or_copy(path: Path, target: Path) -> None:
    try:
        os.link(path.resolve(), target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, target)
