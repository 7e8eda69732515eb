"""Tokens a second by format against the same model in bf16, every format in turn in every round."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from qkv.bench.models import directories, parameters_of
from qkv.bench.plan import Plan
from qkv.bench.table import Row, Table, rows_of
from qkv.bench.timing import Entrant, Run, interleave
from qkv.checkpoint.load import load
from qkv.integration.decoding import prepare_
from qkv.integration.patch import quantize_
from qkv.memory.footprint import footprint

FORMATS: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("int8", "int8", {}),
    ("int8:row", "int8:row", {}),
    ("int8, head int8", "int8", {"embeddings": "int8"}),
    ("nf4", "nf4", {}),
    ("nf4:double", "nf4:double", {}),
    ("nf4, head int8", "nf4", {"embeddings": "int8"}),
    ("int4", "int4", {}),
)
FEW: Final = ("int8", "int8, head int8", "nf4", "nf4, head int8")
"""Formats measured where no one model was asked for."""


def variants(directory: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """The model in bf16 as it is, the yardstick, and prepared; and quantized."""
    models = {"bfloat16": load(directory, dtype="bfloat16")}
    models["bfloat16, prepared"] = copy.deepcopy(models["bfloat16"])
    prepare_(models["bfloat16, prepared"])
    for name, format, settings in FORMATS:
        if name in names:
            models[name] = copy.deepcopy(models["bfloat16"])
            quantize_(models[name], format, **settings)
            prepare_(models[name])
    return models


def generating(model: Any, new_tokens: int) -> Run:
    """A greedy generation after a short prompt."""
    prompt = _prompt(model, 8)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    return lambda: model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options)


def reading(model: Any, tokens: int) -> Run:
    """One call over a long prompt."""
    prompt = _prompt(model, tokens)
    return lambda: model(prompt)


def _prompt(model: Any, tokens: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))


def measure(directory: Path, names: tuple[str, ...], plan: Plan) -> list[Row]:
    """A row a format: generation as the time, reading beside it."""
    models = variants(directory, names)
    entrants = [Entrant(name, generating(model, plan.new_tokens)) for name, model in models.items()]
    readers = [Entrant(name, reading(model, plan.prefill)) for name, model in models.items()]
    measured, read = (
        interleave(entrants, plan.rounds, round_seconds=0),
        interleave(readers, plan.rounds, round_seconds=0),
    )
    sizes = {"parameters": parameters_of(directory)}
    reads = rows_of(readers, read, sizes)
    numbers = [
        {"MB": footprint(model).weight_nbytes / 1e6, "tokens/s": plan.new_tokens / row.median}
        | {f"{plan.prefill} read/s": plan.prefill / took.median, "reading, speed": took.speed}
        for model, row, took in zip(models.values(), rows_of(entrants, measured, sizes), reads, strict=True)
    ]
    return rows_of(entrants, measured, sizes, numbers=numbers)


@torch.inference_mode()
def table(plan: Plan, say: Callable[[str], object]) -> Table:
    """Every model."""
    found: list[Row] = []
    names = tuple(name for name, _, _ in FORMATS) if plan.models else FEW
    with directories(plan) as models:
        for directory in models:
            say(f"{parameters_of(directory):,} parameters")
            found += measure(directory, names, plan)
    title = f"{plan.new_tokens} greedy tokens through transformers' generate, speed over bf16"
    return Table("decode", title, "parameters", found)
