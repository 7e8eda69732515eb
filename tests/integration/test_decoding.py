from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from qkv.errors import QkvError
from qkv.integration.decoding import prepare_, unprepare_
from qkv.integration.patch import dequantize_, quantize_
from qkv.memory.footprint import footprint
from qkv.quantizers.kernels import native
from qkv.quantizers.linear import QuantizedLinear
from tests.helpers import frozen

pytestmark = pytest.mark.skipif(native.cannot_serve_bf16() is not None, reason=str(native.cannot_serve_bf16()))

TEXTS = ["nf4", "nf4:double", "int8", "int4:asym", "int8:asym:double"]


def model(text: str = "nf4") -> nn.Sequential:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 48, bias=False), nn.Linear(48, 20)).bfloat16()
    quantize_(plain, text)
    return plain.requires_grad_(False).eval()


def layer(found: nn.Sequential, index: int = 0) -> QuantizedLinear:
    each = found[index]
    assert isinstance(each, QuantizedLinear)
    return each


def x_of(rows: int = 5, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("text", TEXTS)
def test_it_computes_the_same_and_weighs_the_same(text: str) -> None:
    plain, prepared = model(text), model(text)
    before = footprint(prepared)
    report = prepare_(prepared)
    assert report.names == ("0", "1") and "20" in report.left["2"] and "2 weights interleaved" in str(report)
    for rows in (1, 3, 20):
        want, found = plain(x_of(rows)), prepared(x_of(rows))
        assert torch.allclose(found.float(), want.float(), rtol=2e-2, atol=2e-2 * float(want.abs().max()))
    assert layer(prepared).interleaved and layer(prepared, 1).interleaved and not layer(prepared, 2).interleaved
    after = footprint(prepared)
    assert after.weight_nbytes == before.weight_nbytes
    decoded = sum(layer(prepared, i).quantized().float_scale().nbytes for i in (0, 1)) if "double" in text else 0
    assert after.packed_nbytes == decoded


READERS: dict[str, Callable[[nn.Sequential], object]] = {
    "state_dict": lambda found: found.state_dict(),
    "quantized": lambda found: layer(found).quantized(),
    "cast": lambda found: found.half(),
    "float input": lambda found: layer(found)(x_of().float()),
    "gradients": lambda found: layer(found)(x_of().requires_grad_(True)),
    "unprepare_": unprepare_,
}


@pytest.mark.parametrize("text", ["nf4", "int4:asym"])
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_the_weight_finds_the_stored_order(reader: str, text: str) -> None:
    want, prepared = frozen(model(text)), model(text)
    prepare_(prepared)
    prepared(x_of())
    assert not torch.equal(layer(prepared)._buffers["weight"], want["0.weight"])  # type: ignore[arg-type]
    READERS[reader](prepared)
    assert not layer(prepared).interleaved
    for name in layer(prepared).held_names():
        assert torch.equal(layer(prepared)._buffers[name], want[f"0.{name}"])  # type: ignore[arg-type]
    found = prepared.bfloat16()(x_of())
    assert layer(prepared).interleaved == (reader != "unprepare_")
    assert torch.equal(prepared(x_of()), found)


def test_it_survives_copies_files_and_loading() -> None:
    plain, prepared = model(), model()
    prepare_(prepared)
    y = prepared(x_of())
    for twin in (copy.deepcopy(prepared), _through_a_file(prepared)):
        assert torch.equal(twin(x_of()), y) and layer(twin).interleaved
        assert all(torch.equal(tensor, frozen(plain)[name]) for name, tensor in twin.state_dict().items())
    other = model("nf4")
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in other.state_dict().items()})
    prepared(x_of())
    prepared.load_state_dict(other.state_dict())
    assert not torch.equal(prepared(x_of()), y)
    assert torch.equal(prepared(x_of()), other(x_of()))


def _through_a_file(found: nn.Sequential) -> nn.Sequential:
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, nn.Sequential)
    return loaded


@pytest.mark.parametrize("text", ["nf4", "int4:asym"])
def test_threads_that_read_it_either_way_find_it_whole(text: str) -> None:
    prepared, want = model(text), frozen(model(text))
    prepare_(prepared)
    y, exact = prepared(x_of()), layer(model(text))(x_of().float())

    def read(number: int) -> bool:
        if number % 3 == 0:
            return torch.equal(layer(prepared)(x_of().float()), exact)
        if number % 3 == 1:
            return all(torch.equal(tensor, want[name]) for name, tensor in prepared.state_dict().items())
        return torch.equal(prepared(x_of()), y)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(150)))


def test_dequantizing_forgets_it() -> None:
    plain, prepared = model(), model()
    prepare_(prepared)
    prepared(x_of())
    dequantize_(plain)
    dequantize_(prepared)
    assert torch.equal(prepared[0].weight, plain[0].weight)  # type: ignore[arg-type]
    assert not {"prepared", "interleaved", "_strips"} & set(prepared[0].__dict__)


def test_shared_codes_and_float32_models_are_left_and_said() -> None:
    shared = model()
    shared[1] = shared[0]
    twin = nn.Sequential(shared[0], copy.deepcopy(shared[0]))
    twin[1]._buffers.update(twin[0]._buffers)
    assert all("shares its codes" in reason for reason in prepare_(twin).left.values())
    floats = nn.Sequential(nn.Linear(128, 64))
    quantize_(floats, "nf4")
    report = prepare_(floats)
    assert report.names == () and "bfloat16 models, not float32" in str(report)


def test_it_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = model()
    prepare_(prepared)
    prepared(x_of())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(QkvError, match="unprepare_"):
        layer(prepared).strips(x_of())
