"""Prepare a model for decoding: weights interleaved in memory, and the small steps between products native."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn

from qkv.integration.step import SpedUp, slow_down_, speed_up_
from qkv.quantizers.float_linear import FloatLinear
from qkv.quantizers.holder import Holder
from qkv.quantizers.kernels import native
from qkv.quantizers.prepared import Prepared
from qkv.units import format_bytes


@dataclass(frozen=True)
class Preparation:
    """What :func:`prepare_` did.

    Attributes:
        names: the modules whose weights are interleaved from their next product on.
        nbytes: bytes of their codes and scales, which stay as many as they were.
        floats: the unquantized linear layers whose products of a few rows are the native library's now.
        left: the other quantized modules, and why.
        between: what became of norms and attention.
    """

    names: tuple[str, ...]
    nbytes: int
    floats: tuple[str, ...]
    left: dict[str, str]
    between: SpedUp

    def __str__(self) -> str:
        lines = [f"{len(self.names)} weights interleaved for decoding, {format_bytes(self.nbytes)}"]
        if self.floats:
            lines.append(f"{len(self.floats)} weights in bfloat16 read by the native library")
        if self.between.norms:
            lines.append(f"{len(self.between.norms)} norms computed by the native library")
        if self.between.other_norms:
            lines.append(f"{len(self.between.other_norms)} norms left: not in bfloat16, or of a kind it does not know")
        if self.between.attention:
            lines.append("attention of a few tokens computed by the native library, in place of torch's")
        reasons = Counter(self.left.values())
        lines += [f"{count} left in the stored order: {reason}" for reason, count in reasons.items()]
        return "\n".join(lines)


def prepare_(model: nn.Module) -> Preparation:
    """Let the weights of quantized linear layers lie interleaved by sixteen output features, in place.

    Products of two rows and more, as in batches and in the verification of drafts, are then up to twice as fast on a
    CPU with AVX-512 and BF16, and a row gives the same whatever the number of rows. The memory stays the same (scales
    stored in 8 bits are decoded, and counted by :func:`qkv.footprint`). Saving, casting, moving and reading a weight
    find the stored order, and so does a product that is not served interleaved (another dtype, gradients); the next
    one that is turns it again. Linear layers left in bfloat16, an output head for one, keep their parameters and
    multiply up to eight rows at the memory's speed, where torch reaches a third of it. Norms are the native library's
    too, and so is scaled-dot-product attention of up to 16 tokens that are masked causally alone, summed in float32;
    a cache that is attached has its own attention.

    Args:
        model: any module; its linear layers are looked at, in bfloat16 models.

    Returns:
        What was prepared, and what was not, and why.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Holder)}
    uses = Counter(id(module._buffers[name]) for module in modules.values() for name in module.specs)
    names, left, nbytes = [], {}, 0
    for name, module in modules.items():
        reason = _reason(module, uses)
        if reason is not None:
            left[name] = reason
            continue
        assert isinstance(module, Prepared)
        module.prepared = True
        names.append(name)
        nbytes += module.quantized().nbytes
    return Preparation(tuple(names), nbytes, _prepare_floats(model), left, speed_up_(model))


def _prepare_floats(model: nn.Module) -> tuple[str, ...]:
    """Plain linear layers in bfloat16, an output head for one, get a class with a faster product."""
    if native.cannot_serve_bf16() is not None:
        return ()
    plain = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    found = [(name, module) for name, module in plain if module.weight.dtype == torch.bfloat16 and module.weight.is_cpu]
    for _, module in found:
        module.__class__ = FloatLinear
    return tuple(name for name, _ in found)


def unprepare_(model: nn.Module) -> None:
    """Undo :func:`prepare_`: every weight in the stored order, for good."""
    slow_down_(model)
    for module in model.modules():
        if type(module) is FloatLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
        if isinstance(module, Prepared):
            module.put_in_order()
            module.prepared = False


def _reason(module: Holder, uses: Counter[int]) -> str | None:
    if not isinstance(module, Prepared):
        return "only linear layers are"
    if uses[id(module._buffers["weight"])] > 1:
        return "shares its codes with another module, as a tied embedding does"
    if module._buffers["weight"].device.type != "cpu":  # type: ignore[union-attr]
        return "only on the CPU"
    return module.cannot_prepare()
