"""What is kept between two products of a weight never outlives what it was made from."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from qkv.integration.patch import dequantize_, quantize_
from qkv.quantizers import kernels
from qkv.quantizers.kernels import native
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor
from tests.helpers import run_python

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


def used(text: str = "nf4", seed: int = 0) -> QuantizedTensor:
    """A weight whose first product is done."""
    weight = quantize_tensor(torch.randn(48, 128, generator=torch.Generator().manual_seed(seed)), text)
    kernels.linear(torch.zeros(1, 128), weight)
    return weight


def is_right(weight: QuantizedTensor) -> bool:
    x = torch.randn(3, 128)
    return torch.allclose(kernels.linear(x, weight), x @ weight.dequantize().T, rtol=1e-4, atol=1e-4)


def test_the_second_product_needs_no_choice() -> None:
    weight = used()
    assert weight.ready is not None and weight.ready.reads(weight) and is_right(weight)
    assert weight.ready.takes(torch.zeros(2, 3, 128)) and weight.ready.takes(torch.zeros(128).bfloat16())
    for x in (torch.zeros(1, 127), torch.zeros(1, 128).double(), torch.zeros(1, 128, device="meta")):
        assert not weight.ready.takes(x)
    assert not weight.ready.takes(torch.zeros(17, 128))  # float32: panels


@pytest.mark.parametrize("text", ["nf4:double", "int8:tensor", "int4:g7"])
def test_nothing_is_kept_that_would_be_a_decoded_copy(text: str) -> None:
    weight = used(text)
    assert weight.ready is None and is_right(weight)


@pytest.mark.parametrize("name", ["codes", "scale", "zero"])
def test_a_tensor_that_was_exchanged_is_noticed(name: str) -> None:
    weight, other = used("int4:asym"), used("int4:asym", 1)
    setattr(weight, name, getattr(other, name))
    assert is_right(weight)
    getattr(weight, name).data = getattr(quantize_tensor(torch.randn(48, 128), "int4:asym"), name)
    assert is_right(weight)


def test_what_is_written_in_place_is_read() -> None:
    weight = used()
    weight.codes.copy_(used(seed=2).codes)
    assert is_right(weight)


def test_copies_start_afresh() -> None:
    weight = used()
    for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
        assert twin.ready is None and torch.equal(twin.codes, weight.codes)
        twin.scale.mul_(2)
        assert is_right(twin) and is_right(weight)


@torch.no_grad()
def test_a_module_that_changes_hands_stays_right() -> None:
    x = torch.randn(2, 64)
    model, donor = nn.Sequential(nn.Linear(64, 32)), nn.Sequential(nn.Linear(64, 32))
    for module in (model, donor):
        quantize_(module, "nf4")
        module(x)
    twin = copy.deepcopy(model)
    model.load_state_dict(donor.state_dict())
    assert torch.equal(model(x), donor(x))
    donor.load_state_dict(twin.state_dict(), assign=True)
    assert torch.equal(donor(x), twin(x))
    before = twin(x)
    assert torch.allclose(twin.to(torch.bfloat16).to(torch.float32)(x), before, atol=0.05)
    assert torch.allclose(dequantize_(twin)(x), donor(x), atol=0.05)


EXACT = """
import torch
from qkv.quantizers.kernels import linear
from qkv.quantizers.quantize import quantize_tensor
torch.manual_seed(0)
x, w = torch.randn(40, 256).bfloat16(), quantize_tensor(torch.randn(64, 256), "nf4")
want = (x.double() @ w.dequantize(torch.float64).T).bfloat16()
print(min(float((linear(x[:rows], w) == want[:rows]).float().mean()) for rows in (1, 3, 7, 40)))
"""


def test_float32_products_can_be_asked_for() -> None:
    exact = run_python(EXACT, QKV_EXACT="1")
    assert exact.returncode == 0 and float(exact.stdout) > 0.99, exact.stderr
    if native.level() == "avx512":
        assert float(run_python(EXACT).stdout) < 0.95
