"""Native sources under the sanitizers of addresses and undefined behaviour, driven by a C program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from qkv.quantizers.kernels import native


def run_sanitized(driver: str, folder: Path) -> None:
    """Build a driver with all sources and run it; it prints ``clean`` at its end. Skips without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    sources = Path(native.__file__).parent / "csrc"
    source, program = folder / "driver.c", folder / "driver"
    source.write_text(driver)
    command = [compiler, "-std=gnu11", "-O1", "-g", "-ffp-contract=off", "-fsanitize=address,undefined"]
    command += ["-fno-sanitize-recover=all", f"-I{sources}", str(source), *map(str, sorted(sources.glob("*.c")))]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout == "clean\n", result.stderr
