"""What a layout is: how one directory's files hold quantized weights, for writing and for reading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.header import TensorEntry
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.integration.settings import Settings
from qkv.memory.items import Item
from qkv.quantizers.format import Format
from qkv.quantizers.tensor import QuantizedTensor


@dataclass(frozen=True)
class Weight:
    """A weight that will be written quantized.

    Attributes:
        name: of the float tensor in the file.
        module: what the model calls the module that holds it.
        format: what it is quantized to.
        shape: of the float weight as it is quantized, ``[..., out, in]``.
        dtype: of the float weight.
        transposed: the model's own parameter has the last two dimensions the other way round.
    """

    name: str
    module: str
    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False

    @property
    def is_expert(self) -> bool:
        """Whether it is one of the matrices that transformers fuses into a stack of experts."""
        return "experts" in self.name.split(".")


@dataclass(frozen=True)
class Plan:
    """All that a layout's ``quantization_config`` can depend on.

    Attributes:
        config: the source's ``config.json``.
        settings: what was asked for, as our own layout writes it.
        weights: those that are quantized, by name.
        kept: names of the modules with a matrix that stays as it is, as the model calls them.
    """

    config: Mapping[str, Any]
    settings: Settings
    weights: Mapping[str, Weight]
    kept: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stored:
    """One weight of a directory: a plain tensor (no format), or the tensors a quantized one is made of.

    ``shape`` is that of the float weight as it is quantized, ``transposed`` says that the model's own
    parameter has it the other way round. The codes are the first of ``entries``.
    """

    name: str
    entries: Mapping[str, TensorEntry]
    format: Format | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False
    layout: Layout | None = None

    @classmethod
    def plain(cls, entry: TensorEntry) -> Stored:
        """A tensor that is not quantized."""
        return cls(entry.name, {entry.name: entry}, None, entry.shape, entry.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def item(self) -> Item:
        """The same for a footprint."""
        codes = next(iter(self.entries.values()))
        format = None if self.format is None else str(self.format)
        return Item(self.name, format, codes.dtype, self.shape, self.nbytes, self.nbytes - codes.nbytes)


class Layout(ABC):
    """How files hold quantized weights. One value of each class is in ``LAYOUTS``; none has a state."""

    method: str
    """``quant_method`` in ``config.json``."""
    by_rows: bool = False
    """Whether a weight's tensors are those of its rows, one after the other, where the format lets rows apart."""
    turns_conv1d: bool = False
    """Whether the weight of a ``Conv1D`` is stored transposed and only the model tells that it is."""

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)  # in another process, too

    def __hash__(self) -> int:
        return hash(type(self))

    def check(self, settings: Settings) -> None:
        """Raise QkvError for settings that this layout cannot hold, before any weight is read."""
        return

    def unfit(self, weight: Weight) -> str | None:
        """Why a weight has to stay as it is, whatever was asked for; None where it need not."""
        return None

    @abstractmethod
    def specs(self, weight: Weight) -> list[TensorSpec]:
        """The tensors a weight becomes, the codes first; QkvError for a format that does not fit its shape."""

    @abstractmethod
    def encode(self, weight: Weight, value: Tensor, importance: Tensor | None) -> dict[str, Tensor]:
        """Those tensors for a float ``value`` of the weight's shape; ``importance`` as for ``quantize_tensor``."""

    @abstractmethod
    def config(self, plan: Plan) -> dict[str, Any]:
        """``quantization_config`` of ``config.json``."""

    @abstractmethod
    def stored(self, source: Source, config: Mapping[str, Any]) -> list[Stored]:
        """The weights of a directory of this layout, from its headers; CheckpointError where they do not fit."""

    @abstractmethod
    def decode(self, stored: Stored, source: Source) -> QuantizedTensor:
        """A quantized weight of :meth:`stored`, read: the values that the layout's own library gives, bit for bit."""


def specs_item(weight: Weight, specs: Sequence[TensorSpec]) -> Item:
    """A weight as it will be written, for a footprint."""
    nbytes = sum(spec.nbytes for spec in specs)
    return Item(weight.name, str(weight.format), specs[0].dtype, weight.shape, nbytes, nbytes - specs[0].nbytes)
