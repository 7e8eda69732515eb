"""Rows out of a batch that ``model.generate`` has prepared, for ``custom_generate=``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

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

    Processors and criteria see a row in its place in the batch, with its padding, as in transformers' own loops.

    Raises:
        QkvError: an option or a model input that this decoder cannot honour.
    """
    check_config(config)
    odd = sorted(name for name, value in given.items() if name not in KNOWN and value is not None)
    if odd:
        raise QkvError(f"the speculative decoder cannot hand {', '.join(odd)} to the model; leave it out")
    prompts = split_prompts(input_ids, given.get("attention_mask"), input_ids.device)
    repeats = config.num_return_sequences or 1
    seeds = seeds_of(seed, len(prompts) // repeats)
    rows = []
    for number, prompt in enumerate(prompts):
        key, repeat = seeds[number // repeats], number % repeats
        key = key_of(key, REPEAT_STREAM, repeat) if repeat else key
        padding = input_ids[number, : input_ids.shape[1] - len(prompt)][None]
        row = make_row(prompt, config, processors, criteria, key if config.do_sample else None, accept)
        row.max_length -= padding.shape[1]
        if len(prompts) > 1 or padding.numel():
            row.processors = row.processors and _InBatch(row.processors, padding, number, len(prompts))
            row.criteria = [_InBatch(each, padding.cpu(), number, len(prompts)) for each in row.criteria]
        rows.append(row)
    return rows


class _InBatch:
    """A processor or criterion of a batch, which is shown one row, behind its padding ``[1, n]``, in every place."""

    def __init__(self, inner: Any, padding: Tensor, number: int, batch: int) -> None:
        self._inner, self._padding, self._number, self._batch = inner, padding, number, batch

    def __call__(self, ids: Tensor, scores: Tensor | None) -> Any:
        every = torch.cat((self._padding, ids), 1).repeat(self._batch, 1)
        found = self._inner(every, None if scores is None else scores.repeat(self._batch, 1))
        found = torch.as_tensor(found)
        return found[self._number][None] if found.ndim else found
