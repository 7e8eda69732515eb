"""Measured beside predicted: a running model reads a prompt of the context asked for."""

from __future__ import annotations

import ctypes
import inspect
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache
from qkv.integration.hf_layer import KVLayer
from qkv.progress import Progress

COUNTERS: Final = ("_sliding_window_tensor",)
"""What layers of transformers' cache hold beside keys, values and states: no memory to speak of."""
WRITTEN: Final = 2
"""The last tokens of the context come one by one, as when text is generated."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, SMALL = -1, -3, 65_536


@dataclass(frozen=True)
class Measured:
    """What a running model took.

    Attributes:
        kv_nbytes: of the cache's layers at the end.
        resident_nbytes: storages of weights, buffers and kernels' copies.
        peak_nbytes: these, and the most that the run added: to the process's resident memory on a CPU, in torch's
            allocator on CUDA.
        seconds: the run took.
        by: ``"resident memory"`` or ``"allocator"``.
    """

    kv_nbytes: int
    resident_nbytes: int
    peak_nbytes: int
    seconds: float
    by: str

    @property
    def step_nbytes(self) -> int:
        """The part of the peak that is neither weights nor the cache as it ends."""
        return self.peak_nbytes - self.resident_nbytes - self.kv_nbytes


@dataclass
class Meter:
    """The most memory in use beyond what was in use when it was started, in bytes."""

    by: str
    nbytes: int = 0


def run_and_measure(
    model: Any, context: int, batch: int, chunk: int, settings: Mapping[str, Any], resident_nbytes: int
) -> Measured:
    """Let ``model`` read ``batch`` random sequences of ``context`` tokens, and measure.

    Args:
        model: a model of transformers that holds its weights.
        context, batch, chunk: as for :func:`qkv.footprint`.
        settings: of a :class:`qkv.KVCache`, which is attached; empty for transformers' own cache.
        resident_nbytes: what its storages take.

    Raises:
        QkvError: a model without a context to read, or a system that does not tell a process's peak.
    """
    if any(parameter.is_meta for parameter in model.parameters()) or not hasattr(model, "generate"):
        raise QkvError("to measure takes a model of transformers with its weights in memory")
    if model.config.is_encoder_decoder:
        raise QkvError("measuring feeds tokens to a decoder; this model has an encoder, too")
    vocab = model.get_input_embeddings().weight.shape[0]
    device = model.get_input_embeddings().weight.device
    ids = torch.randint(0, vocab, (batch, context), generator=torch.Generator().manual_seed(0)).to(device)
    _read(model, ids[:, : 2 * chunk + WRITTEN], chunk, settings)  # kernels are chosen, and their code is in memory
    start = time.perf_counter()
    with meter(device.type) as used:
        kv_nbytes = _read(model, ids, chunk, settings)
    seconds = time.perf_counter() - start
    return Measured(kv_nbytes, resident_nbytes, resident_nbytes + max(used.nbytes, kv_nbytes), seconds, used.by)


def _read(model: Any, ids: Tensor, chunk: int, settings: Mapping[str, Any]) -> int:
    """Feed the tokens, the last ones singly; returns the bytes of the cache."""
    from transformers import DynamicCache

    cache = KVCache(model.config, **settings).attach(model) if settings else DynamicCache(config=model.config)
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(type(model).forward).parameters else {}
    parts = [*torch.split(ids[:, :-WRITTEN], chunk, 1), *torch.split(ids[:, -WRITTEN:], 1, 1)]
    try:
        with Progress("reading", ids.shape[1]) as progress, torch.no_grad():
            for part in (part for part in parts if part.shape[1]):
                model(part, use_cache=True, **{cache_argument(model): cache}, **last).logits[:, -1].float()
                progress.advance(amount=part.shape[1])
        return cache_nbytes(cache)
    finally:
        if isinstance(cache, KVCache):
            cache.detach()


def cache_nbytes(cache: Any) -> int:
    """Bytes of a cache's keys, values and states; of blocks, the storages with all metadata.

    A sliding layer of transformers is a view of what its last step joined; what is not in view is the step's.
    """
    total = 0
    for layer in cache.layers:
        if isinstance(layer, KVLayer):
            total += layer.core.nbytes
            continue
        values = [value for name, value in vars(layer).items() if name not in COUNTERS]
        tensors = [t for value in values for t in (value.values() if isinstance(value, dict) else [value])]
        total += sum(t.nbytes for t in tensors if isinstance(t, Tensor))
    return total


@contextmanager
def meter(device: str) -> Iterator[Meter]:
    """Measure the most memory that a block of code takes.

    On a CPU the C library is told, for the rest of the process, to give freed memory back at once; else what it
    hoards would be counted as used.

    Raises:
        QkvError: a system whose processes do not know their peak.
    """
    if device == "cuda":
        used = Meter("allocator")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield used
        used.nbytes = torch.cuda.max_memory_allocated() - before
        return
    used = Meter("resident memory")
    _give_back_what_is_free()
    _forget_peak()
    before = _status("VmRSS")
    yield used
    used.nbytes = _status("VmHWM") - before


def _give_back_what_is_free() -> None:
    if sys.platform.startswith("linux"):
        library = ctypes.CDLL(None)
        for option, value in ((M_MMAP_THRESHOLD, SMALL), (M_TRIM_THRESHOLD, SMALL)):
            library.mallopt(option, value)
        library.malloc_trim(0)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        raise QkvError(
            "this system does not tell a process's peak of resident memory (/proc/self/clear_refs, Linux); "
            "predict without measuring"
        ) from error


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return 1024 * int(value.split()[0])
    raise QkvError(f"this system does not tell {field} of a process; predict without measuring")
