"""Whatever lies in a directory: one error class, nothing read or written elsewhere, nothing allocated on its word."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.header import DTYPES
from qkv.checkpoint.journal import Journal
from qkv.checkpoint.merge import merge_checkpoint
from qkv.checkpoint.parts import read_part
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.source import Source
from qkv.errors import CheckpointError, QkvError
from tests.helpers import tiny

MANY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
NAMES = st.sampled_from(["model.layers.0.mlp.up_proj.weight", "a", "lm_head.weight", "a_scale", "__metadata__", ""])
ODD = st.sampled_from(
    ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', "1" * 5000, "[" * 5000, "-0", "null", "{}"]
)
NUMBERS = st.integers(0, 20) | st.sampled_from([-1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64, 2**200, 1.5, True])
SIZES = st.lists(NUMBERS, max_size=4).map(json.dumps) | ODD
DTYPE = st.sampled_from(["F32", "BF16", "I8", "U8", "F4", "F8_E8M0", *DTYPES]).map(json.dumps) | ODD


def described(dtype: str, shape: str, offsets: str) -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


ENTRY = st.builds(described, DTYPE, SIZES, SIZES | st.just("[0,8]") | st.just("[4,12]"))
HEADER = st.lists(st.tuples(NAMES.map(json.dumps), ENTRY | ODD), max_size=4).map(  # a name may be there twice
    lambda pairs: ("{" + ",".join(f"{name}:{entry}" for name, entry in pairs) + "}").encode()
)
LENGTH = st.none() | st.integers(0, 2**64 - 1) | st.sampled_from([2**63, 10**8, 10**8 + 1, 8, 0])


def file_of(header: bytes, length: int | None, data: bytes) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


FILE = st.binary(max_size=80) | st.builds(file_of, HEADER | st.binary(max_size=60), LENGTH, st.binary(max_size=24))
EVIL = ["../secret/model.safetensors", "/etc/passwd", "link.safetensors", "sub/x.safetensors", "model-1.safetensors"]
INDEX = st.binary(max_size=40) | st.dictionaries(
    NAMES, st.sampled_from([*EVIL, "..", "", "a\0.safetensors", "\ud800"]) | NUMBERS | st.none(), max_size=4
).map(lambda names: json.dumps({"weight_map": names}).encode())
CONFIG: dict[str, Any] = json.loads(tiny("llama").config.to_json_string())
VALUES = NUMBERS | st.text(max_size=3) | st.none() | st.lists(NUMBERS, max_size=2) | st.just({"quant_method": "qkv"})
CHANGED = st.dictionaries(st.sampled_from([*CONFIG, "quantization_config", "text_config"]), VALUES, max_size=3)
CONFIGS = st.binary(max_size=40) | CHANGED.map(lambda changes: json.dumps({**CONFIG, **changes}).encode())

opened: list[str] = []
listening: list[Path] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if listening and event in ("open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.symlink", "os.truncate"):
        opened.extend(os.fspath(a) for a in arguments[:2] if isinstance(a, str) and str(listening[0]) in a)


sys.addaudithook(_listen)


@contextmanager
def within(root: Path, *folders: str) -> Iterator[None]:
    """Check that below `root` nothing but these folders, links followed, is opened, made or removed."""
    opened.clear()
    listening.append(root)
    try:
        yield
    finally:
        listening.clear()
    real = [os.path.relpath(os.path.realpath(path), os.path.realpath(root)) for path in opened]
    elsewhere = {path for path in real if path.split("/")[0] not in (".", *folders)}
    assert not elsewhere


def refused_or_done(run: Callable[[], object]) -> bool:
    """Run it, letting only the one error pass, in one line; whether it was done."""
    try:
        run()
    except QkvError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return False
    return True


def place(tmp_path: Path) -> Path:
    """A folder with a real secret beside it and links to it in it."""
    source, secret = tmp_path / "src", tmp_path / "secret"
    shutil.rmtree(source, ignore_errors=True)
    for folder in (source, secret):
        folder.mkdir(exist_ok=True)
    save_file({"a": torch.ones(2)}, secret / "model.safetensors")
    (source / "link.safetensors").symlink_to(secret / "model.safetensors")
    (source / "sub").symlink_to(secret)
    return source


def read_all(source: Path, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(tmp_path, "src", "out", ".out.partial"):
        if refused_or_done(lambda: Source.open(source)):
            found = Source.open(source)
            for name in found.entries:
                found.read(name)
        for write in (quantize_checkpoint, dequantize_checkpoint):
            refused_or_done(lambda write=write: write(source, tmp_path / "out"))  # type: ignore[misc]
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "src"]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 150_000  # kB; what is imported late included


@MANY
@given(FILE, CONFIGS)
def test_any_file_and_config(tmp_path: Path, content: bytes, config: bytes) -> None:
    source = place(tmp_path)
    (source / "link.safetensors").unlink()
    (source / "model.safetensors").write_bytes(content)
    (source / "config.json").write_bytes(config)
    read_all(source, tmp_path)


@MANY
@given(INDEX, st.lists(FILE, max_size=2))
def test_any_index(tmp_path: Path, index: bytes, files: list[bytes]) -> None:
    source = place(tmp_path)
    (source / "model.safetensors.index.json").write_bytes(index)
    (source / "config.json").write_text(json.dumps(CONFIG))
    for number, content in enumerate(files, 1):
        (source / f"model-{number}.safetensors").write_bytes(content)
    read_all(source, tmp_path)


@MANY
@given(CONFIGS)
def test_any_config_of_a_real_model(tmp_path: Path, config: bytes) -> None:
    source = place(tmp_path)
    (source / "link.safetensors").unlink()
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.randn(64, 32), "lm_head.weight": torch.randn(64, 32)}
    (source / "model.safetensors").write_bytes(save(tensors))
    (source / "config.json").write_bytes(config)
    read_all(source, tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
STEP = st.fixed_dictionaries({}, optional={k: JSON for k in ("identity", "shard", "pieces", "left", "complete")})
LINES = st.lists(STEP.map(lambda step: json.dumps(step).encode()) | st.binary(max_size=30), max_size=4).map(b"\n".join)


@MANY
@given(LINES | st.just(b"[" * 10**5) | ODD.map(lambda text: f'{{"identity": {text}}}\n'.encode()))
def test_any_journal(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(content)
    if refused_or_done(lambda: Journal.read(path)):
        journal = Journal.read(path)
        assert journal is not None and type(journal.identity) is dict
        assert all(type(file) is str and type(pieces) is int for file, pieces in journal.done.items())
        journal.record(shard="x", pieces=1)
        assert Journal.read(path) == journal


PART: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "part": NUMBERS,
        "of": st.integers(1, 3) | NUMBERS,
        "files": st.lists(st.sampled_from([*EVIL, "\ud800.safetensors"]) | NUMBERS, max_size=3) | JSON,
        "identity": JSON | st.just({"source": {"a": 1}}) | st.just({"source": {}}),
    },
)


@MANY
@given(PART.map(lambda part: json.dumps(part).encode()) | st.binary(max_size=30), FILE)
def test_any_part(tmp_path: Path, content: bytes, file: bytes) -> None:
    source = place(tmp_path)
    (source / "qkv_part.json").write_bytes(content)
    (source / "model-1.safetensors").write_bytes(file)
    (source / "config.json").write_text("{}")
    with within(tmp_path, "src", "out", ".out.partial"):
        if refused_or_done(lambda: read_part(source)):
            refused_or_done(lambda: merge_checkpoint([source], tmp_path / "out"))
    assert not (tmp_path / "out" / "link.safetensors").exists()
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer", "num_experts", "encoder_layers"])
def test_a_config_that_claims_layers_is_not_believed(tmp_path: Path, key: str) -> None:
    """A module would be built for each, without weights and yet until the memory is full."""
    source = tmp_path / "src"
    source.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": torch.randn(64, 32)}, source / "model.safetensors")
    for claim in (10**6, 10**18):
        for config in ({**CONFIG, key: claim}, {**CONFIG, "text_config": {key: claim}}):
            (source / "config.json").write_text(json.dumps(config))
            with pytest.raises(CheckpointError, match=rf"claims {key} = {claim} for 1 tensors"):
                quantize_checkpoint(source, tmp_path / "q")


def test_the_secret_would_be_noticed(tmp_path: Path) -> None:
    """The law of this file can fail: opening through a link is seen."""
    source = place(tmp_path)
    with pytest.raises(AssertionError), within(tmp_path, "src"):
        (source / "link.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="link out"):
        Source.open(source)
