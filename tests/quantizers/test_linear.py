from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from qkv.errors import QkvError
from qkv.integration.patch import quantize_
from qkv.quantizers.format import FORMATS, Format
from qkv.quantizers.linear import QuantizedLinear
from tests.helpers import frozen
from tests.laws import check_gradient, check_product, sample

CASTS: list[Callable[[nn.Module], nn.Module]] = [
    lambda m: m.half(),
    lambda m: m.bfloat16(),
    lambda m: m.double(),
    lambda m: m.to(torch.float16),
    lambda m: m.to(torch.bfloat16),
    lambda m: m.to("cpu", torch.float16),
    lambda m: m.type(torch.float16),
]


def layer(text: str = "nf4", *, magnitude: float = 1.0, columns: int = 128, rows: int = 64) -> QuantizedLinear:
    torch.manual_seed(0)
    plain = nn.Linear(columns, rows)
    plain.weight.data.mul_(magnitude)
    model = nn.Sequential(plain)
    quantize_(model, text)
    found = model[0]
    assert isinstance(found, QuantizedLinear)
    return found


@pytest.mark.parametrize("text", FORMATS)
def test_is_a_linear_with_a_quantized_weight(text: str) -> None:
    quantized = layer(text)
    assert isinstance(quantized, nn.Linear) and type(quantized) is QuantizedLinear
    assert (quantized.in_features, quantized.out_features) == (128, 64)
    assert quantized.weight.device == torch.device("cpu") and quantized.bias is not None
    assert set(dict(quantized.named_parameters())) == {"bias"}
    assert f"format={Format.parse(text)}" in repr(quantized)
    check_product(sample("normal", (5, 128), 1), quantized.quantized().dequantize(), quantized.bias, Format.parse(text))
    x = sample("normal", (2, 5, 128), 1)
    want = nn.functional.linear(x, quantized.quantized().dequantize(), quantized.bias)
    assert torch.allclose(quantized(x), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["int8", "nf4", "int4:asym:double"])
@pytest.mark.parametrize("magnitude", [1.0, 1e-6])
def test_casts_touch_neither_codes_nor_scales(text: str, magnitude: float) -> None:
    """HF test_device_and_dtype_assignment, torchao#2571 (scales in the wrong precision), TransformerLens#1743."""
    quantized = layer(text, magnitude=magnitude)
    held = set(quantized.held_names())
    before, x = frozen(quantized), torch.randn(4, 128)
    want = quantized(x)
    for cast in CASTS:
        other = copy.deepcopy(quantized)
        cast(other)
        assert all(
            torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
            for name, tensor in other.state_dict().items()
            if name in held
        )
        assert other.bias.dtype == other.specs["weight"].dtype != torch.float32
        y = other(x.to(other.bias.dtype)).float()
        assert torch.isfinite(y).all() and torch.allclose(
            y, want, rtol=5e-2, atol=5e-2 * float(want.detach().abs().max())
        )
        other.float()
        other.bias.data.copy_(quantized.bias.data)
        assert torch.equal(other(x), want)
    assert list(quantized.state_dict()) == list(before)


def test_the_weight_dequantizes_to_the_dtype_of_the_last_cast() -> None:
    quantized = layer()
    assert quantized.float_parameter("weight").dtype == torch.float32
    assert quantized.half().float_parameter("weight").dtype == torch.float16
    assert quantized.bfloat16().to("cpu").float_parameter("weight").dtype == torch.bfloat16


def test_meta_and_back_keeps_shapes_and_dtypes() -> None:
    quantized = layer("int8:asym:double", columns=100)
    want = {name: (t.shape, t.dtype) for name, t in quantized.state_dict().items()}
    state = frozen(quantized)
    x = torch.randn(3, 100)
    y = quantized(x)
    quantized.to("meta")
    assert all(tensor.device.type == "meta" for tensor in quantized.state_dict().values())
    quantized.to_empty(device="cpu")
    assert {name: (t.shape, t.dtype) for name, t in quantized.state_dict().items()} == want
    quantized.load_state_dict(state, strict=True)
    assert torch.equal(quantized(x), y)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("text", ["int8", "int8:asym:double", "nf4"])
def test_state_dict_round_trips_strictly(text: str, assign: bool) -> None:
    """bitsandbytes#1946: a layer's own state_dict is refused, and strict=False computes garbage."""
    first, second = layer(text, columns=100), layer(text, columns=100, magnitude=3)
    x = torch.randn(3, 100)
    second(x)
    second.load_state_dict(first.state_dict(), strict=True, assign=assign)
    assert torch.equal(first(x), second(x))
    for name in first.held_names():
        less = {key: tensor for key, tensor in first.state_dict().items() if key != name}
        with pytest.raises(RuntimeError, match=name):
            second.load_state_dict(less, strict=True)
    with pytest.raises(RuntimeError):
        nn.Linear(100, 64).load_state_dict(first.state_dict(), strict=True)
    with pytest.raises(RuntimeError):
        first.load_state_dict(nn.Linear(100, 64).state_dict(), strict=True)


def test_a_state_dict_of_another_format_is_refused() -> None:
    """int4 and nf4 have the same shapes and dtypes."""
    for theirs, ours in (
        ("int4", "nf4"),
        ("nf4", "int4"),
        ("int8", "nf4"),
        ("int8:asym", "int8"),
        ("int8", "int8:row"),
    ):
        with pytest.raises((RuntimeError, QkvError)):
            layer(ours).load_state_dict(layer(theirs).state_dict(), strict=True)


def test_copies_are_apart() -> None:
    quantized = layer("nf4:double")
    x = torch.randn(2, 128)
    y = quantized(x)
    stream = io.BytesIO()
    torch.save(quantized, stream)
    stream.seek(0)
    twins = [
        copy.deepcopy(quantized),
        pickle.loads(pickle.dumps(quantized)),
        torch.load(stream, weights_only=False),
    ]
    for twin in twins:
        assert torch.equal(twin(x), y)
        twin.weight.zero_()
        assert not torch.equal(twin(x), y) and torch.equal(quantized(x), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["int8", "nf4", "int8:asym"])
def test_gradients_reach_the_input_and_the_bias_alone(text: str, dtype: torch.dtype) -> None:
    """pytorch#99264, bitsandbytes test_kbit_backprop, torchao test_backward_dtype_match."""
    quantized = layer(text).train()
    quantized.requires_grad_(False).requires_grad_(True)
    check_gradient(quantized, dtype)
    assert quantized.bias.grad is not None and quantized.bias.grad.dtype == torch.float32
    assert all(not buffer.requires_grad and buffer.grad is None for buffer in quantized.buffers())


def test_no_features_in_or_out() -> None:
    for columns, rows in ((0, 4), (4, 0)):
        quantized = layer("int8", columns=columns, rows=rows)
        assert torch.equal(quantized(torch.zeros(2, columns)), quantized.bias.expand(2, rows))
