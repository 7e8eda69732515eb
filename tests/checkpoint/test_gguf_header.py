from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import qkv
from qkv.checkpoint.gguf_header import KINDS, gguf_items
from qkv.cli.main import main
from qkv.demo import packaged_gguf
from qkv.errors import CheckpointError, QkvError

gguf = pytest.importorskip("gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(*tensors: tuple[str, tuple[int, ...], int, int], entries: tuple[bytes, ...] = (), version: int = 3) -> bytes:
    """A file's first bytes; of each tensor the name, the sizes (columns first), the type and where it begins."""
    found = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    for name, sizes, kind, offset in tensors:
        found += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return found + bytes(-len(found) % 32)


def number(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def test_types_are_those_of_llama_cpp() -> None:
    """gguf-py, which llama.cpp keeps beside itself, is the oracle."""
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        if kind.value in KINDS:
            assert KINDS[kind.value][:3] == (kind.name, block, nbytes)
    assert all(gguf.GGMLQuantizationType(number).name == kind.name for number, kind in KINDS.items())


def test_a_real_file_is_as_its_own_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "é"])
    writer.add_array("some.floats", [1.0] * 50_000)  # longer than what is read at once
    writer.add_bool("some.flag", True)
    shapes = {"token_embd.weight": (7, 64), "blk.0.ffn_down_exps.weight": (3, 5, 96), "output.weight": (7, 64)}
    for name, shape in shapes.items():
        data = torch.randn(shape).numpy()
        writer.add_tensor(name, gguf.quantize(data, gguf.GGMLQuantizationType.Q8_0), raw_dtype=8)
    writer.add_tensor("blk.0.attn_norm.weight", torch.ones(64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {item.name: item for item in gguf_items(path)}
    for tensor in gguf.GGUFReader(path).tensors:
        item = found.pop(tensor.name)
        assert item.shape == tuple(tensor.shape.tolist()[::-1]) and item.nbytes == tensor.n_bytes
        assert item.format == (None if tensor.tensor_type.name == "F32" else tensor.tensor_type.name)
        assert item.shape == shapes.get(item.name, (64,))
    assert not found
    report = qkv.footprint(path)
    assert [row.role for row in report.rows] == ["head", "embedding", "experts", "norm"]


def test_the_packaged_model_with_its_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """The weights from our own reader, the cache from the config that transformers makes of the metadata."""
    report = qkv.footprint(packaged_gguf(), context=1000, batch=2)
    assert report.weight_nbytes == 96_576_768  # what gguf-py's reader adds up to, which takes seconds
    assert report.kv_nbytes == 2 * 1000 * 30 * 2 * 3 * 64 * 2 and (report.workspace, report.peak_nbytes) == (None, None)
    main(["report", str(packaged_gguf())])
    assert "Q4_1" in capsys.readouterr().out


@pytest.mark.parametrize("options", [{"memory": "1GB"}, {"live": True}, {"keys": "int8"}])
def test_what_depends_on_who_runs_the_file_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(QkvError, match=r"is for models that are run here.*qkv quantize FILE\.gguf"):
        qkv.footprint(packaged_gguf(), context=9, **options)  # type: ignore[arg-type]


def test_a_cache_that_is_not_known_is_said(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header(("a.weight", (32,), 2, 0)) + bytes(18))
    report = qkv.footprint(path, context=9)
    assert report.weight_nbytes == 18 and report.kv_nbytes is None
    assert "transformers cannot read" in report.kv_note


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (header(("a", (32,), 2, 0)) + bytes(17), "truncated: 'a' ends at byte 82 of 81"),
        (header(("a", (33,), 2, 0)), "rows of 33, and Q4_0 has blocks of 32"),
        (header(("a", (32,), 99, 0)), "'a' is of type 99"),
        (header(("a", (1,) * 5, 0, 0)), "5 dimensions"),
        (header(version=1), "version 1"),
        (header(entries=(number("split.count", 2),)), "one of 2 files of a model; join them"),
        (header(entries=(text("a") + struct.pack("<I", 77),)), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**40), "damaged"),
        (header(entries=(text("a") + struct.pack("<IIQ", 9, 10, 10**7),)), "damaged"),
    ],
)
def test_damage_is_told_in_one_line(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=told) as caught:
        gguf_items(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_alignment_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content = header(("a", (32,), 2, 0), entries=(number("general.alignment", 256),))
    path.write_bytes(content + bytes(-len(content) % 256 + 18))
    assert gguf_items(path)[0].nbytes == 18
    path.write_bytes(content + bytes(18))
    with pytest.raises(CheckpointError, match="truncated"):
        gguf_items(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_bytes_raise_anything_else(data: st.DataObject, tmp_path: Path) -> None:
    entries = (number("general.alignment", 32), text("b") + struct.pack("<IIQ", 9, 8, 2) + text("x") + text("yz"))
    whole = bytearray(header(("a", (64, 3), 8, 0), ("b", (5,), 0, 224), entries=entries) + bytes(300))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(4, len(whole) - 301))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        whole[place : place + len(patch)] = patch
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        assert all(item.nbytes <= len(whole) for item in gguf_items(path))
    except CheckpointError as error:
        assert "\n" not in str(error)
