from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize as untyped_deserialize
from safetensors.torch import save

from qkv.checkpoint.header import DTYPES, read_header
from qkv.errors import CheckpointError

deserialize: Any = untyped_deserialize
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VALID = save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(4, dtype=torch.int8)}, {"format": "pt"})


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def put(folder: Path, header: object, num_data_bytes: int = 0) -> Path:
    """Write a safetensors file whose header is any text or JSON at all."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(num_data_bytes))
    return path


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 4)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(tensors, {"format": "pt"}))
    entries, metadata = read_header(path)
    assert metadata == {"format": "pt"}
    assert {n: (e.dtype, e.shape) for n, e in entries.items()} == {
        n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()
    }
    assert all(e.nbytes == tensors[n].nbytes and e.path == path and e.name == n for n, e in entries.items())
    offsets = [e.offset for e in entries.values()]
    assert offsets == sorted(offsets)
    assert entries["scalar"].shape == () and entries["empty"].nbytes == 0


def test_a_file_without_tensors_is_valid(tmp_path: Path) -> None:
    assert read_header(put(tmp_path, {})) == ({}, {})


# The rules of https://huggingface.co/docs/safetensors, each broken once, and what a forger may try besides.
MALFORMED: list[tuple[str, object, int, str]] = [
    ("not json", b"{nonsense", 0, "not valid JSON"),
    ("not utf-8", b"{\xff}", 0, "not valid JSON"),
    ("not an object", b"[]", 0, "does not begin with"),
    ("leading space", b" {}", 0, "does not begin with"),
    ("text after", b"{}{}", 0, "not valid JSON"),
    ("deeply nested", b'{"a":' * 100_000, 0, "not valid JSON"),
    ("an integer of 5000 digits", b'{"a":' + b"1" * 5000 + b"}", 0, "not valid JSON"),
    ("name twice", b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}', 0, "'a' is listed twice"),
    ("metadata not strings", {"__metadata__": {"a": 1}}, 0, "__metadata__"),
    ("metadata a list", {"__metadata__": []}, 0, "__metadata__"),
    (
        "name not Unicode",
        b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
        0,
        "not valid Unicode",
    ),
    ("entry not an object", {"a": [1]}, 0, "an object"),
    ("entry empty", {"a": {}}, 0, "unknown dtype None"),
    ("dtype unknown", {"a": entry("F4")}, 8, "unknown dtype 'F4'"),
    ("dtype a list", {"a": entry(["F32"])}, 8, "unknown dtype"),  # type: ignore[arg-type]
    ("shape negative", {"a": entry(shape=[-2])}, 8, "shape"),
    ("shape float", {"a": entry(shape=[2.0])}, 8, "shape"),
    ("shape bool", {"a": entry(shape=[True, 2])}, 8, "shape"),
    ("shape text", {"a": entry(shape="2")}, 8, "shape"),
    ("shape missing", {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "shape"),
    ("shape nested", {"a": entry(shape=[[2]])}, 8, "shape"),
    ("shape overflows to right", {"a": entry(shape=[2**62, 2**62, 4, 2])}, 8, r"2\*\*63"),
    ("shape overflows beside zero", {"a": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}, 0, r"2\*\*63"),
    ("shape too large", {"a": entry(shape=[2**64])}, 8, "shape"),
    ("shape of a million", {"a": entry(shape=[2**62] * 100_000)}, 8, r"2\*\*63"),
    ("offsets three", {"a": entry(offsets=[0, 8, 8])}, 8, "data_offsets"),
    ("offsets reversed", {"a": entry(offsets=[8, 0])}, 8, "data_offsets"),
    ("offsets negative", {"a": entry(offsets=[-8, 0])}, 8, "data_offsets"),
    ("offsets huge", {"a": entry(offsets=[2**63 - 8, 2**63 - 1])}, 8, "takes 8 bytes"),
    ("size differs", {"a": entry(offsets=[0, 7])}, 7, "takes 8 bytes, its offsets hold 7"),
    ("hole first", {"a": entry(offsets=[8, 16])}, 16, "leaves a hole"),
    ("hole between", {"a": entry(), "b": entry(offsets=[16, 24])}, 24, "'b' leaves a hole"),
    ("overlap", {"a": entry(), "b": entry(offsets=[4, 12])}, 12, "'b' overlaps"),
    ("same place", {"a": entry(), "b": entry()}, 8, "'b' overlaps"),
    ("empty inside", {"a": entry(), "b": entry(shape=[0], offsets=[4, 4])}, 8, "'b' overlaps"),
    ("claims 1 PB", {"a": entry("U8", [2**50], [0, 2**50])}, 8, "is truncated"),
]


@pytest.mark.parametrize(
    ("header", "num_data_bytes", "message"), [c[1:] for c in MALFORMED], ids=[c[0] for c in MALFORMED]
)
def test_malformed_is_refused_in_one_line(tmp_path: Path, header: object, num_data_bytes: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(put(tmp_path, header, num_data_bytes))
    text = str(caught.value)
    assert "model.safetensors" in text and "\n" not in text and len(text) < 600


# osaurus vmlx-swift PR#217 (shards cut short: zeros, no error), airllm#137, ComfyUI#15602 (bytes appended).
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (VALID[:-7], "is truncated: it has .* bytes, its header says"),
        (VALID[: len(VALID) // 2], "truncated"),
        (VALID[:20], "truncated"),
        (VALID[:5], "truncated"),
        (b"", "truncated"),
        (VALID + bytes(16), "extra bytes at its end"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    ],
)
def test_cut_and_padded_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        read_header(path)


def test_every_cut_of_a_valid_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(CheckpointError):
            read_header(path)


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    for name in ("pipe", "absent", "."):
        with pytest.raises(CheckpointError, match="missing or not a file"):
            read_header(tmp_path / name)


def test_a_header_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((10**11).to_bytes(8, "little"))
        file.truncate(10**12)
    with pytest.raises(CheckpointError, match="over the limit"):
        read_header(path)


def test_a_terabyte_is_parsed_at_once(tmp_path: Path) -> None:
    # hf-mem and accelerate estimate read the data for what the header says.
    path = put(tmp_path, {"w": entry("BF16", [5 * 10**11], [0, 10**12])})
    os.truncate(path, path.stat().st_size + 10**12)
    started = time.monotonic()
    entries, _ = read_header(path)
    assert entries["w"].nbytes == 10**12 and time.monotonic() - started < 3


def accepted(path: Path, content: bytes) -> bool:
    """Read a file, expecting a header or a CheckpointError and never anything else."""
    path.write_bytes(content)
    try:
        read_header(path)
    except CheckpointError:
        return False
    return True


@MANY
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(tmp_path: Path, content: bytes) -> None:
    for text in (content, len(content).to_bytes(8, "little") + content):
        if accepted(tmp_path / "f.safetensors", text):
            deserialize(text)


@MANY
@given(st.data())
def test_a_mutated_file_is_refused_or_valid_for_safetensors_too(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content) - 1))
        length = data.draw(st.sampled_from([0, 1, 1, 2, 8]))
        content[position : position + length] = data.draw(st.binary(max_size=4) | st.sampled_from([b"0", b"9", b"-"]))
    if accepted(tmp_path / "f.safetensors", bytes(content)):
        deserialize(bytes(content))


NUMBERS = st.integers(0, 16) | st.integers(-4, 2**70) | st.floats() | st.booleans() | st.none() | st.text(max_size=3)
SIZES = st.lists(st.integers(0, 4), max_size=3) | st.lists(NUMBERS, max_size=3) | NUMBERS
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F4", "U8", "U8", "U8", 3]),
        "shape": SIZES,
        "data_offsets": st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted) | SIZES,
        "more": NUMBERS,
    },
)
HEADERS = st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), ENTRIES | NUMBERS | SIZES, max_size=4)


@MANY
@given(HEADERS, st.integers(0, 16))
def test_a_random_header_is_refused_or_valid_for_safetensors_too(
    tmp_path: Path, header: dict[str, Any], num_data_bytes: int
) -> None:
    content = put(tmp_path, header, num_data_bytes).read_bytes()
    if accepted(tmp_path / "f.safetensors", content):
        deserialize(content)


@MANY
@given(st.lists(st.tuples(st.sampled_from([*DTYPES]), st.lists(st.integers(0, 3), max_size=3)), max_size=5))
def test_whatever_safetensors_writes_is_accepted(tmp_path: Path, specs: list[tuple[str, list[int]]]) -> None:
    tensors = {str(i): torch.zeros(shape).to(DTYPES[dtype]) for i, (dtype, shape) in enumerate(specs)}
    assert accepted(tmp_path / "f.safetensors", save(tensors))
