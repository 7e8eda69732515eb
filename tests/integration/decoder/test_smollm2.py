"""T4: a real model against transformers' own greedy decoding; its tokenizer's stop strings.

In float32 outputs are equal. In bfloat16 a block of tokens rounds otherwise than one token, and two tokens may change
places where they are all but equal. The certificate: wherever the output departs, both tokens lie within
``TOLERANCE`` of the largest logit that the same weights give in float32. Then it goes on from transformers' own text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qkv.checkpoint.load import load, load_tokenizer
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.hf_cache import KVCache

PROMPTS = (
    "Repeat: The lighthouse was built in 1874 by Walter Harrow, and the last keeper left it in 1988.",
    "Summarise: Ada kept the light burning for six days without sleep, and eleven ships found the harbour.",
    "Rename `total` to `result`:\ndef mean(values):\n    total = sum(values)\n    return total / len(values)\n",
    "Tell me a story about a fox who wants to learn to sail.",
)


TOLERANCE = 0.5
"""Of a logit. bfloat16 resolves 0.125 at the size of the largest logits here (16 to 32), and what is summed up
through the layers moves them by a few such steps."""


@cache
def model_and_tokenizer(path: Path, dtype: str = "float32") -> tuple[Any, Any]:
    return load(path, dtype=dtype), load_tokenizer(path)


@cache
def greedy(path: Path, prompt: str, tokens: int = 160, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    model, tokenizer = model_and_tokenizer(path, dtype)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    return ids, model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None)


def check_equal(path: Path, prompt: str, source: str, tokens: int) -> None:
    model, _ = model_and_tokenizer(path)
    ids, expected = greedy(path, prompt, tokens)
    found = SpeculativeDecoder(model, source=source).generate(ids, max_new_tokens=tokens, eos_token_id=None)
    assert torch.equal(found, expected)


def departures(path: Path, prompt: str, source: str, tokens: int, margins: Callable[[Tensor, Tensor], float]) -> int:
    """How often bfloat16 departs from transformers' greedy text, each time certified."""
    model, _ = model_and_tokenizer(path, "bfloat16")
    ids, expected = greedy(path, prompt, tokens, "bfloat16")
    decoder, count = SpeculativeDecoder(model, source=source), 0
    while ids.shape[1] < expected.shape[1]:
        left = expected.shape[1] - ids.shape[1]
        found = decoder.generate(ids, max_new_tokens=left, eos_token_id=None)
        odd = (found != expected)[0].nonzero()
        if not len(odd):
            return count
        at, count = int(odd[0]), count + 1
        assert margins(expected[:, :at], torch.stack((expected[0, at], found[0, at]))) <= TOLERANCE
        ids = expected[:, : at + 1]
    return count


def margin(path: Path) -> Callable[[Tensor, Tensor], float]:
    """How far tokens lie below the best one after a text, in float32."""
    exact, _ = model_and_tokenizer(path)

    def measure(text: Tensor, tokens: Tensor) -> float:
        with torch.no_grad():
            logits = exact(text).logits[0, -1]
        return float(logits.max() - logits[tokens].min())

    return measure


@pytest.mark.parametrize("source", ["lookup", "self:int8"])
def test_a_little_of_both(smollm2: Path, source: str) -> None:
    check_equal(smollm2, PROMPTS[0], source, 24)
    departures(smollm2, PROMPTS[0], source, 24, margin(smollm2))


@pytest.mark.slow
@pytest.mark.parametrize("source", ["lookup", "ngram", "self:int8"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_that_of_transformers(smollm2: Path, prompt: str, source: str) -> None:
    check_equal(smollm2, prompt, source, 160)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["none", "lookup", "ngram"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_bfloat16_departs_at_near_ties_only(smollm2: Path, prompt: str, source: str) -> None:
    count = departures(smollm2, prompt, source, 160, margin(smollm2))
    assert count <= 16 and (count == 0 or source != "none")


def test_the_certificate_tells_a_wrong_token(smollm2: Path) -> None:
    ids, expected = greedy(smollm2, PROMPTS[0], 24)
    wrong = torch.stack((expected[0, ids.shape[1]], torch.tensor(5)))
    assert margin(smollm2)(ids, wrong) > TOLERANCE


@pytest.mark.slow
def test_quantized_cache_and_stop_strings_in_a_stream(smollm2: Path) -> None:
    model, tokenizer = model_and_tokenizer(smollm2)
    cache = KVCache(model.config, keys="int8", values="int8")
    options: dict[str, Any] = {"max_new_tokens": 60, "stop_strings": ["Harrow"]}
    plain = SpeculativeDecoder(model, cache=cache)
    ids = greedy(smollm2, PROMPTS[0])[0]
    expected = plain.generate(ids, tokenizer=tokenizer, **options)
    drafting = SpeculativeDecoder(model, source="lookup", cache=cache)
    assert torch.equal(drafting.generate(ids, tokenizer=tokenizer, **options), expected)
    text = "".join(drafting.stream(ids, tokenizer, **options))
    assert text == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert text.endswith("Harrow") and drafting.stats.accepted > 0
