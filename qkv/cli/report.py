"""Show what a model takes in memory, byte for byte, from its files' headers."""

from __future__ import annotations

import argparse
import json

from qkv.cli.options import add_cache_options, cache_options, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv report``."""
    parser.add_argument("model", metavar="DIR", help="model directory, quantized or not")
    parser.add_argument("--context", type=positive, metavar="TOKENS", help="add the KV cache of so many tokens")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences of that length (default 1)")
    add_cache_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> None:
    """Print the footprint."""
    from qkv import QkvError, footprint
    from qkv.integration.hf_cache_options import cache_settings

    settings = cache_settings(**cache_options(options))
    if settings and options.context is None:
        raise QkvError("the cache's size depends on how much it holds; add --context TOKENS")
    result = footprint(options.model, context=options.context, batch=options.batch, **settings)
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)
