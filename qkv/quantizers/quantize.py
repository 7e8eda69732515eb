"""``quantize_tensor``: a float tensor in, a :class:`QuantizedTensor` out, a few million elements at a time."""

from __future__ import annotations

from math import ceil, prod

import torch
from torch import Tensor

from qkv.errors import QkvError
from qkv.quantizers import integer
from qkv.quantizers.calibration import check_importance, output_error, search_scales
from qkv.quantizers.double_quant import NestedScale, decode_scale, encode_scale
from qkv.quantizers.format import Format
from qkv.quantizers.grouping import row_chunks, to_groups
from qkv.quantizers.kernels import native, triton_quantize
from qkv.quantizers.packing import pack_nibbles
from qkv.quantizers.scales import Range, Scales, encode, scales_of, spanning_scales
from qkv.quantizers.tensor import QuantizedTensor

SOURCE_DTYPES = tuple(
    getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
)
"""Dtypes that can be quantized; each gives what its float32 value gives."""


def quantize_tensor(
    x: Tensor,
    format: str | Format = "nf4",
    *,
    importance: Tensor | None = None,
    name: str = "tensor",
    scale_dtype: torch.dtype = torch.float32,
) -> QuantizedTensor:
    """Quantize a float tensor, group by group along its last dimension.

    Args:
        x: ``[..., out, in]``, 1-D or more, float32, bfloat16, float16, float64 or float8; any strides;
            it is not changed.
        format: a :class:`Format` or its spelling, ``"nf4"``, ``"int8:g64:asym"``, ``"int4:row:double"``.
        importance: mean squares of the inputs that meet each column, ``[in]``, or ``[experts, in]`` for a stack;
            scales are then searched to keep the layer's outputs close (see :mod:`qkv.quantizers.calibration`).
            The layout is the same. None takes the scales that span each group.
        name: what error messages call the tensor.
        scale_dtype: scales are rounded to this dtype before codes are chosen for them, for layouts that
            store them in it; here they stay float32 tensors.

    Raises:
        QkvError: a dtype that is not a float, a NaN, an infinity, a value beyond float32's range, or an importance
            that does not fit.

    Example:
        >>> t = quantize_tensor(torch.randn(64, 256), "int8:g64")
        >>> float((t.dequantize() - t.dequantize()).abs().max())
        0.0
    """
    format = Format.parse(format)
    _check(x, name)
    rows = _rows(x)
    found = _quickly(rows, format, scale_dtype) if importance is None else None
    if found is not None:
        return _assemble(x, format, *found)
    ranges = _ranges(rows, format, name)
    if importance is not None:
        check_importance(importance, tuple(x.shape), format, name)
        return _searched(x, ranges, format, importance.to(x.device), scale_dtype)
    coding, stored = _spanning(ranges, format, scale_dtype)
    return _assemble(x, format, _codes(rows, format, coding), stored, coding.zero)


def _quickly(
    rows: Tensor, format: Format, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | NestedScale, Tensor | None] | None:
    """What the native library or the GPU kernel makes of the rows, if one of them serves them."""
    found = _natively(rows, format, scale_dtype)
    return _on_gpu(rows, format) if found is None and scale_dtype == torch.float32 else found


def _natively(
    rows: Tensor, format: Format, scale_dtype: torch.dtype
) -> tuple[Tensor, Tensor | NestedScale, Tensor | None] | None:
    """The same codes, scales and zero points in one pass of the native library.

    None where the library does not serve the tensor, and where a value is not finite, which the slow way
    then finds the place of.
    """
    if native.unavailable() is not None or rows.device.type != "cpu" or rows.dtype not in native.DTYPES:
        return None
    rounded = scale_dtype != torch.float32
    if format.group_size == "tensor" or not rows.numel() or (format.double_quant and not format.symmetric):
        return None
    if rounded and (format.name == "nf4" or not format.symmetric):
        return None
    rows, length = rows.contiguous(), format.group_length(rows.shape[1])
    found = native.quantize(rows, kind=format.name, group_size=length, symmetric=format.symmetric)
    if found is None or not (format.double_quant or rounded):
        return found
    codes, scale, _ = found
    scale = scale.to(scale_dtype).to(torch.float32)
    nested = encode_scale(scale, never_below=format.name != "nf4") if format.double_quant else None
    if format.name != "nf4":  # integer codes are chosen for the scales as they will be read back
        scale = scale if nested is None else decode_scale(nested, format.scale_limit)
        again = native.quantize(rows, kind=format.name, group_size=length, scale=scale)
        assert again is not None
        codes = again[0]
    return codes, scale if nested is None else nested, None


def _on_gpu(rows: Tensor, format: Format) -> tuple[Tensor, Tensor | NestedScale, Tensor | None] | None:
    """The same by a Triton kernel; None where it does not serve the tensor or a value is not finite."""
    if triton_quantize.refuses(rows, format) is not None:
        return None
    found = triton_quantize.quantize(rows, format)
    if found is None or not format.double_quant:
        return found
    codes, scale, _ = found
    return codes, encode_scale(scale, never_below=False), None


def check_quantizable(x: Tensor, name: str) -> None:
    """Raise what :func:`quantize_tensor` would raise for ``x``, without quantizing it."""
    _check(x, name)
    _ranges(_rows(x), Format("int8", "row"), name)


def _rows(x: Tensor) -> Tensor:
    return x.detach().reshape(prod(x.shape[:-1]), x.shape[-1])


