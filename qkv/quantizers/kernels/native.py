"""The native CPU library: a plain C file beside this one, called through ctypes.

It reads the stored codes as they are (no packed copy) and runs on the threads of torch. One of three
back ends is chosen by the processor: ``avx512`` (with VBMI and BF16), ``avx2`` or ``portable``. The
environment variable ``QKV_KERNELS`` may force a lower one, or ``reference`` to do without the library.

The functions here are called once a layer and token, so they check nothing: tensors are contiguous and
on the CPU, shapes and dtypes are those that the docstrings state. Ask :func:`supports` first.
"""

from __future__ import annotations

import ctypes
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

LEVELS: Final = ("portable", "avx2", "avx512")
KINDS: Final = {"int8": 0, "int4": 1, "nf4": 2}
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_ROWS: Final = 16
"""Rows of x one pass over the weight serves; above a few dozen, dequantizing panels is faster."""

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int


def _find() -> Path | None:
    here = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := here / f"_native{suffix}").exists()), None)


def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or the reason why there is none."""
    wanted = os.environ.get("QKV_KERNELS")
    if wanted == "reference":
        return None, "QKV_KERNELS=reference asks for the reference kernels"
    path = _find()
    if path is None:
        return None, (
            "not compiled: no C compiler when qkv was installed; "
            "reinstall with one: pip install --force-reinstall --no-deps qkv"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} does not load ({error}); reinstall: pip install --force-reinstall --no-deps qkv"
    _declare(library)
    library.qkv_set_parallel(_parallel_address())
    library.qkv_set_level(LEVELS.index(wanted) if wanted in LEVELS else len(LEVELS) - 1)
    return library, None


def _declare(library: ctypes.CDLL) -> None:
    library.qkv_set_parallel.argtypes = [_POINTER]
    library.qkv_set_parallel.restype = None
    library.qkv_set_level.argtypes = [_INT]
    library.qkv_linear.argtypes = [_POINTER] * 6 + [_SIZE] * 4 + [_INT] * 5
    library.qkv_dequantize.argtypes = [_POINTER] * 4 + [_SIZE] * 3 + [_INT] * 3
    library.qkv_dequantize.restype = None
    library.qkv_quantize.argtypes = [_POINTER] * 4 + [_SIZE] * 3 + [_INT] * 5
    library.qkv_decode_scale.argtypes = [_POINTER] * 4 + [ctypes.c_float, _POINTER, _SIZE]
    library.qkv_decode_scale.restype = None
    library.qkv_read.argtypes = [_POINTER, _SIZE, _INT]
    library.qkv_read.restype = ctypes.c_uint64


def _parallel_address() -> int | None:
    """Where the OpenMP runtime that torch uses starts its threads; None: run on one thread.

    The symbol is looked up through torch's own library, so that it is torch's pool of threads whatever
    other OpenMP runtimes the process holds.
    """
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, _POINTER).value
        except (OSError, AttributeError):
            continue
    return None


_library, _reason = _load()


def unavailable() -> str | None:
    """Why the library is not live, in words for people; None when it is."""
    return _reason


def level() -> str:
    """The back end in use: ``"avx512"``, ``"avx2"`` or ``"portable"``."""
    assert _library is not None
    return LEVELS[_library.qkv_get_level()]


def set_level(name: str) -> str:
    """Use the back end ``name``, or the best below it that the processor has; returns the one in use."""
    assert _library is not None
    return LEVELS[_library.qkv_set_level(LEVELS.index(name))]


def supports(kind: str, group_size: int, x_dtype: torch.dtype, rows: int, in_features: int) -> str | None:
    """Why :func:`linear` should not be used for such a product; None when it should.

    Args:
        kind: ``"int8"``, ``"int4"`` or ``"nf4"``.
        group_size: elements of a stored group.
        x_dtype: dtype of x.
        rows: rows of x.
        in_features: columns of the weight.
    """
    if _library is None:
        return _reason
    if kind not in KINDS:
        return f"no native kernel for {kind}"
    if x_dtype not in DTYPES:
        return f"no native kernel for {x_dtype}"
    if group_size % 16 and group_size < in_features:
        return f"groups of {group_size} are no multiple of 16"
    if rows > MAX_ROWS:
        return f"{rows} rows: above {MAX_ROWS}, dequantized panels are faster"
    return None


def linear(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    *,
    kind: str,
    in_features: int,
    group_size: int,
    exact: bool = False,
) -> Tensor:
    """``x @ weight.T + bias`` straight from the stored codes, accumulated in float32.

    Two modes. The exact one multiplies in float32 (within 1e-5 of the float64 product) and always runs
    for float32 and float16 x. The fast one runs for bfloat16 x, unless ``exact``: products of bfloat16,
    exact for integer codes, while the levels of nf4 are rounded to bfloat16 (within 3e-3).

    Args:
        x: ``[rows, in]``, float32, bfloat16 or float16, contiguous.
        codes: ``[out, groups, bytes of a group]``, int8 or uint8.
        scale: float32 ``[out, groups]``.
        zero: uint8 ``[out, groups]``, or None for symmetric formats.
        bias: ``[out]``, float32, bfloat16 or float16, or None.
        kind: ``"int8"``, ``"int4"`` or ``"nf4"``.
        in_features: columns of the weight.
        group_size: elements of a stored group.
        exact: float32 products for bfloat16 x too.

    Returns:
        ``[rows, out]`` in x's dtype.
    """
    rows, out_features = x.shape[0], codes.shape[0]
    y = x.new_empty((rows, out_features))
    failed = _library.qkv_linear(  # type: ignore[union-attr]
        x.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        None if zero is None else zero.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows,
        out_features,
        in_features,
        group_size,
        KINDS[kind],
        DTYPES[x.dtype],
        0 if bias is None else DTYPES[bias.dtype],
        not exact,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory to prepare {rows} rows of {in_features} elements")
    return y


def dequantize(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    *,
    kind: str,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The float weight, bit for bit that of the reference: float32 arithmetic, rounded once to ``dtype``.

    Args:
        codes, scale, zero: as for :func:`linear`; a slice of their first dimension gives those rows alone.
        kind, in_features, group_size: as for :func:`linear`.
        dtype: float32, bfloat16 or float16.
        out: a contiguous ``[out, in]`` tensor of ``dtype`` to write to.

    Returns:
        ``[out, in]`` in ``dtype``.
    """
    out_features = codes.shape[0]
    if out is None:
        out = torch.empty((out_features, in_features), dtype=dtype)
    _library.qkv_dequantize(  # type: ignore[union-attr]
        codes.data_ptr(),
        scale.data_ptr(),
        None if zero is None else zero.data_ptr(),
        out.data_ptr(),
        out_features,
        in_features,
        group_size,
        KINDS[kind],
        DTYPES[dtype],
        torch.get_num_threads(),
    )
    return out


