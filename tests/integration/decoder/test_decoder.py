"""The decoder as a person uses it: budgets, ends, options, streams, models left as they were."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache

from qkv.errors import QkvError
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.hf_cache import KVCache
from qkv.integration.prepare import NEUTRAL
from tests.helpers import frozen, logits, prompt, tiny
from tests.integration.decoder.cases import CACHES, continued, kv_cache, ragged, related, target


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


@pytest.mark.parametrize("option", [
    {"num_beams": 2}, {"guidance_scale": 1.5}, {"return_dict_in_generate": True}, {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3}, {"num_assistant_tokens": 4}, {"use_mtp": True}, {"max_cache_len": 64},
    {"cache_implementation": "static"}, {"use_cache": False}, {"nonsense": 1},
    {"stop_strings": "end"}, {"seed": -1}, {"seed": [1, 2]}, {"pixel_values": None},
])  # fmt: skip
def test_what_is_not_supported_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(QkvError):
        SpeculativeDecoder(tiny("llama"), source="lookup").generate(prompt(), max_new_tokens=4, **option)


HONOURED = """max_length max_new_tokens min_length min_new_tokens max_time stop_strings do_sample temperature top_k
top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty no_repeat_ngram_size
bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id remove_invalid_values eos_token_id pad_token_id
exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias watermarking_config
num_return_sequences encoder_no_repeat_ngram_size""".split()
"""Fields that ``generate`` turns into lengths, processors and criteria, which the walk asks."""
SILENT = """early_stopping length_penalty bos_token_id decoder_start_token_id disable_compile _from_model_config
transformers_version""".split()
"""Fields that say nothing to a decoder-only model without beams."""


def test_every_field_of_a_generation_config_is_honoured_or_refused() -> None:
    left = set(GenerationConfig().to_dict()) - set(NEUTRAL) - set(HONOURED) - set(SILENT)
    assert not left, f"fields of this transformers that nobody thought about: {left}"


@pytest.mark.parametrize("option", [
    {"top_k": 5, "top_p": 0.9, "min_p": 0.05}, {"typical_p": 0.8}, {"epsilon_cutoff": 3e-4}, {"eta_cutoff": 1e-3},
    {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[3], [4, 5]]}, {"suppress_tokens": [3, 4]}, {"top_h": 0.5},
    {"begin_suppress_tokens": [7]}, {"sequence_bias": [[[4], 2.0]]}, {"exponential_decay_length_penalty": (3, 1.3)},
    {"forced_eos_token_id": 5}, {"min_length": 14}, {"max_length": 19, "max_new_tokens": None}, {"max_time": 60.0},
    {"remove_invalid_values": True}, {"renormalize_logits": True}, {"encoder_repetition_penalty": 1.2},
])  # fmt: skip
def test_options_are_those_of_transformers(option: dict[str, Any]) -> None:
    """Greedily they are comparable: the same tokens as ``model.generate`` with the same options."""
    if not set(option) <= set(GenerationConfig().to_dict()):
        pytest.skip("this transformers does not know it")
    given: dict[str, Any] = {"max_new_tokens": 14, "eos_token_id": [9], "pad_token_id": 0, "do_sample": False, **option}
    expected = target().generate(prompt(), attention_mask=torch.ones_like(prompt()), **given)
    for source, length in ((related(), 4), ("lookup", 3)):
        assert torch.equal(
            SpeculativeDecoder(target(), source=source, length=length).generate(prompt(), **given), expected
        )
    sampled = {**given, "do_sample": True, "seed": 3}
    plain = SpeculativeDecoder(target()).generate(prompt(), **sampled)
    assert torch.equal(SpeculativeDecoder(target(), source=related(), length=4).generate(prompt(), **sampled), plain)


@pytest.mark.parametrize("option", [
    {"source": "magic"}, {"source": "lookup:3"}, {"source": 3}, {"length": "long"}, {"length": -1}, {"length": None},
    {"accept": "typical"}, {"chunk": 0}, {"cache": "int8"}, {"source": "self:int77"}, {"source": "model:nowhere"},
])  # fmt: skip
def test_mistakes_are_told_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(QkvError):
        SpeculativeDecoder(tiny("llama"), **option)


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


@pytest.mark.parametrize("cache", ["dynamic", "int8"])
def test_inside_transformers_own_generate(cache: str) -> None:
    model = target()
    decoder = SpeculativeDecoder(model, source="lookup", cache=kv_cache(cache, model))
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": True, "temperature": 0.8, "top_k": 0}
    expected = decoder.generate(prompt(), seed=5, **options)
    assert torch.equal(model.generate(prompt(), custom_generate=decoder, seed=5, **options), expected)
    with pytest.raises(QkvError, match="another model"):
        related().generate(prompt(), custom_generate=decoder, **options)


@pytest.mark.parametrize("cache", ["dynamic", "int8"])
def test_batches_inside_transformers_own_generate(cache: str) -> None:
    """What ``generate`` returns for a padded batch: each row's own output, and padding behind it."""
    model, (ids, mask) = target(), ragged()
    decoder = SpeculativeDecoder(model, source="lookup", cache=kv_cache(cache, model))
    plain = SpeculativeDecoder(model, cache=kv_cache(cache, model))
    stop = continued(plain, ids[2:, 13:], max_new_tokens=16)[0][5]
    for options in (
        {"do_sample": False, "eos_token_id": stop},
        {"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 5},
        {"do_sample": True, "temperature": 0.8, "seed": 5, "num_return_sequences": 2},
        {"do_sample": False, "min_new_tokens": 9, "eos_token_id": stop},
    ):
        given: dict[str, Any] = {"max_new_tokens": 16, "pad_token_id": 0, **options}
        found = model.generate(ids, attention_mask=mask, custom_generate=decoder, **given)
        assert torch.equal(found, decoder.generate(ids, mask, **given)), options
        if not options["do_sample"] and cache == "dynamic":
            assert torch.equal(found, model.generate(ids, attention_mask=mask, **given))


def test_inside_generate_processors_see_padding_as_transformers_own_do() -> None:
    model, (ids, mask) = tiny("llama"), ragged()
    given: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 1.7, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **given)
    decoder = SpeculativeDecoder(model, source="lookup", length=3)
    assert torch.equal(model.generate(ids, attention_mask=mask, custom_generate=decoder, **given), expected)


