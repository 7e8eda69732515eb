from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.integration.patch import quantize_
from qkv.quantizers.holder import Holder
from tests.helpers import frozen, logits, prompt, tiny


class Adapter(nn.Module):
    """What LoRA wrappers do with a layer: HF's own test wrapper, hqq + peft#1616, GPTQModel#1534."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 4, bias=False).to(inner.weight.device)
        self.up = nn.Linear(4, inner.out_features, bias=False).to(inner.weight.device)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + self.up(self.down(x))
        return result


def train(model: nn.Module, steps: int = 15) -> list[float]:
    ids = prompt(12, batch=2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("text", ["int8", "nf4"])
def test_an_adapter_trains_and_the_base_does_not_change(text: str) -> None:
    model = tiny("llama")
    quantize_(model, text)
    model.requires_grad_(False)
    want = logits(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)
        layer.mlp.up_proj = Adapter(layer.mlp.up_proj)
    assert torch.equal(logits(model), want)
    base = {name: tensor for name, tensor in frozen(model).items() if ".up." not in name and ".down." not in name}
    losses = train(model)
    assert losses[-1] < losses[0] - 0.05
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_attaches_and_trains(family: str) -> None:
    peft = pytest.importorskip("peft")
    model = tiny(family)
    quantize_(model, "nf4")
    held = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = ["c_attn"] if family == "gpt2" else ["q_proj", "up_proj"]
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=layers, task_type="CAUSAL_LM"))
    trainable = [name for name, parameter in wrapped.named_parameters() if parameter.requires_grad]
    assert trainable and all("lora_" in name for name in trainable)
    losses = train(wrapped)
    assert losses[-1] < losses[0] - 0.05
    base = wrapped.unload()
    assert sum(isinstance(module, Holder) for module in base.modules()) == sum(
        isinstance(module, Holder) for module in model.modules()
    )
    assert all(torch.equal(tensor, held[name]) for name, tensor in base.state_dict().items())


def test_adapters_already_there_are_left_in_full_precision() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    report = quantize_(model, "int8")
    assert not any("lora" in row.name for row in report.quantized)
    assert any("lora_A" in row.name and "adapter" in row.reason for row in report.kept)
    assert len(report.quantized) == 14
    losses = train(model, 8)
    assert losses[-1] < losses[0]
