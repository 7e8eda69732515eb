"""Quantize a model directory into a new one, one tensor in memory at a time."""

from __future__ import annotations

import argparse

from qkv.cli.options import add_format_options, add_output_options, overrides, positive, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv quantize``."""
    add_output_options(parser)
    add_format_options(parser)
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help="search scales for the inputs that this text makes (or .jsonl, or a saved calibration); runs the model",
    )
    parser.add_argument(
        "--samples", type=positive, default=32, metavar="N", help="pieces of 512 tokens of it (default 32)"
    )
    parser.add_argument("--save-calibration", metavar="FILE", help="keep the statistics for the next --calibrate")


def run(options: argparse.Namespace) -> None:
    """Quantize and print what was written."""
    from qkv import QkvError, quantize_checkpoint
    from qkv.checkpoint.calibration import find_calibration

    calibration = None
    if options.save_calibration is not None and options.calibrate is None:
        raise QkvError("--save-calibration needs --calibrate TEXT to have something to save")
    if options.calibrate is not None:
        calibration = find_calibration(options.src, options.calibrate, options.samples)
        if options.save_calibration is not None:
            calibration.save(options.save_calibration)
    report = quantize_checkpoint(
        options.src,
        options.dst,
        options.format,
        skip=options.skip,
        embeddings=options.embeddings,
        overrides=overrides(options),
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        calibrate=calibration,
        restart=options.restart,
        workers=options.workers,
        shard=options.shard,
    )
    print(report)
    print(written(options))
