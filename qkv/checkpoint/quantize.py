"""``quantize_checkpoint``: a float model directory in, a quantized one out, one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qkv.checkpoint.by_rows import has_rows_apart, quantized_rows
from qkv.checkpoint.calibration import Importances, importance_tensor
from qkv.checkpoint.job import Job, PieceOf, Target
from qkv.checkpoint.output import write_model
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.errors import CheckpointError, QkvError
from qkv.integration.calibration import Calibration
from qkv.integration.report import uncalibrated_lines
from qkv.integration.settings import FORMAT_VERSION, Settings
from qkv.integration.skeleton import Choice, Chooser
from qkv.memory.items import Footprint, Item, Note
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import native
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor
from qkv.units import format_bytes

PACKED_ENDINGS = (".qweight", ".weight_packed", ".SCB", ".absmax", ".weight_scale_inv", ".weight_scale")


@dataclass(frozen=True)
class CheckpointReport:
    """What was written.

    Attributes:
        footprint: the new weights, as :func:`qkv.footprint` reads them from the directory.
        before_nbytes: bytes of the source's tensors.
        left_behind: files of the source that were not copied, with the reason.
        note: how layers were told apart where transformers does not know the model; else empty.
        uncalibrated: tensors that a calibration says nothing of.
        slow: why it was done without the native library; else empty.
    """

    footprint: Footprint
    before_nbytes: int
    left_behind: Mapping[str, str]
    note: str
    uncalibrated: tuple[str, ...] = ()
    slow: str = ""

    def __str__(self) -> str:
        before, after = format_bytes(self.before_nbytes), format_bytes(self.footprint.weight_nbytes)
        lines = [f"weights {before} -> {after}", str(self.footprint)]
        if self.note:
            lines.append(self.note)
        if self.slow:
            lines.append(f"done without the native library, more slowly: {self.slow}")
        lines += uncalibrated_lines(self.uncalibrated)
        others = {name: why for name, why in self.left_behind.items() if why not in ("weights", "hidden")}
        lines += [f"not copied: {name} ({reason})" for name, reason in others.items()]
        return "\n".join(lines)


def quantize_checkpoint(
    src: str | Path,
    dst: str | Path,
    format: str | Format = "nf4",
    *,
    skip: str | list[str] | tuple[str, ...] | None = None,
    embeddings: str | Format | None = None,
    overrides: Mapping[str, str | Format] | None = None,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
    calibrate: Calibration | str | Path | None = None,
    samples: int = 32,
    restart: bool = False,
    workers: int = 1,
    shard: str | None = None,
) -> CheckpointReport:
    """Quantize a Hugging Face model directory into a new one; everything that is not a weight comes along.

    The peak of memory is about the largest tensor, whatever the model's size. ``dst`` appears whole, when
    all is written, or not at all. A run that was killed leaves a hidden folder ``.NAME.partial`` beside it; run
    again with the same arguments, it goes on from there and ends with the same bytes.

    Args:
        src: a directory with ``config.json`` and safetensors, one file or sharded; it is only read.
        dst: the directory to make.
        format, skip, embeddings, overrides: as for :func:`qkv.quantize_`.
        max_shard_size: largest file, ``"5GB"`` or a number of bytes.
        overwrite: replace ``dst`` if it is a model directory.
        calibrate: a text or JSON-lines file to search the scales by, a saved calibration (``.safetensors``), or a
            :class:`qkv.Calibration`. For a text the model is loaded and run once, before anything is written.
        samples: pieces of 512 tokens of that text to read.
        restart: throw away what an earlier run left unfinished, instead of going on with it.
        workers: processes that write files at the same time, each in the memory of one; a script that asks for
            more than one needs ``if __name__ == "__main__":``.
        shard: ``"2/8"`` writes the second of eight parts of the model, for :func:`qkv.merge_checkpoint`.

    Raises:
        CheckpointError: a source that is damaged, unsafe, a pickle, or quantized already; a destination
            that exists, overlaps the source, or holds the unfinished work of other arguments; a full disk.
        QkvError: settings that do not fit, or a tensor that cannot be quantized.
    """
    settings = Settings.parse(format, skip, embeddings, overrides)
    with Source.open(src) as source:
        refuse_quantized(source)
        source.require_config()
        chooser = Chooser(source.directory, settings, source.entries)
        choices = {n: chooser.choose(n, e.shape, e.dtype) for n, e in source.entries.items()}
        if not any(choice.format for choice in choices.values()):
            raise QkvError(f"{source.path} has no tensor that the settings let be quantized")
        importances = Importances.find(source, choices, calibrate, samples)
        pieces = {name: _piece(name, source, choice, importances) for name, choice in choices.items()}
        config = _config(source, choices, chooser.final_settings())
        job = Job(source, pieces, config, settings.to_dict() | importances.settings(), "quantizing")
        left = write_model(job, Target(dst, max_shard_size, overwrite, restart, workers, shard))
        footprint = Footprint.of([_item(n, source, c) for n, c in choices.items()], _notes(source, choices))
        return CheckpointReport(
            footprint, source.nbytes, left, chooser.note, importances.missing, native.unavailable() or ""
        )


def planned_items(source: Source, settings: Settings) -> list[Item]:
    """The weights as they would be stored, from the source's headers alone."""
    chooser = Chooser(source.directory, settings, source.entries)
    return [_item(name, source, chooser.choose(name, e.shape, e.dtype)) for name, e in source.entries.items()]


