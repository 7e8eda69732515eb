"""Quantize a model directory into a new one, one tensor in memory at a time."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from qkv.cli.options import add_calibration_options, add_format_options, add_output_options, overrides, written

if TYPE_CHECKING:
    from qkv import Calibration, Plan

LIMITS = ("target_bpw", "target_size", "max_perplexity_increase")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv quantize``."""
    add_output_options(parser)
    add_format_options(parser)
    parser.add_argument(
        "--layout",
        default="qkv",
        help="of DST: qkv (all formats), bnb (nf4, int8:row), compressed-tensors (int4, int8) (default qkv)",
    )
    add_calibration_options(parser)


def run(options: argparse.Namespace) -> None:
    """Plan if asked to, quantize, and print what was written."""
    from qkv import quantize_checkpoint, save_plan

    calibration = _calibration(options)
    plan = _plan(options, calibration)
    if plan is not None:
        print(plan)
        if options.save_plan is not None:
            save_plan(plan, options.save_plan)
        if options.dry_run:
            return
    report = quantize_checkpoint(
        options.src,
        options.dst,
        **_formats(options, plan),
        skip=options.skip,
        layout=options.layout,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        calibrate=calibration,
        restart=options.restart,
        workers=options.workers,
        shard=options.shard,
    )
    print(report)
    print(written(options))


def _calibration(options: argparse.Namespace) -> Calibration | None:
    from qkv import QkvError
    from qkv.checkpoint.calibration import find_calibration

    limit = next((name for name in LIMITS if getattr(options, name) is not None), None)
    for name in [limit] if limit else ["save_calibration"] if options.save_calibration else []:
        if options.calibrate is None:
            raise QkvError(f"--{name.replace('_', '-')} needs --calibrate TEXT")
    if options.calibrate is None:
        return None
    calibration = find_calibration(options.src, options.calibrate, options.samples, gradients=limit is not None)
    if options.save_calibration is not None:
        calibration.save(options.save_calibration)
    return calibration


def _plan(options: argparse.Namespace, calibration: Calibration | None) -> Plan | None:
    """The plan to do; None where formats are named.

    Raises:
        QkvError: both, or options of a plan without one.
    """
    from qkv import QkvError, load_plan, plan_checkpoint

    limits = {name: getattr(options, name) for name in LIMITS}
    if options.plan is None and all(limit is None for limit in limits.values()):
        if options.dry_run or options.save_plan is not None:
            raise QkvError("--dry-run and --save-plan are of a plan; add --target-bpw, --target-size or --plan")
        return None
    if options.format is not None or options.embeddings is not None or options.override:
        raise QkvError("a plan decides every format: leave --format, --embeddings and --override out, or edit the plan")
    if options.plan is not None:
        return load_plan(options.plan, options.src, options.skip)
    assert calibration is not None
    more = {"skip": options.skip, "samples": options.samples, "text": options.calibrate}
    return plan_checkpoint(options.src, calibration, **limits, **more)


def _formats(options: argparse.Namespace, plan: Plan | None) -> dict[str, Any]:
    if plan is not None:
        return plan.options()
    return {
        "format": options.format or "nf4",
        "embeddings": options.embeddings,
        "overrides": overrides(options),
    }