def test_what_cannot_be_done_inside_generate_is_refused() -> None:
    model, decoder = target(), SpeculativeDecoder(target(), source="lookup")
    with pytest.raises(QkvError, match="call decoder"):
        allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4]}
        model.generate(prompt(batch=2), custom_generate=decoder, max_new_tokens=4, **allowed)
    with pytest.raises(QkvError, match="num_beams"):
        model.generate(prompt(), custom_generate=decoder, max_new_tokens=4, num_beams=2)
    with pytest.raises(QkvError, match="synced_gpus"):
        model.generate(prompt(), custom_generate=decoder, max_new_tokens=4, synced_gpus=True)


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


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_a_live_decoder_is_patched_and_restored(family: str) -> None:
    model = tiny(family)
    decoder = SpeculativeDecoder(model, source="self:int8", length=3)
    before, state = decoder.generate(prompt(), max_new_tokens=12), frozen(model)
    decoder.patch_(weights="nf4", draft_weights="int4", keys="int8", values="int8", block_size=4, residual=4)
    after = decoder.generate(prompt(), max_new_tokens=12)
    plain = SpeculativeDecoder(model, cache=decoder.cache).generate(prompt(), max_new_tokens=12)
    assert torch.equal(after, plain) and isinstance(decoder.last_cache, KVCache)
    footprint = decoder.footprint()
    assert footprint.before is not None and footprint.target < footprint.before.target and footprint.kept > 0
    assert "kept" in str(footprint) and footprint.total > 0
    with pytest.raises(QkvError, match="already"):
        decoder.patch_(weights="int8")
    decoder.unpatch_()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert decoder.cache is None and decoder.footprint().kept == 0
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=12), before)
    for wrong in ({}, {"weights": "int77"}, {"weights": "nf4", "keys": "int99"}):
        with pytest.raises(QkvError):
            decoder.patch_(**wrong)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def held_nbytes() -> int:
    """Bytes of all tensor storages that are alive, each once."""
    gc.collect()
    found = [value for value in gc.get_objects() if isinstance(value, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def test_footprint_is_what_is_held() -> None:
    """Against all storages of the process: originals that wait, what kernels packed, both caches."""
    model = tiny("llama", dtype=torch.bfloat16, hidden_size=64)
    decoder = SpeculativeDecoder(model, source="self:int8", length=3)
    others = held_nbytes() - decoder.footprint().total
    for weights in (None, "int4", "nf4"):
        if weights:
            decoder.patch_(weights=weights, draft_weights="int4", keys="int8", values="int8", block_size=8)
        decoder.generate(prompt(), max_new_tokens=20)
        footprint = decoder.footprint()
        assert abs(held_nbytes() - others - footprint.total) <= 2048, weights  # lengths of blocks, tables
        assert (footprint.kept > 0) == bool(weights) and footprint.cache > 0 and footprint.draft_cache > 0
        decoder.unpatch_()


def test_a_self_draft_shares_what_is_not_quantized() -> None:
    model = tiny("llama")
    decoder = SpeculativeDecoder(model, source="self:nf4")
    footprint = decoder.footprint()
    assert 0 < footprint.draft < footprint.target / 2
    source: Any = decoder.source
    assert source.model.model.embed_tokens.weight is model.model.embed_tokens.weight


def test_plain_decoding_takes_any_cache() -> None:
    model = tiny("mistral")
    cache = StaticCache(config=model.config, max_cache_len=40)
    expected = model.generate(prompt(), max_new_tokens=14, do_sample=False)
    assert torch.equal(SpeculativeDecoder(model).generate(prompt(), max_new_tokens=14, cache=cache), expected)
