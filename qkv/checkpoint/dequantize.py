"""``dequantize_checkpoint``: plain floats again, for tools that read nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qkv.checkpoint.foreign import foreign_weights
from qkv.checkpoint.job import Job, PieceOf, Target
from qkv.checkpoint.layouts.base import Stored
from qkv.checkpoint.output import write_model
from qkv.checkpoint.read import stored_weights
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.dtypes import dtype_named
from qkv.errors import CheckpointError


def dequantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    restart: bool = False,
    workers: int = 1,
    shard: str | None = None,
) -> None:
    """Turn a directory that :func:`qkv.quantize_checkpoint` or ``save_pretrained`` wrote into floats.

    So are those that transformers wrote with bitsandbytes (NF4, INT8), and ``pack-quantized`` compressed-tensors.

    Tensors get the names, shapes and dtypes that they had before; the values are those the codes stand for.

    Args:
        src: a quantized directory; it is only read.
        dst: the directory to make; it appears whole or not at all.
        dtype: of the dequantized weights, ``"bfloat16"`` say; by default what each was.
        max_shard_size: largest file.
        overwrite: replace ``dst`` if it is a model directory.
        restart: throw away what an earlier run left unfinished; by default it is gone on with.
        workers, shard: as for :func:`qkv.quantize_checkpoint`.

    Raises:
        CheckpointError: a source that is not quantized, or in a way that cannot be read here, or damaged.
    """
    target = dtype_named(dtype) if dtype else None
    with Source.open(src) as source:
        weights = foreign_weights(source, stored_weights(source))
        if not any(stored.format for stored in weights):
            raise CheckpointError(f"{source.path} is not quantized; there is nothing to undo")
        pieces = {next(iter(stored.entries)): _piece(stored, target) for stored in weights}
        config = {k: v for k, v in source.config.items() if k != "quantization_config"}
        job = Job(source, pieces, config, {"dtype": target and str(target)}, "dequantizing")
        write_model(job, Target(dst, max_shard_size, overwrite, restart, workers, shard))


def read_weight(stored: Stored, source: Source, dtype: torch.dtype | None = None) -> Tensor:
    """The float tensor that ``stored`` stands for, as the model names it."""
    if stored.layout is None:
        return source.read(stored.name)
    value = stored.layout.decode(stored, source).dequantize(dtype or stored.dtype)
    return value.mT.contiguous() if stored.transposed else value


@dataclass(frozen=True)
class _Dequantized:
    """Makes the float tensor of a stored one."""

    stored: Stored
    dtype: torch.dtype | None

    def __call__(self, source: Source) -> dict[str, Tensor]:
        return {self.stored.name: read_weight(self.stored, source, self.dtype)}


def _piece(stored: Stored, dtype: torch.dtype | None) -> PieceOf:
    if stored.format is None:
        return PieceOf((TensorSpec(stored.name, stored.dtype, stored.shape),), None)
    shape = (*stored.shape[:-2], stored.shape[-1], stored.shape[-2]) if stored.transposed else stored.shape
    return PieceOf((TensorSpec(stored.name, dtype or stored.dtype, shape),), _Dequantized(stored, dtype))
