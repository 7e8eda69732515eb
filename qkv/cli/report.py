"""Show what a model takes in memory, byte for byte, from its files' headers."""

from __future__ import annotations

import argparse
import json
from typing import Any

from qkv.cli.options import add_cache_options, cache_options, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv report``."""
    parser.add_argument("model", metavar="DIR", help="model directory, quantized or not; or a .gguf file")
    parser.add_argument(
        "--context", type=positive, metavar="TOKENS", help="add the KV cache and steps of so many tokens"
    )
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences of that length (default 1)")
    parser.add_argument("--chunk", type=positive, default=512, metavar="N", help="tokens read at once (default 512)")
    parser.add_argument("--memory", metavar="SIZE", help="say how long a context and how large a batch fit: 24GB")
    parser.add_argument(
        "--compare",
        nargs="*",
        metavar="FORMAT",
        help="formats side by side: int8 nf4:double nf4+int8 (embeddings in int8); a usual choice where none is named",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw that: .png, .svg, or .html (needs matplotlib)")
    parser.add_argument("--live", action="store_true", help="load the model, let it read the context, and measure")
    add_cache_options(parser)
    parser.add_argument("--json", action="store_true", help="for programs; docs/report.md has the schema")


def run(options: argparse.Namespace) -> None:
    """Print the footprint, or formats side by side."""
    from qkv import QkvError
    from qkv.integration.hf_cache_options import cache_settings

    settings = cache_settings(**cache_options(options))
    if settings and options.context is None:
        raise QkvError("the cache's size depends on how much it holds; add --context TOKENS")
    if (options.compare is not None or options.plot) and options.live:
        raise QkvError("--live measures one model as it is; leave --compare and --plot out")
    result = _compared(options, settings) if options.compare is not None or options.plot else _one(options, settings)
    print(json.dumps(result.to_dict(), indent=2) if options.json else result)


def _one(options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    from qkv import footprint

    sizes = {name: getattr(options, name) for name in ("context", "batch", "chunk", "memory", "live")}
    return footprint(options.model, **sizes, **settings)


def _compared(options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    from pathlib import Path

    from qkv.memory.compare import AS_IS, CACHES, WEIGHTS, compare
    from qkv.memory.plot import check_target, draw

    if options.plot:
        check_target(Path(options.plot))
    if options.keys or options.values:
        from qkv import QkvError

        raise QkvError("side by side, keys and values have one codec; say --kv")
    caches = (options.kv, *(c for c in CACHES if c != options.kv)) if options.kv else CACHES
    weights = (AS_IS, *options.compare) if options.compare else WEIGHTS
    sizes = {name: getattr(options, name) for name in ("context", "batch", "chunk", "memory")}
    result = compare(options.model, weights, caches, **sizes, retain=settings.get("retain"))
    if options.plot:
        draw(result, Path(options.plot))
    return result
