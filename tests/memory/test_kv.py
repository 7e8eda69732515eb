from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.cache.retention import Window
from qkv.integration.compat import cache_argument
from qkv.memory.footprint import footprint
from tests.helpers import FAMILIES, prompt, tiny

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 8, "intermediate_size": 8,
}  # fmt: skip
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_experts_per_tok": 8, "n_routed_experts": 16,
}  # fmt: skip


def kv(folder: Path, config: dict[str, Any], context: int = 1000, batch: int = 1) -> int | None:
    (folder / "config.json").write_text(json.dumps(config))
    return footprint(folder, context=context, batch=batch).kv_nbytes


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        (QWEN3, 147_456),  # LMCache#688: head_dim is not hidden / heads
        ({**LLAMA, "num_key_value_heads": 8}, 131_072),  # vllm-fit#14: 8 times over, GQA ignored
        (LLAMA, 524_288),  # no kv heads named: all
        ({**LLAMA, "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "head_dim": 64}, 8192),
        ({"model_type": "llava", "text_config": QWEN3}, 147_456),
        ({"model_type": "gpt_bigcode", "n_layer": 40, "n_embd": 6144, "n_head": 48}, 2 * 40 * 128 * 2),  # multi-query
        (DEEPSEEK_V3, 70_272),  # the latent and one rotary key
        ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}, 2 * 12 * 768 * 2),
        ({**QWEN3, "dtype": "float32"}, 2 * 147_456),
    ],
)
def test_by_the_config_alone(config: dict[str, Any], per_token: int, tmp_path: Path) -> None:
    assert kv(tmp_path, config) == per_token * 1000
    assert kv(tmp_path, config, 4096, 3) == per_token * 4096 * 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", [3, 7, 8, 9, 30])
def test_is_what_the_cache_of_transformers_holds(family: str, context: int) -> None:
    """omlx#3489, lmstudio#1862 (sliding layers counted in full), Rapid-MLX#2970."""
    from transformers import DynamicCache

    model = tiny(family, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(context, batch=2), **{cache_argument(model): cache})
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert footprint(model, context=context, batch=2).kv_nbytes == held


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["linear_attention"] * 36},
        {"is_encoder_decoder": True},
        {"mamba_d_state": 16},
        {"num_hidden_layers": None},
        {"num_attention_heads": None},
    ],
)
def test_a_cache_it_does_not_understand_is_said_not_guessed(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3, **change}))
    result = footprint(tmp_path, context=100)
    assert result.kv_nbytes is None and "not known" in result.kv_note and result.kv_note in str(result)
    assert result.total_nbytes == 0 and result.peak_nbytes is None and result.kv_rows == ()


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("t5", "encoder and decoder"),
        ("whisper", "encoder and decoder"),
        ("rwkv", "stays empty"),
        ("cpmant", "39 tokens of 7"),
        ("made_up", "made_up"),
    ],
)
def test_an_architecture_it_does_not_understand_is_said_by_name(model_type: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    note = footprint(tmp_path, context=100).kv_note
    assert "not known" in note and words in note


def test_the_figure_is_part_of_the_total_and_says_what_it_is() -> None:
    model = tiny("llama")
    plain, full = footprint(model), footprint(model, context=100, batch=2, kv_dtype="bfloat16")
    assert plain.kv_nbytes is None and full.kv_nbytes == 2 * 2 * 2 * 8 * 2 * 100 * 2
    assert full.total_nbytes == plain.total_nbytes + full.kv_nbytes
    assert "2 x 100 tokens" in str(full) and "bfloat16" in str(full)
    assert footprint(torch.nn.Linear(2, 2), context=10).kv_nbytes is None
    summary = footprint(model, context=100, keys="int8", values="int8", retain=Window(20, sinks=2, summary=8))
    assert "not counted" in summary.kv_note
