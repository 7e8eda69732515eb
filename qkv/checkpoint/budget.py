"""``plan_checkpoint``: the formats that lose least within a size, or that stay within a loss; and plans as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qkv.checkpoint.calibration import find_calibration, read_texts
from qkv.checkpoint.load import load, load_tokenizer
from qkv.checkpoint.quantize import refuse_quantized
from qkv.checkpoint.shards import parse_size
from qkv.checkpoint.source import Source
from qkv.checkpoint.strict_json import read_object
from qkv.checkpoint.units import Members, fixed_nbytes, measure_units, num_parameters, read_members
from qkv.errors import CheckpointError, QkvError
from qkv.integration.calibrate import WINDOW, token_windows
from qkv.integration.calibration import Calibration
from qkv.integration.trial import Trial
from qkv.progress import Progress
from qkv.quantizers.budget import Ladder, Plan, checked_format


def plan_checkpoint(
    src: str | Path,
    calibrate: Calibration | str | Path,
    *,
    target_bpw: float | None = None,
    target_size: str | int | None = None,
    max_perplexity_increase: float | str | None = None,
    skip: str | Sequence[str] = (),
    samples: int = 32,
    text: str | Path | None = None,
) -> Plan:
    """Give every linear layer and table of a checkpoint a format: NF4 of three kinds, INT8, or its own floats.

    What a format costs is estimated from the gradients of the loss on the calibration text. The result is the
    same each time; ``quantize_checkpoint(src, dst, **plan.options(), calibrate=...)`` does it.

    Args:
        src: a directory with ``config.json`` and safetensors.
        calibrate: as for :func:`qkv.quantize_checkpoint`; a calibration must have been made with ``gradients=True``.
        target_bpw: bits a weight at most, everything counted.
        target_size: bytes of all weights at most, ``"1.2GB"`` or a number.
        max_perplexity_increase: ``0.02`` or ``"2%"``: the smallest plan that measures no more than that on the
            calibration text. Plans are tried on the loaded model, rounded in place.
        skip: names or patterns of modules that stay as they are.
        samples: pieces of 512 tokens of the text to read.
        text: the calibration text, to measure on, where ``calibrate`` is not the text itself.

    Raises:
        QkvError: not exactly one of the three limits, or one that cannot be reached.
        CheckpointError: a source that is damaged, unsafe, or quantized already.
    """
    limits = (target_bpw, target_size, max_perplexity_increase)
    if sum(limit is not None for limit in limits) != 1:
        raise QkvError("a plan takes one limit: target_bpw, target_size or max_perplexity_increase")
    increase = None if max_perplexity_increase is None else parse_share(max_perplexity_increase)
    skip = [skip] if isinstance(skip, str) else list(skip)
    with Source.open(src) as source:
        refuse_quantized(source)
        source.require_config()
        members = read_members(source, skip)
        calibration = find_calibration(source.directory, calibrate, samples, gradients=True)
        count = num_parameters(source)
        ladder = Ladder(measure_units(source, members, calibration), fixed_nbytes(source, members), count)
        if increase is not None:
            return _within_increase(ladder, increase, source.directory, calibration, text or calibrate, samples)
        if target_bpw is not None:
            return ladder.within(int(target_bpw * count / 8))
        assert target_size is not None
        return ladder.within(parse_size(target_size))


def parse_share(value: float | str) -> float:
    """``"2%"`` or ``0.02`` as 0.02.

    Raises:
        QkvError: neither, or below 0.
    """
    text = str(value).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 100:
        raise QkvError(f"an increase of {value!r} is no share of the perplexity; write 2% or 0.02")
    return share


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON, to be edited and given back."""
    Path(path).write_text(json.dumps(plan.to_dict(), indent=2) + "\n", encoding="utf-8")


def load_plan(path: str | Path, src: str | Path, skip: Sequence[str] = ()) -> Plan:
    """Read a plan for the checkpoint ``src``, and count what it takes as it is now.

    Raises:
        CheckpointError: not a plan.
        QkvError: a format that does not exist, or modules that are not those of ``src``.
    """
    values = read_object(Path(path), unique_keys=True)
    parts = [values.get(part) for part in ("layers", "tables")]
    if values.get("qkv_plan") != 1 or not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f'{path} is no plan of version 1, with "layers" and "tables"; make one with --save-plan')
    layers, tables = ({n: checked_format(f, n) for n, f in part.items()} for part in parts if part is not None)
    with Source.open(src) as source:
        members = read_members(source, skip)
        nbytes = fixed_nbytes(source, members)
        nbytes += sum(each.nbytes(_agreed(each, tables if each.table else layers, path), source) for each in members)
        _check_known({**layers, **tables}, members, path)
        return Plan(layers, tables, nbytes, num_parameters(source))


def _agreed(members: Members, formats: Mapping[str, str], path: str | Path) -> str:
    """The one format that the plan gives modules which share a weight."""
    found = {name: formats.get(name) for name in members.modules}
    missing = next((name for name, format in found.items() if format is None), None)
    if missing is not None:
        raise QkvError(f'{path} says nothing of {missing}; add it with a format or "keep"')
    if len(set(found.values())) > 1:
        raise QkvError(f"{path} gives {', '.join(members.modules)} several formats, and they share one weight")
    return str(found[members.modules[0]])


def _check_known(formats: Mapping[str, str], members: Sequence[Members], path: str | Path) -> None:
    known = {name for each in members for name in each.modules}
    unknown = next((name for name in formats if name not in known), None)
    if unknown is not None:
        raise QkvError(f"{path} names {unknown}, which is nothing that this model lets be quantized; take it out")


def _within_increase(
    ladder: Ladder, limit: float, directory: Path, calibration: Calibration, text: Any, samples: int
) -> Plan:
    """The smallest plan that measures ``limit`` or less, found by halving; more bytes are taken to lose less."""
    if isinstance(text, Calibration) or Path(text).suffix == ".safetensors":
        raise QkvError("max_perplexity_increase is measured on the calibration text; give the text, not its statistics")
    tokenizer = load_tokenizer(directory)
    windows = list(token_windows(tokenizer, read_texts(Path(text), tokenizer), samples, WINDOW))
    low, high, measured = 0, len(ladder) - 1, 0.0  # the last plan keeps everything
    with (
        Trial(load(directory), calibration, windows) as trial,
        Progress("trying", len(ladder).bit_length()) as progress,
    ):
        while low < high:
            middle = (low + high) // 2
            plan = ladder[middle]
            found = trial.increase({**plan.layers, **plan.tables})
            progress.advance(f"{found:+.2%} at {plan.bits_per_weight:.2f} bits a weight")
            if found <= limit:
                high, measured = middle, found
            else:
                low = middle + 1
    return replace(ladder[high], measured=measured)
