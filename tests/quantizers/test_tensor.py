from __future__ import annotations

import copy
import pickle

import pytest
import torch

from qkv.errors import QkvError
from qkv.quantizers.format import FORMATS, Format
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor
from tests.laws import sample


@pytest.mark.parametrize("text", [*FORMATS, "int8:tensor", "nf4:g33"])
@pytest.mark.parametrize("shape", [(5, 100), (7,), (2, 3, 33), (0, 8), (4, 128)])
def test_state_round_trips(text: str, shape: tuple[int, ...]) -> None:
    weight = quantize_tensor(sample("normal", shape, 0).half(), text)
    for twin in (
        QuantizedTensor.from_state(weight.state("a.w"), weight.format, shape, torch.float16, "a.w"),
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
    ):
        assert torch.equal(twin.dequantize(), weight.dequantize()) and twin.nbytes == weight.nbytes


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    weight = quantize_tensor(sample("normal", (4, 100), 0), "int8:asym:double")
    state = weight.state("w")
    for name, tensor in state.items():
        for wrong in (None, tensor.double(), tensor[None]):
            broken = {**state, name: wrong} if wrong is not None else {k: v for k, v in state.items() if k != name}
            with pytest.raises(QkvError, match=rf"^{name} is "):
                QuantizedTensor.from_state(broken, weight.format, weight.shape, weight.dtype, "w")
    with pytest.raises(QkvError):
        QuantizedTensor.from_state(state, Format("nf4"), weight.shape, weight.dtype, "w")


def test_one_expert_of_a_stack_shares_its_storage() -> None:
    x = sample("normal", (3, 8, 100), 1)
    for text in ("int8", "int8:asym", "nf4", "int4:row"):
        stack = quantize_tensor(x, text)
        for index in range(3):
            one = stack[index]
            assert one.codes.untyped_storage().data_ptr() == stack.codes.untyped_storage().data_ptr()
            assert torch.equal(one.dequantize(), stack.dequantize()[index])
            assert torch.equal(one.dequantize(), quantize_tensor(x[index], text).dequantize())


@pytest.mark.parametrize(
    ("text", "shape"), [("int8", (4, 64)), ("int8:double", (2, 4, 64)), ("nf4:tensor", (2, 4, 64))]
)
def test_what_reaches_across_a_stack_cannot_be_indexed(text: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(QkvError, match="cannot be indexed"):
        quantize_tensor(torch.ones(shape), text)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_narrow_dtype_saturates(dtype: torch.dtype) -> None:
    for text in ("int8", "nf4", "int8:asym"):
        back = quantize_tensor(torch.full((1, 64), 1e6), text).dequantize(dtype)
        assert torch.equal(back.float(), torch.full((1, 64), torch.finfo(dtype).max))


def test_repr_tells_the_bits() -> None:
    assert repr(quantize_tensor(torch.zeros(64, 64), "nf4")).endswith(
        "shape=[64, 64], torch.float32, 4.5 bits a weight)"
    )
