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
from qkv.checkpoint.gguf import as_directory
from qkv.checkpoint.job import Job, PieceOf, Target
from qkv.checkpoint.layouts import LAYOUTS, layout_named
from qkv.checkpoint.layouts.base import Layout, Plan, Weight, specs_item
from qkv.checkpoint.output import write_model
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.errors import CheckpointError, QkvError
from qkv.integration.calibration import Calibration
from qkv.integration.report import uncalibrated_lines
from qkv.integration.settings import Settings
from qkv.integration.skeleton import Choice, Chooser
from qkv.memory.items import Footprint, Item, Note
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import native
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor
from qkv.units import format_bytes

READABLE = tuple(layout.method for layout in LAYOUTS.values())
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
    layout: str = "qkv",
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
        src: a directory with ``config.json`` and safetensors, one file or sharded; it is only read. Or a ``.gguf``
            file, which transformers reads whole and which meanwhile lies dequantized in ``.NAME.gguf`` beside ``dst``.
        dst: the directory to make.
        format, skip, embeddings, overrides: as for :func:`qkv.quantize_`.
        layout: how the files hold them: ``"qkv"``; ``"bnb"`` (nf4, int8:row), which stock transformers loads with
            bitsandbytes; ``"compressed-tensors"`` (int4, int8), which vLLM and SGLang load too.
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
        QkvError: settings that do not fit each other or the layout, or a tensor that cannot be quantized.
    """
    settings = Settings.parse(format, skip, embeddings, overrides)
    target = layout_named(layout)
    target.check(settings)
    with as_directory(src, dst, overwrite, restart) as directory, Source.open(directory) as source:
        refuse_quantized(source)
        source.require_config()
        chooser = Chooser(source.directory, settings, source.entries)
        if chooser.note and layout != "qkv":
            raise QkvError(f"the layout {layout} needs a model that transformers can build ({chooser.note})")
        choices = {n: _choose(n, source, chooser, target) for n in source.entries}
        weights = {n: _weight(n, source, choice) for n, choice in choices.items() if choice.format}
        if not weights:
            raise QkvError(_nothing_to_do(source, layout, choices))
        kept = chooser.kept_modules(weight.module for weight in weights.values())
        config = _config(source, target.config(Plan(source.config, chooser.final_settings(), weights, kept)))
        specs = {n: tuple(target.specs(weight)) for n, weight in weights.items()}
        importances = Importances.find(source, choices, calibrate, samples)
        makers = {n: _Quantized(weight, target, importances.by_name.get(n)) for n, weight in weights.items()}
        pieces = {n: PieceOf(specs.get(n) or (_plain(n, source),), makers.get(n)) for n in choices}
        asked = {**settings.to_dict(), **importances.settings(), "layout": layout}
        job = Job(source, pieces, config, asked, "quantizing")
        left = write_model(job, Target(dst, max_shard_size, overwrite, restart, workers, shard))
        footprint = Footprint.of(_items(source, weights, target), _notes(source, choices))
        return CheckpointReport(
            footprint, source.nbytes, left, chooser.note, importances.missing, native.unavailable() or ""
        )


def planned_items(source: Source, settings: Settings) -> list[Item]:
    """The weights as they would be stored, from the source's headers alone."""
    chooser, layout = Chooser(source.directory, settings, source.entries), LAYOUTS["qkv"]
    choices = {name: _choose(name, source, chooser, layout) for name in source.entries}
    return _items(source, {n: _weight(n, source, choice) for n, choice in choices.items() if choice.format}, layout)


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
                + (", or from what `qkv dequantize` makes of this one" if method in READABLE else "")
            )
    packed = next((name for name in source.entries if name.endswith(PACKED_ENDINGS)), None)
    if packed:
        raise CheckpointError(f"{source.path} is quantized already: it holds {packed}; start from floats")


@dataclass(frozen=True)
class _Quantized:
    """Makes the codes and scales of a tensor of the source; ``importance`` is float32 by columns, as bytes."""

    weight: Weight
    layout: Layout
    importance: bytes | None

    def __call__(self, source: Source) -> dict[str, Tensor] | Iterator[dict[str, Tensor]]:
        weight = self.weight
        if self.layout.by_rows and self._has_rows_apart():
            return quantized_rows(weight.name, source, weight.format, self._quantize)
        value = source.read(weight.name)
        value = value.mT if weight.transposed else value
        return self.layout.encode(weight, value, self._importance(value))

    def _has_rows_apart(self) -> bool:
        """Not experts with an importance each, whose rows along dimension 0 need their own."""
        shape = self.weight.shape
        each_its_own = self.importance is not None and len(shape) > 2
        return has_rows_apart(self.weight.format, shape) and not self.weight.transposed and not each_its_own

    def _quantize(self, value: Tensor) -> QuantizedTensor:
        return quantize_tensor(value, self.weight.format, importance=self._importance(value), name=self.weight.name)

    def _importance(self, value: Tensor) -> Tensor | None:
        return None if self.importance is None else importance_tensor(self.importance, value.shape)


def _choose(name: str, source: Source, chooser: Chooser, layout: Layout) -> Choice:
    """What the settings ask for, unless the layout cannot hold it."""
    entry = source.entries[name]
    choice = chooser.choose(name, entry.shape, entry.dtype)
    reason = layout.unfit(_weight(name, source, choice)) if choice.format else None
    return Choice(None, reason) if reason else choice


def _weight(name: str, source: Source, choice: Choice) -> Weight:
    entry = source.entries[name]
    assert choice.format is not None
    shape = (*entry.shape[:-2], *entry.shape[:-3:-1]) if choice.transposed else entry.shape
    module = choice.parameter.rpartition(".")[0]
    return Weight(name, module, choice.format, shape, entry.dtype, choice.transposed)


def _plain(name: str, source: Source) -> TensorSpec:
    entry = source.entries[name]
    return TensorSpec(name, entry.dtype, entry.shape)


def _nothing_to_do(source: Source, layout: str, choices: Mapping[str, Choice]) -> str:
    reasons = dict.fromkeys(c.reason for n, c in choices.items() if len(source.entries[n].shape) > 1)
    told = "; ".join(list(reasons)[:3])
    return f"{source.path} has no tensor that the settings let be quantized in the layout {layout} ({told})"


def _config(source: Source, quantization: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with what it takes to read the weights."""
    return json.loads(json.dumps({**source.config, "quantization_config": quantization}))  # type: ignore[no-any-return]


def _items(source: Source, weights: Mapping[str, Weight], layout: Layout) -> list[Item]:
    """All weights as they will lie in the files."""
    return [
        specs_item(weights[name], layout.specs(weights[name]))
        if name in weights
        else Item(name, None, entry.dtype, entry.shape, entry.nbytes)
        for name, entry in source.entries.items()
    ]


def _notes(source: Source, choices: Mapping[str, Choice]) -> list[Note]:
    return [
        Note(name, source.entries[name].nbytes, choice.reason)
        for name, choice in choices.items()
        if choice.format is None and len(source.entries[name].shape) > 1
    ]
