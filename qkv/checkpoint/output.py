"""Write a model directory from a source, tensor by tensor: what quantizing and dequantizing have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from qkv.checkpoint.auxiliary import copy_auxiliary
from qkv.checkpoint.destination import Destination
from qkv.checkpoint.index import write_index
from qkv.checkpoint.job import Job, Target
from qkv.checkpoint.shards import parse_size, plan_shards, shard_names
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import StreamWriter, TensorSpec
from qkv.errors import CheckpointError
from qkv.progress import Progress

COPY_NBYTES = 32 * 10**6
"""Tensors that pass through unchanged are copied in pieces of about this size."""


def write_model(job: Job, target: Target) -> dict[str, str]:
    """Write what the job says and all that belongs to the source's model; ``target.dst`` appears at the end.

    Returns:
        Files of the source that were not copied, with the reason.

    Raises:
        CheckpointError: the source is one file, so that nobody knows what else belongs to it.
    """
    source = job.source
    if not source.path.is_dir():
        raise CheckpointError(f"{source.path} is a file; name the model's directory, whose other files come along")
    limit = parse_size(target.max_shard_size)
    owner = {spec.name: name for name, piece in job.pieces.items() for spec in piece.specs}
    specs = [spec for piece in job.pieces.values() for spec in piece.specs]
    shards = plan_shards(specs, limit, group_of=owner.__getitem__)
    names = shard_names(len(shards))
    with Destination(target.dst, source_dir=source.directory, overwrite=target.overwrite) as folder:
        left = copy_auxiliary(source.directory, folder)
        with Progress(job.title, source.nbytes) as progress:
            for file_name, shard in zip(names, shards, strict=True):
                _write_shard(folder / file_name, shard, owner, job, progress)
        (folder / "config.json").write_text(json.dumps(job.config, indent=2) + "\n", encoding="utf-8")
        if len(shards) > 1:
            weight_map = {s.name: file for file, shard in zip(names, shards, strict=True) for s in shard}
            write_index(folder, weight_map, sum(spec.nbytes for spec in specs))
    return left


def _write_shard(path: Path, specs: list[TensorSpec], owner: Mapping[str, str], job: Job, progress: Progress) -> None:
    with StreamWriter(path, specs) as writer:
        for name in dict.fromkeys(owner[spec.name] for spec in specs):
            piece = job.pieces[name]
            if piece.make is None:
                _copy(name, job.source, writer)
            else:
                made = piece.make(job.source)
                for spec in piece.specs:
                    writer.write(spec.name, made[spec.name])
                del made
            progress.advance(name, job.source.entries[name].nbytes)


def _copy(name: str, source: Source, writer: StreamWriter) -> None:
    entry = source.entries[name]
    if len(entry.shape) < 2 or entry.nbytes <= COPY_NBYTES:
        writer.write(name, source.read(name))
        return
    step = max(1, COPY_NBYTES // max(prod(entry.shape[1:]) * entry.dtype.itemsize, 1))
    for start in range(0, entry.shape[0], step):
        rows = source.read_rows(name, start, min(start + step, entry.shape[0]))
        writer.write_chunk(name, rows)
