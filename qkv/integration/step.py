"""What decoding does between its products, made native: norms, and the attention of a few tokens.

A token of a small model costs as much in torch's small operations, six for a norm, as in products. That a norm is one
that the native library knows is tried and not told from names alone: it must agree on random rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from qkv.integration.hf_attention import own_implementation, set_own_implementation
from qkv.integration.hf_dense import stock_attention
from qkv.quantizers.kernels import native, native_step
from qkv.quantizers.kernels.native import is_plain_bf16

NAME: Final = "qkv_prepared"
EPSILONS: Final = ("variance_epsilon", "eps")
"""What norms call the number that is added to the mean square."""
TRIED: Final = 4096
"""Numbers that a norm is tried with, at least."""
_SETTINGS: Final = "_qkv_norm"


@dataclass(frozen=True)
class SpedUp:
    """What :func:`speed_up_` did.

    Attributes:
        norms: those that are the native library's now.
        other_norms: those that are not of a kind it knows, or not in bfloat16.
        attention: whether attention is.
    """

    norms: tuple[str, ...] = ()
    other_norms: tuple[str, ...] = ()
    attention: bool = False


def speed_up_(model: nn.Module) -> SpedUp:
    """Replace norms, and scaled-dot-product attention of a few tokens, where the native library gives the same."""
    if native.unavailable() is not None or native.EXACT:
        return SpedUp()
    norms = {name: _replace_norm(module) for name, module in model.named_modules() if _is_norm(module)}
    attention = own_implementation(model) == "sdpa" and _computes_in_bf16(model)
    if attention:
        _register()
        set_own_implementation(model, NAME)
    return SpedUp(
        tuple(name for name, replaced in norms.items() if replaced),
        tuple(name for name, replaced in norms.items() if not replaced),
        attention,
    )


def slow_down_(model: nn.Module) -> None:
    """Give back the model's own norms and attention."""
    for module in model.modules():
        if _is_replaced(module):
            del module.forward, vars(module)[_SETTINGS]
    if own_implementation(model) == NAME:
        set_own_implementation(model, "sdpa")


# ---- norms ----


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")


def _replace_norm(module: nn.Module) -> bool:
    """Whether it is a norm that the native library knows; then its ``forward`` is another from now on."""
    if "forward" in vars(module):
        return _is_replaced(module)
    weight = module._parameters.get("weight")
    if weight is None or len(module._parameters) > 1 or weight.ndim != 1 or not is_plain_bf16(weight.detach()):
        return False
    eps = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    offset = None if eps is None else _offset_of(module, weight, eps)
    if eps is None or offset is None:
        return False
    module.forward = MethodType(_forward, module)
    vars(module)[_SETTINGS] = (eps, offset)
    return True


@torch.no_grad()
def _offset_of(module: nn.Module, weight: Tensor, eps: float) -> float | None:
    """What is added to the weight, found by trying; None where neither choice gives the module's own values."""
    rows = 4 + TRIED // weight.shape[0]
    x = torch.randn(rows, weight.shape[0], generator=torch.Generator().manual_seed(0)).mul(3).to(torch.bfloat16)
    try:
        wanted = type(module).forward(module, x)
    except Exception:  # a norm that takes something else than rows
        return None
    for offset in (0.0, 1.0):
        found = native_step.rms_norm(x, weight, eps, offset)
        if wanted.dtype == found.dtype and torch.allclose(found, wanted, rtol=2**-7, atol=0):
            if (found == wanted).float().mean() > 0.98:
                return offset
    return None


def _forward(self: nn.Module, x: Tensor, *others: Any, **options: Any) -> Tensor:
    weight = self._parameters["weight"]
    is_served = (
        not (others or options or torch.compiler.is_compiling())
        and weight is not None
        and x.numel() <= native_step.MOST
        and x.shape[-1] == weight.shape[0]
        and x.is_contiguous()
        and is_plain_bf16(x)
        and is_plain_bf16(weight)
    )
    if not is_served:
        return type(self).forward(self, x, *others, **options)  # type: ignore[no-any-return]
    return native_step.rms_norm(x, weight, *vars(self)[_SETTINGS])  # type: ignore[arg-type]


def _is_replaced(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "__func__", None) is _forward


# ---- attention ----


def _computes_in_bf16(model: Any) -> bool:
    return native.cannot_serve_bf16() is None and model.dtype == torch.bfloat16 and model.device.type == "cpu"


def _is_causal(module: Any, mask: Tensor | None, query: Tensor, key: Tensor) -> bool:
    """Whether the newest tokens see all that are not newer than they."""
    tokens, seen = query.shape[2], key.shape[2]
    if mask is None:
        return tokens == 1 or (tokens == seen and bool(getattr(module, "is_causal", True)))
    if mask.dtype != torch.bool or mask.shape[-2:] != (tokens, seen):
        return False
    return torch.equal(mask, torch.ones(tokens, seen, dtype=torch.bool).tril(seen - tokens).expand(mask.shape))


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Stock attention; that of a few tokens, masked causally alone, by the native library."""
    scale = options.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    is_usual = not options.get("dropout") and options.get("position_bias") is None and options.get("is_causal") is None
    if is_usual and scale > 0 and not torch.compiler.is_compiling():
        if native_step.serves_attention(query, key, value) and _is_causal(module, attention_mask, query, key):
            return native_step.attend_few(query, key, value, scale), None
    return stock_attention()(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
