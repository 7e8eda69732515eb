"""What of a checkpoint can be quantized, at what size, and what that is expected to cost: the units of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from qkv.checkpoint.calibration import expert_part
from qkv.checkpoint.source import Source
from qkv.errors import QkvError
from qkv.integration.calibration import Calibration
from qkv.integration.settings import Settings
from qkv.integration.skeleton import Choice, Chooser
from qkv.memory.items import Item
from qkv.progress import Progress
from qkv.quantizers.budget import KEEP, LAYER_OPTIONS, TABLE_OPTIONS, Option, Unit, checked_format
from qkv.quantizers.calibration import output_error
from qkv.quantizers.experts import experts_refuse, parameter_format
from qkv.quantizers.format import Format
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor

LAYER, TABLE = Format("int8"), Format("int8", "row")
"""Stand-ins by which the choices tell layers from tables."""


@dataclass(frozen=True)
class Member:
    """A file tensor of a unit: the parameter it is part of, and its shape as it is quantized."""

    name: str
    choice: Choice
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Members:
    """Modules that share their weights, and the file tensors those are."""

    modules: tuple[str, ...]
    tensors: tuple[Member, ...]
    table: bool

    def options(self) -> tuple[str, ...]:
        """The formats that all of its tensors can take."""
        refused = any(
            "experts" in member.choice.parameter.split(".") and experts_refuse(Format("nf4"), member.shape[-1])
            for member in self.tensors
        )
        options = TABLE_OPTIONS if self.table else LAYER_OPTIONS
        return tuple(each for each in options if each == KEEP or not refused or Format.parse(each).bits == 8)

    def nbytes(self, format: str, source: Source) -> int:
        """Bytes of its tensors in ``format``, scales included."""
        if format == KEEP:
            return sum(source.entries[member.name].nbytes for member in self.tensors)
        return sum(Item.quantized(m.name, _own_format(m, format), m.shape).nbytes for m in self.tensors)


def read_members(source: Source, skip: Sequence[str]) -> list[Members]:
    """Group the tensors of a checkpoint that can be quantized by the modules that share them, in the files' order.

    Raises:
        QkvError: a model that transformers cannot build.
    """
    chooser = Chooser(source.directory, Settings.parse(LAYER, tuple(skip), TABLE), source.entries)
    if chooser.note:
        raise QkvError(f"{source.path} cannot be planned ({chooser.note}); name the formats with --override")
    grouped: dict[tuple[str, ...], list[Member]] = {}
    tables: set[tuple[str, ...]] = set()
    for name, entry in source.entries.items():
        choice = chooser.choose(name, entry.shape, entry.dtype)
        if choice.format:
            modules = chooser.sharers(choice.parameter)
            shape = (*entry.shape[:-2], entry.shape[-1], entry.shape[-2]) if choice.transposed else entry.shape
            grouped.setdefault(modules, []).append(Member(name, choice, shape))
            tables |= {modules} if choice.format == TABLE else set()
    return [Members(modules, tuple(tensors), modules in tables) for modules, tensors in grouped.items()]


def measure_units(source: Source, members: Sequence[Members], calibration: Calibration) -> list[Unit]:
    """The options of each unit with their sizes and costs, one tensor in memory at a time. What the calibration never
    met can only be kept.

    Raises:
        QkvError: a calibration without costs, or of another model.
    """
    if not calibration.columns:
        raise QkvError("the calibration holds no costs to plan by; make it with gradients=True (or --target-... TEXT)")
    calibration.check_covers(m.tensors[0].choice.parameter for m in members if not m.table)
    units = []
    with Progress("weighing", len(members)) as progress:
        for each in members:
            losses = _losses(source, each, calibration)
            formats = [format for format in each.options() if format == KEEP or format in losses]
            options = (
                Option(checked_format(format, each.modules[0]), each.nbytes(format, source), losses.get(format, 0.0))
                for format in formats
            )
            units.append(Unit(each.modules, tuple(options), each.table))
            progress.advance(each.modules[0])
    return units


def fixed_nbytes(source: Source, members: Sequence[Members]) -> int:
    """Bytes of the tensors that are in no unit."""
    planned = {member.name for each in members for member in each.tensors}
    return sum(entry.nbytes for name, entry in source.entries.items() if name not in planned)


def num_parameters(source: Source) -> int:
    """Numbers in the checkpoint."""
    return sum(prod(entry.shape) for entry in source.entries.values())


def _own_format(member: Member, format: str) -> Format:
    return parameter_format(member.choice.parameter, Format.parse(format), member.shape[-1])


def _losses(source: Source, members: Members, calibration: Calibration) -> dict[str, float]:
    """Expected cost by format; empty where it is not known."""
    formats = [format for format in members.options() if format != KEEP]
    losses: dict[str, float] = {}
    num_elements = sum(prod(member.shape) for member in members.tensors)
    for member in members.tensors:
        calibration.check_weight(member.choice.parameter, source.read_rows(member.name, 0, 1))
        x = source.read(member.name)
        x = x.mT if member.choice.transposed else x
        for name in _names(members, member, calibration):
            for format in formats:
                weight = quantize_tensor(x, _own_format(member, format), name=member.name)
                cost = _cost(x, weight, calibration, name, member.name)
                share = prod(member.shape) / num_elements if calibration.columns[name].dim() == 0 else 1.0
                losses[format] = losses.get(format, 0.0) + cost * share
    return losses


def _names(members: Members, member: Member, calibration: Calibration) -> list[str]:
    """The parameters, a shared one under each of its names, whose cost is known."""
    leaf = member.choice.parameter.rpartition(".")[2]
    return [name for module in members.modules if (name := f"{module}.{leaf}") in calibration.columns]


def _cost(x: Tensor, weight: QuantizedTensor, calibration: Calibration, name: str, file_name: str) -> float:
    """Half the mean squared change of the loss to first order, which is its growth (Fisher); for experts, whose
    inner gradients are not collected, that of a change of their outputs by the relative error of their weights."""
    columns, shares = calibration.columns[name], calibration.outputs.get(name)
    if columns.dim():
        errors = output_error(x, weight, columns)
        return float((errors.mean() if shares is None else (errors * shares).sum()) / 2)
    importance = expert_part(calibration.importance[name], file_name, x.dim())
    error, power = (output_error(x, each, importance).sum(-1) for each in (weight, None))
    return float(columns) * float((error / power.clamp(min=torch.finfo(torch.float32).tiny)).mean())
