"""Options that several commands take."""

from __future__ import annotations

import argparse
from typing import Any


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """SRC, DST and how DST is written."""
    parser.add_argument(
        "src", metavar="SRC", help="model directory: config.json and safetensors (quantize takes a .gguf file too)"
    )
    parser.add_argument("dst", metavar="DST", help="directory to make; it appears whole or not at all")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default 5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a model directory")
    parser.add_argument(
        "--restart", action="store_true", help="throw away what an unfinished run left, instead of going on with it"
    )
    parser.add_argument(
        "--workers", type=positive, default=1, metavar="N", help="processes, each with files of its own"
    )
    parser.add_argument("--shard", metavar="I/N", help="write the I-th of N parts to DST, for `qkv merge` to join")


def written(options: argparse.Namespace) -> str:
    """The last line of a command that wrote DST."""
    if options.shard:
        return f"written: {options.dst}, part {options.shard}; join all parts with qkv merge PART... DST"
    return f"written: {options.dst}"


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """What to quantize to what."""
    parser.add_argument(
        "--format",
        help="nf4, int8 or int4, with options: int8:g128:asym, nf4:double (default nf4)",
    )
    parser.add_argument(
        "--embeddings",
        metavar="FORMAT",
        help="quantize embedding tables and the output head too, to int8 say",
    )
    parser.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="NAME",
        help="leave modules alone: mlp, layers.0, layers.*.q_proj",
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=FORMAT",
        help="another format for some modules, or keep",
    )


def add_calibration_options(parser: argparse.ArgumentParser) -> None:
    """What scales are searched by, and which formats a plan may take."""
    group = parser.add_argument_group("calibrated scales, and formats planned with them (the model is loaded and run)")
    group.add_argument(
        "--calibrate", metavar="FILE", help="search scales for what the layers read: a text, .jsonl, or saved file"
    )
    group.add_argument("--samples", type=positive, default=32, metavar="N", help="pieces of 512 tokens (default 32)")
    group.add_argument("--save-calibration", metavar="FILE", help="keep the statistics, for the next --calibrate")
    limit = group.add_mutually_exclusive_group()
    limit.add_argument("--target-bpw", type=float, metavar="BITS", help="plan formats: bits a weight at most")
    limit.add_argument("--target-size", metavar="SIZE", help="plan formats: size of all weights at most, 1.2GB")
    limit.add_argument(
        "--max-perplexity-increase", metavar="SHARE", help="plan formats: the smallest that measures at most, 2%%"
    )
    limit.add_argument("--plan", metavar="FILE", help="do this plan, as saved or edited")
    group.add_argument("--save-plan", metavar="FILE", help="keep the plan as JSON, to be edited")
    group.add_argument("--dry-run", action="store_true", help="stop when the plan is printed")


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """How keys and values are stored, and which stay."""
    group = parser.add_argument_group("KV cache (default: exact, everything kept)")
    group.add_argument("--kv", metavar="CODEC", help="keys and values: exact, int8, int4, int2, nf4")
    group.add_argument("--keys", metavar="CODEC", help="keys alone")
    group.add_argument("--values", metavar="CODEC", help="values alone")
    group.add_argument("--window", type=positive, metavar="N", help="keep the last N tokens and the sinks")
    group.add_argument("--sinks", type=int, default=4, metavar="N", help="first tokens that always stay (default 4)")
    group.add_argument("--summary", type=int, default=0, metavar="N", help="squeeze what the window left into N")
    group.add_argument("--budget", metavar="SIZE", help="evict by importance: 512MB, a number of tokens, or 0.5")


def cache_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of :func:`add_cache_options`, for ``cache_settings``."""
    return {name: getattr(options, name) for name in ("kv", "keys", "values", "window", "sinks", "summary", "budget")}


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """``--override NAME=FORMAT`` as a mapping.

    Raises:
        QkvError: an option without ``=``.
    """
    from qkv.errors import QkvError

    result = {}
    for text in options.override:
        name, equals, format = text.partition("=")
        if not equals:
            raise QkvError(f"--override takes NAME=FORMAT, for example self_attn=int8; got {text!r}")
        result[name] = format
    return result


def positive(text: str) -> int:
    """A whole number from 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return value


def read_text(path: str) -> str:
    """A text file.

    Raises:
        QkvError: not UTF-8.
    """
    from pathlib import Path

    from qkv.errors import QkvError

    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise QkvError(f"{path} is not a UTF-8 text (byte {error.start}); convert it first") from error