def _check(x: Tensor, name: str) -> None:
    if x.dtype not in SOURCE_DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in SOURCE_DTYPES)
        raise QkvError(f"{name} is {str(x.dtype).removeprefix('torch.')}; only floats can be quantized: {known}")
    if x.device.type == "meta":
        raise QkvError(f"{name} is on the meta device and has no values; load the weights first")
    if x.dim() == 0:
        raise QkvError(f"{name} is a single number (0-D); quantize tensors of one dimension or more")


def _chunks(rows: Tensor, length: int) -> list[slice]:
    return list(row_chunks(rows.shape[0], max(rows.shape[1], length)))


def _ranges(rows: Tensor, format: Format, name: str) -> Range:
    """Range of every group; the whole tensor counts as one group under ``tensor``."""
    num_rows, columns = rows.shape
    length = format.group_length(columns)
    low = torch.zeros((num_rows, ceil(columns / length)), dtype=torch.float32, device=rows.device)
    high = torch.zeros_like(low)
    for part in _chunks(rows, length):
        if columns:
            groups = to_groups(rows[part].to(torch.float32), length)
            torch.clamp(groups.amin(-1), max=0, out=low[part])
            torch.clamp(groups.amax(-1), min=0, out=high[part])
    if not bool(torch.isfinite(low).all() & torch.isfinite(high).all()):
        _refuse_non_finite(rows, name)
    if format.group_size == "tensor" and columns:
        zero = low.new_zeros(1)
        low, high = torch.cat((zero, low.flatten())).amin(), torch.cat((zero, high.flatten())).amax()
        low, high = low.reshape(1, 1), high.reshape(1, 1)
    return Range(low, high)


def _refuse_non_finite(rows: Tensor, name: str) -> None:
    count, first = 0, None
    for part in row_chunks(*rows.shape):
        bad = ~torch.isfinite(rows[part].to(torch.float32))
        found = int(bad.sum())
        if found and first is None:
            row, column = (int(i) for i in bad.nonzero()[0])
            first = (part.start + row, column)
        count += found
    assert first is not None
    value = float(rows[first])
    what = f"{value}" if value != value or abs(value) == float("inf") else f"{value:g}, beyond float32's range"
    raise QkvError(
        f"{name} has {count:,} values that are NaN, infinite or not finite in float32, the first at row {first[0]}, "
        f"column {first[1]} ({what}); repair the weights before quantizing them"
    )


def _spanning(ranges: Range, format: Format, scale_dtype: torch.dtype) -> tuple[Scales, Tensor | NestedScale]:
    """Scales and zero points under which codes are chosen, and the scales as they are stored."""
    scales = _rounded(spanning_scales(ranges, format), scale_dtype)
    if not format.double_quant:
        return scales, scales.scale
    nested = encode_scale(scales.scale, never_below=format.name != "nf4")
    if format.name == "nf4":  # as bitsandbytes does it
        return scales, nested
    scale = decode_scale(nested, format.scale_limit)
    zero = None if scales.zero is None else integer.zero_point(ranges.low, scale, format.bits)
    return Scales(scale, zero), nested


def _rounded(scales: Scales, dtype: torch.dtype) -> Scales:
    return scales._replace(scale=scales.scale.to(dtype).to(torch.float32))


def _searched(
    x: Tensor, ranges: Range, format: Format, importance: Tensor, scale_dtype: torch.dtype
) -> QuantizedTensor:
    """``x`` under searched scales. Nesting changes them a little: then the better set counts, as a whole."""
    rows, stored = _rows(x), None
    scales = _rounded(search_scales(rows, ranges, format, importance), scale_dtype)
    if format.double_quant:
        stored = encode_scale(scales.scale, never_below=False)
        scales = scales._replace(scale=decode_scale(stored, format.scale_limit))
    result = _assemble(x, format, _codes(rows, format, scales), stored or scales.scale, scales.zero)
    if stored is None:
        return result
    plain = quantize_tensor(x, format, scale_dtype=scale_dtype)
    errors = [float(output_error(x, each, importance).sum(dtype=torch.float64)) for each in (plain, result)]
    return result if errors[1] < errors[0] else plain


def _codes(rows: Tensor, format: Format, scales: Scales) -> Tensor:
    num_rows, columns = rows.shape
    (_, *stored), dtype = format.layout((num_rows, columns))[""]
    codes = torch.empty((num_rows, *stored), dtype=dtype, device=rows.device)
    length = format.group_length(columns)
    for part in _chunks(rows, length) if columns else []:
        groups = to_groups(rows[part].to(torch.float32), length)
        chunk = encode(groups, scales_of(scales, part, groups.shape, format), format)
        codes[part] = chunk if format.bits == 8 else pack_nibbles(chunk)
    return codes


def _assemble(
    x: Tensor, format: Format, codes: Tensor, scale: Tensor | NestedScale, zero: Tensor | None
) -> QuantizedTensor:
    """Give the parts the shapes of :meth:`Format.layout`."""
    layout = format.layout(tuple(x.shape))
    parts = {"": codes, "_zero": zero}
    if isinstance(scale, NestedScale):
        parts |= {"_scale": scale.codes, "_scale_absmax": scale.absmax, "_scale_offset": scale.offset}
    else:
        parts["_scale"] = scale
    shaped = {
        suffix: tensor.reshape(layout[suffix][0]).contiguous() for suffix, tensor in parts.items() if tensor is not None
    }
    assert all(prod(layout[suffix][0]) == tensor.numel() for suffix, tensor in shaped.items())
    return QuantizedTensor(
        format,
        tuple(x.shape),
        x.dtype,
        shaped[""],
        shaped["_scale"],
        shaped.get("_zero"),
        shaped.get("_scale_absmax"),
        shaped.get("_scale_offset"),
    )
