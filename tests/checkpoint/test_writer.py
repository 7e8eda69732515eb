from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qkv.checkpoint.header import DTYPES, read_header
from qkv.checkpoint.index import write_index
from qkv.checkpoint.shards import parse_size, plan_shards, shard_names
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import StreamWriter, TensorSpec
from qkv.errors import CheckpointError, QkvError

SOME = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(tensor: torch.Tensor) -> list[int]:
    values: list[int] = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    return values


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    with StreamWriter(path, specs_of(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)


X = torch.arange(8, dtype=torch.int16).reshape(4, 2)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(st.sampled_from([*DTYPES.values()]), SHAPES), max_size=6)


@SOME
@given(TENSORS, st.data())
def test_round_trip_by_safetensors_and_by_ourselves(
    tmp_path: Path, specs: list[tuple[torch.dtype, tuple[int, ...]]], data: st.DataObject
) -> None:
    """Whole or in pieces, both readers read bit for bit what was written, and every tensor is aligned."""
    path = tmp_path / "model.safetensors"
    path.unlink(missing_ok=True)
    tensors = {f"t{i}": random_tensor(dtype, shape) for i, (dtype, shape) in enumerate(specs)}
    with StreamWriter(path, specs_of(tensors)) as writer:
        for name, tensor in tensors.items():
            if tensor.dim() and tensor.numel() and data.draw(st.booleans()):
                step = data.draw(st.integers(1, 4))
                for start in range(0, len(tensor), step):
                    writer.write_chunk(name, tensor[start : start + step])
            else:
                writer.write(name, tensor)
    source, theirs = Source.open(path), load_file(path)
    assert set(theirs) == set(source.entries) == set(tensors)
    for name, tensor in tensors.items():
        for read in (theirs[name], source.read(name)):
            assert (read.dtype, read.shape, bits(read)) == (tensor.dtype, tensor.shape, bits(tensor))
        assert source.entries[name].offset % tensor.dtype.itemsize == 0


def test_golden_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write(path, {"b": torch.tensor([1, 2, 3], dtype=torch.uint8), "a": torch.tensor([[1.0, -2.0]])})
    header = (
        b'{"__metadata__":{"format":"pt"},'
        b'"a":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    )
    header += b" " * (-len(header) % 8)
    body = b"\x00\x00\x80\x3f\x00\x00\x00\xc0\x01\x02\x03"
    assert path.read_bytes() == len(header).to_bytes(8, "little") + header + body


def test_same_data_as_safetensors_itself(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(5, 3) for i in range(9)}
    write(tmp_path / "ours", tensors)
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_metadata(tmp_path: Path) -> None:
    # mlx#743, safetensors#549: without format=pt transformers refuses the file.
    for name, metadata, expected in (
        ("a", None, {"format": "pt"}),
        ("b", {"é": "1"}, {"é": "1"}),
        ("c", {}, {}),
    ):
        StreamWriter(tmp_path / name, [], metadata).close()
        assert read_header(tmp_path / name) == ({}, expected)


def test_any_tensor_is_written_by_value(tmp_path: Path) -> None:
    whole = torch.randn(6, 8)
    pair = torch.randn(4, dtype=torch.complex64)
    tensors = {
        "transposed": whole.T,
        "strided": whole[::2, 1::3],
        "one_row_with_strides": whole[:1, ::8],
        "expanded": whole[:, :1].expand(6, 5),
        "needs_grad": whole.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(whole),
        "conjugate": pair.conj(),
        "negative": pair.conj().imag,
        "negative_contiguous": pair[:1].conj().imag,
    }
    write(tmp_path / "model.safetensors", tensors)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, tensors[name].detach().clone().resolve_conj().resolve_neg()), name


def test_misuse_is_refused_and_says_what_was_expected(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.float32, (2, 3)), TensorSpec("b", torch.int8, ())]
    writer = StreamWriter(tmp_path / "model.safetensors", specs)
    with pytest.raises(ValueError, match="has no tensor 'c'"):
        writer.write("c", torch.tensor(1, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"shape \[2, 3\]"):
        writer.write("a", torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"needs torch\.float32"):
        writer.write("a", torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"rows of \[1, 2\]"):
        writer.write_chunk("a", torch.zeros(1, 2))
    writer.write_chunk("a", torch.zeros(1, 3))
    with pytest.raises(ValueError, match="in one piece"):
        writer.write("a", torch.zeros(2, 3))
    with pytest.raises(ValueError, match="takes 24 bytes"):
        writer.write_chunk("a", torch.zeros(2, 3))
    writer.write_chunk("a", torch.zeros(1, 3))
    with pytest.raises(ValueError, match="do not fit"):
        writer.write_chunk("b", torch.zeros((), dtype=torch.int8))
    writer.write("b", torch.tensor(1, dtype=torch.int8))
    with pytest.raises(ValueError, match="in one piece"):
        writer.write("b", torch.tensor(1, dtype=torch.int8))
    writer.close()
    assert len(load_file(tmp_path / "model.safetensors")) == 2


def test_specs_that_no_file_can_hold_are_refused_before_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="complex128"):
        TensorSpec("a", torch.complex128, (2,))
    spec = TensorSpec("a", torch.int8, (2,))
    for name in ("a", "__metadata__"):
        with pytest.raises(ValueError, match="is taken"):
            StreamWriter(path, [spec, TensorSpec(name, torch.int8, (2,))])
    assert not path.exists()


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        StreamWriter(tmp_path / "model.safetensors", [])
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_an_unfinished_file_is_removed(tmp_path: Path) -> None:
    specs = [TensorSpec("a", torch.int8, (2,)), TensorSpec("b", torch.int8, (2,))]
    with (
        pytest.raises(ValueError, match="'b' was not written"),
        StreamWriter(tmp_path / "f", specs) as writer,
    ):
        writer.write("a", torch.zeros(2, dtype=torch.int8))
    for error in (KeyboardInterrupt, SystemExit, RuntimeError):
        with pytest.raises(error), StreamWriter(tmp_path / "f", specs) as writer:
            writer.write("a", torch.zeros(2, dtype=torch.int8))
            raise error
    assert not list(tmp_path.iterdir())


