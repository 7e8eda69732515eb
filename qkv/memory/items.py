"""Weights, rows and totals: what a footprint is made of, whatever it was read from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch

from qkv.quantizers.format import Format

if TYPE_CHECKING:
    from qkv.memory.forecast import Fit
    from qkv.memory.kv import KvRow
    from qkv.memory.live import Measured
    from qkv.memory.workspace import Workspace

SCHEMA_VERSION: Final = 1
"""Of :meth:`Footprint.to_dict`, which ``docs/report.md`` describes."""
ROLES = tuple(
    (role, re.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)"))
    for role, pattern in (
        ("head", r"lm_head|embed_out|output_layer|(?<!\.)output"),
        ("embedding", r"\w*embe?d\w*|wte|wpe"),
        ("experts", r"experts|\w+_exps"),
        ("router", "router|gate|shared_expert_gate|ffn_gate_inp"),
        ("norm", r"\w*norm\w*|ln|ln_\w+"),
        ("attention", r"\w*attn\w*|\w*attention\w*"),
        ("mlp", r"\w*mlp\w*|\w*ffn\w*|feed_forward|fc\w*"),
    )
)
"""Roles by the components of a tensor's name, as transformers or llama.cpp gives it; the first that fits counts."""
NUMBERS = re.compile(r"\d+")
"""Layers and experts differ by these alone; with them alike, few names are left to look at."""


@dataclass(frozen=True)
class Item:
    """One weight.

    Attributes:
        format: None for a plain tensor.
        dtype: what the numbers, or their codes, are stored in.
        shape: of the numbers, however they are packed.
        nbytes: everything that is stored for it.
        overhead_nbytes: the part of ``nbytes`` that is scales and zero points.
    """

    name: str
    format: str | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    overhead_nbytes: int = 0

    @classmethod
    def quantized(cls, name: str, format: Format, shape: tuple[int, ...]) -> Item:
        """A weight of float shape ``shape`` in ``format``."""
        codes_shape, dtype = format.layout(shape)[""]
        nbytes = format.stored_nbytes(shape)
        return cls(name, str(format), dtype, shape, nbytes, nbytes - prod(codes_shape) * dtype.itemsize)

    @property
    def role(self) -> str:
        """``embedding``, ``attention``, ``mlp`` and so on, or ``other``."""
        return _role(NUMBERS.sub("0", self.name.lower()))


