"""Formats side by side: what weights and caches would take, from a float source's headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from qkv.checkpoint.gguf_header import is_gguf
from qkv.checkpoint.quantize import planned_items, refuse_quantized
from qkv.checkpoint.shards import parse_size
from qkv.checkpoint.source import Source
from qkv.errors import CheckpointError
from qkv.integration.anatomy import UnknownCacheError
from qkv.integration.settings import Settings
from qkv.memory.footprint import collector_paused, read_subject
from qkv.memory.forecast import Forecast
from qkv.memory.items import SCHEMA_VERSION, Footprint, Item
from qkv.memory.kv import KvPlan
from qkv.memory.workspace import DEFAULT_CHUNK, Steps, quantized_matrices

AS_IS: Final = "as is"
WEIGHTS: Final = (AS_IS, "int8", "nf4", "nf4:double", "nf4+int8")
"""Compared where nothing else is asked for; ``nf4+int8`` has embeddings and head in INT8."""
CACHES: Final = ("exact", "int8", "int4")


@dataclass(frozen=True)
class Cell:
    """One format of weights with one of the cache.

    Attributes:
        cache: codec of keys and values.
        kv_nbytes: the cache at the context and batch.
        workspace_nbytes: of a step, an estimate.
        peak_nbytes: the most on the way there.
        longest_context: that fits the memory asked for; None without one, and for any context.
        largest_batch: likewise.
    """

    cache: str
    kv_nbytes: int
    workspace_nbytes: int
    peak_nbytes: int
    longest_context: int | None = None
    largest_batch: int | None = None


@dataclass(frozen=True)
class Choice:
    """One format of the weights.

    Attributes:
        weights: ``"nf4"``; ``"nf4+int8"`` with embeddings and output head in INT8; ``"as is"``.
        codes_nbytes: quantized weights without their scales; ``scales_nbytes`` those.
        plain_nbytes: what stays as it is.
        forecasts: predictors by codec of the cache; empty without a context.
    """

    weights: str
    codes_nbytes: int
    scales_nbytes: int
    plain_nbytes: int
    bits_per_weight: float
    cells: tuple[Cell, ...]
    forecasts: Mapping[str, Forecast]

    @property
    def nbytes(self) -> int:
        """All weights."""
        return self.codes_nbytes + self.scales_nbytes + self.plain_nbytes


@dataclass(frozen=True)
class Comparison:
    """Formats side by side. Printed, it is a table.

    Attributes:
        choices: the first is what the others are compared with.
        note: why there are no caches, where that is so.
    """

    name: str
    choices: tuple[Choice, ...]
    context: int | None
    batch: int
    memory_nbytes: int | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the schema is in ``docs/report.md``."""
        choices = []
        for choice in self.choices:
            sizes = ("weights", "codes_nbytes", "scales_nbytes", "plain_nbytes", "nbytes", "bits_per_weight")
            values = {name: getattr(choice, name) for name in sizes}
            choices.append({**values, "caches": [asdict(cell) for cell in choice.cells]})
        names = ("name", "context", "batch", "memory_nbytes", "note")
        return {"schema_version": SCHEMA_VERSION, **{n: getattr(self, n) for n in names}, "comparison": choices}

    def __str__(self) -> str:
        from qkv.memory.table import comparison_table

        return comparison_table(self)


def compare(
    path: str | Path,
    weights: Sequence[str] = WEIGHTS,
    caches: Sequence[str] = CACHES,
    *,
    context: int | None = None,
    batch: int = 1,
    chunk: int = DEFAULT_CHUNK,
    memory: str | int | None = None,
    retain: Any = None,
) -> Comparison:
    """What a model would take in other formats; nothing is quantized and no weight is read.

    Args:
        path: a model directory, of floats where ``weights`` names formats.
        weights: formats, ``"as is"``, and ``FORMAT+FORMAT`` for another one of embeddings and head.
        caches: codecs of keys and values; ``"exact"`` is transformers' own cache, unless ``retain`` is given.
        context, batch, chunk, memory: as for :func:`qkv.footprint`.
        retain: what a cache keeps.

    Raises:
        CheckpointError: a directory that cannot be read, or is quantized already.
        QkvError: a format or codec that does not exist.
    """
    if is_gguf(path):
        raise CheckpointError(f"{path} is quantized already; compare formats from the model's float directory")
    nbytes = None if memory is None else parse_size(memory)
    with collector_paused():
        subject = read_subject(Path(path))
        source = Source.open(Path(path))
    choices, note = [], ""
    for text in weights:
        items = subject.items if text == AS_IS else _items(source, text)
        found = Footprint.of(items)
        forecasts: dict[str, Forecast] = {}
        try:
            for codec in caches if context is not None else ():
                plan = KvPlan(subject.anatomy(), subject.dtype, _settings(codec, retain))
                steps = Steps(plan, subject.dtype, subject.device, quantized_matrices(items))
                forecasts[codec] = Forecast(found.weight_nbytes, steps, chunk)
        except UnknownCacheError as error:
            forecasts, note = {}, f"KV cache: not known for this model ({error})"
        cells = tuple(_cell(codec, f, context or 1, batch, nbytes) for codec, f in forecasts.items())
        plain = sum(row.nbytes for row in found.rows if row.format is None)
        codes = found.weight_nbytes - plain - found.overhead_nbytes
        sizes = (codes, found.overhead_nbytes, plain, found.bits_per_weight)
        choices.append(Choice(text, *sizes, cells, forecasts))
    return Comparison(Path(path).absolute().name, tuple(choices), context, batch, nbytes, note)


def _items(source: Source, text: str) -> list[Item]:
    format, plus, embeddings = text.partition("+")
    refuse_quantized(source)
    settings = Settings.parse(format, None, embeddings if plus else None, None)
    return planned_items(source, settings)


def _settings(codec: str, retain: Any) -> dict[str, Any]:
    if codec == "exact" and retain is None:
        return {}
    return {"keys": codec, "values": codec, "retain": retain}


def _cell(codec: str, forecast: Forecast, context: int, batch: int, memory_nbytes: int | None) -> Cell:
    kv = forecast.steps.plan.nbytes(context, batch)
    step = forecast.steps.workspace(context, batch, forecast.chunk).nbytes
    cell = (codec, kv, step, forecast.peak_nbytes(context, batch))
    if memory_nbytes is None:
        return Cell(*cell)
    fit = forecast.fit(memory_nbytes, context, batch)
    return Cell(*cell, fit.longest_context, fit.largest_batch)
