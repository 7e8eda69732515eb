"""``model.generate(..., custom_generate=decoder)``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qkv.errors import QkvError
from qkv.integration.decoder import SpeculativeDecoder
from tests.helpers import prompt, tiny
from tests.integration.decoder.cases import Ends, continued, kv_cache, ragged, related, target


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
    decoder = SpeculativeDecoder(model, source="lookup", length=3)
    for option in (
        {"repetition_penalty": 1.7},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [batch + 3, 2 * batch + 20, int(ids[-1] + 1) % 64]},
        {"no_repeat_ngram_size": 2, "min_length": 30, "eos_token_id": [5, 9]},
        {"stopping_criteria": [Ends()], "eos_token_id": [63]},
    ):
        given: dict[str, Any] = {"max_new_tokens": 12, "pad_token_id": 0, "do_sample": False, **option}
        expected = model.generate(ids, attention_mask=mask, **given)
        assert torch.equal(model.generate(ids, attention_mask=mask, custom_generate=decoder, **given), expected), option


def test_what_cannot_be_done_inside_generate_is_refused() -> None:
    model, decoder = target(), SpeculativeDecoder(target(), source="lookup")
    with pytest.raises(QkvError, match="num_beams"):
        model.generate(prompt(), custom_generate=decoder, max_new_tokens=4, num_beams=2)
    with pytest.raises(QkvError, match="synced_gpus"):
        decoder(model, prompt(), synced_gpus=True)
    with pytest.raises(QkvError, match="inputs_embeds"):
        decoder(model, prompt(), generation_config=model.generation_config, inputs_embeds=torch.zeros(1, 7, 32))
