from __future__ import annotations

from itertools import product

import pytest
import torch

from qkv.errors import QkvError
from qkv.quantizers import kernels
from qkv.quantizers.format import FORMATS, Format
from qkv.quantizers.kernels import reference
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.choose import BACKENDS, KERNELS_VARIABLE, NATIVE_LEVELS, choose
from qkv.quantizers.kernels.status import status
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import TOLERANCES, run_python
from tests.laws import check_product, sample

LIVE = [name for name, backend in BACKENDS.items() if backend.unavailable() is None]
TEXTS = [*FORMATS, "int8:g128", "int8:g48", "int4:g16:asym:double", "nf4:g128", "nf4:row", "int8:tensor", "nf4:g7"]
SHAPES = [(32, 64), (48, 256), (5, 128), (17, 100), (1, 1), (3, 7), (33, 320), (2, 1030), (0, 64), (4, 0)]
CASES = list(product(LIVE, TEXTS))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS = [0, 1, 2, 3, 7, 16, 17, 65]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_back_end_is_the_reference(name: str, text: str) -> None:
    """Every product that it takes, to a stated tolerance; every dequantization bit for bit.

    aten::_weight_int8pack_mm reads past rows of no multiple of 16: garbage, or a crash.
    """
    backend, format = BACKENDS[name], Format.parse(text)
    for shape, dtype in product(SHAPES, DTYPES):
        weight = quantize_tensor(sample("normal", shape, 0).to(dtype), format)
        exact = reference.dequantize(weight, torch.float64)
        bias = sample("normal", shape[:1], 1).to(dtype)
        for rows in ROWS:
            if backend.refuses(Case(format, shape, "cpu", dtype, rows)) is not None:
                continue
            if rows == 0:
                assert torch.equal(backend.dequantize(weight, dtype), reference.dequantize(weight, dtype))
                continue
            x = sample("normal", (rows, shape[1]), rows).to(dtype)
            for bias_or_none in (None, bias):
                got = backend.linear(x, weight, bias_or_none)
                want = x.double() @ exact.T + (0 if bias_or_none is None else bias.double())
                size = x.double().abs() @ exact.abs().T + bias.double().abs() + 1e-30
                assert got.dtype == dtype and got.shape == want.shape
                worst = float(((got.double() - want).abs() / size).max()) if want.numel() else 0.0
                assert worst <= TOLERANCES["product"][dtype], (shape, dtype, rows, worst)


@pytest.mark.parametrize("name", LIVE)
def test_a_back_end_reads_strided_rows_and_changes_nothing(name: str) -> None:
    for text, dtype in product(("int8:row", "nf4", "int8:asym"), (torch.float32, torch.bfloat16)):
        weight = quantize_tensor(sample("normal", (32, 128), 2), text)
        if BACKENDS[name].refuses(Case(weight.format, weight.shape, "cpu", dtype, 3)) is not None:
            continue
        before = [tensor.clone() for tensor in weight.state().values()]
        wide = sample("normal", (256, 6), 3).to(dtype).T[::2]  # [3, 256], strided both ways
        x = wide[:, ::2]
        plain = BACKENDS[name].linear(x.contiguous(), weight, None)
        assert torch.equal(BACKENDS[name].linear(x, weight, None), plain)
        assert all(torch.equal(a, b) for a, b in zip(before, weight.state().values(), strict=True))


@pytest.mark.parametrize("text", ["int8", "nf4", "int8:row", "int4:asym:double"])
def test_linear_takes_any_number_of_dimensions(text: str) -> None:
    weight = sample("normal", (24, 96), 4)
    quantized = quantize_tensor(weight, text)
    for shape in ((96,), (1, 96), (2, 3, 96), (2, 0, 96), (0, 96), (1, 1, 1, 96)):
        x = sample("normal", shape, 5)
        y = kernels.linear(x, quantized, None)
        assert y.shape == (*shape[:-1], 24)
        assert torch.allclose(y, x @ quantized.dequantize().T, rtol=1e-4, atol=1e-4)
        check_product(x, weight, None, Format.parse(text))


def test_a_bias_may_have_another_dtype() -> None:
    weight = quantize_tensor(sample("normal", (24, 96), 4), "nf4")
    x, bias = sample("normal", (3, 96), 5), sample("normal", (24,), 6)
    half = kernels.linear(x.bfloat16(), weight, bias)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, kernels.linear(x.bfloat16(), weight, bias.bfloat16()))