def quantize(
    x: Tensor,
    *,
    kind: str,
    group_size: int,
    symmetric: bool = True,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, scales and zero points of a float weight, bit for bit those of the reference formulas.

    Args:
        x: ``[out, in]``, float32, bfloat16 or float16, contiguous.
        kind: ``"int8"``, ``"int4"`` or ``"nf4"`` (symmetric only).
        group_size: elements of a stored group; any.
        symmetric: absmax scaling; otherwise a zero point a group.
        scale: float32 ``[out, groups]`` to use instead of those found; integer kinds only.
        zero: uint8 ``[out, groups]``, given with ``scale`` for asymmetric kinds.

    Returns:
        ``codes`` ``[out, groups, bytes of a group]``, ``scale`` ``[out, groups]`` (the absmax for nf4) and
        ``zero`` or None; or None alone when x holds NaN or infinity.
    """
    out_features, in_features = x.shape
    groups = -(-in_features // group_size)
    length = group_size if kind == "int8" else -(-group_size // 2)
    codes = torch.empty(
        (out_features, groups, length), dtype=torch.int8 if kind == "int8" and symmetric else torch.uint8
    )
    given = scale is not None
    if scale is None:
        scale = torch.empty((out_features, groups), dtype=torch.float32)
    if zero is None and not symmetric:
        zero = torch.empty((out_features, groups), dtype=torch.uint8)
    not_finite = _library.qkv_quantize(  # type: ignore[union-attr]
        x.data_ptr(),
        codes.data_ptr(),
        scale.data_ptr(),
        None if zero is None else zero.data_ptr(),
        out_features,
        in_features,
        group_size,
        KINDS[kind],
        symmetric,
        DTYPES[x.dtype],
        given,
        torch.get_num_threads(),
    )
    return None if not_finite else (codes, scale, zero)


def decode_scale(codes: Tensor, values: Tensor, absmax: Tensor, offset: Tensor, limit: float) -> Tensor:
    """Scales stored in 8 bits, as ``double_quant.decode_scale`` decodes them, bit for bit.

    Args:
        codes: uint8, any shape, contiguous.
        values: float32 ``[256]``, the dynamic map.
        absmax: float32 ``[ceil(codes / 256)]``.
        offset: float32 ``[]``.
        limit: the largest scale.

    Returns:
        float32 of the codes' shape.
    """
    scale = torch.empty(codes.shape, dtype=torch.float32)
    _library.qkv_decode_scale(  # type: ignore[union-attr]
        codes.data_ptr(),
        values.data_ptr(),
        absmax.data_ptr(),
        offset.data_ptr(),
        limit,
        scale.data_ptr(),
        codes.numel(),
    )
    return scale


def read(tensor: Tensor) -> int:
    """Read every byte of a contiguous tensor once, four distant streams a thread; returns a checksum.

    The yardstick of the benchmarks: how long the memory takes where nothing is computed.
    """
    checksum: int = _library.qkv_read(  # type: ignore[union-attr]
        tensor.data_ptr(), tensor.numel() * tensor.element_size(), torch.get_num_threads()
    )
    return checksum
