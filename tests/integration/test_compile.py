from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from qkv.integration.patch import quantize_
from tests.helpers import logits, prompt, tiny


@pytest.mark.parametrize("text", ["int8", "nf4", "int8:asym:double", "int4:row"])
def test_a_patched_model_compiles_without_a_break(text: str) -> None:
    """bitsandbytes#1184, PR#1616, hqq#64: graph breaks and recompiles; aot_eager needs no compiler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    quantize_(model, text)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        for rows in (4, 7, 9):
            x = torch.randn(rows, 100)
            assert torch.allclose(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_a_compiled_model_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, "nf4")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for run in (model, compiled):
        x = torch.ones(3, 64, requires_grad=True)
        run(x).sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None and grads[1] is not None and torch.allclose(grads[0], grads[1], atol=1e-4)


def test_a_quantized_table_compiles() -> None:
    model = tiny("llama_tied")
    quantize_(model, "int8", embeddings="int8")
    torch._dynamo.reset()
    compiled: Any = torch.compile(model.model.embed_tokens, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(prompt()), model.model.embed_tokens(prompt()))
    whole = torch.compile(model, backend="aot_eager")
    assert torch.allclose(logits(whole), logits(model), atol=1e-4)
