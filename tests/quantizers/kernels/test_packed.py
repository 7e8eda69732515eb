from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn

import qkv
from qkv.quantizers.kernels import bitsandbytes, torch_int4
from qkv.quantizers.kernels.choose import BACKENDS, choose
from qkv.quantizers.linear import QuantizedLinear
from qkv.quantizers.quantize import quantize_tensor

CASES = [
    *((torch_int4, text) for text in ("int8", "int4:asym", "int8:asym:double")),
    *((bitsandbytes, text) for text in ("nf4", "nf4:double")),
]


def product_of(backend: ModuleType, weight: qkv.QuantizedTensor, x: torch.Tensor) -> float:
    """Largest error of the product, of the size of its terms."""
    exact = weight.dequantize(torch.float64)
    error = (backend.linear(x, weight, None).double() - x.double() @ exact.T).abs()
    return float((error / (x.double().abs() @ exact.abs().T)).max())


@pytest.mark.parametrize(("backend", "text"), CASES)
def test_a_packed_copy_is_made_once_and_made_anew_when_the_weight_changes(backend: ModuleType, text: str) -> None:
    weight = quantize_tensor(torch.randn(64, 128), text)
    x = torch.randn(3, 128).bfloat16()
    assert product_of(backend, weight, x) < 5e-3
    if weight.packed is None:
        pytest.skip("this processor has no such product")
    first = weight.packed
    backend.linear(x, weight, None)
    assert weight.packed is first and weight.packed_nbytes >= weight.codes.nbytes
    for tensor, other in zip(
        weight.state().values(), quantize_tensor(torch.randn(64, 128), text).state().values(), strict=True
    ):
        tensor.copy_(other)
    assert product_of(backend, weight, x) < 5e-3 and weight.packed is not first


@pytest.fixture
def no_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine without a compiler."""
    monkeypatch.setattr(BACKENDS["native"], "unavailable", lambda: "not built")
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("text", ["int8", "int4"])
def test_copies_are_counted_never_saved_and_follow_the_weights(text: str) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128)).bfloat16()
    qkv.quantize_(model, text)
    before = qkv.footprint(model)
    x = torch.randn(2, 128).bfloat16()
    with torch.no_grad():
        y = model(x)
    after = qkv.footprint(model)
    codes = sum(m.weight.nbytes for m in model.modules() if isinstance(m, QuantizedLinear))
    assert before.packed_nbytes == 0 and after.packed_nbytes > codes
    assert after.total_nbytes == before.total_nbytes + after.packed_nbytes
    assert after.weight_nbytes == before.weight_nbytes and "copies that kernels keep" in str(after)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert qkv.footprint(twin).packed_nbytes == 0
        with torch.no_grad():
            assert torch.equal(twin(x), y)
    other = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 128)).bfloat16()
    qkv.quantize_(other, text)
    model.load_state_dict(other.state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), other(x)) and not torch.equal(model(x), y)
    qkv.dequantize_(model)
    assert qkv.footprint(model).packed_nbytes == 0
