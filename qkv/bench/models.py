"""Directories to load and decode with: a model's own, or random Llamas of several sizes for want of one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from qkv.bench.plan import Plan
from qkv.memory.footprint import footprint


@contextmanager
def directories(plan: Plan) -> Iterator[list[Path]]:
    """The plan's models, or random ones that are gone afterwards."""
    if plan.models:
        yield list(plan.models)
        return
    with tempfile.TemporaryDirectory(prefix="qkv-bench-") as folder:
        yield [random_llama(Path(folder) / str(width), width) for width in plan.widths]


def random_llama(directory: Path, width: int) -> Path:
    """A Llama of random bf16 weights: 22 layers, 32,000 tokens; 2,048 wide it has 1.06 billion parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=22,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model = model.to_empty(device="cpu")
    model.init_weights()
    model.tie_weights()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02)
    model.save_pretrained(directory)
    return directory


def parameters_of(directory: Path) -> int:
    """Weights of a directory's model, told from its headers."""
    return footprint(directory).num_parameters
