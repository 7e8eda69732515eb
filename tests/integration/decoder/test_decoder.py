"""The decoder as a person uses it: budgets, ends, options, streams, models left as they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from qkv.errors import QkvError
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.hf_cache import KVCache
from tests.helpers import frozen, logits, prompt, tiny
from tests.integration.decoder.cases import CACHES, continued, kv_cache, related, target


class Letters:
    """A tokenizer of 64 characters."""

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoded", (), {"input_ids": torch.tensor([[ord(c) - 48 for c in text]])})

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(chr(token + 48) for token in ids)


class EndsWith:
    """A stopping criterion that knows nothing of blocks."""

    def __init__(self, ending: list[int]) -> None:
        self.ending = ending

    def __call__(self, ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.tensor([ids[0, -len(self.ending) :].tolist() == self.ending])


def test_self_draft_accepts_all() -> None:
    """S02 (vllm#6285, vllm#9730): every token right, no call too many."""
    model = tiny("llama")
    for length in (1, 2, 3, 4, 6):
        for count in (12, 25):
            decoder = SpeculativeDecoder(model, source=model, length=length)
            decoder.generate(prompt(9), max_new_tokens=count)
            assert decoder.stats.accepted == decoder.stats.drafted > 0
            assert decoder.stats.target_calls <= math.ceil(count / (length + 1)) + 1


@pytest.mark.parametrize("length", [1, 4, 10])
def test_token_budget_is_exact(length: int) -> None:
    """S04 (transformers#29585, lorax#474)."""
    model = tiny("llama")
    for draft in (model, tiny("llama", seed=1), "lookup"):
        decoder = SpeculativeDecoder(model, source=draft, length=length)
        for count in (1, 2, 3, 5, 8):
            assert decoder.generate(prompt(5), max_new_tokens=count).shape == (1, 5 + count)
    assert torch.equal(decoder.generate(prompt(5), max_new_tokens=0), prompt(5))
    for wrong in (-1, 2.5, True):
        with pytest.raises(QkvError, match="max_new_tokens"):
            decoder.generate(prompt(5), max_new_tokens=wrong)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-9, 1e-6])
def test_low_temperature_is_greedy(temperature: float) -> None:
    """S08 (jaymody/speculative-sampling#5, llama.cpp#5657)."""
    model = tiny("llama")
    expected = model.generate(prompt(6), max_new_tokens=12, do_sample=False)
    for draft in (model, tiny("llama", seed=1)):
        for accept in ("coupled", "rejection"):
            decoder = SpeculativeDecoder(model, source=draft, length=3, accept=accept)
            options: dict[str, Any] = {"do_sample": True, "temperature": temperature, "seed": 1}
            assert torch.equal(decoder.generate(prompt(6), max_new_tokens=12, **options), expected)


@pytest.mark.parametrize("accept", ["coupled", "rejection"])
def test_any_temperature_gives_tokens(accept: str) -> None:
    model = tiny("llama")
    decoder = SpeculativeDecoder(model, source=model, length=3, accept=accept)
    for temperature in (0.01, 0.5, 1.0, 100.0):
        found = decoder.generate(prompt(6), max_new_tokens=10, do_sample=True, temperature=temperature, seed=2)
        assert found.shape == (1, 16) and 0 <= int(found.min()) <= int(found.max()) < 64
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(QkvError, match="temperature"):
            decoder.generate(prompt(6), max_new_tokens=4, do_sample=True, temperature=wrong)


@pytest.mark.parametrize("size", [80, 64, 60])
def test_padded_vocabularies_are_tolerated(size: int) -> None:
    """S10 (vllm#16210, transformers#30728): ids that the target lacks are never proposed, nor fed where unknown."""
    model, draft = tiny("llama"), tiny("llama", seed=1, vocab_size=size)
    if size == 80:
        draft.lm_head.weight.data[64:] = draft.lm_head.weight.data[:16] * 50
    ids = prompt(6).clamp(max=59)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    for length in (1, 4):
        assert torch.equal(
            SpeculativeDecoder(model, source=draft, length=length).generate(ids, max_new_tokens=20), expected
        )


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(QkvError, match=r"vocabulary of 2,000 .*lookup"):
        SpeculativeDecoder(tiny("llama"), source=tiny("llama", vocab_size=2000))


def test_models_are_left_as_they_were() -> None:
    """S13 (transformers#30042): weights, settings, training mode, attention; one-token prompts work."""
    model, draft = tiny("llama"), tiny("llama", seed=1)
    before = [(frozen(m), logits(m), m.generation_config.to_dict(), m.config.to_dict()) for m in (model, draft)]
    cache = KVCache(model.config)
    first = SpeculativeDecoder(model, source=draft, cache=cache).generate(prompt(8), max_new_tokens=10)
    SpeculativeDecoder(draft, source=model).generate(prompt(3), max_new_tokens=10)
    assert torch.equal(
        SpeculativeDecoder(model, source=draft, cache=cache).generate(prompt(8), max_new_tokens=10), first
    )
    assert len(cache.block_layers[0]) == 0
    for m, (state, values, generation, config) in zip((model, draft), before, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in m.state_dict().items())
        assert torch.equal(logits(m), values) and not m.training
        assert m.generation_config.to_dict() == generation and m.config.to_dict() == config
    one = model.generate(prompt(1), max_new_tokens=6, do_sample=False)
    assert torch.equal(SpeculativeDecoder(model, source=draft).generate(prompt(1), max_new_tokens=6), one)


