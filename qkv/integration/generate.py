"""Generate text as the command line does it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from qkv.errors import QkvError
from qkv.integration.compat import cache_argument
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.hf_cache import KVCache
from qkv.integration.hf_cache_options import cache_from_options


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    cache: Mapping[str, Any] | None = None,
    source: str | None = None,
    stats: bool = False,
) -> None:
    """Continue ``prompt`` on standard output, and say on standard error how fast it went.

    Args:
        model, tokenizer: of transformers.
        prompt: text, or a message with ``chat``.
        cache: options of :func:`qkv.integration.hf_cache_options.cache_settings`; none for the model's own cache.
        source: of drafts, see :class:`qkv.SpeculativeDecoder`; None generates with transformers alone.
        stats: print what the decoder did.

    Raises:
        QkvError: a temperature below 0, ``top_p`` outside (0, 1], a seed out of range, no chat template, or
            ``stats`` without a source.
    """
    sampling = sampling_options(temperature, top_p)
    if not 0 <= seed < 2**63:
        raise QkvError(f"seed {seed} is not a whole number from 0 to 2**63 - 1")
    if stats and source is None:
        raise QkvError("stats are those of the speculative decoder; add a source, none for plain decoding with it")
    inputs = encode_prompt(tokenizer, prompt, chat=chat).to(model.device)
    held = cache_from_options(model.config, **(cache or {}))
    options = {"max_new_tokens": max_new_tokens, **sampling}
    start = time.perf_counter()
    if source is None:
        count = _generate(model, tokenizer, inputs, held, seed, chat, options)
    else:
        count = _speculate(model, tokenizer, inputs, held, seed, source, stats, options)
    seconds = time.perf_counter() - start
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)


def _generate(
    model: Any, tokenizer: Any, inputs: Any, held: KVCache | None, seed: int, chat: bool, options: dict[str, Any]
) -> int:
    from transformers import TextStreamer

    torch.manual_seed(seed)
    extra = {} if held is None else {cache_argument(model): held.attach(model)}
    streamer = TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True)
    output = model.generate(**inputs, streamer=streamer, **options, **extra)
    if held is not None:
        held.detach()
        print(held.report(), file=sys.stderr)
    return int(output.shape[1] - inputs["input_ids"].shape[1])


def _speculate(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    held: KVCache | None,
    seed: int,
    source: str,
    stats: bool,
    options: dict[str, Any],
) -> int:
    decoder = SpeculativeDecoder(model, source=source, cache=held)
    for text in decoder.stream(inputs["input_ids"], tokenizer, seed=seed, **options):
        print(text, end="", flush=True)
    print()
    if stats:
        print(decoder.stats, file=sys.stderr)
    if held is not None:
        print(decoder.last_cache.report(), file=sys.stderr)
    return decoder.stats.emitted


def sampling_options(temperature: float, top_p: float) -> dict[str, Any]:
    """What ``generate`` takes; greedy at temperature 0.

    Raises:
        QkvError: a value outside its range.
    """
    if not 0 <= temperature < float("inf"):
        raise QkvError(f"temperature {temperature} is not 0 (greedy) or more")
    if not 0 < top_p <= 1:
        raise QkvError(f"top-p {top_p} is not above 0 and at most 1")
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def encode_prompt(tokenizer: Any, prompt: str, *, chat: bool) -> Any:
    """Input ids and mask of a prompt, in the model's chat template where asked for.

    Raises:
        QkvError: the model has no chat template, or the prompt has no tokens.
    """
    if not chat:
        inputs = tokenizer(prompt, return_tensors="pt")
    elif tokenizer.chat_template is None:
        raise QkvError("the model has no chat template; leave --chat out")
    else:
        message = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    if not inputs["input_ids"].numel():
        raise QkvError("the prompt has no tokens; write at least a word")
    return inputs
