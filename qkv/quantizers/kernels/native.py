"""The native CPU library: a plain C file beside this one, called through ctypes.

It reads the stored codes as they are (no packed copy) and runs on the threads of torch. One of three
back ends is chosen by the processor: ``avx512`` (with VBMI and BF16), ``avx2`` or ``portable``. The
environment variable ``QKV_KERNELS`` may force a lower one, or ``reference`` to do without the library, and
``QKV_EXACT=1`` asks for float32 products of bfloat16 x.

The functions here are called often, so they check nothing: tensors are contiguous and on the CPU, shapes
and dtypes are those that the docstrings state.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from qkv.quantizers.kernels.stamp import stamp

EXACT: Final = os.environ.get("QKV_EXACT", "0") not in ("", "0")
LEVELS: Final = ("portable", "avx2", "avx512")
KINDS: Final = {"int8": 0, "int4": 1, "nf4": 2}
DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_ROWS: Final = 16
"""Rows of x one pass over the weight serves; above a few dozen, dequantizing panels is faster."""
FLOAT_ROWS: Final = 8
"""Rows of x that a product with a bfloat16 weight serves."""
ANY_ROWS: Final = 2**62
"""Where many rows are served from the codes at the processor's full speed as well."""

_level: str = LEVELS[0]
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
    if _is_stale(library):
        stale = f"{path.name} is stale, built from other C files than those beside it: rebuild with pip install -e ."
        warnings.warn(f"qkv does without its native library: {stale}", stacklevel=2)
        return None, stale
    _declare(library)
    library.qkv_set_parallel(_parallel_address())
    _set_level(library, wanted if wanted in LEVELS else LEVELS[-1])
    return library, None


def _is_stale(library: ctypes.CDLL) -> bool:
    """Whether the C files are there to compare and are others: what is called may be missing or mean another thing."""
    wanted = stamp(Path(__file__).parent / "csrc")
    try:
        library.qkv_stamp.restype = ctypes.c_uint64
    except AttributeError:  # built before libraries were stamped
        return True
    return wanted is not None and wanted != library.qkv_stamp()


def _set_level(library: ctypes.CDLL, name: str) -> str:
    global _level
    _level = LEVELS[library.qkv_set_level(LEVELS.index(name))]
    return _level


def _declare(library: ctypes.CDLL) -> None:
    library.qkv_set_parallel.argtypes = [_POINTER]
    library.qkv_set_parallel.restype = None
    library.qkv_set_level.argtypes = [_INT]
    library.qkv_linear.argtypes = [_POINTER] * 4 + [_SIZE, _INT]
    library.qkv_linear_bf16.argtypes = [_POINTER] * 4 + [_SIZE] * 3 + [_INT] * 2
    library.qkv_rms_norm.argtypes = [_POINTER] * 3 + [_SIZE] * 2 + [ctypes.c_float] * 2
    library.qkv_rms_norm.restype = None
    library.qkv_dequantize.argtypes = [_POINTER] * 4 + [_SIZE] * 3 + [_INT] * 3
    library.qkv_dequantize.restype = None
    library.qkv_quantize.argtypes = [_POINTER] * 4 + [_SIZE] * 3 + [_INT] * 5
    library.qkv_decode_scale.argtypes = [_POINTER] * 4 + [ctypes.c_float, _POINTER, _SIZE]
    library.qkv_decode_scale.restype = None
    if os.name == "posix":
        library.qkv_read_file.argtypes = [_INT, ctypes.c_int64, _POINTER, _SIZE, _INT]
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
    return _level


def set_level(name: str) -> str:
    """Use the back end ``name``, or the best below it that the processor has; returns the one in use."""
    return _set_level(library(), name)


def library() -> ctypes.CDLL:
    """The library itself, for those who call it; it must be live."""
    assert _library is not None
    return _library


def most_rows(x_dtype: torch.dtype) -> int:
    """Rows of x up to which a product is faster straight from the codes than by dequantized panels."""
    return ANY_ROWS if _level == "avx512" and x_dtype == torch.bfloat16 and not EXACT else MAX_ROWS


def cannot_serve_bf16() -> str | None:
    """Why nothing is computed in bfloat16 here, in words for people; None when it is."""
    if (missing := unavailable()) is not None:
        return f"needs the native library: {missing}"
    if _level != "avx512" or EXACT:
        return f"needs AVX-512 with BF16 and no QKV_EXACT; in use is {_level}"
    return None


def is_plain_bf16(x: Tensor) -> bool:
    """Whether it is bfloat16 on the CPU, and no gradient is wanted."""
    return x.dtype == torch.bfloat16 and x.is_cpu and not (x.requires_grad and torch.is_grad_enabled())


def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` with a float weight, accumulated in float32, reading it as fast as memory goes.

    Args:
        x: bfloat16 ``[..., in]``, at most :data:`FLOAT_ROWS` rows.
        weight: bfloat16 ``[out, in]``, contiguous.
        bias: ``[out]``, float32, bfloat16 or float16, or None.

    Returns:
        bfloat16 ``[..., out]``. The back end in use must be ``avx512``.
    """
    x = x.contiguous()
    out, columns = weight.shape
    y = x.new_empty((*x.shape[:-1], out))
    pointer, dtype = (None, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])
    rows, threads = x.numel() // columns, torch.get_num_threads()
    sizes = (out, columns, rows, dtype, threads)
    refused = library().qkv_linear_bf16(weight.data_ptr(), x.data_ptr(), pointer, y.data_ptr(), *sizes)
    assert not refused
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