@dataclass(frozen=True)
class Note:
    """A matrix that is not quantized, its bytes and the reason."""

    name: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Row:
    """All weights of one role, format and dtype together."""

    role: str
    format: str | None
    dtype: str
    num_tensors: int
    num_parameters: int
    nbytes: int
    overhead_nbytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits a parameter takes, scales counted."""
        return 8 * self.nbytes / self.num_parameters if self.num_parameters else 0.0


@dataclass(frozen=True)
class Footprint:
    """What a model takes. Printed, it is a table; bytes are exact.

    Attributes:
        rows: the weights by role, format and dtype.
        buffer_nbytes: buffers that are not weights (rotary tables, masks), live models only.
        unused_nbytes: storage behind the weights that no weight uses, live models only.
        packed_nbytes: copies of the codes that kernels keep in a layout of their own, live models only.
        kv_nbytes: the key-value cache at the context asked for, None without one or where it is not known.
        kv_note: what the figure stands for, or why there is none.
        kept: matrices that are not quantized, with the reason where it is known.
        context, batch: tokens of each sequence and sequences that the figures below stand for.
        kv_rows: the cache by kind of layer.
        kv_peak_nbytes: the most the cache holds on the way there (blocks that are not sealed yet are exact).
        workspace: what a step needs beside weights and cache, an estimate.
        fit: how far a memory goes, where one was asked for.
        measured: what was measured on the running model beside these predictions, where it was.
    """

    rows: list[Row]
    buffer_nbytes: int = 0
    unused_nbytes: int = 0
    packed_nbytes: int = 0
    kv_nbytes: int | None = None
    kv_note: str = ""
    kept: tuple[Note, ...] = ()
    context: int | None = None
    batch: int = 1
    kv_rows: tuple[KvRow, ...] = ()
    kv_peak_nbytes: int | None = None
    workspace: Workspace | None = None
    fit: Fit | None = None
    measured: Measured | None = None

    @classmethod
    def of(cls, items: Iterable[Item], kept: Iterable[Note] = (), **others: Any) -> Footprint:
        """Add items up into rows, in the order of ``ROLES``."""
        groups: dict[tuple[str, str | None, str], list[Item]] = {}
        for item in items:
            dtype = str(item.dtype).removeprefix("torch.")
            groups.setdefault((item.role, item.format, dtype), []).append(item)
        rows = [
            Row(
                *key,
                len(group),
                sum(prod(item.shape) for item in group),
                sum(item.nbytes for item in group),
                sum(item.overhead_nbytes for item in group),
            )
            for key, group in sorted(groups.items(), key=_row_order)
        ]
        return cls(rows, kept=tuple(kept), **others)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights, scales included, tied ones once."""
        return sum(row.nbytes for row in self.rows)

    @property
    def overhead_nbytes(self) -> int:
        """Bytes of scales, zero points and second-level scales, part of ``weight_nbytes``."""
        return sum(row.overhead_nbytes for row in self.rows)

    @property
    def num_parameters(self) -> int:
        """Numbers in the model, however they are packed, tied ones once."""
        return sum(row.num_parameters for row in self.rows)

    @property
    def bits_per_weight(self) -> float:
        """Bits a parameter takes on average, scales and unquantized weights included."""
        return 8 * self.weight_nbytes / self.num_parameters if self.num_parameters else 0.0

    @property
    def total_nbytes(self) -> int:
        """Weights, buffers, unused storage, kernels' copies and, where asked for and known, the KV cache."""
        extra = self.buffer_nbytes + self.unused_nbytes + self.packed_nbytes
        return self.weight_nbytes + extra + (self.kv_nbytes or 0)

    @property
    def peak_nbytes(self) -> int | None:
        """The most that is needed on the way to the context, steps included; None where that is not known."""
        if self.workspace is None or self.kv_peak_nbytes is None:
            return None
        return self.total_nbytes - (self.kv_nbytes or 0) + self.kv_peak_nbytes + self.workspace.nbytes

    def to_dict(self) -> dict[str, Any]:
        """The footprint as plain values; the schema is in ``docs/report.md``."""
        totals = (
            "total_nbytes", "weight_nbytes", "overhead_nbytes", "buffer_nbytes", "unused_nbytes",
            "packed_nbytes", "num_parameters", "bits_per_weight", "kv_nbytes", "kv_note", "context", "batch",
            "kv_peak_nbytes", "peak_nbytes",
        )  # fmt: skip
        rows = [{**asdict(row), "bits_per_weight": row.bits_per_weight} for row in self.rows]
        kept = [asdict(note) for note in self.kept]
        parts: dict[str, Any] = {"rows": rows, "not_quantized": kept, "kv_rows": [asdict(row) for row in self.kv_rows]}
        for name in ("workspace", "fit", "measured"):
            value = getattr(self, name)
            parts[name] = None if value is None else asdict(value)
        if self.workspace is not None:
            parts["workspace"]["nbytes"] = self.workspace.nbytes
        if self.measured is not None:
            parts["measured"]["step_nbytes"] = self.measured.step_nbytes
        return {"schema_version": SCHEMA_VERSION, **{name: getattr(self, name) for name in totals}, **parts}

    def __str__(self) -> str:
        from qkv.memory.table import table

        return table(self)


@lru_cache(maxsize=4096)
def _role(name: str) -> str:
    return next((role for role, pattern in ROLES if pattern.search(name)), "other")


def _row_order(group: tuple[tuple[str, str | None, str], list[Item]]) -> tuple[int, str, str]:
    role, format, dtype = group[0]
    roles = [name for name, _ in ROLES]
    return roles.index(role) if role in roles else len(roles), format or "", dtype


def unquantized(items: Iterable[Item]) -> list[Note]:
    """The matrices among ``items`` that are plain tensors."""
    return [Note(item.name, item.nbytes, "") for item in items if item.format is None and len(item.shape) > 1]
