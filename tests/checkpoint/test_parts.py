"""A model written by several processes, or in parts by several machines, has the bytes of one run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.merge import merge_checkpoint
from qkv.checkpoint.plan import parse_part
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.source import Source
from qkv.errors import CheckpointError, QkvError
from qkv.progress import Progress
from tests.helpers import tensors_in

Checkpoint = Callable[..., Path]
SMALL: dict[str, Any] = {"format": "nf4", "max_shard_size": "10KB"}
PART = "qkv_part.json"


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


LAYOUTS: tuple[dict[str, Any], ...] = (
    SMALL,
    {"format": "nf4:double", "layout": "bnb", "max_shard_size": "10KB"},
    {"format": "int4:g32", "layout": "compressed-tensors", "max_shard_size": "10KB"},
)


@pytest.mark.parametrize("options", LAYOUTS, ids=lambda options: options.get("layout", "qkv"))
def test_workers_write_the_same_bytes(
    options: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint("llama")
    advanced: list[int] = []
    monkeypatch.setattr(Progress, "advance", lambda self, item="", amount=1: advanced.append(amount))
    for folder, workers in (("one", 1), ("two", 2)):
        quantize_checkpoint(source, tmp_path / folder, **options, workers=workers)
        assert sum(advanced) == Source.open(source).nbytes  # the bar is full
        advanced.clear()
    assert tree(tmp_path / "one") == tree(tmp_path / "two") and len(list((tmp_path / "two").glob("model-*"))) > 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"] and not active_children()


@pytest.mark.parametrize("options", LAYOUTS[1:], ids=lambda options: options["layout"])
def test_parts_in_a_layout_of_others_make_the_same_model(
    options: dict[str, Any], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    quantize_checkpoint(source, tmp_path / "one", **options)
    for part in (1, 2):
        quantize_checkpoint(source, tmp_path / f"part{part}", **options, shard=f"{part}/2")
    merge_checkpoint([tmp_path / "part1", tmp_path / "part2"], tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(tmp_path / "one")


def test_an_error_of_one_worker_stops_all_with_its_one_line(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(checkpoint("llama"), source)
    state = tensors_in(source)
    state["model.layers.0.mlp.up_proj.weight"][3, 2] = float("nan")
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QkvError, match=r"layers\.0\.mlp\.up_proj\.weight has 1 values.*row 3, column 2") as caught:
        quantize_checkpoint(source, tmp_path / "q", **SMALL, workers=2)
    assert "\n" not in str(caught.value) and not active_children()
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_told_and_the_work_goes_on(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", hidden_size=512, intermediate_size=2048, num_hidden_layers=12)
    options: dict[str, Any] = {"format": "int8:double", "max_shard_size": "5MB"}
    quantize_checkpoint(source, tmp_path / "one", **options)

    def kill() -> None:
        while not list(tmp_path.glob(".two.partial/model/model-*")):
            time.sleep(0.01)
        pid = active_children()[0].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(CheckpointError, match="a worker process ended with status -9") as caught:
        quantize_checkpoint(source, tmp_path / "two", **options, workers=2)
    assert "\n" not in str(caught.value) and not active_children()
    quantize_checkpoint(source, tmp_path / "two", **options, workers=2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_more_workers_or_parts_than_files_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for options in ({"workers": 2}, {"shard": "1/2"}, {"workers": 0}):
        with pytest.raises(QkvError, match=r"cannot share 1 files.*--max-shard-size"):
            quantize_checkpoint(checkpoint("llama"), tmp_path / "q", **options)
    for text in ("", "0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3", "1.0/2", "01/2"):
        with pytest.raises(QkvError, match="2/8"):
            parse_part(text)
    assert not list(tmp_path.iterdir())


def make_parts(source: Path, folder: Path, count: int = 3) -> list[Path]:
    parts = [folder / f"part{number}" for number in range(1, count + 1)]
    for number, part in enumerate(parts, 1):
        quantize_checkpoint(source, part, **SMALL, shard=f"{number}/{count}")
    return parts


def test_two_processes_on_two_folders(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each with a source of its own, copied at another time, as on two machines."""
    for number in (1, 2):
        shutil.copytree(checkpoint("llama"), tmp_path / f"src{number}", copy_function=shutil.copy)
        os.utime(tmp_path / f"src{number}" / "model.safetensors", (number, number))
        (tmp_path / f"src{number}" / "tokenizer.json").write_text("{}")
    quantize_checkpoint(tmp_path / "src1", tmp_path / "one", **SMALL)
    program = [sys.executable, "-m", "qkv", "quantize"]
    options = ["--format", "nf4", "--max-shard-size", "10KB"]
    runs = [
        subprocess.Popen(
            [*program, *(str(tmp_path / f"{name}{n}") for name in ("src", "part")), *options, "--shard", f"{n}/2"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in (1, 2)
    ]
    for n, run in enumerate(runs, 1):
        out, _ = run.communicate()
        assert run.returncode == 0 and out.endswith(f"part {n}/2; join all parts with qkv merge PART... DST\n")
    merge_checkpoint([tmp_path / "part2", tmp_path / "part1"], tmp_path / "q")
    assert tree(tmp_path / "q") == tree(tmp_path / "one")
    for part in (1, 2):
        shutil.rmtree(tmp_path / f"part{part}")
    assert tree(tmp_path / "q") == tree(tmp_path / "one")


def test_parts_are_dequantized_too_and_hold_their_files_only(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama")
    parts = make_parts(source, tmp_path)
    names = [{p.name for p in part.glob("*.safetensors")} for part in parts]
    assert all(names) and not set.intersection(*names)
    merge_checkpoint(parts, tmp_path / "q")
    dequantize_checkpoint(tmp_path / "q", tmp_path / "one", max_shard_size="20KB")
    halves = [tmp_path / "d1", tmp_path / "d2"]
    for number, half in enumerate(halves, 1):
        dequantize_checkpoint(tmp_path / "q", half, max_shard_size="20KB", shard=f"{number}/2")
    merge_checkpoint(halves, tmp_path / "d")
    assert tree(tmp_path / "d") == tree(tmp_path / "one")


def test_parts_that_do_not_make_one_model_are_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    parts = make_parts(checkpoint("llama"), tmp_path)
    other = tmp_path / "other"
    quantize_checkpoint(checkpoint("llama"), other, "int8", max_shard_size="10KB", shard="2/3")
    four = tmp_path / "four"
    quantize_checkpoint(checkpoint("llama"), four, **SMALL, shard="2/4")
    tiny_change = tmp_path / "changed"
    shutil.copytree(parts[1], tiny_change)
    content = json.loads((tiny_change / PART).read_text())
    content["identity"]["source"]["model.safetensors"]["header"] = "0"
    (tiny_change / PART).write_text(json.dumps(content))
    for given, told in (
        ([], "no parts to join"),
        (parts[:1], "2 are missing: 2/3, 3/3"),
        ([*parts, parts[1]], "part 2/3 is there twice: .*part2"),
        ([parts[0], other, parts[2]], r"other is not of the same run .*settings\.format"),
        ([parts[0], four, parts[2]], "four is not of the same run .*parts were 3 and are 4"),
        ([parts[0], tiny_change, parts[2]], r"changed is not of the same run .*model\.safetensors\.header"),
        ([tmp_path / "none"], "is no part of a model"),
        ([checkpoint("llama")], "is no part of a model"),
    ):
        with pytest.raises(QkvError, match=told) as caught:
            merge_checkpoint(given, tmp_path / "q")
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError, match="overlap"):
        merge_checkpoint(parts, parts[1], overwrite=True)
    shard = next(parts[1].glob("*.safetensors"))
    good = shard.read_bytes()
    for bad in (good[:-1], b""):
        shard.unlink()
        shard.write_bytes(bad)
        with pytest.raises(CheckpointError, match=shard.name):
            merge_checkpoint(parts, tmp_path / "q")
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"part2 lacks {shard.name}; write part 2/3 again"):
        merge_checkpoint(parts, tmp_path / "q")
    (tmp_path / "secret.safetensors").write_bytes(good)
    shard.symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(CheckpointError, match="link out"):
        merge_checkpoint(parts, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_part_is_no_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    part = make_parts(checkpoint("llama"), tmp_path)[0]
    for path in part.glob("*.safetensors"):
        path.rename(part / "model.safetensors")  # which would else be taken for a whole one
    with pytest.raises(CheckpointError, match=r"is a part of a model; .*qkv merge"):
        Source.open(part)


def test_files_are_copied_where_they_cannot_be_linked(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = make_parts(checkpoint("llama"), tmp_path)
    merge_checkpoint(parts, tmp_path / "linked")

    def refuse(*arguments: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    merge_checkpoint(parts, tmp_path / "copied")
    assert tree(tmp_path / "linked") == tree(tmp_path / "copied")
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "copied").iterdir())
