"""Quantizing a checkpoint beside copying its files (warm page cache), and the memory it takes.

python -m benchmarks.files MODEL_DIR [--formats nf4,int8] [--rounds 5] [--folder DIR]

The copy is `cp`, which leaves its data to the system; what is quantized is on the disk before it gets its name.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qkv import quantize_checkpoint
from qkv.units import format_bytes

PEAK = """
import re, shutil, sys
from pathlib import Path
from qkv import quantize_checkpoint

def field(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

quantize_checkpoint(*sys.argv[1:])  # whatever is imported late
shutil.rmtree(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
before = field("VmRSS")
quantize_checkpoint(*sys.argv[1:])
print(field("VmHWM") - before)
"""


def weights_nbytes(folder: Path) -> int:
    """Bytes of a folder's weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def peak_nbytes(model: Path, target: Path, format: str) -> int:
    """Resident memory above what a process holds that has done the same before; Linux only."""
    command = [sys.executable, "-c", PEAK, str(model), str(target), format]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout.split()[-1])


def measure(model: Path, folder: Path, formats: list[str], rounds: int) -> None:
    """Print a table: medians of interleaved rounds."""
    target, copy = folder / "quantized", folder / "copy"

    def copied() -> None:
        copy.mkdir()
        subprocess.run(["cp", *map(str, model.glob("*.safetensors")), str(copy)], check=True)

    def quantized(format: str) -> Callable[[], object]:
        return lambda: quantize_checkpoint(model, target, format)

    jobs: dict[str, Callable[[], object]] = {"cp": copied} | {format: quantized(format) for format in formats}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    written: dict[str, int] = {}
    for round in range(-1, rounds):  # the first warms the page cache up
        for name, run in jobs.items():
            start = time.perf_counter()
            run()
            if round >= 0:
                seconds[name].append(time.perf_counter() - start)
            made = copy if name == "cp" else target
            written[name] = weights_nbytes(made)
            shutil.rmtree(made)
            subprocess.run(["sync"], check=True)
    size, yardstick = weights_nbytes(model), statistics.median(seconds["cp"])
    print(f"{model}: {format_bytes(size)}, {torch.get_num_threads()} threads, {rounds} rounds")
    for name, found in seconds.items():
        median = statistics.median(found)
        peak = "" if name == "cp" else format_bytes(peak_nbytes(model, target, name))
        print(
            f"{name:12} {median:6.2f} s  {median / yardstick:5.2f} x cp  in {size / median / 1e6:6,.0f} MB/s  "
            f"out {written[name] / median / 1e6:6,.0f} MB/s  peak {peak}"
        )
        shutil.rmtree(target, ignore_errors=True)


def main() -> None:
    """Measure in a temporary folder on the disk of ``--folder``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--formats", default="nf4,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(options.model, Path(folder), options.formats.split(","), options.rounds)


if __name__ == "__main__":
    main()
