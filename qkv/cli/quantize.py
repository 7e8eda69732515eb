"""Quantize a model directory into a new one, one tensor in memory at a time."""

from __future__ import annotations

import argparse

from qkv.cli.options import add_format_options, add_output_options, overrides


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv quantize``."""
    add_output_options(parser)
    add_format_options(parser)


def run(options: argparse.Namespace) -> None:
    """Quantize and print what was written."""
    from qkv import quantize_checkpoint

    report = quantize_checkpoint(
        options.src,
        options.dst,
        options.format,
        skip=options.skip,
        embeddings=options.embeddings,
        overrides=overrides(options),
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
    )
    print(report)
    print(f"written: {options.dst}")
