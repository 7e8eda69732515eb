"""The law: output is that of plain decoding with the same seed, whatever source, length, neighbours, chunk, cache."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.sources import NGram
from tests.helpers import prompt, tiny
from tests.integration.decoder.cases import (
    CACHES,
    MODES,
    Adversary,
    Moody,
    continued,
    kv_cache,
    padded,
    ragged,
    related,
    target,
    unrelated,
)

NEW = 24


def source_of(name: str, family: str) -> Any:
    made: dict[str, Any] = {
        "related": related(family),
        "unrelated": unrelated(),
        "adversary": Adversary(),
        "ngram": NGram().fit([prompt(40, seed=9)[0].tolist()]),
    }
    return made.get(name, name)


@cache
def plain(family: str, cache: str, mode: str) -> list[list[int]]:
    """Each prompt of ``ragged`` alone, without a source."""
    ids, mask = ragged()
    decoder = SpeculativeDecoder(target(family), cache=kv_cache(cache, target(family)))
    return [
        continued(decoder, row[real.bool()][None], seed=3, max_new_tokens=NEW, **MODES[mode])[0]
        for row, real in zip(ids, mask, strict=True)
    ]


COMBINED = [
    ("related", 3),
    ("related", "adaptive"),
    ("unrelated", 7),
    ("lookup", "adaptive"),
    ("lookup", 7),
    ("ngram", Moody()),
    ("adversary", Moody()),
    ("self:nf4", 2),
]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", MODES)
def test_output_is_that_of_plain_decoding(cache: str, mode: str) -> None:
    expected = plain("llama", cache, mode)
    ids, mask = ragged()
    for number, (source, length) in enumerate(COMBINED):
        decoder = SpeculativeDecoder(
            target(),
            source=source_of(source, "llama"),
            length=length,  # type: ignore[arg-type]
            cache=kv_cache(cache, target()),
            chunk=(1, 4, 512)[number % 3],
        )
        if number % 2:
            found = continued(decoder, ids, mask, seed=3, max_new_tokens=NEW, **MODES[mode])
            assert found == padded(expected), (source, length)
        else:
            found = continued(decoder, ids[:1], seed=3, max_new_tokens=NEW, **MODES[mode])
            assert found == expected[:1], (source, length)


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt2"])
@pytest.mark.parametrize("cache", ["dynamic", "int8"])
def test_other_models(family: str, cache: str) -> None:
    """Sliding windows, learned positions; prompts and outputs longer than the window of 8."""
    expected = plain(family, cache, "sampled")
    ids, mask = ragged()
    for source, length in (("related", 4), ("lookup", 6)):
        decoder = SpeculativeDecoder(
            target(family), source=source_of(source, family), length=length, cache=kv_cache(cache, target(family))
        )
        found = continued(decoder, ids, mask, seed=3, max_new_tokens=NEW, **MODES["sampled"])
        assert found == padded(expected), source


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_over_a_quantized_cache(family: str) -> None:
    """Float32, because their products know no float64; greedy."""
    model = tiny(family)
    cache = kv_cache("int8", model)
    expected = SpeculativeDecoder(model, cache=cache).generate(prompt(20), max_new_tokens=16)
    for source in ("lookup", "self:int8"):
        found = SpeculativeDecoder(model, source=source, length=5, cache=cache).generate(prompt(20), max_new_tokens=16)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_greedy_is_that_of_transformers(family: str) -> None:
    """S01: float32; a random, a related and the model itself as draft; 1 to 6 tokens."""
    model = tiny(family)
    ids = prompt(7)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    drafts: tuple[Any, ...] = (tiny(family, seed=1), related(family).float(), model, "lookup", "self:int8")
    for number, draft in enumerate(drafts):
        for length in (1, 2, 3, 6)[number % 2 :: 2]:
            found = SpeculativeDecoder(model, source=draft, length=length).generate(ids, max_new_tokens=20)
            assert torch.equal(found, expected), (number, length)
    related(family).double()


def test_different_seeds_differ_and_equal_ones_do_not() -> None:
    decoder = SpeculativeDecoder(target(), source="lookup")
    runs = [continued(decoder, prompt(), seed=seed, max_new_tokens=12, do_sample=True) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_several_sequences_differ_and_the_first_is_the_one_alone() -> None:
    decoder = SpeculativeDecoder(target(), source=related(), length=3)
    alone = continued(decoder, prompt(), seed=4, max_new_tokens=12, do_sample=True)
    three = continued(decoder, prompt(), seed=4, max_new_tokens=12, do_sample=True, num_return_sequences=3)
    assert three[0] == alone[0] and len({tuple(row) for row in three}) == 3


def test_a_draft_model_may_have_a_quantized_cache() -> None:
    from qkv.integration.sources import ModelSource

    expected = plain("llama", "dynamic", "everything")
    ids, mask = ragged()
    source = ModelSource(related(), target(), cache=kv_cache("int8", target()))
    decoder = SpeculativeDecoder(target(), source=source, length=5)
    assert continued(decoder, ids, mask, seed=3, max_new_tokens=NEW, **MODES["everything"]) == padded(expected)
    assert decoder.stats.acceptance > 0.3
