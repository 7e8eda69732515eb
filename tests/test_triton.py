"""The Triton kernels where there is no GPU: interpreted against the reference, and compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.quantizers.format import Format
from qkv.quantizers.kernels import bitsandbytes, triton_linear, triton_live
from qkv.quantizers.kernels.case import Case
from qkv.quantizers.kernels.choose import choose
from tests.helpers import run_python

HERE = Path(__file__).parent
CELLS = sorted(path.name for path in (HERE / "interpreted").glob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("name", CELLS)
def test_kernels_under_the_interpreter(name: str) -> None:
    """In a process of its own: the variable counts when a kernel is defined."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted" / name)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for variable in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS", "QKV_KERNELS"):
        environment.pop(variable, None)
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=HERE.parent)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: Any) -> Any:
    """A kernel as machine code of compute capability 9.0; no GPU is needed for that."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    pointers = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if types.get(n, "")[:1] == "*"}
    source = triton.compiler.ASTSource(kernel, signature, constants, pointers)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


WEIGHT = {"codes": "*u8", "scale": "*fp32", "zero": "*u8", "levels": "*fp32"}
SIZES = {"M": "i32", "N": "i32", "K": "i32", "row_bytes": "i32", "scale_stride": "i32"}


def test_products_compile_for_a_gpu() -> None:
    pytest.importorskip("triton")
    from qkv.quantizers.kernels.triton_few import few_rows
    from qkv.quantizers.kernels.triton_many import many_rows

    types = {**WEIGHT, **SIZES, "x": "*bf16", "bias": "*bf16", "out": "*bf16"}
    kind = {"GROUP": 64, "KIND": 2, "ASYM": False, "BIAS": True}
    few = compiled(few_rows, types, {**kind, "CHUNK": 64, "CHUNKS": 32, "FEATURES": 4, "SPLITS": 1})
    many = compiled(
        many_rows, types, {**kind, "ROWS": 256, "FEATURES": 128, "DEPTH": 64, "SPLITS": 1}, num_warps=8, num_stages=3
    )
    assert few.asm["cubin"] and "wgmma" in many.asm["ptx"]


def test_attention_and_quantizing_compile_for_a_gpu() -> None:
    pytest.importorskip("triton")
    import triton.language as tl

    from qkv.cache.blocks import BlockLayout
    from qkv.cache.codec import Codec
    from qkv.cache.triton_blocks import walk
    from qkv.cache.triton_walk import _constants
    from qkv.quantizers.kernels.triton_encode import encode

    pointers = ("runs", "starts", "positions")
    types = {name: "*i64" for name in pointers} | {"first_run": "*i32", "softcap": "fp32"}
    types |= {name: "*fp32" for name in ("queries", "peaks", "totals", "outputs", "mass", "norms", "mass_peaks")}
    types |= {name: "i32" for name in ("rows", "tokens", "hidden", "reach", "num_blocks")}
    layout = BlockLayout(8, 128, 128, 64, Codec.parse("int4", "channel"), Codec.parse("int8"), torch.bfloat16)
    switches = dict.fromkeys(("MASKED", "REACHES", "CAPPED", "OBSERVED", "ALIGNED"), True)
    constants = {"ROWS": 16, "SPLITS": 8, **switches, **_constants(layout, torch.bfloat16)}
    assert constants["DTYPE"] == tl.bfloat16 and compiled(walk, types, constants, num_stages=2).asm["cubin"]
    types = {"x": "*bf16", "codes": "*u8", "scale": "*fp32", "zero": "*u8", "midpoints": "*fp32"}
    types |= {name: "i32" for name in ("N", "K", "groups", "group_bytes")}
    sizes = {"GROUP": 64, "WIDTH": 64, "GROUPS": 32, "KIND": 1, "ASYM": True}
    numbers = {"QMAX": 15.0, "TINY": 1e-38, "LIMIT": 1e38, "SHRINK": 0.999, "SMALLEST": 1e-38}
    assert compiled(encode, types, {**sizes, **numbers}, enable_fp_fusion=False).asm["cubin"]


def test_on_cuda_bitsandbytes_takes_one_row_of_nf4_and_triton_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_live, "unavailable", lambda: None)
    choose.cache_clear()
    for text, rows, want in (("nf4", 1, bitsandbytes), ("nf4", 2, triton_linear), ("nf4", 512, triton_linear),
                             ("nf4:g48", 1, triton_linear), ("int8", 1, triton_linear)):  # fmt: skip
        assert choose(Case(Format.parse(text), (96, 480 * 2), "cuda", torch.bfloat16, rows)) is want
    assert triton_linear.refuses(Case(Format("nf4"), (96, 960), "cpu", torch.bfloat16, 1)) == "runs on CUDA"
    choose.cache_clear()


def test_without_a_gpu_the_reason_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code = "from qkv.quantizers.kernels.status import status; print([r.reason for r in status() if r.name == 'triton'])"
    assert "torch sees no CUDA device" in run_python(code).stdout
    hidden = "import sys; sys.modules['triton'] = None\n" + code
    assert "not installed" in run_python(hidden).stdout
