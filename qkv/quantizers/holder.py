"""What every drop-in module shares: quantized tensors held as plain buffers that no cast can damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from qkv.quantizers.format import Format
from qkv.quantizers.tensor import QuantizedTensor

CACHES: Final = ("_views", "_strips")
"""Attributes of a module that are made anew when they are wanted."""
FLAGS: Final = ("prepared", "interleaved")
"""Attributes of a module that say how its weight may lie in memory."""


@dataclass(frozen=True)
class Spec:
    """What a module's float parameter was, and the format it is in now.

    ``shape`` is ``[..., out, in]``, the order in which it is quantized; ``transposed`` says that the
    parameter itself had its last two dimensions the other way round.
    """

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    transposed: bool = False
    requires_grad: bool = True


class Holder(nn.Module):
    """A module that holds some of its parameters quantized.

    A module becomes one by a change of class, in place: hooks, training mode, references from elsewhere
    and everything else that hangs on the object stay. Codes and scales are buffers, under the parameter's
    own name and that name plus ``_scale`` and so on; so ``requires_grad_`` and optimizers pass them by.
    """

    specs: dict[str, Spec]
    format: Format
    """The format that was asked for; a parameter's own can differ where that one does not fit it."""
    source_class: type[nn.Module]
    parameter_order: list[str]
    combined_from: tuple[type[Holder], type[nn.Module]] | None = None

    def hold(self, name: str, spec: Spec, state: Mapping[str, Tensor]) -> None:
        """Put quantized tensors (``QuantizedTensor.state(name)``) in the place of the parameter ``name``."""
        self._parameters.pop(name, None)
        for key, tensor in state.items():
            self.__dict__.pop(key, None)
            self.register_buffer(key, tensor)
        self.specs[name] = spec

    def float_parameter(self, name: str) -> nn.Parameter:
        """The dequantized parameter as the module's own class expects it."""
        spec = self.specs[name]
        value = self.quantized(name).dequantize()
        if spec.transposed:
            value = value.transpose(-1, -2).contiguous()
        return nn.Parameter(value, requires_grad=spec.requires_grad)

    def quantized(self, name: str = "weight") -> QuantizedTensor:
        """The tensor held under ``name``, a view of the buffers as they are now."""
        codes = self._buffers[name]
        views: dict[str, QuantizedTensor] = self.__dict__.setdefault("_views", {})
        view = views.get(name)
        if view is None or view.codes is not codes or view.scale is not self._buffers[f"{name}_scale"]:
            spec = self.specs[name]
            view = QuantizedTensor.from_state(self._buffers, spec.format, spec.shape, spec.dtype, name)  # type: ignore[arg-type]
            views[name] = view
        return view

    def held_names(self) -> list[str]:
        """Names of all buffers that belong to quantized tensors."""
        return [name + suffix for name, spec in self.specs.items() for suffix in spec.format.layout(spec.shape)]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", None)
        if metadata is not None:
            metadata.setdefault(prefix[:-1], {})["format"] = str(self.format)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Refuse codes of another format, whose shapes can be the same (int4 and nf4)."""
        found = local_metadata.get("format")
        if found is not None and found != str(self.format):
            error_msgs.append(f"{prefix}weight is in format {found}; the module holds {self.format}")
            return
        self.__dict__.pop("_views", None)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    @property
    def packed_nbytes(self) -> int:
        """Bytes of the packed copies that kernels keep of this module's weights; they are never saved."""
        views: dict[str, QuantizedTensor] = self.__dict__.get("_views", {})
        return sum(view.packed_nbytes for view in views.values())

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is made anew when it is wanted."""
        return {name: value for name, value in self.__dict__.items() if name not in CACHES}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle a combined class by its two parts; it is in no module by its own name."""
        if self.combined_from is None:
            return super().__reduce_ex__(protocol)
        return _new_combined, self.combined_from, self.__getstate__()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move to a device as asked, but never change the dtype of codes and scales."""
        held = {name: self._buffers[name] for name in self.held_names()}
        order = list(self._buffers)
        for name in held:
            del self._buffers[name]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        others = dict(self._buffers)
        self._buffers.clear()
        for name in order:
            self._buffers[name] = others[name] if name in others else _moved(held[name], fn)
        self.__dict__.pop("_views", None)
        self._note_dtype(fn)
        return self

    def _note_dtype(self, fn: Callable[[Tensor], Tensor]) -> None:
        """``half()`` and the like change the dtype that the weight dequantizes to, and nothing stored."""
        for name, spec in self.specs.items():
            dtype = fn(torch.empty(0, dtype=spec.dtype)).dtype
            if dtype.is_floating_point and dtype != spec.dtype:
                self.specs[name] = replace(spec, dtype=dtype)


def _moved(tensor: Tensor | None, fn: Callable[[Tensor], Tensor]) -> Tensor | None:
    if tensor is None:
        return None
    moved = fn(tensor)
    if moved.dtype != tensor.dtype:
        moved = tensor.to(moved.device)
    if moved is not tensor and torch._has_compatible_shallow_copy_type(tensor, moved):
        tensor.data = moved  # in place, so that modules that share the tensor go on sharing it
        return tensor
    return moved


def become(module: nn.Module, new_class: type[Holder], format: Format) -> Holder:
    """Turn ``module`` into a ``new_class`` in place; :func:`unbecome` undoes it."""
    source = type(module)
    module.__class__ = new_class
    assert isinstance(module, Holder)
    module.source_class = source
    module.format = format
    module.specs = {}
    module.parameter_order = list(module._parameters)
    _rebind_wrapped_forward(module)
    return module


def unbecome(module: Holder, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Give the module its own class and ``parameters`` in the place of the quantized ones, in the old order."""
    for name in module.held_names():
        module._buffers.pop(name, None)
    source, everything = module.source_class, {**module._parameters, **parameters}
    names = [*module.parameter_order, *(name for name in everything if name not in module.parameter_order)]
    module._parameters = {name: everything[name] for name in names if name in everything}
    extra = () if issubclass(source, nn.Linear) else ("in_features", "out_features")
    for attribute in ("specs", "format", "source_class", "parameter_order", *FLAGS, *CACHES, *extra):
        module.__dict__.pop(attribute, None)
    module.__class__ = source  # type: ignore[assignment]
    _rebind_wrapped_forward(module)
    return module


_COMBINED: dict[tuple[type[Holder], type[nn.Module]], type[Holder]] = {}


def combine(holder: type[Holder], source: type[nn.Module]) -> type[Holder]:
    """A class that is both, ``holder``'s methods before ``source``'s: a model's own variant kept alive."""
    key = (holder, source)
    if key not in _COMBINED:
        _COMBINED[key] = type(f"Quantized{source.__name__}", key, {"combined_from": key})
    return _COMBINED[key]


def _new_combined(holder: type[Holder], source: type[nn.Module]) -> Holder:
    combined = combine(holder, source)
    return combined.__new__(combined)


def _rebind_wrapped_forward(module: nn.Module) -> None:
    """accelerate's hooks keep the bound forward of the old class; point them at the new one."""
    if "_old_forward" in module.__dict__:
        module.__dict__["_old_forward"] = type(module).forward.__get__(module)
