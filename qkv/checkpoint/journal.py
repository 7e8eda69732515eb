"""How far a run has come, in a file that survives it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qkv.checkpoint.strict_json import MAX_JSON_NBYTES, parse_object
from qkv.errors import CheckpointError, shown


@dataclass
class Journal:
    """What a run is and what it has put on the disk.

    The file holds one JSON object a line: first the run's identity, then a line a step, each written when
    what it claims is on the disk. A last line without its end was torn by a crash and counts for nothing.

    Attributes:
        path: the file.
        identity: source and settings, as JSON.
        done: pieces complete in each shard, by the shard's name.
        left: files of the source that were not copied, with the reason.
        complete: whether the whole model is on the disk.
        end: where the next line goes; a torn line behind it is overwritten.
    """

    path: Path
    identity: Mapping[str, Any]
    done: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    complete: bool = False
    end: int = 0

    @classmethod
    def create(cls, path: Path, identity: Mapping[str, Any]) -> Journal:
        """Begin a journal; the file appears with its first line whole."""
        new = path.with_name(f"{path.name}.new")
        end = new.write_bytes(_line({"identity": identity}))
        new.replace(path)
        return cls(path, identity, end=end)

    @classmethod
    def read(cls, path: Path) -> Journal | None:
        """The journal of an earlier run, or None where there is none.

        Raises:
            CheckpointError: a file that no run wrote.
        """
        if not path.is_file():
            return None
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_NBYTES)
        lines = raw.split(b"\n")[:-1]
        try:
            first, *steps = [parse_object(line, f"line {i}", unique_keys=True) for i, line in enumerate(lines, 1)]
            journal = cls(path, _checked(first.get("identity"), dict), end=sum(len(line) + 1 for line in lines))
            for step in steps:
                journal._take(step)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged ({error}); begin anew with --restart, or remove the folder {path.parent}"
            ) from error
        return journal

    def record(self, **step: Any) -> None:
        """Write down a step: ``shard=NAME, pieces=N``, ``left={...}`` or ``complete=True``."""
        self._take(step)
        with self.path.open("r+b") as file:
            file.truncate(self.end)
            file.seek(self.end)
            self.end += file.write(_line(step))

    def _take(self, step: Mapping[str, Any]) -> None:
        if "shard" in step:
            self.done[_checked(step["shard"], str)] = _checked(step.get("pieces"), int)
        if "left" in step:
            self.left = _checked(step["left"], dict)
        self.complete = self.complete or step.get("complete") is True


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def differences(before: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> list[str]:
    """What differs between two identities, as ``"settings.format was 'int8' and is 'nf4'"``."""
    found = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{where}{key}.")
        elif old != new:
            found.append(f"{where}{key} was {shown(old)} and is {shown(new)}")
    return found


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise CheckpointError(f"{shown(value)} is no {kind.__name__}")
    return value
