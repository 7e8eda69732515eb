"""Memory, told truthfully: of a live model from its storages, of a directory from its headers alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from qkv.checkpoint.gguf import gguf_config
from qkv.checkpoint.gguf_header import gguf_items, is_gguf
from qkv.checkpoint.load import load
from qkv.checkpoint.read import read_items
from qkv.checkpoint.shards import parse_size
from qkv.dtypes import dtype_named
from qkv.errors import QkvError, shown
from qkv.integration.anatomy import Anatomy, UnknownCacheError, anatomy
from qkv.integration.select import memory_key
from qkv.memory.forecast import Forecast
from qkv.memory.items import Footprint, Item, unquantized
from qkv.memory.kv import KvPlan
from qkv.memory.workspace import DEFAULT_CHUNK, Steps, quantized_matrices
from qkv.quantizers.holder import Holder

if TYPE_CHECKING:
    from qkv.memory.live import Measured


def footprint(
    model: nn.Module | str | Path,
    *,
    context: int | None = None,
    batch: int = 1,
    kv_dtype: str | None = None,
    chunk: int = DEFAULT_CHUNK,
    memory: str | int | None = None,
    live: bool = False,
    **cache: Any,
) -> Footprint:
    """What a model takes in memory.

    Args:
        model: a live model (its storages are added up; meta tensors count what they would take) or the
            path of a checkpoint or GGUF file (headers are read, no weight is).
        context: tokens for which to add the key-value cache and a step's workspace; None leaves them out.
        batch: sequences of that many tokens.
        kv_dtype: dtype of exact keys and values, ``"bfloat16"`` say; that of the model by default.
        chunk: tokens of a prompt that are read at once.
        memory: ``"24GB"`` or bytes: adds how long a context and how large a batch fit; needs ``context``.
        live: let the model read so many tokens, and add what that really took; a directory is loaded for it.
        **cache: ``keys``, ``values`` and ``retain`` of a :class:`qkv.KVCache`; without them, transformers' own.

    Raises:
        CheckpointError: a directory that is damaged, unsafe, or quantized by something else.
        QkvError: a context, batch, chunk or memory that is none; more than weights and context of a GGUF file.
    """
    if is_gguf(model):
        _check_gguf(memory=memory, live=live or None, **cache)
    _check_counts(context=context, batch=batch, chunk=chunk)
    nbytes = None if memory is None else parse_size(memory)
    if nbytes is not None and context is None:
        raise QkvError("what fits a memory depends on the context too; say for how many tokens (context=8192)")
    if live and context is None:
        raise QkvError("to measure takes a context to read; say how many tokens (context=8192)")
    if live and not isinstance(model, nn.Module):
        model = load(model)
    measured = measure(model, context or 1, batch, chunk, cache) if live and isinstance(model, nn.Module) else None
    with collector_paused():
        subject = read_subject(model, require_weights=context is None)
        result = Footprint.of(subject.items, unquantized(subject.items), **subject.others)
    if context is None:
        return result
    kv_type = dtype_named(kv_dtype) if kv_dtype else subject.dtype
    try:
        plan = KvPlan(subject.anatomy(), kv_type, cache)
    except UnknownCacheError as error:
        note = f"KV cache: not known for this model ({error})"
        return replace(result, context=context, batch=batch, kv_note=note, measured=measured)
    forecast = subject.forecast(result.total_nbytes, plan, chunk)
    return replace(
        result,
        context=context,
        batch=batch,
        kv_nbytes=plan.nbytes(context, batch),
        kv_peak_nbytes=plan.high_water(context, batch),
        kv_rows=plan.rows(context, batch),
        kv_note=f"KV cache of {batch} x {context:,} tokens, {plan}",
        workspace=None if forecast is None else forecast.steps.workspace(context, batch, chunk),
        fit=None if nbytes is None or forecast is None else forecast.fit(nbytes, context, batch),
        measured=measured,
    )


def measure(model: nn.Module, context: int, batch: int, chunk: int, cache: Mapping[str, Any]) -> Measured:
    """What a live model really takes to read so many tokens; see :func:`run_and_measure`."""
    from qkv.memory.live import run_and_measure

    items, others = live_items(model)
    resident = Footprint.of(items).weight_nbytes + sum(others.values())
    return run_and_measure(model, context, batch, chunk, cache, resident)


def _check_gguf(**options: Any) -> None:
    """Raise for what is known of a directory alone, whose model is run here."""
    given = next((name for name, value in options.items() if value is not None), None)
    if given is not None:
        raise QkvError(
            f"{given} is for models that are run here, and a GGUF file is run by other programs; leave it out, or make "
            "a directory of it (qkv quantize FILE.gguf DST) and report on that"
        )


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise QkvError(f"{name} {shown(value)} is not a whole number from 1")


@dataclass(frozen=True)
class Subject:
    """A model to report on: its weights, config and dtype, whether it lives or lies in files."""

    items: list[Item]
    config: Any
    dtype: torch.dtype
    device: str
    others: dict[str, int]
    gguf: Path | None = None

    def anatomy(self) -> Anatomy:
        """What its cache depends on; UnknownCacheError where that is not known."""
        if self.gguf is None:
            return anatomy(self.config, self.dtype)
        try:
            return anatomy(gguf_config(self.gguf), self.dtype)
        except QkvError as error:
            raise UnknownCacheError(str(error)) from error

    def forecast(self, resident: int, plan: KvPlan, chunk: int) -> Forecast | None:
        """What it will need by context and batch; ``resident``: bytes that are there anyway. None for a GGUF file:
        what a step takes is up to the program that runs it."""
        if self.gguf is not None:
            return None
        return Forecast(resident, Steps(plan, self.dtype, self.device, quantized_matrices(self.items)), chunk)


def read_subject(model: nn.Module | str | Path, *, require_weights: bool = True) -> Subject:
    """The weights of a live model from its storages, of a directory from its headers alone."""
    if is_gguf(model):
        return Subject(gguf_items(Path(model)), None, torch.float16, "cpu", {}, Path(model))
    if not isinstance(model, nn.Module):
        items, config, dtype = read_items(Path(model), require_weights=require_weights)
        return Subject(items, config, dtype, "cpu", {})
    items, others = live_items(model)
    own: Any = getattr(model, "config", None)
    config = own.to_dict() if hasattr(own, "to_dict") else own
    parameters = list(model.parameters())
    dtype = next((p.dtype for p in parameters if p.dtype.is_floating_point), torch.bfloat16)
    device = next((p.device.type for p in parameters if p.device.type != "meta"), "cpu")
    return Subject(items, config, dtype, device, others)


@contextmanager
def collector_paused() -> Iterator[None]:
    """A large checkpoint makes a few hundred thousand small values that all stay: looking through them over and over
    for cycles would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def live_items(model: nn.Module) -> tuple[list[Item], dict[str, int]]:
    """The weights of a live model, tied ones once, and the bytes of what else its storages hold."""
    seen: set[tuple[int, ...]] = set()
    items = []
    for prefix, module in model.named_modules():
        for name, tensors in _weights(module):
            if _claim(tensors[0], seen):
                items.append(_live_item(f"{prefix}.{name}".lstrip("."), name, module, tensors))
                seen.update(memory_key(tensor) for tensor in tensors)
    buffer_nbytes = sum(buffer.nbytes for buffer in model.buffers() if _claim(buffer, seen))
    storages = {_storage_key(t): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    unused = sum(storages.values()) - sum(item.nbytes for item in items) - buffer_nbytes
    packed = sum(module.packed_nbytes for module in model.modules() if isinstance(module, Holder))
    return items, {"buffer_nbytes": buffer_nbytes, "unused_nbytes": max(unused, 0), "packed_nbytes": packed}


def _weights(module: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """A module's own weights by name, each with all the tensors that make it up, the codes first."""
    if isinstance(module, Holder):
        for name, spec in module.specs.items():
            buffers = [module._buffers[name + suffix] for suffix in spec.format.layout(spec.shape)]
            yield name, [buffer for buffer in buffers if buffer is not None]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, [parameter]


def _live_item(full_name: str, name: str, module: nn.Module, tensors: list[Tensor]) -> Item:
    first, nbytes = tensors[0], sum(tensor.nbytes for tensor in tensors)
    if isinstance(module, Holder) and name in module.specs:
        spec = module.specs[name]
        return Item(full_name, str(spec.format), first.dtype, spec.shape, nbytes, nbytes - first.nbytes)
    return Item(full_name, None, first.dtype, tuple(first.shape), nbytes)


def _claim(tensor: Tensor, seen: set[tuple[int, ...]]) -> bool:
    """Whether the tensor's memory was not counted before; it is now."""
    key = memory_key(tensor)
    fresh = key not in seen
    seen.add(key)
    return fresh


def _storage_key(tensor: Tensor) -> tuple[int, ...]:
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return (tensor.untyped_storage().data_ptr(), 0)
