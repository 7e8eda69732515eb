"""A run that is killed at any moment, run again, ends with the bytes of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkv.checkpoint import syncing
from qkv.checkpoint.dequantize import dequantize_checkpoint
from qkv.checkpoint.journal import Journal
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.syncing import Syncer
from qkv.checkpoint.writer import StreamWriter
from qkv.errors import CheckpointError
from tests.helpers import fails, run_python

Checkpoint = Callable[..., Path]
Patch = pytest.MonkeyPatch


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from qkv import dequantize_checkpoint, quantize_checkpoint
from qkv.checkpoint import shard_writer, syncing
from qkv.checkpoint.journal import Journal
from qkv.checkpoint.writer import StreamWriter

source, target, job, *points = sys.argv[1:]
shard_writer.ROWS_NBYTES, syncing.SYNC_NBYTES = 2000, 1

def kill_at(point):
    '''Kill this process before its point-th step: a write, a sync, a line of the journal, a rename, a removal.'''
    steps = iter(range(10**9))
    def counted(holder, name):
        original = getattr(holder, name)
        def step(*arguments, **options):
            if next(steps) == point:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)
        setattr(holder, name, step)
    for holder, names in (
        (StreamWriter, ("_put", "sync")), (Journal, ("record",)), (Path, ("rename", "replace", "mkdir", "unlink")),
        (os, ("fsync", "rmdir")), (shutil, ("copyfile", "rmtree")),
    ):
        for name in names:
            counted(holder, name)

def run(point):
    '''In a process of its own; whether it lived.'''
    child = os.fork()
    if child == 0:
        kill_at(point)
        write(source, target, max_shard_size="20KB", overwrite=True, **arguments)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == 0

arguments = {} if job == "dequantize" else {"format": "int8"}
write = dequantize_checkpoint if job == "dequantize" else quantize_checkpoint
write(source, target, max_shard_size="20KB", overwrite=True, **arguments)  # whatever is imported late

for point in points:
    lived = [run(int(p)) for p in point.split(",")]
    if not lived[-1]:
        assert run(-1), point
    print(point, lived[0], flush=True)
    assert not [p for p in Path(target).parent.iterdir() if p.name.startswith(".")], point
    shutil.copytree(target, f"{target}-{point}")
    (Path(target) / "old").write_text("for the next to replace")
"""


def check_killed(source: Path, folder: Path, job: str, points: list[str]) -> list[str]:
    """Kill runs at steps, each point a list of them, and compare what they end with; the points that came too late."""
    undisturbed = folder / "undisturbed"
    write: Callable[..., Any] = dequantize_checkpoint if job == "dequantize" else quantize_checkpoint
    write(source, undisturbed, **({} if job == "dequantize" else {"format": "int8"}), max_shard_size="20KB")
    shutil.copytree(undisturbed, folder / "q")
    result = run_python(KILLED, str(source), str(folder / "q"), job, *points)
    assert result.returncode == 0, result.stderr
    for point in points:
        assert tree(folder / f"q-{point}") == tree(undisturbed), point
    return [line.split()[0] for line in result.stdout.splitlines() if line.endswith("True")]


def test_killed_at_some_steps(checkpoint: Checkpoint, tmp_path: Path) -> None:
    generator = random.Random(0)
    points = [str(generator.randrange(130)) for _ in range(10)] + ["40,20", "60,10,10"]
    check_killed(checkpoint("llama", shard="40KB"), tmp_path, "quantize", points)


