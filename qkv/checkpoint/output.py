"""Write a model directory from a source, tensor by tensor: what quantizing and dequantizing have in common."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkv.checkpoint.auxiliary import copy_auxiliary
from qkv.checkpoint.destination import Destination
from qkv.checkpoint.identity import identity_of
from qkv.checkpoint.index import write_index
from qkv.checkpoint.job import Job, Target
from qkv.checkpoint.journal import Journal
from qkv.checkpoint.parts import Part, write_part
from qkv.checkpoint.plan import Shard, check_workers, parse_part, part_of, plan_job
from qkv.checkpoint.shards import parse_size
from qkv.checkpoint.workers import Task, write_shards
from qkv.errors import CheckpointError
from qkv.progress import Progress


def write_model(job: Job, target: Target) -> dict[str, str]:
    """Write what the job says and all that belongs to the source's model; ``target.dst`` appears at the end.

    A run that was killed goes on where it was when it is started again with the same job and target, and
    ends with the same bytes.

    Returns:
        Files of the source that were not copied, with the reason.

    Raises:
        CheckpointError: the source is one file, so that nobody knows what else belongs to it; the
            destination is taken, or holds unfinished work of another job; the disk is full.
    """
    source = job.source
    if not source.path.is_dir():
        raise CheckpointError(f"{source.path} is a file; name the model's directory, whose other files come along")
    shards = plan_job(job, target)
    own = part_of(shards, target.part)
    check_workers(target.workers, own)
    identity = identity_of(job, parse_size(target.max_shard_size), target.part)
    place = Destination(
        target.dst,
        source_dir=source.directory,
        overwrite=target.overwrite,
        identity=identity,
        restart=target.restart,
    )
    try:
        with place as folder:
            if not place.journal.complete:
                _fill(folder, job, own, target.workers, place.journal)
                _finish(folder, job, shards, target.part, identity)
    except OSError as error:
        kept = place.keeps_after(error)
        raise CheckpointError(
            f"{target.dst} is not finished: {error.strerror or error}; what is done is in {kept}: mend that and run "
            "the same again to go on, or remove that folder"
        ) from error
    return place.journal.left


def _fill(folder: Path, job: Job, shards: list[Shard], workers: int, journal: Journal) -> None:
    """Write what is missing of the shards, and all that belongs to the model besides."""
    _clear(folder, {shard.file for shard in shards if journal.done.get(shard.file)})
    journal.record(left=copy_auxiliary(job.source.directory, folder))
    tasks = [Task(shard, _checked_done(shard, journal)) for shard in shards]
    names = [name for shard in shards for name in shard.pieces]
    with Progress(job.title, sum(job.source.entries[name].nbytes for name in names)) as progress:

        def wrote(name: str) -> None:
            progress.advance(name, job.source.entries[name].nbytes)

        def synced(file: str, pieces: int) -> None:
            journal.record(shard=file, pieces=pieces)

        for name in (name for task in tasks for name in task.shard.pieces[: task.num_done]):
            wrote(name)
        write_shards(folder, tasks, job, workers, wrote, synced)


def _finish(folder: Path, job: Job, shards: list[Shard], part: str | None, identity: Mapping[str, Any]) -> None:
    """Write what makes the files one model, or a part of one."""
    (folder / "config.json").write_text(json.dumps(job.config, indent=2) + "\n", encoding="utf-8")
    if part is not None:
        number, count = parse_part(part)
        write_part(folder, Part(folder, number, count, [shard.file for shard in shards], identity))
    elif len(shards) > 1:
        weight_map = {spec.name: shard.file for shard in shards for spec in shard.specs}
        write_index(folder, weight_map, sum(spec.nbytes for shard in shards for spec in shard.specs))


def _clear(folder: Path, keep: set[str]) -> None:
    """Remove what an earlier run left but the shards that it had begun."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in keep or path.is_symlink():
            path.unlink()


def _checked_done(shard: Shard, journal: Journal) -> int:
    num_done = journal.done.get(shard.file, 0)
    if not 0 <= num_done <= len(shard.pieces):
        raise CheckpointError(f"{journal.path} claims {num_done} pieces of {shard.file}; run again to begin anew")
    return num_done
