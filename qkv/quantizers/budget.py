"""Which layer gets which format within a budget of bytes: the steps that save most loss a byte come first.

Every unit (a weight, or several that must agree) has options of a size and an expected cost in loss. Of these only
the lower convex hull counts, so that each further step of a unit gains less a byte than the one before it; taking
all steps of all units in the order of that gain makes one ladder of plans, from the smallest to the largest
(Lagrangian relaxation of the multiple-choice knapsack).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

from qkv.errors import QkvError
from qkv.quantizers.format import Format
from qkv.units import format_bytes

KEEP: Final = "keep"
LAYER_OPTIONS: Final = ("nf4:g128:double", "nf4:g128", "nf4:double", "nf4", "int8", KEEP)
TABLE_OPTIONS: Final = ("int8:row", "int8", KEEP)
"""Formats that are weighed against each other; four bits are too few for tables of words."""


class Option(NamedTuple):
    """A format or ``"keep"``, the bytes it takes, and what it is expected to cost in loss (nats a token)."""

    format: str
    nbytes: int
    loss: float


@dataclass(frozen=True)
class Unit:
    """Modules that share what they are given, and their options."""

    modules: tuple[str, ...]
    options: tuple[Option, ...]
    table: bool = False

    def hull(self) -> list[Option]:
        """The options worth taking, by size, each step gaining less a byte than the one before."""
        hull: list[Option] = []
        for option in sorted(self.options, key=lambda each: (each.nbytes, each.loss, each.format)):
            if hull and option.loss >= hull[-1].loss:
                continue
            while len(hull) > 1 and _gain(hull[-2], hull[-1]) <= _gain(hull[-1], option):
                hull.pop()
            hull.append(option)
        return hull


def _gain(first: Option, second: Option) -> float:
    return (first.loss - second.loss) / (second.nbytes - first.nbytes)


@dataclass(frozen=True)
class Plan:
    """A format, or ``"keep"``, for every module that can be quantized.

    Attributes:
        layers: linear layers and experts by name.
        tables: embedding tables and the output head by name.
        nbytes: of all weights, those that are never quantized included.
        num_parameters: numbers in the model, tied ones once.
        loss: what it is expected to cost, in nats a token; None where it is not known.
        measured: perplexity on the calibration text over that of the float model, less 1, where it was measured.
    """

    layers: Mapping[str, str]
    tables: Mapping[str, str]
    nbytes: int
    num_parameters: int
    loss: float | None = None
    measured: float | None = None

    @property
    def bits_per_weight(self) -> float:
        """Bits a parameter takes, everything counted."""
        return 8 * self.nbytes / self.num_parameters

    def options(self) -> dict[str, Any]:
        """``format``, ``embeddings`` and ``overrides`` that do this, for ``quantize_`` and ``quantize_checkpoint``.

        Raises:
            QkvError: it keeps everything.
        """
        layers = Counter(format for format in self.layers.values() if format != KEEP)
        tables = Counter(format for format in self.tables.values() if format != KEEP)
        if not layers and not tables:
            raise QkvError("the plan keeps every weight, so that there is nothing to quantize")
        default = (layers or tables).most_common(1)[0][0]
        embeddings = tables.most_common(1)[0][0] if tables else None
        overrides = {name: format for name, format in self.layers.items() if format != default}
        if embeddings is not None:
            overrides |= {name: format for name, format in self.tables.items() if format != embeddings}
        longest_first = dict(sorted(overrides.items(), key=lambda item: -len(item[0])))
        return {"format": default, "embeddings": embeddings, "overrides": longest_first}

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values; what may be edited are ``layers`` and ``tables``."""
        sizes = {"nbytes": self.nbytes, "bits_per_weight": self.bits_per_weight, "expected_loss": self.loss}
        measured = {} if self.measured is None else {"measured_increase": self.measured}
        return {"qkv_plan": 1, **sizes, **measured, "tables": dict(self.tables), "layers": dict(self.layers)}

    def __str__(self) -> str:
        measured = "" if self.measured is None else f", measured {self.measured:+.2%} on the calibration text"
        lines = [
            f"plan: {format_bytes(self.nbytes)}, {self.bits_per_weight:.2f} bits a weight, "
            f"expected cost {'not known' if self.loss is None else f'{self.loss:.4f} nats a token'}{measured}"
        ]
        for title, formats in (("tables", self.tables), ("layers", self.layers)):
            kinds = Counter((name.rpartition(".")[2], format) for name, format in formats.items())
            lines += [f"  {title:7} {kind:16} {format:12} {count:5}" for (kind, format), count in sorted(kinds.items())]
        return "\n".join(lines)


class Ladder:
    """All plans on the hull of some units, from the smallest to the largest.

    Args:
        units: what can be quantized.
        fixed_nbytes: of weights that never are.
        num_parameters: of the whole model.
    """

    def __init__(self, units: Sequence[Unit], fixed_nbytes: int, num_parameters: int) -> None:
        self._units, self._fixed, self._num_parameters = units, fixed_nbytes, num_parameters
        hulls = [unit.hull() for unit in units]
        self._start = [hull[0] for hull in hulls]
        steps = [
            (-_gain(first, second), unit.modules[0], first.nbytes, number, first, second)
            for number, (unit, hull) in enumerate(zip(units, hulls, strict=True))
            for first, second in pairwise(hull)
        ]
        self._steps = [step[3:] for step in sorted(steps, key=lambda step: step[:3])]

    def __len__(self) -> int:
        return len(self._steps) + 1

    def __getitem__(self, index: int) -> Plan:
        """The plan after the first ``index`` steps."""
        chosen = list(self._start)
        for number, _, option in self._steps[:index]:
            chosen[number] = option
        return plan_of(self._units, chosen, self._fixed, self._num_parameters)

    def within(self, nbytes: int) -> Plan:
        """The best plan of at most ``nbytes`` in all: steps are taken while they fit.

        Raises:
            QkvError: not even the smallest fits.
        """
        smallest = self[0]
        if smallest.nbytes > nbytes:
            bits = 8 * nbytes / self._num_parameters
            raise QkvError(
                f"{format_bytes(nbytes)} ({bits:.2f} bits a weight) is out of reach: the smallest plan takes "
                f"{format_bytes(smallest.nbytes)} ({smallest.bits_per_weight:.2f} bits a weight)"
            )
        chosen, left = list(self._start), nbytes - smallest.nbytes
        for number, first, option in self._steps:
            if chosen[number] is first and option.nbytes - first.nbytes <= left:
                chosen[number], left = option, left - (option.nbytes - first.nbytes)
        return plan_of(self._units, chosen, self._fixed, self._num_parameters)


def plan_of(units: Iterable[Unit], chosen: Iterable[Option], fixed_nbytes: int, num_parameters: int) -> Plan:
    """The plan that gives each unit its chosen option."""
    pairs = list(zip(units, chosen, strict=True))
    layers, tables = (
        {name: option.format for unit, option in pairs if unit.table == table for name in unit.modules}
        for table in (False, True)
    )
    nbytes = fixed_nbytes + sum(option.nbytes for _, option in pairs)
    return Plan(layers, tables, nbytes, num_parameters, sum(option.loss for _, option in pairs))


def checked_format(text: Any, name: str) -> str:
    """A format of a plan as it is spelled in full, or ``"keep"``.

    Raises:
        QkvError: neither.
    """
    if not isinstance(text, str):
        raise QkvError(f"the plan gives {name} {text!r}; it takes a format or 'keep'")
    return text if text == KEEP else str(Format.parse(text))