def refuse_quantized(source: Source) -> None:
    """Raise unless the source's weights are floats.

    Raises:
        CheckpointError: naming the method it is quantized with.
    """
    nested = source.config.get("text_config")
    for config in (source.config, nested if isinstance(nested, dict) else {}):
        found = config.get("quantization_config") or config.get("compression_config")
        if found:
            method = found.get("quant_method", "an unnamed method") if isinstance(found, dict) else found
            raise CheckpointError(
                f"{source.path} is quantized already ({method}); start from the float checkpoint"
                + (", or from what `qkv dequantize` makes of this one" if method == "qkv" else "")
            )
    packed = next((name for name in source.entries if name.endswith(PACKED_ENDINGS)), None)
    if packed:
        raise CheckpointError(f"{source.path} is quantized already: it holds {packed}; start from floats")


@dataclass(frozen=True)
class _Quantized:
    """Makes the codes and scales of a tensor of the source; ``importance`` is float32 by columns, as bytes."""

    name: str
    format: Format
    transposed: bool
    importance: bytes | None

    def __call__(self, source: Source) -> dict[str, Tensor] | Iterator[dict[str, Tensor]]:
        if self._goes_by_rows(source.entries[self.name].shape):
            return quantized_rows(self.name, source, self.format, self._quantize)
        value = source.read(self.name)
        return self._quantize(value.mT if self.transposed else value).state(self.name)

    def _goes_by_rows(self, shape: tuple[int, ...]) -> bool:
        """Not experts with an importance each, whose rows along dimension 0 need their own."""
        each_its_own = self.importance is not None and len(shape) > 2
        return has_rows_apart(self.format, shape) and not self.transposed and not each_its_own

    def _quantize(self, value: Tensor) -> QuantizedTensor:
        importance = None if self.importance is None else importance_tensor(self.importance, value.shape)
        return quantize_tensor(value, self.format, importance=importance, name=self.name)


def _piece(name: str, source: Source, choice: Choice, importances: Importances) -> PieceOf:
    entry = source.entries[name]
    if choice.format is None:
        return PieceOf((TensorSpec(name, entry.dtype, entry.shape),), None)
    layout = choice.format.layout(_quantized_shape(entry.shape, choice))
    specs = tuple(TensorSpec(name + suffix, dtype, size) for suffix, (size, dtype) in layout.items())
    return PieceOf(specs, _Quantized(name, choice.format, choice.transposed, importances.by_name.get(name)))


def _quantized_shape(shape: tuple[int, ...], choice: Choice) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if choice.transposed else shape


def _config(source: Source, choices: Mapping[str, Choice], settings: Settings) -> dict[str, Any]:
    """config.json with what it takes to read the weights, and what they were."""
    default = source.config.get("dtype") or source.config.get("torch_dtype")
    dtypes = {
        name: dtype
        for name, choice in choices.items()
        if choice.format and (dtype := str(source.entries[name].dtype).removeprefix("torch.")) != default
    }
    own: dict[str, Any] = {"quant_method": "qkv", "format_version": FORMAT_VERSION, **settings.to_dict()}
    transposed = sorted(name for name, choice in choices.items() if choice.transposed)
    own |= {"transposed": transposed} if transposed else {}
    own |= {"dtypes": dtypes} if dtypes else {}
    return json.loads(json.dumps({**source.config, "quantization_config": own}))  # type: ignore[no-any-return]


def _item(name: str, source: Source, choice: Choice) -> Item:
    entry = source.entries[name]
    if choice.format is None:
        return Item(name, None, entry.dtype, entry.shape, entry.nbytes)
    return Item.quantized(name, choice.format, _quantized_shape(entry.shape, choice))


def _notes(source: Source, choices: Mapping[str, Choice]) -> list[Note]:
    return [
        Note(name, source.entries[name].nbytes, choice.reason)
        for name, choice in choices.items()
        if choice.format is None and len(source.entries[name].shape) > 1
    ]