@pytest.mark.parametrize("length", [1, 3, 7])
def test_ends_inside_an_accepted_block(length: int) -> None:
    """transformers#47912 and stop strings: the model drafts for itself, so that every block is accepted whole."""
    full = continued(SpeculativeDecoder(target()), prompt(), max_new_tokens=24)[0]
    decoder = SpeculativeDecoder(target(), source=target(), length=length)
    for end in range(3, 12):
        if full[end] in full[:end]:
            continue
        assert continued(decoder, prompt(), max_new_tokens=24, eos_token_id=[63, full[end]])[0] == full[: end + 1]
        stop = [EndsWith(full[end - 1 : end + 1])]
        assert continued(decoder, prompt(), max_new_tokens=24, stopping_criteria=stop)[0] == full[: end + 1]
        held = continued(decoder, prompt(), max_new_tokens=24, eos_token_id=full[end], min_new_tokens=end + 4)[0]
        plain = SpeculativeDecoder(target())
        assert held == continued(plain, prompt(), max_new_tokens=24, eos_token_id=full[end], min_new_tokens=end + 4)[0]
        assert len(held) >= end + 4


def test_a_cache_that_cannot_roll_back_is_refused_before_anything_is_generated() -> None:
    model = tiny("mistral")
    cache = StaticCache(config=model.config, max_cache_len=40)
    if cache.is_croppable:
        pytest.skip("this transformers can roll it back")
    with pytest.raises(QkvError, match="cannot take tokens back"):
        SpeculativeDecoder(model, source="lookup").generate(prompt(), max_new_tokens=4, cache=cache)


def test_prompts_padded_on_the_right_are_refused() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0]])
    with pytest.raises(QkvError, match="left"):
        SpeculativeDecoder(tiny("llama")).generate(prompt(), mask, max_new_tokens=4)


@pytest.mark.parametrize("cache", CACHES)
def test_a_given_cache_is_continued(cache: str) -> None:
    model = target()
    expected = continued(SpeculativeDecoder(model, cache=kv_cache(cache, model)), prompt(12), max_new_tokens=16)
    held = kv_cache(cache, model) or DynamicCache(config=model.config)
    decoder = SpeculativeDecoder(model, source=related(), length=3)
    first = decoder.generate(prompt(12), max_new_tokens=7, cache=held)
    assert held.get_seq_length() == first.shape[1] - 1
    assert first[0, 12:].tolist() + continued(decoder, first, max_new_tokens=9, cache=held)[0] == expected[0]


def test_streams_are_what_is_generated() -> None:
    decoder, letters = SpeculativeDecoder(target(), source=target(), length=3), Letters()
    text = letters.decode(prompt()[0].tolist())
    pieces = list(decoder.stream(text, letters, max_new_tokens=13, do_sample=True, seed=1))
    expected = continued(decoder, prompt(), max_new_tokens=13, do_sample=True, seed=1)[0]
    assert "".join(pieces) == letters.decode(expected) and 3 < len(pieces) <= 5

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    streamer = Streamer()
    decoder.generate(prompt(), max_new_tokens=13, do_sample=True, seed=1, streamer=streamer)
    assert streamer.seen == [*prompt()[0].tolist(), *expected, -1]


def test_accounts_add_up() -> None:
    """T5."""
    decoder = SpeculativeDecoder(target(), source=related(), length=4)
    found = decoder.generate(prompt(batch=2), max_new_tokens=20)
    stats = decoder.stats
    assert stats.emitted == 2 * 20 == found.shape[1] * 2 - 14 == stats.accepted + stats.row_steps
    assert stats.steps == stats.target_calls and stats.accepted <= stats.drafted
    assert sum(stats.drafted_at) == stats.drafted and sum(stats.accepted_at) == stats.accepted
    assert all(0 <= rate <= 1 for rate in stats.acceptance_by_depth) and "drafted accepted" in str(stats)
    assert decoder.last_cache.get_seq_length() == found.shape[1] - 1


def test_plain_decoding_takes_any_cache() -> None:
    model = tiny("mistral")
    cache = StaticCache(config=model.config, max_cache_len=40)
    expected = model.generate(prompt(), max_new_tokens=14, do_sample=False)
    assert torch.equal(SpeculativeDecoder(model).generate(prompt(), max_new_tokens=14, cache=cache), expected)
