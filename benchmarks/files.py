"""Quantizing a checkpoint beside copying its files (warm page cache), and the memory it takes.

python -m benchmarks.files MODEL_DIR [--formats nf4,int8] [--rounds 5] [--workers 2] [--folder DIR]

The copy is `cp`, which leaves its data to the system, and `cp` with a `sync` of the copy; what is quantized is on the
disk before it gets its name. What that costs is told by a second run of each format, without syncs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from qkv import quantize_checkpoint
from qkv.units import format_bytes

PEAK = """
import re, resource, sys
from multiprocessing import get_context
from pathlib import Path
from qkv import quantize_checkpoint
from qkv.integration.skeleton import build_skeleton

def field(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def children():
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024

def idle():
    pass  # a worker without work

if __name__ == "__main__":
    *arguments, size, count = sys.argv[1:]
    worker = get_context("spawn").Process(target=idle)
    worker.start()
    worker.join()
    options = {"max_shard_size": int(size), "workers": int(count)}
    build_skeleton(Path(arguments[0]))  # imports what the model needs of transformers
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = children() if int(count) > 1 else field("VmRSS")
    quantize_checkpoint(*arguments, **options)
    print((children() if int(count) > 1 else field("VmHWM")) - before)
"""


def weights_nbytes(folder: Path) -> int:
    """Bytes of a folder's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def peak_nbytes(model: Path, target: Path, format: str, shard_size: int, workers: int = 1) -> int:
    """Most resident memory above what a process holds with everything imported; of several workers, of the one that
    took most, above one without work. Linux only."""
    script = target.parent / "peak.py"
    script.write_text(PEAK)
    command = [sys.executable, str(script), str(model), str(target), format, str(shard_size), str(workers)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout.split()[-1])


def make_jobs(model: Path, folder: Path, formats: list[str], workers: int) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each makes `folder / "made"`."""
    made = folder / "made"
    shard_size = weights_nbytes(model) // (3 * max(workers, 2))

    def copied(*then: str) -> None:
        made.mkdir()
        subprocess.run(["cp", *map(str, model.glob("*.safetensors")), str(made)], check=True)
        if then:
            subprocess.run([*then, *map(str, made.iterdir())], check=True)

    jobs: dict[str, Callable[[], object]] = {"cp": copied, "cp, sync": partial(copied, "sync")}
    for format in formats:
        quantized = partial(quantize_checkpoint, model, made, format)
        jobs[format] = quantized
        jobs[f"{format}, no syncs"] = patch.object(os, "fsync", lambda descriptor: None)(quantized)
        if workers > 1:
            jobs[f"{format}, {workers} workers"] = partial(quantized, workers=workers, max_shard_size=shard_size)
    return jobs


def measure(model: Path, folder: Path, formats: list[str], rounds: int, workers: int) -> None:
    """Print a table: medians of interleaved rounds."""
    made = folder / "made"
    jobs = make_jobs(model, folder, formats, workers)
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    written: dict[str, int] = {}
    for round in range(-1, rounds):  # the first warms the page cache up
        for name, run in jobs.items():
            start = time.perf_counter()
            run()
            if round >= 0:
                seconds[name].append(time.perf_counter() - start)
            written[name] = weights_nbytes(made)
            shutil.rmtree(made)
            subprocess.run(["sync"], check=True)
    size, yardstick = weights_nbytes(model), statistics.median(seconds["cp"])
    print(f"{model}: {format_bytes(size)}, {torch.get_num_threads()} threads, {rounds} rounds")
    for name, found in seconds.items():
        median = statistics.median(found)
        print(
            f"{name:16} {median:6.2f} s (fastest {min(found):5.2f})  {median / yardstick:5.2f} x cp  "
            f"in {size / median / 1e6:6,.0f} MB/s  out {written[name] / median / 1e6:6,.0f} MB/s"
        )
    for format in formats:
        for count in sorted({1, workers}):
            peak = peak_nbytes(model, made, format, size if count == 1 else size // (3 * count), count)
            print(f"{format}, {count} worker{'s' * (count > 1)}: peak {format_bytes(peak)} each")
            shutil.rmtree(made)


def main() -> None:
    """Measure in a temporary folder on the disk of ``--folder``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", default="nf4,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="measure so many processes, too")
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options.model, Path(folder), options.formats.split(","), options.rounds, options.workers)


if __name__ == "__main__":
    main()
