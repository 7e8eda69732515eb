"""What a part of a model says of itself, so that only parts of one model are joined."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qkv.checkpoint.identity import without_times
from qkv.checkpoint.journal import differences
from qkv.checkpoint.paths import check_plain_name
from qkv.checkpoint.strict_json import read_object
from qkv.checkpoint.weight_files import PART_NAME
from qkv.errors import CheckpointError, QkvError, shown


@dataclass(frozen=True)
class Part:
    """A directory that holds every N-th shard of a model.

    Attributes:
        path: the directory.
        number: from 1.
        count: parts in all.
        files: of the whole model, in order.
        identity: source and settings of the run.
    """

    path: Path
    number: int
    count: int
    files: Sequence[str]
    identity: Mapping[str, Any]

    @property
    def own_files(self) -> Sequence[str]:
        """The files that this part holds."""
        return self.files[self.number - 1 :: self.count]

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


def write_part(folder: Path, part: Part) -> None:
    """Say in a folder that it is a part."""
    content = {"part": part.number, "of": part.count, "files": list(part.files), "identity": part.identity}
    (folder / PART_NAME).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_part(path: Path) -> Part:
    """What a folder says of itself.

    Raises:
        CheckpointError: it is no part, or what it says is damaged.
    """
    file = path / PART_NAME
    if not file.is_file():
        raise CheckpointError(f"{path} is no part of a model: it has no {PART_NAME}; name what --shard I/N wrote")
    content = read_object(file, unique_keys=True)
    number, count, files, identity = (content.get(key) for key in ("part", "of", "files", "identity"))
    if type(number) is not int or type(count) is not int or not 1 <= number <= count:
        raise CheckpointError(f"{file} is damaged: part {shown(number)} of {shown(count)}; write the part again")
    if not isinstance(files, list) or len(files) < count or len(set(map(str, files))) < len(files):
        raise CheckpointError(f"{file} is damaged: files {shown(files)}; write the part again")
    for name in files:
        if not isinstance(name, str) or "/" in name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{file} names {shown(name)}, which is no file of a part; write the part again")
        check_plain_name(name, str(file))
    if not isinstance(identity, dict) or not isinstance(identity.get("source"), dict):
        raise CheckpointError(f"{file} is damaged: identity {shown(identity)}; write the part again")
    return Part(path, number, count, files, identity)


def check_complete(parts: Sequence[Part]) -> None:
    """Raise unless the parts are all of one model.

    Raises:
        QkvError: none; one is missing, given twice, or from another run.
    """
    if not parts:
        raise QkvError("no parts to join; name the folders of all `--shard I/N` runs")
    first, *others = parts
    for part in others:
        _check_alike(first, part)
    seen: dict[int, Part] = {}
    for part in parts:
        if part.number in seen:
            raise CheckpointError(f"part {part} is there twice: {seen[part.number].path} and {part.path}; name one")
        seen[part.number] = part
    missing = [f"{number}/{first.count}" for number in range(1, first.count + 1) if number not in seen]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise CheckpointError(
            f"of {first.count} parts {len(missing)} are missing: {', '.join(missing[:5])}{more}; write them, or name "
            "their folders too"
        )


def _check_alike(first: Part, part: Part) -> None:
    found = differences(without_times(first.identity), without_times(part.identity))
    if part.count != first.count:
        found.insert(0, f"parts were {first.count} and are {part.count}")
    elif not found and list(part.files) != list(first.files):
        found.append("the files differ")
    if found:
        raise CheckpointError(f"{part.path} is not of the same run as {first.path}: {found[0]}; write that part again")
