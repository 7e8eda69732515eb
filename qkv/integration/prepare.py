"""What transformers' ``generate`` prepares, once for each row: processors, stopping criteria, lengths."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

from qkv.errors import QkvError, shown
from qkv.integration.sampling import key_of
from qkv.integration.walk import Row

EXTRA_OPTIONS: Final = ("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0.0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1, 1.0),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "is_assistant": (None, False),
    "token_healing": (None, False),
    "prefill_chunk_size": (None,),
    "cache_implementation": (None, "dynamic"),
    "use_cache": (None, True),
    "return_dict_in_generate": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "low_memory": (None, False),
    "use_mtp": (None, False),
    "cache_config": (None,),
    "max_cache_len": (None,),
    "compile_config": (None,),
    "continuous_batching_config": (None,),
    "num_assistant_tokens": (None, 20),
    "num_assistant_tokens_schedule": (None, "constant"),
    "assistant_confidence_threshold": (None, 0.4),
    "assistant_lookbehind": (None, 10),
    "target_lookbehind": (None, 10),
    "max_matching_ngram_size": (None,),
    "speculation_type": (None,),
}
"""Fields of a GenerationConfig that this decoder cannot honour, to the values that ask nothing of it: transformers'
own defaults. How far to draft is the decoder's ``source=`` and ``length=``."""
REPEAT_STREAM: Final = 17


def prepare_rows(
    model: Any,
    prompts: Sequence[Tensor],
    seed: int | Sequence[int] | None,
    tokenizer: Any,
    options: Mapping[str, Any],
    accept: str,
) -> list[Row]:
    """A row for each prompt and each of its ``num_return_sequences``, as it would be alone.

    Args:
        prompts: int64 ``[tokens]`` each, without padding.

    Raises:
        QkvError: an option that is unknown or not supported.
    """
    check_ids(model, prompts)
    options = _checked(options)
    seeds = seeds_of(seed, len(prompts))
    rows: list[Row] = []
    for number, prompt in enumerate(prompts):
        ids, processors, criteria, config = _prepared(model, prompt, tokenizer, options, number)
        for repeat in range(ids.shape[0]):
            key = key_of(seeds[number], REPEAT_STREAM, repeat) if repeat else seeds[number]
            rows.append(make_row(prompt, config, processors, criteria, key if config.do_sample else None, accept))
    return rows


