"""Measure a model directory's perplexity on a text file."""

from __future__ import annotations

import argparse

from qkv.cli.options import add_cache_options, cache_options, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv perplexity``."""
    parser.add_argument("model", metavar="DIR", help="model directory, quantized or not")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens of a window (default 512)")
    parser.add_argument("--windows", type=positive, metavar="N", help="only the first N windows (default all)")
    add_cache_options(parser)
    parser.add_argument("--dtype", default="auto", help="to compute in: float32, bfloat16 (default: the model's)")


def run(options: argparse.Namespace) -> None:
    """Measure and print."""
    from qkv.checkpoint.load import load, load_tokenizer
    from qkv.cli.options import read_text
    from qkv.integration.hf_cache_options import cache_settings
    from qkv.integration.perplexity import perplexity

    text = read_text(options.text)
    model = load(options.model, dtype=options.dtype)
    result = perplexity(
        model,
        load_tokenizer(options.model),
        text,
        window=options.length,
        num_windows=options.windows,
        cache=cache_settings(**cache_options(options)),
    )
    print(result)
