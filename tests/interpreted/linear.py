"""The Triton kernels of linear layers under Triton's interpreter; tests/test_triton.py runs this in its own process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from qkv.integration.patch import quantize_
from qkv.quantizers import kernels
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import reference, triton_linear
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.choose import choose
from qkv.quantizers.kernels.triton_live import interpreted, unavailable
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor

assert interpreted() and unavailable() is None

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TEXTS = ("int8", "int8:asym", "int4:asym:double", "nf4", "nf4:row", "int8:tensor", "int4:g16", "nf4:g48")
SHAPES = ((5, 128), (33, 100), (70, 320))
BOUND = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1.1e-3}
"""Of the sum of the magnitudes of all products; 16 bits round the weight and the result."""


def check(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> None:
    exact = reference.dequantize(weight, torch.float64)
    got = triton_linear.linear(x, weight, bias)
    added = torch.zeros(()).double() if bias is None else bias.double()
    want, size = x.double() @ exact.T + added, x.double().abs() @ exact.abs().T + added.abs() + 1e-30
    assert got.shape == want.shape and got.dtype == x.dtype
    assert not got.numel() or float(((got.double() - want).abs() / size).max()) <= BOUND[x.dtype]


@pytest.mark.parametrize("text", TEXTS)
def test_products_and_weights_are_those_of_the_reference(text: str) -> None:
    torch.manual_seed(0)
    for shape, dtype in product(SHAPES, DTYPES):
        weight = quantize_tensor(torch.randn(shape) * 0.1, text)
        assert torch.equal(triton_linear.dequantize(weight, dtype), reference.dequantize(weight, dtype))
        for rows in (0, 1, 2, 17):
            check(torch.randn(rows, shape[1]).to(dtype), weight, torch.randn(shape[0]).to(dtype) if rows % 2 else None)


@settings(max_examples=12)
@given(st.data())
def test_any_product(data: st.DataObject) -> None:
    """Ragged sizes, groups that do and do not divide the row, strided x, huge and tiny values."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    groups: tuple[int | str, ...] = (16, 32, 80, 128, "row")
    group = draw(st.sampled_from(groups))
    name = draw(st.sampled_from(["int8", "int4", "nf4"]))
    format = Format(name, group, symmetric=name == "nf4" or draw(st.booleans()))
    shape = (draw(st.integers(1, 40)), 2 * draw(st.integers(1, 120)))
    dtype, rows = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([1, 3, 20]))
    weight = quantize_tensor(torch.randn(shape) * draw(st.sampled_from([1e-4, 1.0, 30.0])), format)
    case = Case(format, shape, "cpu", dtype, rows)
    if triton_linear.refuses(case) is None:
        check(torch.randn(shape[1] * 2, rows).to(dtype).T[:, ::2], weight, None)
    else:
        assert format.group_length(shape[1]) % 16 and format.group_length(shape[1]) < shape[1]


@pytest.mark.parametrize("columns", [8192, 8200])
def test_columns_are_split_where_the_rows_are_few(columns: int) -> None:
    torch.manual_seed(0)
    weight = quantize_tensor(torch.randn(3, columns), "nf4")
    for rows in (1, 2):
        check(torch.randn(rows, columns).bfloat16(), weight, torch.randn(3).bfloat16())


def test_stacks_are_dequantized_and_what_is_not_served_is_refused() -> None:
    stack = quantize_tensor(torch.randn(2, 3, 64), "int8:asym")
    assert torch.equal(triton_linear.dequantize(stack, torch.float32), reference.dequantize(stack, torch.float32))
    for text, shape, dtype in (("nf4:g7", (4, 64), torch.float32), ("nf4", (2, 4, 64), torch.float32),
                               ("nf4", (4, 64), torch.float64)):  # fmt: skip
        assert triton_linear.refuses(Case(Format.parse(text), shape, "cpu", dtype, 1))


def test_the_table_may_be_told_to_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QKV_KERNELS", "triton")
    choose.cache_clear()
    assert choose(Case(Format("nf4"), (32, 128), "cpu", torch.bfloat16, 2)) is triton_linear
    weight, x = quantize_tensor(torch.randn(32, 128), "nf4"), torch.randn(2, 3, 128)
    assert torch.allclose(kernels.linear(x, weight), x @ weight.dequantize().T, atol=1e-4)
    choose.cache_clear()


@pytest.mark.parametrize("text", ["nf4", "int8:asym:double"])
def test_a_compiled_graph_holds_the_product_as_one_operator(text: str) -> None:
    """No break, no decoded weight in the graph, no new graph for another number of rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32)).eval()
    quantize_(model, text)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    with torch.no_grad():
        for rows in (4, 7, 9):
            x = torch.randn(rows, 64)
            assert torch.allclose(compiled(x), model(x), atol=1e-5)
    assert len(graphs) <= 2
    names = [str(node.target) for node in graphs[-1].graph.nodes]
    assert sum("qkv" in name and "linear" in name for name in names) == 2


def test_a_compiled_model_still_trains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    quantize_(model, "nf4")
    torch._dynamo.reset()
    x = torch.ones(3, 64, requires_grad=True)
    torch.compile(model, fullgraph=True, backend="aot_eager")(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None and bool(x.grad.any())


@pytest.mark.parametrize("text", ["nf4", "int8:asym"])
def test_the_operator_is_registered_as_torch_wants_it(text: str) -> None:
    """Schema, fake kernel and strides, by torch's own check."""
    weight = quantize_tensor(torch.randn(5, 64), text)
    arguments = (torch.randn(2, 3, 64), weight.codes, weight.scale, weight.zero, torch.randn(5), weight.format.name)
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.qkv.linear.default, (*arguments, 64, 64), test_utils=utilities)
