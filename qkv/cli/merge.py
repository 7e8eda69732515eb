"""Join the parts that `qkv quantize --shard I/N` wrote to one model directory."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv merge``."""
    parser.add_argument("parts", metavar="PART", nargs="+", help="the folders of all parts, in any order")
    parser.add_argument("dst", metavar="DST", help="directory to make; it appears whole or not at all")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a model directory")


def run(options: argparse.Namespace) -> None:
    """Merge."""
    from qkv import merge_checkpoint

    merge_checkpoint(options.parts, options.dst, overwrite=options.overwrite)
    print(f"written: {options.dst}")
