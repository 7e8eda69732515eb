"""Small doubles of real models, and what many tests compare. No downloads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from qkv.quantizers.format import FORMATS, Format

TOLERANCES: Final[dict[str, Any]] = {
    "ulps": 4.0,  # of float32, on scaled values: what rounding twice may cost
    "step": 2.0**-12,  # of a step, documented in integer.py: the shrunk asymmetric scale
    "product": {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float64: 1e-10},
    "logits": 1e-4,  # the same weights through packed kernels and through float ones, float32
    # the same weights through other libraries' kernels, as a share of the largest logit: bitsandbytes computes NF4
    # in bfloat16 on some CPUs, and LLM.int8 rounds x to 8 bits
    "stock_logits": {
        torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3, "nf4": 3e-2, "nf4d": 3e-2, "int8": 0.1,
    },
    "nested_codes": 0.02,  # share of double quantization's codes that bitsandbytes' own table puts one step away
    "int8_logits": 0.1,  # share of the largest logit that int8 rounding may move a tiny random model's
}
"""The one place for tolerances; everything else is compared exactly."""

SOURCE_DTYPES: Final = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
GROUPS: Final = ("g16", "g32", "g64", "g128", "g256", "g512", "g1024", "row", "tensor", "g1", "g7", "g33")
VARIANTS: Final = tuple(
    f"{name}{options}"
    for name, options in (
        ("int8", ""),
        ("int8", ":asym"),
        ("int8", ":double"),
        ("int8", ":asym:double"),
        ("int4", ""),
        ("int4", ":asym"),
        ("int4", ":double"),
        ("nf4", ""),
        ("nf4", ":double"),
    )
)
MATRIX: Final = tuple(
    dict.fromkeys(
        [str(f) for f in FORMATS.values()] + [str(Format.parse(f"{v}:{g}")) for v in VARIANTS for g in GROUPS]
    )
)
"""Every usual format, and every kind of format at every kind of group size."""

BASE: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
SLIDES: Final[dict[str, Any]] = {
    "head_dim": 8,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS: Final[dict[str, Any]] = {"num_experts_per_tok": 2, "num_local_experts": 4}
QWEN_EXPERTS: Final[dict[str, Any]] = {
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT2: Final[dict[str, Any]] = {
    "vocab_size": 64,
    "n_positions": 256,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
FAMILIES: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", {}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", SLIDES),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN_EXPERTS),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", EXPERTS),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**EXPERTS, **SLIDES}),
}
"""Family name to the classes of transformers and what its config adds to ``BASE``."""
MIXTURES: Final = ("qwen3_moe", "mixtral", "gpt_oss")


def tiny(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of a family, small enough to run in milliseconds, in evaluation mode."""
    import transformers

    config_name, class_name, extra = FAMILIES[family]
    base = GPT2 if family == "gpt2" else BASE
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**base, **extra, **changes})
    model = getattr(transformers, class_name)(config).eval().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms that are all 0 or 1 would hide what is lost
                parameter.add_(torch.randn_like(parameter) / 16)
    return model


def letters_tokenizer() -> Any:
    """A tokenizer with one token a letter, that every double knows; it can be saved beside a checkpoint."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(number) for number in range(32, 32 + 62)]
    inner = Tokenizer(models.WordLevel({"?" * 2: 0, **{letter: n for n, letter in enumerate(letters, 1)}}, "?" * 2))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?" * 2, pad_token="?" * 2)


def prompt(num_tokens: int = 7, *, seed: int = 1, batch: int = 1) -> Tensor:
    """Token ids ``[batch, num_tokens]`` that every double knows."""
    return torch.randint(1, 64, (batch, num_tokens), generator=torch.Generator().manual_seed(seed))


def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    """Logits of a prompt, without gradients."""
    with torch.no_grad():
        result: Tensor = model(prompt() if ids is None else ids).logits
    return result


def generated(model: Any, num_tokens: int = 8) -> list[int]:
    """Ids that greedy decoding appends to a prompt."""
    with torch.no_grad():
        output = model.generate(prompt(), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
    return [int(token) for token in output[0, prompt().shape[1] :]]


def assert_same_tensors(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """The same names, and under each the same dtype, shape and bytes."""
    assert set(first) == set(second), sorted(set(first) ^ set(second))
    for name, tensor in first.items():
        other = second[name]
        assert tensor.dtype == other.dtype and tensor.shape == other.shape, (name, tensor.dtype, other.dtype)
        assert torch.equal(tensor, other), name


def assert_same_model(first: Any, second: Any) -> None:
    """Equal tensors, equal logits, equal generated ids."""
    assert_same_tensors(first.state_dict(), second.state_dict())
    assert torch.equal(logits(first), logits(second))
    assert generated(first) == generated(second)


def tensors_in(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory's safetensors files, as they are stored."""
    result: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        result |= load_file(path)
    return result


def tensor_nbytes_in(directory: Path) -> int:
    """Bytes of all tensors in a directory's files, headers not counted."""
    return sum(tensor.nbytes for tensor in tensors_in(directory).values())


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the state dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def live_nbytes(model: nn.Module) -> int:
    """Bytes of the distinct storages behind parameters and persistent buffers."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return sum(storages.values())


def group_max(values: Tensor, format: Format) -> Tensor:
    """For each element of ``[..., columns]`` the largest value of its group, float64; written out naively."""
    result = torch.empty_like(values, dtype=torch.float64)
    columns = values.shape[-1]
    if format.group_size == "tensor":
        return result.fill_(float(values.max()) if values.numel() else 0.0)
    size = columns if format.group_size == "row" else int(format.group_size)
    for start in range(0, columns, max(size, 1)):
        part = values[..., start : start + size].double()
        result[..., start : start + size] = part.amax(-1, keepdim=True)
    return result


def each_scale(scale: Tensor, shape: tuple[int, ...], format: Format) -> Tensor:
    """For each element of a tensor of ``shape`` its own scale, float64; written out naively."""
    rows, columns = prod(shape[:-1]), shape[-1]
    if format.group_size == "tensor":
        return scale.reshape(-1)[:1].double().expand(rows * columns).reshape(shape)
    size = max(columns, 1) if format.group_size == "row" else int(format.group_size)
    spread = scale.reshape(rows, -1).double().repeat_interleave(size, dim=-1)[:, :columns]
    return spread.reshape(shape)


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, offline."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
    )


def fails(check: Callable[[], object]) -> bool:
    """Whether a law's check finds a fault."""
    try:
        check()
    except AssertionError:
        return True
    return False
