"""Generate text as the command line does it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from qkv.errors import QkvError
from qkv.integration.compat import cache_argument
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
) -> None:
    """Continue ``prompt`` on standard output, and say on standard error how fast it went.

    Args:
        model, tokenizer: of transformers.
        prompt: text, or a message with ``chat``.
        cache: options of :func:`qkv.integration.hf_cache_options.cache_settings`; none for the model's own cache.

    Raises:
        QkvError: a temperature below 0, ``top_p`` outside (0, 1], a seed out of range, or no chat template.
    """
    import sys

    from transformers import TextStreamer

    sampling = sampling_options(temperature, top_p)
    if not 0 <= seed < 2**63:
        raise QkvError(f"seed {seed} is not a whole number from 0 to 2**63 - 1")
    inputs = encode_prompt(tokenizer, prompt, chat=chat)
    held = cache_from_options(model.config, **(cache or {}))
    extra = {} if held is None else {cache_argument(model): held.attach(model)}
    torch.manual_seed(seed)
    start = time.perf_counter()
    output = model.generate(
        **inputs.to(model.device),
        max_new_tokens=max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=chat, skip_special_tokens=True),
        **sampling,
        **extra,
    )
    seconds = time.perf_counter() - start
    count = output.shape[1] - inputs["input_ids"].shape[1]
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.1f} tokens/s", file=sys.stderr)
    if held is not None:
        print(held.report(), file=sys.stderr)
        held.detach()


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