def make_row(prompt: Tensor, config: Any, processors: Any, criteria: Any, seed: int | None, accept: str) -> Row:
    """A row of what ``generate`` prepared; length and EOS are told apart, so that they cost nothing."""
    eos: frozenset[int] = frozenset()
    max_length, others = 2**31, []
    for criterion in criteria or ():
        if type(criterion) is EosTokenCriteria:
            eos |= frozenset(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is MaxLengthCriteria:
            max_length = min(max_length, int(criterion.max_length))
        else:
            others.append(criterion)
    return Row(
        prompt,
        processors=processors if processors else None,
        criteria=others,
        seed=seed,
        max_length=max_length,
        eos=eos,
        accept=accept,
    )


def check_config(config: Any) -> None:
    """Refuse what this decoder would otherwise ignore.

    Raises:
        QkvError: a field set to something that it cannot honour.
    """
    for name, neutral in NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            drafting = name.startswith(("num_assistant", "assistant", "prompt_lookup", "speculation", "max_matching"))
            remedy = "; give its own source= and length=" if drafting else "; leave it out"
            raise QkvError(f"{name}={shown(value)} is not supported by the speculative decoder{remedy}")


def seeds_of(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """A seed for each row: the same for all, since a row does not know its neighbours.

    Raises:
        QkvError: as many seeds as there are no rows, or one out of range.
    """
    if seed is None:
        seed = int(torch.randint(2**63 - 1, ()))
    found = list(seed) if isinstance(seed, (Sequence, range, Tensor)) and not isinstance(seed, str) else [seed] * count
    seeds = [int(each) if isinstance(each, (int, Tensor)) else -1 for each in found]
    if len(seeds) != count or any(not 0 <= each < 2**63 for each in seeds):
        raise QkvError(f"seed {shown(seed)} is no whole number from 0 to 2**63 - 1, nor one for each of {count} rows")
    return seeds


def new_tokens(options: Mapping[str, Any]) -> int | None:
    """``max_new_tokens`` as given.

    Raises:
        QkvError: below 0.
    """
    config = options.get("generation_config")
    count = options.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise QkvError(f"max_new_tokens {shown(count)} is not a whole number of tokens, 0 or more")
    return count


def check_ids(model: Any, prompts: Sequence[Tensor]) -> None:
    """Refuse token ids that the model has no embedding for: on a GPU they would end the process.

    Raises:
        QkvError: an id out of range.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.cat(list(prompts))
    least, most = int(ids.min()), int(ids.max())
    if least < 0 or most >= rows:
        odd = least if least < 0 else most
        raise QkvError(f"token id {odd} is none of the model's {rows:,}; encode with the model's own tokenizer")


def split_prompts(input_ids: Tensor, attention_mask: Tensor | None, device: Any) -> list[Tensor]:
    """The prompts of a batch ``[rows, tokens]`` without their padding.

    Raises:
        QkvError: shapes that do not fit, padding that is not on the left, or a prompt without tokens.
    """
    if not isinstance(input_ids, Tensor):
        raise QkvError(f"input_ids {shown(input_ids)} are no tensor; tokenizer(..., return_tensors='pt') makes one")
    if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
        shape = f"{input_ids.dtype} {tuple(input_ids.shape)}"
        raise QkvError(f"input_ids of {shape}: give whole numbers [batch, tokens], with a token at least")
    input_ids = input_ids.to(device)
    if attention_mask is None:
        return list(input_ids)
    if attention_mask.shape != input_ids.shape:
        shapes = f"{tuple(attention_mask.shape)} for input_ids of {tuple(input_ids.shape)}"
        raise QkvError(f"attention_mask of shape {shapes}")
    counts = attention_mask.long().sum(1).tolist()
    width = input_ids.shape[1]
    for count, row in zip(counts, attention_mask.tolist(), strict=True):
        if count == 0 or not all(row[width - count :]):
            raise QkvError("each prompt needs a token, and padding on its left only: tokenizer.padding_side = 'left'")
    return [row[width - count :] for count, row in zip(counts, input_ids, strict=True)]


def check_streamer(streamer: Any, rows: Sequence[Row]) -> None:
    """Hand the prompt to a streamer, if there is one.

    Raises:
        QkvError: several rows, which streamers cannot tell apart.
    """
    if streamer is None:
        return
    if len(rows) > 1:
        raise QkvError(f"a streamer takes one row, not {len(rows)}")
    streamer.put(torch.tensor([rows[0].ids]))


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with a temperature of 0 as greedy."""
    known = GenerationConfig().to_dict()
    odd = sorted(name for name in options if name not in known and name not in EXTRA_OPTIONS and name not in NEUTRAL)
    if odd:
        raise QkvError(f"generate does not know {', '.join(odd)}; it takes the fields of a GenerationConfig")
    found = dict(options)
    temperature = found.get("temperature")
    if temperature is not None and not (isinstance(temperature, (int, float)) and 0 <= temperature < math.inf):
        raise QkvError(f"temperature {shown(temperature)} is not a number, 0 (greedy) or more")
    if temperature is not None and temperature < 1e-9:  # the limit of sampling, which logits / 0 cannot take
        found.update(do_sample=False, temperature=None, top_k=None, top_p=None)
    return found


def _prepared(
    model: Any, prompt: Tensor, tokenizer: Any, options: dict[str, Any], number: int
) -> tuple[Tensor, Any, Any, Any]:
    """Ask ``model.generate`` for what it would decode one prompt with."""
    options = dict(options)
    config = options.get("generation_config") or model.generation_config
    strings = options.pop("stop_strings", config.stop_strings)
    if strings:
        options["stop_strings"] = None
        criteria = [*(options.get("stopping_criteria") or ()), _stop_criterion(strings, tokenizer)]
        options["stopping_criteria"] = StoppingCriteriaList(criteria)
    if (allowed := options.get("prefix_allowed_tokens_fn")) is not None:
        options["prefix_allowed_tokens_fn"] = lambda _, ids: allowed(number, ids)
    captured: list[tuple[Tensor, Any, Any, Any]] = []

    def capture(
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **_: Any
    ) -> Tensor:
        captured.append((input_ids, logits_processor, stopping_criteria, generation_config))
        return input_ids

    try:
        model.generate(prompt[None], attention_mask=torch.ones_like(prompt)[None], custom_generate=capture, **options)
    except (ValueError, TypeError) as error:
        raise QkvError(f"transformers cannot generate with these options: {error}") from error
    check_config(captured[0][3])
    return captured[0]


def _stop_criterion(strings: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        raise QkvError("stop_strings need the tokenizer; pass tokenizer=")
    return StopStringCriteria(tokenizer, [strings] if isinstance(strings, str) else list(strings))
