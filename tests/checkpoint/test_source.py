from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from qkv.checkpoint.header import DTYPES
from qkv.checkpoint.raw import read_into
from qkv.checkpoint.source import Source
from qkv.errors import CheckpointError
from qkv.quantizers.kernels import native

INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Compare bit for bit, which float8 and NaN do not do by themselves."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second))
    return torch.equal(first, second)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    """Write three shards of two tensors each, with their index and a config."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"w{i}": torch.full((3, 4), float(i)) for i in range(6)}
    for i, shard in enumerate(SHARDS):
        save_file({f"w{j}": tensors[f"w{j}"] for j in (2 * i, 2 * i + 1)}, folder / shard)
    write_index(folder, {f"w{i}": SHARDS[i // 2] for i in range(6)})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return tensors


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Source.open(path)
    assert "\n" not in str(caught.value)


def test_reads_every_tensor_of_a_sharded_model(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    with Source.open(tmp_path) as source:
        assert list(source.entries) == list(tensors)
        assert source.shards == [tmp_path / shard for shard in SHARDS]
        assert source.nbytes == 6 * 48 and source.directory == tmp_path
        assert source.require_config() == {"model_type": "llama"}
        assert all(same(source.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_single_file_is_found_by_folder_or_by_its_own_path(tmp_path: Path, name: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / name)
    (tmp_path / "._model.safetensors").write_bytes(b"left by macOS")
    save_file({"lora": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    for path in (tmp_path, tmp_path / name):
        source = Source.open(path)
        assert source.shards == [tmp_path / name] and source.config == {} and source.path == path
        with pytest.raises(CheckpointError, match=r"config\.json"):
            source.require_config()


def test_the_index_wins_over_other_files(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert Source.open(tmp_path).shards == [tmp_path / shard for shard in SHARDS]


def test_model_safetensors_wins_over_an_index_as_in_transformers(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors")
    assert list(Source.open(tmp_path).entries) == ["other"]


def test_every_dtype_and_shape_reads_as_safetensors_reads_it(tmp_path: Path) -> None:
    bits = torch.randint(0, 256, (6, 8), dtype=torch.uint8)
    tensors = {name: bits.clone().view(dtype) for name, dtype in DTYPES.items() if dtype != torch.bool}
    tensors |= {
        "bool": bits % 2 == 0,
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 7),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = Source.open(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert same(source.read(name), tensor), name
        assert source.read(name).data_ptr() % 64 == 0 or tensor.numel() == 0


def test_a_tensor_owns_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4096)}, path)
    tensor = Source.open(tmp_path).read("w")
    if (maps := Path("/proc/self/maps")).exists():
        assert str(path) not in maps.read_text()
    path.write_bytes(b"")  # a map of it would now kill the process
    assert tensor.add_(1).sum() == 8192


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_rows_are_slices(tmp_path: Path, shape: list[int], data: st.DataObject) -> None:
    tensor = torch.randn(shape, dtype=torch.float64).to(torch.bfloat16)
    save_file({"first": torch.ones(3), "w": tensor}, tmp_path / "model.safetensors")
    start = data.draw(st.integers(0, shape[0]))
    stop = data.draw(st.integers(start, shape[0]))
    assert same(Source.open(tmp_path).read_rows("w", start, stop), tensor[start:stop])


def test_rows_that_are_not_there_are_an_index_error(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3, 2), "scalar": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    source = Source.open(tmp_path)
    for name, start, stop in (("w", 0, 4), ("w", -1, 2), ("w", 2, 1), ("scalar", 0, 1)):
        with pytest.raises(IndexError, match=name):
            source.read_rows(name, start, stop)


def sparse(path: Path, name: str, dtype: str, shape: list[int], nbytes: int) -> int:
    """Write a file of zeros that takes no room; return where its data begins."""
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    return 8 + len(header)


def test_rows_beyond_two_gigabytes(tmp_path: Path) -> None:
    path, num_rows = tmp_path / "model.safetensors", 5 * 2**20
    start = sparse(path, "w", "U8", [num_rows, 1024], num_rows * 1024)
    with path.open("r+b") as file:
        file.seek(start + (num_rows - 1) * 1024)
        file.write(b"\x07" * 1024)
    rows = Source.open(tmp_path).read_rows("w", num_rows - 2, num_rows)
    assert rows.sum(dim=1).tolist() == [0, 7 * 1024]


def test_sizes_come_from_headers_alone(tmp_path: Path) -> None:
    # hf-mem, accelerate estimate: two shards of 20 GB each, reported exactly, at once, and in no memory.
    nbytes = 20_000_000_000
    for i in (0, 1):
        sparse(tmp_path / SHARDS[i], f"w{i}", "BF16", [nbytes // 4, 2], nbytes)
    write_index(tmp_path, {"w0": SHARDS[0], "w1": SHARDS[1]})
    (tmp_path / "config.json").write_text("{}")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    assert Source.open(tmp_path).nbytes == 2 * nbytes
    assert time.monotonic() - started < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    # sgl-project/sglang PR#32279: the server starts without the shard and answers garbage.
    sharded(tmp_path)
    (tmp_path / SHARDS[0]).write_bytes(b"broken too, but what is missing comes first")
    (tmp_path / SHARDS[1]).unlink()
    refused(tmp_path, f"lacks 1 of the 3 files.*{SHARDS[1]}")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    # osaurus vmlx-swift PR#217: 8 of 102 shards cut short, read as zeros.
    sharded(tmp_path)
    os.truncate(tmp_path / SHARDS[1], (tmp_path / SHARDS[1]).stat().st_size - 7)
    refused(tmp_path, f"{SHARDS[1]} is truncated")


@pytest.mark.parametrize("library", ["with the native library", "without"])
def test_what_is_read_and_what_is_not_there_any_more(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "without":
        monkeypatch.setattr(native, "_reason", "not here")
    weight = torch.arange(10**6, dtype=torch.float32)  # several helpings of 256 kB, the last one short
    save_file({"a": torch.ones(3), "w": weight}, tmp_path / "model.safetensors")
    source = Source.open(tmp_path)
    assert same(source.read("w"), weight) and same(source.read_rows("w", 77, 999_999), weight[77:-1])
    os.truncate(tmp_path / "model.safetensors", 3_999_999)
    with pytest.raises(CheckpointError, match="cut short"):
        source.read("w")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        source.read("w")


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_an_error_of_the_system_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        read_into(tmp_path, 0, torch.empty(3))
    (tmp_path / "file").write_bytes(bytes(12))
    with pytest.raises(OSError, match=r"Invalid argument.*file"):
        read_into(tmp_path / "file", -1, torch.empty(3))


# huggingface/transformers#47176, #46913, diffusers#14175, kekzl/imp#1612: weight_map is attacker text.
@pytest.mark.parametrize(
    "evil",
    [
        "../secret/model.safetensors",
        "a/../../secret/model.safetensors",
        "{tmp}/secret/model.safetensors",
        "..\\secret\\model.safetensors",
        "C:model.safetensors",
        "./model.safetensors",
        "",
        ".",
        "..",
        "/",
        "a//model.safetensors",
        "model\0.safetensors",
        "model\n.safetensors",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
        "pytorch_model.bin",
        "config.json",
        None,
        3,
        ["model.safetensors"],
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path, evil: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path / "secret")
    save_file({"w0": torch.ones(2)}, tmp_path / "secret" / "model.safetensors")
    sharded(tmp_path / "src")
    evil = evil.replace("{tmp}", str(tmp_path)) if isinstance(evil, str) else evil
    write_index(tmp_path / "src", {"w0": evil, "w1": SHARDS[0]})
    opened = spy_on_open(monkeypatch)
    refused(tmp_path / "src", "index")
    assert opened == [INDEX]


def spy_on_open(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    original: Callable[..., Any] = Path.open

    def spy(path: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(path.name)
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", spy)
    return opened


@pytest.mark.parametrize("name", [SHARDS[1], INDEX, "config.json"])
def test_a_link_out_of_the_folder_is_refused_unopened(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path / "secret")
    sharded(tmp_path / "src")
    (tmp_path / "src" / name).unlink()
    (tmp_path / "src" / name).symlink_to(tmp_path / "secret" / name)
    opened = spy_on_open(monkeypatch)
    refused(tmp_path / "src", f"{name} is a link out of the model's folder")
    assert name not in opened


def test_a_single_file_may_not_link_out_unless_it_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"w": torch.ones(1)}, tmp_path / "private.safetensors")
    (tmp_path / "src" / "model.safetensors").symlink_to(tmp_path / "private.safetensors")
    refused(tmp_path / "src", "link out")
    assert list(Source.open(tmp_path / "src" / "model.safetensors").entries) == ["w"]


def test_a_linked_folder_in_an_index_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path / "secret")
    sharded(tmp_path / "src")
    (tmp_path / "src" / "sub").symlink_to(tmp_path / "secret")
    write_index(tmp_path / "src", {"w0": f"sub/{SHARDS[0]}"})
    refused(tmp_path / "src", "link out")


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    (tmp_path / SHARDS[1]).symlink_to(SHARDS[1])
    refused(tmp_path, SHARDS[1])


def hub_snapshot(cache: Path) -> Path:
    """Lay a model out as huggingface_hub does: named links in a snapshot, contents under their hashes."""
    repository = cache / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc123", repository / "blobs"
    sharded(snapshot)
    blobs.mkdir()
    for i, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"hash{i}")
        path.symlink_to(Path("../../blobs") / f"hash{i}")
    return snapshot


def test_hub_snapshots_and_links_to_them_are_read(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        source = Source.open(folder)
        assert len(source.entries) == 6 and source.config and source.read("w5").sum() == 60
    assert len(Source.open(snapshot / SHARDS[0]).entries) == 2


def test_a_hub_snapshot_cannot_read_another_repository(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path / "cache")
    sharded(tmp_path / "cache" / "models--victim--private")
    (snapshot / SHARDS[0]).unlink()
    (snapshot / SHARDS[0]).symlink_to(Path("../../../models--victim--private") / SHARDS[0])
    refused(snapshot, "link out")


def test_a_read_only_source_is_read(tmp_path: Path) -> None:
    sharded(tmp_path / "src")
    for path in (tmp_path / "src").iterdir():
        path.chmod(0o400)
    (tmp_path / "src").chmod(0o500)
    try:
        assert Source.open(tmp_path / "src").read("w1").sum() == 12
    finally:
        (tmp_path / "src").chmod(0o700)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    sharded(tmp_path)
    weight_map = {f"w{i}": SHARDS[i // 2] for i in range(6)}
    write_index(tmp_path, {**weight_map, "w9": SHARDS[2]})
    refused(tmp_path, f"{SHARDS[2]} lacks the tensor 'w9'")
    write_index(tmp_path, {**weight_map, "w0": SHARDS[2]})
    refused(tmp_path, f"{SHARDS[2]} lacks the tensor 'w0'")
    write_index(tmp_path, {name: shard for name, shard in weight_map.items() if name != "w3"})
    refused(tmp_path, f"{SHARDS[1]} holds the tensor 'w3'")
    save_file({"w0": torch.ones(1), "w4": torch.ones(1), "w5": torch.ones(1)}, tmp_path / SHARDS[2])
    write_index(tmp_path, weight_map)
    refused(tmp_path, f"'w0' is in both .*{SHARDS[0]} and .*{SHARDS[2]}")


def test_a_tensor_listed_twice_in_the_index_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"w0": "{SHARDS[0]}", "w0": "{SHARDS[1]}"}}}}')
    refused(tmp_path, "'w0' is listed twice")


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8) | st.sampled_from(SHARDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON | st.dictionaries(st.sampled_from(["w0", "w2", "w9"]), JSON))  # never all of a shard's tensors
def test_a_random_index_is_refused(tmp_path: Path, weight_map: Any) -> None:
    sharded(tmp_path)
    write_index(tmp_path, weight_map)
    refused(tmp_path, "index")
    (tmp_path / INDEX).write_text(json.dumps(weight_map))
    refused(tmp_path, "index")


class Evil:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    # ecmwf/anemoi-core#1416, synthefy-nori PR#54, NeMo Automodel PR#3240.
    folder, mark = tmp_path / "src", tmp_path / "pwned"
    folder.mkdir()
    torch.save({"w": Evil(mark)}, folder / name)
    (folder / "config.json").write_text("{}")
    for path in (folder, folder / name):
        refused(path, r"pickle \(\.bin, \.pt\).*save_pretrained")
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    assert list(Source.open(folder).entries) == ["w"]
    assert not mark.exists()


def test_an_index_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {}}')
    refused(tmp_path, "pickle")


def test_what_is_no_model_is_said_in_one_line(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "does not exist")
    refused(tmp_path, r"holds no model: expected model\.safetensors")
    (tmp_path / "notes.txt").write_text("")
    refused(tmp_path / "notes.txt", r"not a \.safetensors file")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a directory nor a file")
    for name in ("a", "b", "c", "d"):
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    refused(tmp_path, "4 safetensors files .*restore the index")


def test_a_malformed_config_is_refused_and_an_ordinary_one_is_not(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    for text in ("{", "[]", "\xff", '{"a": 1} x'):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        refused(tmp_path, r"config\.json")
    # Mamba configs hold Infinity, and hand-edited ones repeat keys.
    (tmp_path / "config.json").write_text('{"limit": [0.0, Infinity], "a": 1, "a": 2}')
    assert Source.open(tmp_path).config == {"limit": [0.0, float("inf")], "a": 2}
