"""A native library built from other C files than those beside it is refused, and said to be stale."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qkv.quantizers.kernels import native
from qkv.quantizers.kernels.stamp import stamp


def test_any_byte_and_any_name_of_a_c_file_change_the_stamp(tmp_path: Path) -> None:
    assert stamp(tmp_path) is None
    (tmp_path / "a.c").write_text("int a;")
    (tmp_path / "b.h").write_text("int b;")
    found = {stamp(tmp_path)}
    (tmp_path / "notes.txt").write_text("no code")
    assert {stamp(tmp_path)} == found
    (tmp_path / "b.h").write_text("int c;")
    found.add(stamp(tmp_path))
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    found.add(stamp(tmp_path))
    assert len(found) == 3 and all(0 <= each < 2**63 for each in found if each is not None)


@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_a_library_of_other_c_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native._load()[1] is None
    monkeypatch.setattr(native, "stamp", lambda folder: 5)
    with pytest.warns(UserWarning, match="does without its native library.*stale.*pip install -e"):
        library, reason = native._load()
    assert library is None and reason is not None and reason.endswith("rebuild with pip install -e .")
    monkeypatch.setattr(native, "stamp", lambda folder: None)  # a folder without sources: nothing to compare
    assert native._load()[1] is None


def test_a_library_without_a_stamp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes_itself = sys.modules["_ctypes"].__file__
    if ctypes_itself is None:
        pytest.skip("ctypes is built into this interpreter")
    monkeypatch.setattr(native, "_find", lambda: Path(ctypes_itself))
    with pytest.warns(UserWarning, match="stale"):
        assert native._load()[0] is None


def test_doctor_says_so_and_other_back_ends_serve() -> None:
    """In a process of its own, which has chosen no back end before; its products still come out."""
    if native.unavailable() is not None:
        pytest.skip(str(native.unavailable()))
    program = """
import torch, qkv
from qkv.cli.main import main
from qkv.quantizers.kernels import native
native.stamp = lambda folder: 5
native._library, native._reason = native._load()
weight = qkv.quantize_tensor(torch.randn(64, 64), "int8")
from qkv.quantizers import kernels
assert torch.allclose(kernels.linear(torch.eye(64), weight, None), weight.dequantize().T, atol=1e-5)
main(["doctor"])
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("is stale") == 1
    assert found.stdout.count("is stale") == 2, "of products and of attention"
