"""Which pieces of a job go into which file, and which of the files are whose."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qkv.checkpoint.job import Job, Target
from qkv.checkpoint.shards import parse_size, plan_shards, shard_names
from qkv.checkpoint.writer import TensorSpec
from qkv.errors import QkvError, shown

_PART = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Shard:
    """One file to write: its name, its tensors, and the pieces of the job that they are."""

    file: str
    specs: tuple[TensorSpec, ...]
    pieces: tuple[str, ...]


def plan_job(job: Job, target: Target) -> list[Shard]:
    """All shards of a job, in order.

    Raises:
        QkvError: a shard size that is none.
    """
    owner = {spec.name: name for name, piece in job.pieces.items() for spec in piece.specs}
    specs = [spec for piece in job.pieces.values() for spec in piece.specs]
    shards = plan_shards(specs, parse_size(target.max_shard_size), group_of=owner.__getitem__)
    return [
        Shard(file, tuple(shard), tuple(dict.fromkeys(owner[spec.name] for spec in shard)))
        for file, shard in zip(shard_names(len(shards)), shards, strict=True)
    ]


def parse_part(text: str) -> tuple[int, int]:
    """``"2/8"`` as ``(2, 8)``.

    Raises:
        QkvError: not of this form, or beyond the last part.
    """
    match = _PART.fullmatch(text)
    number, count = (int(match[1]), int(match[2])) if match else (1, 0)
    if number > count:
        raise QkvError(f"{shown(text)} is not a part; write the second of eight as 2/8")
    return number, count


def part_of(shards: list[Shard], part: str | None) -> list[Shard]:
    """The shards of one part: every N-th, so that parts are about as large as each other.

    Raises:
        QkvError: a part without a shard.
    """
    if part is None:
        return shards
    number, count = parse_part(part)
    if count > len(shards):
        raise QkvError(
            f"{count} parts cannot share {len(shards)} files; make them smaller (--max-shard-size), or take at most "
            f"{len(shards)} parts"
        )
    return shards[number - 1 :: count]


def check_workers(workers: int, shards: list[Shard]) -> None:
    """Raise QkvError unless each worker has a shard to write."""
    if not 1 <= workers <= max(len(shards), 1):
        raise QkvError(
            f"{workers} workers cannot share {len(shards)} files; take 1 to {len(shards)} workers, or make the files "
            "smaller (--max-shard-size)"
        )