class FullDisk:
    """A file on a disk with room for `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        """As much as there is room for, as the system does it; then nothing."""
        data = data[: self.room]
        if not data:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(data)
        return int(self.file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 150, 4000])
def test_a_full_disk_leaves_no_file(tmp_path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Any = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode, **more: FullDisk(original(path, mode, **more), room))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", {name: torch.zeros(1000, dtype=torch.int8) for name in "abcdef"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("num_done", [0, 1, 2, 3])
def test_a_file_is_gone_on_with(tmp_path: Path, num_done: int) -> None:
    tensors = {"a": torch.randn(7, 3), "b": torch.arange(5, dtype=torch.uint8), "c": torch.randn(()), "d": X}
    write(tmp_path / "whole", tensors)
    path, names = tmp_path / "f", list(tensors)
    with pytest.raises(KeyboardInterrupt), StreamWriter(path, specs_of(tensors), keep=True) as writer:
        for name in names[:num_done]:
            writer.write(name, tensors[name])
        writer.write_chunk("d", X[:2])  # a torn tail, which counts for nothing
        raise KeyboardInterrupt
    with StreamWriter(path, specs_of(tensors), keep=True, done=names[:num_done]) as writer:
        for name in names[num_done:]:
            writer.write(name, tensors[name])
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()


def test_another_file_is_not_gone_on_with(tmp_path: Path) -> None:
    write(tmp_path / "f", {"a": torch.zeros(9), "b": X})
    before = (tmp_path / "f").read_bytes()
    for cut in (len(before), len(before) - 1, 60, 0):
        (tmp_path / "f").write_bytes(before[:cut])
        specs = [TensorSpec("a", torch.float32, (9 if cut < len(before) else 8,)), TensorSpec("b", X.dtype, (4, 2))]
        with pytest.raises(CheckpointError, match="begin anew"):
            StreamWriter(tmp_path / "f", specs, keep=True, done=["a", "b"])
        assert (tmp_path / "f").read_bytes() == before[:cut]


def test_a_disk_that_fills_at_the_very_end_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "f", {"a": torch.zeros(10)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5_000_000_000),
        ("500MB", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("2GiB", 2**31),
        ("40KB", 40_000),
        ("0.5 kib", 512),
        ("1tb", 10**12),
        ("123", 123),
        (123, 123),
        ("7B", 7),
        (" 9.007199254740993TB ", 9_007_199_254_740),
    ],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-5GB", "5XB", "5G", "5 G B", "1e9", "inf", "nan", "0", "0.1B", "٣GB", "1_000", -5, 0]
)
def test_a_size_that_is_none_is_refused_with_examples(text: str | int) -> None:
    with pytest.raises(QkvError, match="5GB"):
        parse_size(text)


@SOME
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 100), st.integers(1, 4))
def test_shards_are_full_but_not_over(sizes: list[int], limit: int, group: int) -> None:
    specs = [TensorSpec(str(i), torch.int8, (size,)) for i, size in enumerate(sizes)]
    shards = plan_shards(specs, limit, group_of=lambda name: str(int(name) // group))
    assert [spec for shard in shards for spec in shard] == specs
    assert len(shards) == 1 or all(shards)
    keys = [{int(spec.name) // group for spec in shard} for shard in shards]
    assert all(not a & b for i, a in enumerate(keys) for b in keys[:i]), "a group is split"
    totals = [sum(spec.nbytes for spec in shard) for shard in shards]
    assert all(total <= limit or len(key) == 1 for total, key in zip(totals, keys, strict=True))
    for i in range(1, len(shards)):
        first = sum(spec.nbytes for spec in shards[i] if int(spec.name) // group == min(keys[i]))
        assert totals[i - 1] + first > limit, "a shard was closed too early"


def test_a_shard_must_have_room() -> None:
    with pytest.raises(QkvError, match="5GB"):
        plan_shards([], 0)


def test_a_sharded_model_is_one_model(tmp_path: Path) -> None:
    # Edge0#104, hub-docs#2704: total_size is the sum of the tensors, not stale, every shard says format=pt.
    tensors = {f"layers.{i}.weight": torch.randn(4, 5) for i in range(5)}
    shards = plan_shards(specs_of(tensors), 170)
    names = shard_names(len(shards))
    assert names[0] == "model-00001-of-00003.safetensors" and shard_names(1) == ["model.safetensors"]
    for name, specs in zip(names, shards, strict=True):
        write(tmp_path / name, {spec.name: tensors[spec.name] for spec in specs})
        assert read_header(tmp_path / name)[1] == {"format": "pt"}
    weight_map = {spec.name: name for name, specs in zip(names, shards, strict=True) for spec in specs}
    index = write_index(tmp_path, weight_map, 5 * 80)
    assert json.loads(index.read_text()) == {"metadata": {"total_size": 400}, "weight_map": weight_map}
    source = Source.open(tmp_path)
    assert source.nbytes == 400
    assert all(torch.equal(source.read(name), tensor) for name, tensor in tensors.items())
