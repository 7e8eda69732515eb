"""Turn a quantized directory back into plain safetensors for other tools."""

from __future__ import annotations

import argparse

from qkv.cli.options import add_output_options, written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv dequantize``."""
    add_output_options(parser)
    parser.add_argument("--dtype", help="of the dequantized weights (default: what they were)")


def run(options: argparse.Namespace) -> None:
    """Dequantize."""
    from qkv import dequantize_checkpoint

    dequantize_checkpoint(
        options.src,
        options.dst,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        overwrite=options.overwrite,
        restart=options.restart,
        workers=options.workers,
        shard=options.shard,
    )
    print(written(options))
