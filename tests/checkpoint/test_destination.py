from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qkv.checkpoint.auxiliary import copy_auxiliary
from qkv.checkpoint.destination import Destination
from qkv.errors import CheckpointError


def model(folder: Path, value: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    save_file({"w": torch.full((2,), value)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(dst: Path, message: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Destination(dst, **options)
    assert "\n" not in str(caught.value)


def test_appears_whole_at_the_end_in_a_folder_made_for_it(tmp_path: Path) -> None:
    dst = tmp_path / "deep" / "down" / "out"
    with Destination(dst) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert folder.parent == dst.parent / ".out.partial"
        assert not dst.exists()
    assert tree(dst) == {"sub/file": b"x"} and names(dst.parent) == ["out"]


def test_has_the_permissions_of_any_new_folder(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with Destination(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, OSError(errno.ENOSPC, "full")])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_leaves_everything_as_it_was(tmp_path: Path, error: Any, overwrite: bool) -> None:
    if overwrite:
        model(tmp_path / "out")
    before = tree(tmp_path)
    kind = error if isinstance(error, type) else type(error)
    with pytest.raises(kind), Destination(tmp_path / "out", overwrite=overwrite) as folder:
        model(folder / "sub")
        raise error
    assert tree(tmp_path) == before and names(tmp_path) == (["out"] if overwrite else [])


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_fills_while_syncing_leaves_everything_as_it_was(
    tmp_path: Path, overwrite: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if overwrite:
        model(tmp_path / "out")
    before = tree(tmp_path)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with (
        pytest.raises(OSError, match="No space left"),
        Destination(tmp_path / "out", overwrite=overwrite) as folder,
    ):
        (folder / "file").write_text("x")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_run_leaves_nothing_under_the_final_name(tmp_path: Path, how: signal.Signals) -> None:
    code = (
        "import sys, time; from qkv.checkpoint.destination import Destination\n"
        "with Destination(sys.argv[1]) as folder:\n"
        "    (folder / 'config.json').write_text('{}'); print('ready', flush=True); time.sleep(60)\n"
    )
    command, root = [sys.executable, "-c", code, str(tmp_path / "out")], Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(how)
    assert not (tmp_path / "out").exists()
    if how == signal.SIGINT:  # no program can tidy up after SIGKILL
        assert names(tmp_path) == []
    with Destination(tmp_path / "out") as folder:  # but the next one does, and the lock died with the process
        assert not list(folder.iterdir())
    assert names(tmp_path) == ["out"]


def test_an_existing_destination_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(model(tmp_path / "model"))
    for name in ("empty", "model", "link"):
        refused(tmp_path / name, "exists already.*--overwrite")
    for overwrite in (False, True):
        refused(tmp_path / "file", "not a directory", overwrite=overwrite)
        with pytest.raises(CheckpointError, match="cannot write in"), Destination(tmp_path / "file" / "out"):
            pass
    with pytest.raises(CheckpointError):
        Destination("/", overwrite=True)


def test_overwrite_replaces_a_model_or_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    model(tmp_path / "model")
    (tmp_path / "link").symlink_to(model(tmp_path / "linked"))
    for name in ("empty", "model", "link"):
        with Destination(tmp_path / name, overwrite=True) as folder:
            (folder / "new").write_text("x")
        assert tree(tmp_path / name) == {"new": b"x"}
    assert names(tmp_path) == ["empty", "link", "linked", "model"] and (tmp_path / "link").is_symlink()


def test_overwrite_never_replaces_what_is_not_a_model(tmp_path: Path) -> None:
    for name in ("precious.txt", "config.json", "model.safetensors"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("{}")
        refused(folder, "does not look like a model directory", overwrite=True)


def test_the_old_model_comes_back_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(model(tmp_path / "out"))
    original: Any = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.parent.name == ".out.partial" and path.name == "model":
            raise OSError(errno.EIO, "Input/output error")
        result: Path = original(path, target)
        return result

    monkeypatch.setattr(Path, "rename", rename)
    with (
        pytest.raises(OSError, match="Input/output"),
        Destination(tmp_path / "out", overwrite=True) as folder,
    ):
        (folder / "new").write_text("x")
    assert tree(tmp_path / "out") == before and names(tmp_path) == ["out"]


def test_another_run_that_was_quicker_wins(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists already"), Destination(tmp_path / "out") as folder:
        (folder / "new").write_text("x")
        before = tree(model(tmp_path / "out"))
    assert tree(tmp_path / "out") == before and names(tmp_path) == ["out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_source_is_never_the_destination(tmp_path: Path, overwrite: bool) -> None:
    # llama.cpp#12753: quantizing onto the input destroyed it.
    source = model(tmp_path / "p" / "src")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "parent").symlink_to(tmp_path / "p")
    before = tree(source)
    apart = [
        source,
        tmp_path / "link",
        source / "out",
        source / "a" / "b",
        tmp_path / "p",
        source / "." / "..",
    ]
    apart += [tmp_path / "parent" / "src", tmp_path / "link" / "out", Path(os.path.relpath(source))]
    for dst in apart:
        for src in (source, tmp_path / "link"):
            refused(dst, "overlap", source_dir=src, overwrite=overwrite)
    assert tree(source) == before
    with Destination(tmp_path / "p" / "src2", source_dir=source):  # a name that only begins the same
        pass


ONE: dict[str, Any] = {"identity": {"settings": {"format": "nf4"}}}
OTHER: dict[str, Any] = {"identity": {"settings": {"format": "int8"}}}


def stop(dst: Path, error: BaseException, **options: Any) -> None:
    with pytest.raises(type(error)), Destination(dst, **options) as folder:
        (folder / "begun").write_text("x")
        raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_what_stops_a_run_with_an_identity_leaves_its_work_for_the_next(tmp_path: Path, error: Any) -> None:
    stop(tmp_path / "out", error, **ONE)
    assert names(tmp_path) == [".out.partial"]
    place = Destination(tmp_path / "out", **ONE)
    with place as folder:
        assert names(folder) == ["begun"] and not place.journal.complete
    assert tree(tmp_path) == {"out/begun": b"x"}


def test_an_error_that_would_come_again_leaves_nothing(tmp_path: Path) -> None:
    stop(tmp_path / "out", CheckpointError("bad"), **ONE)
    assert names(tmp_path) == []


def test_the_work_of_another_identity_is_refused_unless_it_is_thrown_away(tmp_path: Path) -> None:
    stop(tmp_path / "out", KeyboardInterrupt(), **ONE)
    before = tree(tmp_path)
    told = r"\.out\.partial holds .*settings\.format was 'nf4' and is 'int8'.*--restart"
    with pytest.raises(CheckpointError, match=told), Destination(tmp_path / "out", **OTHER):
        pass
    assert tree(tmp_path) == before
    with Destination(tmp_path / "out", restart=True, **OTHER) as folder:
        assert not names(folder)
    assert names(tmp_path) == ["out"]


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Destination(tmp_path / "out", **ONE):
        for options in (ONE, OTHER, {**ONE, "restart": True}):
            with (
                pytest.raises(CheckpointError, match="another run is writing"),
                Destination(tmp_path / "out", **options),
            ):
                pass
    assert names(tmp_path) == ["out"]


def test_a_folder_of_that_name_that_is_not_ours_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "precious").write_text("x")
    for restart in (False, True):
        with pytest.raises(CheckpointError, match="precious"), Destination(tmp_path / "out", restart=restart, **ONE):
            pass
    assert tree(tmp_path) == {".out.partial/precious": b"x"}
    (tmp_path / ".p.partial").symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="cannot write in"), Destination(tmp_path / "p", **ONE):
        pass


@pytest.mark.parametrize("published", [False, True])
def test_a_run_killed_while_it_replaces_is_finished_by_the_next(tmp_path: Path, published: bool) -> None:
    """Between the two renames nothing has the final name; after them, only tidying up is left."""
    model(tmp_path / "out", 1.0)
    place = Destination(tmp_path / "out", overwrite=True, **ONE)
    with pytest.raises(KeyboardInterrupt), place as folder:
        (folder / "new").write_text("x")
        place.journal.record(complete=True)
        raise KeyboardInterrupt
    partial = tmp_path / ".out.partial"
    (tmp_path / "out").rename(partial / "replaced")
    if published:
        (partial / "model").rename(tmp_path / "out")
    again = Destination(tmp_path / "out", overwrite=True, **ONE)
    with again:
        assert again.journal.complete and again.is_published == published
    assert tree(tmp_path) == {"out/new": b"x"}


def test_the_old_model_is_put_back_before_unfinished_work_is_refused(tmp_path: Path) -> None:
    model(tmp_path / "out")
    stop(tmp_path / "out", KeyboardInterrupt(), overwrite=True, **ONE)
    (tmp_path / "out").rename(tmp_path / ".out.partial" / "replaced")
    with pytest.raises(CheckpointError, match="unfinished"), Destination(tmp_path / "out", overwrite=True, **OTHER):
        pass
    assert (tmp_path / "out" / "model.safetensors").exists()


WEIGHTS = [
    *("consolidated.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    *(
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "model.safetensors.index.fp16.json",
        "optimizer.pt",
    ),
    *("a.pth", "a.ckpt", "tf_model.h5", "flax_model.msgpack", "a.gguf", "a.gguf.part1of2", "A.SAFETENSORS"),
    *("a.onnx", "a.onnx_data", "a.npz", "rust_model.ot", "consolidated.00.pth", "adapter_model.safetensors"),
]
FILES = [
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"),
    *("tokenizer.model", "tokenizer.model.v3", "README.md", "README.pt.md", "modeling_x.py", "vocab.json"),
    *("additional_chat_templates/rag.jinja", "1_Pooling/config.json"),
]


def fill(folder: Path, files: list[str]) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")


def test_everything_but_weights_is_copied(tmp_path: Path) -> None:
    # SkyRL PR#2024: the copy brought the source's shards along and overwrote the converted ones.
    source, target = model(tmp_path / "src"), tmp_path / "out"
    fill(source, WEIGHTS + FILES + ["original/params.json", "original/consolidated.00.pth", "onnx/model.onnx"])
    fill(source, [".gitattributes", ".git/config", ".cache/x", "__pycache__/a.pyc", "vocab.json"])
    target.mkdir()
    (target / "vocab.json").write_text("new")
    (tmp_path / "link").symlink_to(source)
    left = copy_auxiliary(tmp_path / "link", target)
    assert set(tree(target)) == set(FILES)
    assert all(tree(target)[name] == tree(source)[name] for name in FILES if name != "vocab.json")
    assert (target / "vocab.json").read_text() == "new"
    assert {name for name, reason in left.items() if reason == "weights"} == {*WEIGHTS, "model.safetensors"}
    assert left["original"] == left["onnx"] == "a folder that holds weights"
    assert left["vocab.json"] == "written already" and left[".git"] == "hidden" and "config.json" not in left


def test_links_are_copied_as_files_within_the_model_only(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "abc"
    fill(repository, ["blobs/1", "blobs/2"])
    fill(tmp_path, ["passwd", "private/key"])
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    (snapshot / "sub" / "a.jinja").symlink_to("../../../blobs/2")
    (snapshot / "README.md").symlink_to(tmp_path / "passwd")
    (snapshot / "LICENSE").symlink_to("LICENSE")
    (snapshot / "gone").symlink_to("../../blobs/gone")
    (snapshot / "folder").symlink_to(tmp_path / "private")
    os.mkfifo(snapshot / "pipe")
    (tmp_path / "out").mkdir()
    left = copy_auxiliary(snapshot, tmp_path / "out")
    assert tree(tmp_path / "out") == {
        "tokenizer.json": b"content of blobs/1",
        "sub/a.jinja": b"content of blobs/2",
    }
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert left["README.md"] == left["LICENSE"] == "a link out of the model's folder"
    assert left["gone"] == left["pipe"] == "not a file" and left["folder"] == "a link to a folder"


def test_a_read_only_source_gives_a_writable_copy(tmp_path: Path) -> None:
    fill(tmp_path / "src", ["tokenizer.json"])
    (tmp_path / "src" / "tokenizer.json").chmod(0o400)
    (tmp_path / "out").mkdir()
    started = time.time()
    copy_auxiliary(tmp_path / "src", tmp_path / "out")
    copied = (tmp_path / "out" / "tokenizer.json").stat()
    assert copied.st_mode & 0o200 and copied.st_mtime >= started - 1
