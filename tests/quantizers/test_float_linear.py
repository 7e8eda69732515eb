from __future__ import annotations

import pytest
import torch
from torch import nn

from qkv.integration.decoding import prepare_, unprepare_
from qkv.integration.patch import dequantize_, patched, quantize_
from qkv.quantizers.float_linear import FloatLinear
from qkv.quantizers.kernels import native
from qkv.quantizers.linear import QuantizedLinear

pytestmark = pytest.mark.skipif(native.unavailable() is not None or native.level() != "avx512", reason="needs AVX-512")


def layer(columns: int, rows: int, bias: bool = True) -> FloatLinear:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=bias)).bfloat16().requires_grad_(False)
    assert prepare_(model).floats == ("0",)
    found = model[0]
    assert isinstance(found, FloatLinear)
    return found


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(("columns", "features"), [(1, 1), (31, 3), (64, 5), (577, 129), (2048, 64)])
def test_products_are_exact_to_bfloat16(rows: int, columns: int, features: int) -> None:
    """Accumulated in float32 and rounded once."""
    for bias in (True, False):
        found = layer(columns, features, bias)
        x = torch.randn(rows, columns).bfloat16()
        want = x.double() @ found.weight.double().T + (found.bias.double() if bias else 0)
        size = x.double().abs() @ found.weight.double().abs().T
        assert found._is_served(x)
        assert ((found(x).double() - want).abs() <= want.abs() / 256 + 1e-6 * size).all()
        assert torch.equal(found(x.reshape(1, rows, columns))[0], found(x))
        assert torch.equal(found(x[:1]), found(x)[:1])


def test_what_is_not_served_is_torchs() -> None:
    found = layer(64, 48)
    plain = nn.Linear(64, 48).bfloat16()
    plain.load_state_dict(found.state_dict())
    many, wants_grad = torch.randn(9, 64).bfloat16(), torch.randn(2, 64).bfloat16().requires_grad_()
    for x in (many, wants_grad, torch.empty(0, 64).bfloat16()):
        assert not found._is_served(x) and torch.equal(found(x), plain(x))
    found(wants_grad).sum().backward()
    assert wants_grad.grad is not None
    assert found.float()(many.float()).dtype == torch.float32


def test_a_spoilt_row_spoils_no_other() -> None:
    found, x = layer(64, 48), torch.randn(4, 64).bfloat16()
    want = found(x)
    x[1, 3] = float("nan")
    assert found(x)[1].isnan().all() and torch.equal(found(x)[2:], want[2:])


def test_a_prepared_model_is_quantized_like_any_other() -> None:
    model, plain = (nn.Sequential(nn.Linear(64, 48)).bfloat16().requires_grad_(False) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    prepare_(model)
    with patched(model, "int8"):
        inside = type(model[0])
    assert inside is QuantizedLinear and type(model[0]) is FloatLinear
    for each in (model, plain):
        quantize_(each, "nf4")
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())
    dequantize_(model)
    assert type(model[0]) is FloatLinear


def test_unprepared_it_is_an_nn_linear_again() -> None:
    model = nn.Sequential(nn.Linear(64, 48)).bfloat16()
    weight = model[0].weight
    prepare_(model)
    assert list(model.state_dict()) == ["0.weight", "0.bias"] and model[0].weight is weight
    unprepare_(model)
    assert type(model[0]) is nn.Linear and model[0].weight is weight
    assert prepare_(nn.Sequential(nn.Linear(8, 8))).floats == ()
