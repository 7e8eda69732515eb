"""T4: a real model in float32, 160 tokens, against transformers' own greedy decoding; its tokenizer's stop strings."""

from __future__ import annotations

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


@cache
def model_and_tokenizer(path: Path) -> tuple[Any, Any]:
    return load(path, dtype="float32"), load_tokenizer(path)


@cache
def greedy(path: Path, prompt: str) -> tuple[Tensor, Tensor]:
    model, tokenizer = model_and_tokenizer(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    mask = torch.ones_like(ids)
    return ids, model.generate(ids, attention_mask=mask, max_new_tokens=160, do_sample=False, eos_token_id=None)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["lookup", "ngram", "self:int8"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_that_of_transformers(smollm2: Path, prompt: str, source: str) -> None:
    model, _ = model_and_tokenizer(smollm2)
    ids, expected = greedy(smollm2, prompt)
    found = SpeculativeDecoder(model, source=source).generate(ids, max_new_tokens=160, eos_token_id=None)
    assert torch.equal(found, expected)


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
