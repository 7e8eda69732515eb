"""Continue a prompt with a model directory, streaming to the terminal."""

from __future__ import annotations

import argparse

from qkv.cli.options import add_cache_options, cache_options, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv generate``."""
    parser.add_argument("model", metavar="DIR", help="model directory, quantized or not")
    parser.add_argument("--prompt", required=True, help="text to continue, or a message with --chat")
    parser.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    parser.add_argument("--max-new-tokens", type=positive, default=100, metavar="N", help="(default 100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="(default 1.0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling (default 0)")
    parser.add_argument("--source", help="speculate: lookup, ngram, self:nf4, model:DIR; none for plain decoding")
    parser.add_argument("--stats", action="store_true", help="print what speculation did (with --source)")
    add_cache_options(parser)


def run(options: argparse.Namespace) -> None:
    """Generate and stream."""
    from qkv.checkpoint.load import load, load_tokenizer
    from qkv.integration.decoding import prepare_
    from qkv.integration.generate import generate_text

    model = load(options.model)
    prepare_(model)
    generate_text(
        model,
        load_tokenizer(options.model),
        options.prompt,
        chat=options.chat,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        cache=cache_options(options),
        source=options.source,
        stats=options.stats,
    )