def test_a_width_that_does_not_fit_is_named() -> None:
    with pytest.raises(QkvError, match="100 features and the weight takes 96"):
        kernels.linear(torch.zeros(2, 100), quantize_tensor(torch.ones(4, 96), "nf4"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("text", ["int8", "nf4", "int8:asym:double"])
def test_gradients_are_those_of_the_dequantized_weight(text: str, dtype: torch.dtype) -> None:
    weight = quantize_tensor(sample("normal", (24, 96), 4), text)
    x = sample("normal", (2, 3, 96), 5).to(dtype).requires_grad_()
    bias = sample("normal", (24,), 6).requires_grad_()
    grad = sample("normal", (2, 3, 24), 7).to(dtype)
    kernels.linear(x, weight, bias).backward(grad)  # type: ignore[no-untyped-call]
    want = grad.double() @ weight.dequantize(torch.float64)
    size = grad.double().abs() @ weight.dequantize(torch.float64).abs()
    assert x.grad is not None and x.grad.dtype == dtype and bias.grad is not None
    assert bool(((x.grad.double() - want).abs() <= TOLERANCES["product"][dtype] * size).all())
    assert bias.grad.dtype == torch.float32
    assert torch.allclose(bias.grad, grad.float().sum((0, 1)), rtol=2e-2, atol=2e-2)


def test_gradients_of_gradients() -> None:
    weight = quantize_tensor(sample("normal", (5, 16), 4).double(), "int8")
    x = sample("normal", (3, 16), 5).double().requires_grad_()
    bias = sample("normal", (5,), 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, b: kernels.linear(x, weight, b), (x, bias))
    assert torch.autograd.gradgradcheck(lambda x: kernels.linear(x, weight, None), (x,))


def test_no_float_weight_is_kept_for_backward() -> None:
    weight = quantize_tensor(sample("normal", (64, 64), 4), "int8")
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernels.linear(torch.randn(2, 64, requires_grad=True), weight, torch.zeros(64, requires_grad=True))
    assert not saved


def test_status_says_what_is_live_and_why_the_rest_is_not() -> None:
    rows = status()
    assert [row.name for row in rows] == list(BACKENDS) and rows[-1].reason is None
    assert all(row.serves and (row.reason is None or row.reason.strip()) for row in rows)


def test_the_reference_is_never_chosen_while_another_takes_the_case() -> None:
    for text, rows in product(TEXTS, ROWS):
        case = Case(Format.parse(text), (32, 128), "cpu", torch.bfloat16, rows)
        takers = [name for name in LIVE if BACKENDS[name].refuses(case) is None]
        assert choose(case) is BACKENDS[takers[0]]


@pytest.mark.parametrize("forced", BACKENDS)
def test_the_environment_limits_the_table(forced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, forced)
    choose.cache_clear()
    try:
        for text in ("int8:row", "nf4", "int8:asym"):
            case = Case(Format.parse(text), (32, 128), "cpu", torch.bfloat16, 2)
            takes = forced in LIVE and BACKENDS[forced].refuses(case) is None
            assert choose(case) is BACKENDS[forced if takes else "reference"]
            check_product(torch.randn(2, 128), torch.randn(32, 128), None, Format.parse(text))
    finally:
        monkeypatch.undo()
        choose.cache_clear()


CHOSEN = """
import torch
from qkv.quantizers.kernels import BACKENDS, linear
from qkv.quantizers.quantize import quantize_tensor
x, w = torch.randn(2, 128).bfloat16(), quantize_tensor(torch.randn(32, 128).bfloat16(), "nf4")
assert (linear(x, w) - x @ w.dequantize().T).abs().max() < 0.5
print("right")
"""


@pytest.mark.parametrize("level", NATIVE_LEVELS)
def test_an_instruction_set_can_be_named(level: str) -> None:
    result = run_python(CHOSEN, QKV_KERNELS=level)
    assert result.stdout == "right\n", result.stderr


def test_an_unknown_choice_is_refused_by_name() -> None:
    result = run_python(CHOSEN, QKV_KERNELS="cublas")
    assert result.returncode == 1
    assert "QKV_KERNELS=cublas is not a back end; choose from native, torch" in result.stderr
