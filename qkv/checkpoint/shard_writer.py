"""One shard of a job, written piece by piece: what every worker does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from torch import Tensor

from qkv.checkpoint.job import Job, PieceOf
from qkv.checkpoint.plan import Shard
from qkv.checkpoint.source import Source
from qkv.checkpoint.syncing import Syncer
from qkv.checkpoint.writer import StreamWriter

ROWS_NBYTES = 2 * 10**6
"""Rows are read, worked on and written in pieces of about this size: what fits a processor's cache and stays with
the allocator, whose fresh memory costs more than the work."""


def write_shard(
    path: Path, shard: Shard, job: Job, num_done: int, wrote: Callable[[str], None], synced: Callable[[int], None]
) -> None:
    """Write a file, or the rest of it.

    Args:
        path: of the file.
        shard: what goes into it.
        job: where that comes from.
        num_done: pieces that are in the file already.
        wrote: called with each piece that was written.
        synced: called with the number of pieces that are surely on the disk, from another thread too.
    """
    done = [spec.name for name in shard.pieces[:num_done] for spec in job.pieces[name].specs]
    with StreamWriter(path, shard.specs, keep=True, done=done) as writer:
        with Syncer(writer, synced) as syncer:
            for number, name in enumerate(shard.pieces[num_done:], num_done + 1):
                piece = job.pieces[name]
                for rows in _made(name, piece, job.source):
                    _write(writer, rows, piece)
                syncer.wrote(number, sum(spec.nbytes for spec in piece.specs))
                wrote(name)
    synced(len(shard.pieces))


def row_slices(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Starts and ends of rows along dimension 0 that take about `ROWS_NBYTES`, one row at least."""
    step = max(1, ROWS_NBYTES // max(prod(shape[1:]) * itemsize, 1))
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _made(name: str, piece: PieceOf, source: Source) -> Iterator[Mapping[str, Tensor]]:
    if piece.make is None:
        return _copied(name, source)
    made = piece.make(source)
    return iter([made]) if isinstance(made, dict) else made


def _copied(name: str, source: Source) -> Iterator[Mapping[str, Tensor]]:
    entry = source.entries[name]
    if not entry.shape or not entry.nbytes:
        yield {name: source.read(name)}
        return
    for start, stop in row_slices(entry.shape, entry.dtype.itemsize):
        yield {name: source.read_rows(name, start, stop)}


def _write(writer: StreamWriter, made: Mapping[str, Tensor], piece: PieceOf) -> None:
    for spec in piece.specs:
        if spec.name in made:
            tensor = made[spec.name]
            write = writer.write if tuple(tensor.shape) == spec.shape else writer.write_chunk
            write(spec.name, tensor)
