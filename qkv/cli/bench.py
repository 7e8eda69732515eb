"""Measure a model's speed on this machine: its layers, its context, loading and decoding, beside what else there is."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qkv.cli.options import positive

if TYPE_CHECKING:
    from qkv.bench.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv bench``."""
    parser.add_argument("model", metavar="MODEL", help="model directory, in float")
    parser.add_argument(
        "--subject",
        action="append",
        default=[],
        metavar="NAME",
        help="linear, attention, quantize, load or decode; can be repeated (default all)",
    )
    add_measuring_options(parser)


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Sizes, and what becomes of the tables."""
    parser.add_argument("--rounds", type=positive, metavar="N", help="turns of each entrant (default 9)")
    parser.add_argument("--shapes", type=_shapes, metavar="OUTxIN,...", help="of linear layers, 4096x4096 for example")
    parser.add_argument("--rows", type=_numbers, metavar="N,N", help="rows of x (default 1,4,8,16,64)")
    parser.add_argument("--context", type=_numbers, metavar="N,N", help="tokens that attention reads")
    parser.add_argument("--formats", type=_names, metavar="F,F", help="formats of the subject linear")
    parser.add_argument("--new-tokens", type=positive, metavar="N", help="tokens to generate (default 32)")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    parser.add_argument("--threads", type=positive, metavar="N", help="torch's threads (default: its own choice)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the tables")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="say what moved since a kept file")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="draw speed by rows and time by context")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    from qkv.bench.plan import plan_of_model

    measure_and_print(plan_of_model(options.model), options.subject, options)


def measure_and_print(plan: Plan, subjects: list[str], options: argparse.Namespace) -> None:
    """Measure what the options of :func:`add_measuring_options` ask for."""
    import torch

    from qkv.bench.run import measure
    from qkv.progress import Progress

    wanted = {
        "rounds": options.rounds,
        "shapes": options.shapes,
        "rows": options.rows,
        "contexts": options.context,
        "formats": options.formats,
        "new_tokens": options.new_tokens,
    }
    plan = replace(plan, peers=not options.no_peers, **{name: value for name, value in wanted.items() if value})
    if options.threads:
        torch.set_num_threads(options.threads)
    with Progress("measuring", 1) as progress:
        pieces = measure(
            plan,
            subjects,
            keep_in=options.json,
            compare=options.compare,
            pictures=options.plot,
            say=lambda item: progress.advance(item, 0),
        )
        for piece in pieces:
            print(piece, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for part in text.split(","):
        out_features, _, in_features = part.partition("x")
        found.append((positive(out_features), positive(in_features)))
    return tuple(found)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))
