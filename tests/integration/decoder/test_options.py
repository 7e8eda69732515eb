"""Every option is honoured as transformers does, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from qkv.errors import QkvError
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.draft import Draft
from qkv.integration.prepare import NEUTRAL
from qkv.integration.sources import Lookup
from tests.helpers import prompt, tiny
from tests.integration.decoder.cases import related, target


@pytest.mark.parametrize("option", [
    {"num_beams": 2}, {"guidance_scale": 1.5}, {"return_dict_in_generate": True}, {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3}, {"num_assistant_tokens": 4}, {"use_mtp": True}, {"max_cache_len": 64},
    {"cache_implementation": "static"}, {"use_cache": False}, {"nonsense": 1},
    {"stop_strings": "end"}, {"seed": -1}, {"seed": [1, 2]}, {"pixel_values": None},
    {"seed": 1.5}, {"seed": "a"}, {"temperature": "hot"}, {"eos_token_id": "x"}, {"cache": "dynamic"},
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
    {"source": "magic"}, {"source": "lookup:3"}, {"source": 3}, {"source": Lookup}, {"chunk": 1.5},
    {"length": "long"}, {"length": -1}, {"length": None},
    {"accept": "typical"}, {"chunk": 0}, {"cache": "int8"}, {"source": "self:int77"}, {"source": "model:nowhere"},
])  # fmt: skip
def test_mistakes_are_told_at_once(option: dict[str, Any]) -> None:
    with pytest.raises(QkvError):
        SpeculativeDecoder(tiny("llama"), **option)


@pytest.mark.parametrize("ids", [
    torch.tensor([[1, 64]]), torch.tensor([[-1, 3]]), torch.tensor([1, 2]), torch.tensor([[1.0]]), [[1, 2]],
])  # fmt: skip
def test_ids_that_are_none_are_refused(ids: Any) -> None:
    with pytest.raises(QkvError):
        SpeculativeDecoder(tiny("llama"), source="lookup").generate(ids, max_new_tokens=4)


def test_what_cannot_generate_is_refused() -> None:
    for model in (None, "model", tiny("llama").lm_head):
        with pytest.raises(QkvError, match="output head"):
            SpeculativeDecoder(model)


class Wrong:
    """A source that returns what it must not."""

    def __init__(self, drafts: Any) -> None:
        self.drafts = drafts

    def begin(self, rows: Any) -> None:
        pass

    def draft(self, rows: Any, limits: Any) -> Any:
        return self.drafts

    def select(self, rows: Any) -> None:
        pass


@pytest.mark.parametrize("drafts", [[], [[1, 2]], [None]])
def test_a_source_that_does_not_draft_is_told_so(drafts: Any) -> None:
    with pytest.raises(QkvError, match="Wrong must return a Draft for each"):
        SpeculativeDecoder(tiny("llama"), source=Wrong(drafts), length=3).generate(prompt(), max_new_tokens=6)
    with pytest.raises(QkvError, match="whole numbers"):
        Draft.chain(torch.tensor([1.0]))
