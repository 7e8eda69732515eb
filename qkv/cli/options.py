"""Options that several commands take."""

from __future__ import annotations

import argparse


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """SRC, DST and how DST is written."""
    parser.add_argument("src", metavar="SRC", help="model directory: config.json and safetensors")
    parser.add_argument("dst", metavar="DST", help="directory to make; it appears whole or not at all")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="largest file (default 5GB)")
    parser.add_argument("--overwrite", action="store_true", help="replace DST if it is a model directory")


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """What to quantize to what."""
    parser.add_argument(
        "--format",
        default="nf4",
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
