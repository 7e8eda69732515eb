"""QuantizedExperts: the fused expert weights of a mixture of experts, one quantized stack a projection.

transformers 5 keeps all experts of a layer in 3-D parameters; quantizers that look for ``nn.Linear``
leave those, most of such a model, in 16 bits without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qkv.quantizers import kernels
from qkv.quantizers.format import Format
from qkv.quantizers.holder import Holder

UP_NAMES = ("gate_up_proj", "up_proj")
DOWN_NAME = "down_proj"


def expert_format(format: Format, columns: int) -> Format:
    """The variant of ``format`` for one expert's matrix with ``columns`` inputs.

    Checkpoints hold experts apart that a model holds as one stack, so nothing may reach across two of
    them: no double quantization, no single scale for a tensor, and a group size that divides the row.
    """
    size = format.group_size
    if not isinstance(size, int) or columns == 0:
        return replace(format, group_size="row", double_quant=False)
    step = 2 if format.bits == 4 and columns % 2 == 0 else 1
    largest = min(size, columns) // step * step
    size = next((divisor for divisor in range(largest, 0, -step) if columns % divisor == 0), step)
    return replace(format, group_size=size, double_quant=False)


def experts_refuse(format: Format, columns: int) -> str | None:
    """Why experts with ``columns`` inputs cannot take ``format``: codes must tell their number of columns."""
    if format.bits == 4 and columns % 2:
        return f"{columns} inputs, an odd number, do not pack into bytes of two; int8 fits"
    return None


def parameter_format(name: str, format: Format, columns: int) -> Format:
    """The format a parameter really gets when ``format`` is asked for: experts, known by name, get their own."""
    return expert_format(format, columns) if "experts" in name.split(".") else format


def expert_parameters(module: nn.Module) -> list[str]:
    """Names of the 3-D weights of a fused experts module as transformers writes them; empty for any other."""
    flags = ("num_experts", "has_gate", "is_transposed", "_apply_gate")
    if not all(hasattr(module, flag) for flag in flags) or getattr(module, "has_post_expert_norm", False):
        return []
    up = [name for name in UP_NAMES if isinstance(_entry(module, name), Tensor)]
    down = _entry(module, DOWN_NAME)
    if len(up) != 1 or not isinstance(down, Tensor) or down.dim() != 3:
        return []
    return [*up, DOWN_NAME]


def _entry(module: nn.Module, name: str) -> Tensor | None:
    return module._parameters.get(name, module._buffers.get(name))


class QuantizedExperts(Holder):
    """Runs each expert that a token was sent to, in turn, on its own quantized matrices.

    Combined with the model's own class, whose ``_apply_gate``, biases and activation it uses.
    """

    num_experts: int
    has_gate: bool
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *args: Any) -> Tensor:
        """Weighted sum of the experts' outputs.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: ``[tokens, k]``, the experts each token goes to; ``num_experts`` means none.
            top_k_weights: ``[tokens, k]``.
        """
        output = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self.num_experts:
                continue
            token, position = torch.where(top_k_index == expert)
            result = self._run_expert(hidden_states[token], expert) * top_k_weights[token, position, None]
            output.index_add_(0, token, result.to(output.dtype))
        return output

    def _run_expert(self, x: Tensor, expert: int) -> Tensor:
        up = self._project(x, next(name for name in UP_NAMES if name in self.specs), expert)
        return self._project(self._apply_gate(up) if self.has_gate else self.act_fn(up), DOWN_NAME, expert)

    def _project(self, x: Tensor, name: str, expert: int) -> Tensor:
        biases = getattr(self, f"{name}_bias", None)
        return kernels.linear(x, self.quantized(name)[expert], None if biases is None else biases[expert])
