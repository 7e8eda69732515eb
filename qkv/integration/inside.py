"""Rows out of a batch that ``model.generate`` has prepared, for ``custom_generate=``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor

from qkv.errors import QkvError
from qkv.integration.prepare import REPEAT_STREAM, check_config, make_row, seeds_of, split_prompts
from qkv.integration.sampling import key_of
from qkv.integration.walk import Row

KNOWN: Final = frozenset(
    "attention_mask cache past_key_values use_cache position_ids cache_position logits_to_keep num_logits_to_keep "
    "output_attentions output_hidden_states return_dict".split()
)
"""What ``generate`` hands to a decoding loop for the model, and the loop here makes or reads itself."""


def rows_inside(
    input_ids: Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    seed: int | None,
    accept: str,
    given: Mapping[str, Any],
) -> list[Row]:
    """A row for each of ``input_ids`` ``[batch, tokens]``, padded on the left as ``attention_mask`` in ``given`` says.

    Processors and criteria see a row with its padding, as they do in transformers' own loops.

    Raises:
        QkvError: an option or a model input that this decoder cannot honour.
    """
    check_config(config)
    odd = sorted(name for name, value in given.items() if name not in KNOWN and value is not None)
    if odd:
        raise QkvError(f"the speculative decoder cannot hand {', '.join(odd)} to the model; leave it out")
    if len(input_ids) > 1 and any(isinstance(each, PrefixConstrainedLogitsProcessor) for each in processors or ()):
        raise QkvError("prefix_allowed_tokens_fn in a batch inside model.generate; call decoder.generate instead")
    prompts = split_prompts(input_ids, given.get("attention_mask"), input_ids.device)
    repeats = config.num_return_sequences or 1
    seeds = seeds_of(seed, len(prompts) // repeats)
    rows = []
    for number, prompt in enumerate(prompts):
        key, repeat = seeds[number // repeats], number % repeats
        key = key_of(key, REPEAT_STREAM, repeat) if repeat else key
        padding = input_ids[number, : input_ids.shape[1] - len(prompt)][None]
        row = make_row(prompt, config, processors, criteria, key if config.do_sample else None, accept)
        if padding.numel():
            row.max_length -= padding.shape[1]
            row.processors = row.processors and _Padded(row.processors, padding)
            row.criteria = [_Padded(each, padding.cpu()) for each in row.criteria]
        rows.append(row)
    return rows


class _Padded:
    """A processor or criterion that sees a row behind its padding ``[1, n]``."""

    def __init__(self, inner: Any, padding: Tensor) -> None:
        self._inner, self._padding = inner, padding

    def __call__(self, ids: Tensor, scores: Any) -> Any:
        return self._inner(torch.cat((self._padding, ids), 1), scores)