@pytest.mark.slow
@pytest.mark.parametrize("job", ["quantize", "dequantize"])
def test_killed_at_every_step(job: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("llama", shard="40KB")
    if job == "dequantize":
        quantize_checkpoint(source, tmp_path / "source", "int8")
        source = tmp_path / "source"
    points = [str(point) for point in range(320)]
    too_late = check_killed(source, tmp_path, job, points)
    assert 10 < len(too_late) < 280  # every step there is was tried


@pytest.mark.slow
def test_killed_at_any_time(smollm2: Path, tmp_path: Path) -> None:
    """The program itself, on a real model, with SIGKILL after random times."""
    command = [sys.executable, "-m", "qkv", "quantize", str(smollm2), str(tmp_path / "q"), "--format", "nf4"]
    command += ["--max-shard-size", "30MB"]
    subprocess.run([*command[:5], str(tmp_path / "whole"), *command[6:]], check=True, capture_output=True)
    generator, kills = random.Random(0), 0
    for _ in range(20):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            seen = time.monotonic()
            while not (tmp_path / ".q.partial").exists() and process.poll() is None:
                seen = time.monotonic()
                time.sleep(0.001)
            delay = generator.uniform(0, 0.3)
            while time.monotonic() < seen + delay and process.poll() is None:
                time.sleep(0.001)
            kills += process.poll() is None
            process.send_signal(signal.SIGKILL)
        if (tmp_path / "q").exists():
            break
    else:
        subprocess.run(command, check=True, capture_output=True)
    assert kills and tree(tmp_path / "q") == tree(tmp_path / "whole")


def check_claims_are_on_disk(source: Path, target: Path) -> None:
    """A journal may claim only what the disk has: here one that holds of each file what was there at its last sync."""
    quantize_checkpoint(source, target, "nf4", restart=True)
    final = (target / "model.safetensors").read_bytes()
    shutil.rmtree(target)
    disk: dict[Path, bytes] = {}
    missing: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        fsync, record, make = os.fsync, Journal.record, StreamWriter.__init__
        writers: list[StreamWriter] = []

        def remembered(self: StreamWriter, *arguments: Any, **options: Any) -> None:
            make(self, *arguments, **options)
            writers.append(self)

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.suffix == ".safetensors":
                disk[path] = path.read_bytes()

        def recorded(self: Journal, **step: Any) -> None:
            if "shard" in step:
                (writer,) = writers
                held = disk.get(self.path.parent / "model" / step["shard"], b"")
                done = [name for name in writer._specs if not name.endswith("_scale")][: step["pieces"]]
                for name in (n for base in done for n in (base, f"{base}_scale") if n in writer._specs):
                    part = slice(writer._offsets[name], writer._offsets[name] + writer._specs[name].nbytes)
                    missing.extend([name] if held[part] != final[part] else [])
            record(self, **step)

        patch.setattr(StreamWriter, "__init__", remembered)
        patch.setattr(os, "fsync", synced)
        patch.setattr(Journal, "record", recorded)
        patch.setattr(syncing, "SYNC_NBYTES", 1)
        quantize_checkpoint(source, target, "nf4")
    assert not missing


def claims_before_the_sync(patch: Patch) -> None:
    def mutant(self: Syncer, num_pieces: int) -> None:
        self._report(num_pieces)
        self._writer.sync()

    patch.setattr(Syncer, "_sync", mutant)


def claims_without_a_sync(patch: Patch) -> None:
    patch.setattr(StreamWriter, "sync", lambda self: None)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks the system which file a descriptor is")
def test_the_journal_claims_only_what_is_on_the_disk(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_claims_are_on_disk(checkpoint("llama"), tmp_path / "q")
    for mutate in (claims_before_the_sync, claims_without_a_sync):
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            shutil.rmtree(tmp_path / "q", ignore_errors=True)
            assert fails(lambda: check_claims_are_on_disk(checkpoint("llama"), tmp_path / "q")), mutate


def stopped(source: Path, target: Path, monkeypatch: Patch, *, after: int = 12, **options: Any) -> list[str]:
    """Stop a run after some tensors were made; what a whole run from then on makes."""
    made: list[str] = []
    write = StreamWriter.write

    def counted(self: StreamWriter, name: str, tensor: Any) -> None:
        if len(made) == after:
            raise KeyboardInterrupt
        made.append(name)
        write(self, name, tensor)

    monkeypatch.setattr(syncing, "SYNC_NBYTES", 1)
    monkeypatch.setattr(StreamWriter, "write", counted)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, target, **{"format": "nf4", **options})
    made.clear()
    after = -1  # from now on it only counts
    return made


def test_a_run_goes_on_where_it_was(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: Patch) -> None:
    source = checkpoint("llama")
    quantize_checkpoint(source, tmp_path / "whole", "nf4")
    made = stopped(source, tmp_path / "q", monkeypatch, after=30)
    quantize_checkpoint(source, tmp_path / "q", "nf4")
    again = len(made)
    assert tree(tmp_path / "q") == tree(tmp_path / "whole")
    made.clear()
    quantize_checkpoint(source, tmp_path / "all", "nf4")
    assert 0 < again < len(made) - 20


def test_work_on_something_else_is_refused(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: Patch) -> None:
    source, target = tmp_path / "src", tmp_path / "q"
    shutil.copytree(checkpoint("llama"), source)
    stopped(source, target, monkeypatch)
    before = tree(tmp_path / ".q.partial")
    others: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "int8"}, r"settings\.format was 'nf4:g64' and is 'int8:g64'"),
        ({"skip": ["o_proj"]}, r"settings\.skip was \[\] and is \['o_proj'\]"),
        ({"max_shard_size": "30KB"}, "max_shard_nbytes was 5000000000 and is 30000"),
    )
    for options, told in others:
        with pytest.raises(CheckpointError, match=rf"{told}.*--restart"):
            quantize_checkpoint(source, target, **{"format": "nf4", **options})
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(CheckpointError, match=r"source\.model\.safetensors\.modified_ns was .*--restart"):
        quantize_checkpoint(source, target, "nf4")
    assert tree(tmp_path / ".q.partial") == before
    quantize_checkpoint(source, target, "nf4", restart=True)
    quantize_checkpoint(source, tmp_path / "whole", "nf4")
    assert tree(target) == tree(tmp_path / "whole") and not (tmp_path / ".q.partial").exists()


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"{}",
        b"[1]",
        b"\xff\xfe",
        b'{"shard": 3, "pieces": 1}',
        b'{"shard": "model.safetensors", "pieces": "4"}',
        b'{"shard": "model.safetensors", "pieces": -1}',
        b'{"shard": "model.safetensors", "pieces": 99999}',
        b'{"shard": "model.safetensors", "pieces": 1e400}',
        b'{"shard": "../model.safetensors", "pieces": 2}',
        b'{"left": []}',
        b"[" * 100_000,
        b'{"shard": "\\ud800", "pieces": 1}',
    ],
)
@pytest.mark.parametrize("first", [False, True])
def test_a_damaged_journal(
    line: bytes, first: bool, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: Patch
) -> None:
    source = checkpoint("llama")
    quantize_checkpoint(source, tmp_path / "whole", "nf4")
    stopped(source, tmp_path / "q", monkeypatch)
    path = tmp_path / ".q.partial" / "journal"
    path.write_bytes(line + b"\n" + path.read_bytes() if first else path.read_bytes() + line + b"\n")
    try:
        quantize_checkpoint(source, tmp_path / "q", "nf4")
    except CheckpointError as error:
        assert "\n" not in str(error)
        quantize_checkpoint(source, tmp_path / "q", "nf4", restart=True)
    assert tree(tmp_path / "q") == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["q", "whole"]


def test_a_torn_last_line_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal.create(path, {"a": 1})
    journal.record(shard="x", pieces=3)
    path.write_bytes(path.read_bytes() + b'{"shard": "x", "pie')
    found = Journal.read(path)
    assert found is not None and found == journal
    found.record(shard="x", pieces=4)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"identity": {"a": 1}}, {"shard": "x", "pieces": 3}, {"shard": "x", "pieces": 4}]
