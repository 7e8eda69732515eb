"""What it takes to write a model: values alone, so that any process can do any part of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec


class Maker(Protocol):
    """Makes the tensors of a piece, by their names, from what it holds and the source alone.

    Either all of them whole, in one dict, or an iterator over dicts that each hold the next rows of some.
    A frozen dataclass of small values, not a closure: it is pickled for worker processes. Whatever is large (a
    calibration) is held as a path. The same maker and source give the same bytes.
    """

    def __call__(self, source: Source) -> dict[str, Tensor] | Iterator[dict[str, Tensor]]:
        """The tensors of the piece."""
        ...


class PieceOf(NamedTuple):
    """The tensors that one tensor of the source becomes, and what makes them (None: a copy)."""

    specs: tuple[TensorSpec, ...]
    make: Maker | None


@dataclass(frozen=True)
class Job:
    """A model directory to write.

    Attributes:
        source: the model it is made from.
        pieces: what becomes of each tensor of the source, by its name.
        config: the new config.json.
        settings: everything asked for that decides what is written, as JSON takes it; a file among it (a
            calibration) by its hash. Two jobs over one source with equal settings write the same bytes.
        title: of the progress bar.
    """

    source: Source
    pieces: Mapping[str, PieceOf]
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    title: str


@dataclass(frozen=True)
class Target:
    """Where and how a job is written.

    Attributes:
        dst: the directory to make.
        max_shard_size: largest file, ``"5GB"`` or a number of bytes.
        overwrite: replace ``dst`` if it is a model directory.
        restart: throw away what an earlier run left unfinished, instead of going on with it.
        workers: processes that write shards at the same time.
        part: ``"2/8"``: the second of eight parts of the model, for :func:`qkv.merge_checkpoint` to join.
    """

    dst: str | Path
    max_shard_size: str | int = "5GB"
    overwrite: bool = False
    restart: bool = False
    workers: int = 1
    part: str | None = None
