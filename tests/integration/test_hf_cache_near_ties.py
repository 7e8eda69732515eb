"""int8 gives the exact model's tokens up to its first near tie, whatever way they are generated."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig

from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache

NEAR = 0.25
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "chunked prefill": {"prefill_chunk_size": 32},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
}


@pytest.fixture(scope="module")
def gemma3() -> tuple[Any, Tensor]:
    """A tiny random Gemma 3 and a text, periodic so that prompt lookup finds something; prompts are
    of four windows. Untied, with sharp attention and few near
    ties, so that what the cache holds decides the tokens: int2 fails here."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=1024, sliding_window=32, bos_token_id=None,
        eos_token_id=None, pad_token_id=0, initializer_range=0.2,
        layer_types=["sliding_attention", "full_attention"] * 2, tie_word_embeddings=False, query_pre_attn_scalar=1,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    model.lm_head.weight.data *= 8
    return model, torch.randint(1, 64, (1, 90)).repeat(1, 6)


@pytest.fixture(scope="module")
def smollm2_text(smollm2: Path) -> tuple[Any, Tensor]:
    from pydoc_data import topics

    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, torch.tensor([AutoTokenizer.from_pretrained(smollm2).encode(topics.topics["compound"])])


@pytest.fixture(params=["gemma3", pytest.param("smollm2_text", marks=pytest.mark.slow)])
def subject(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    """Model and text."""
    found: tuple[Any, Tensor] = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=[False, True], ids=["dense", "attached"])
def attached(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@torch.no_grad()
def generate(model: Any, prompt: Tensor, cache: Any, **options: Any) -> Tensor:
    given = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, **options, cache_argument(model): cache}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Tensor = model.generate(prompt, max_new_tokens=24, do_sample=False, **given)
    return found


def both(model: Any, prompt: Tensor, attached: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens over transformers' exact cache, and over ours in int8."""
    exact = generate(model, prompt, DynamicCache(config=model.config), **options)
    cache = int8(model, attached)
    found = generate(model, prompt, cache, **options)
    cache.detach()
    return exact, found


def int8(model: Any, attached: bool) -> KVCache:
    """Blocks small enough that much of every prompt is sealed."""
    cache = KVCache(model.config, block_size=16, residual=16)
    return cache.attach(model) if attached else cache


@torch.no_grad()
def gaps(model: Any, tokens: Tensor) -> Tensor:
    """By how much the exact model prefers its best token at each position of ``tokens [n]``, from the second."""
    best: Tensor = model(tokens[None]).logits[0, :-1].topk(2).values
    return best[:, 0] - best[:, 1]


def assert_equal_up_to_a_near_tie(model: Any, exact: Tensor, found: Tensor) -> None:
    """One row each, without its padding: the first token that differs is one the exact model all but tossed for."""
    differ = (exact != found).nonzero()
    if len(differ):
        at = int(differ[0])
        assert float(gaps(model, exact)[at - 1]) < NEAR, (at, exact.tolist(), found.tolist())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("start", [0, 200])
def test_one_row(subject: tuple[Any, Tensor], attached: bool, way: str, start: int) -> None:
    model, text = subject
    exact, found = both(model, text[:, start : start + 150], attached, **WAYS[way])
    assert_equal_up_to_a_near_tie(model, exact[0], found[0])


def test_beams(subject: tuple[Any, Tensor], attached: bool) -> None:
    """Beams choose by summed log probability: a near tie lies at or before the first difference, or the exact
    model itself holds the two hypotheses for all but equal."""
    model, text = subject
    exact, found = both(model, text[:, :150], attached, num_beams=3)
    differ = (exact != found)[0].nonzero()
    if len(differ):
        between = gaps(model, exact[0])[149 : int(differ[0])]
        assert float(between.min()) < NEAR or score(model, exact, 150) - score(model, found, 150) < NEAR


@torch.no_grad()
def score(model: Any, tokens: Tensor, begin: int) -> float:
    """Log probability of the tokens of the one row from ``begin`` on."""
    logits = model(tokens).logits[0, begin - 1 : -1].log_softmax(-1)
    return float(logits.gather(1, tokens[0, begin:, None]).sum())


def test_a_left_padded_batch(subject: tuple[Any, Tensor], attached: bool) -> None:
    model, text = subject
    pads = (0, 23, 70)
    prompt, mask = text[:, :150].repeat(3, 1), torch.ones(3, 150, dtype=torch.long)
    for row, count in enumerate(pads):
        prompt[row, :count] = mask[row, :count] = 0
    exact, found = both(model, prompt, attached, attention_mask=mask)
    for row, count in enumerate(pads):
        assert_equal_up_to_a_near_tie(model, exact[row, count:], found[row, count:])


def test_the_next_turn(subject: tuple[Any, Tensor], attached: bool) -> None:
    model, text = subject
    cache = int8(model, attached)
    history = torch.cat((generate(model, text[:, :120], cache), text[:, 200:240]), 1)
    assert cache.get_seq_length() == 143
    found = generate(model, history, cache)
    cache.detach()
    assert_equal_up_to_a_near_tie(model, generate(model, history, DynamicCache(config=model.config))[0], found[0])
