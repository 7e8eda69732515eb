"""Patch a live model: ``quantize_``, ``dequantize_`` and the context manager ``patched``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.announce import announce, put_marks, take_marks, withdraw
from qkv.integration.calibration import Calibration
from qkv.integration.mapped import detach_from_files, return_freed_memory
from qkv.integration.report import PatchedRow, PatchReport
from qkv.integration.select import Target, memory_key, select
from qkv.integration.settings import Settings
from qkv.progress import Progress
from qkv.quantizers.format import Format
from qkv.quantizers.holder import Holder, Spec, become, unbecome
from qkv.quantizers.quantize import check_quantizable, quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor

Model = TypeVar("Model", bound=nn.Module)


def quantize_(
    model: nn.Module,
    format: str | Format = "nf4",
    *,
    skip: str | list[str] | tuple[str, ...] | None = None,
    embeddings: str | Format | None = None,
    overrides: Mapping[str, str | Format] | None = None,
    calibration: Calibration | None = None,
) -> PatchReport:
    """Quantize a model's linear layers in place, on whatever device they are, and free what they held.

    Linear layers, GPT-2's ``Conv1D`` and the fused experts of transformers 5 change their class and keep
    everything else: hooks, training mode, biases, references from elsewhere. Embedding tables and the
    output head stay as they are unless ``embeddings`` names a format; tied ones stay tied.

    Args:
        model: any module; nothing is changed unless every weight can be quantized.
        format: see :meth:`Format.parse`.
        skip: module names or patterns of whole components: ``"mlp"``, ``"layers.0"``, ``"layers.*.q_proj"``.
        embeddings: format for embedding tables and the output head, for example ``"int8"``.
        overrides: other formats by pattern, ``{"self_attn": "int8", "layers.0": "keep"}``; first match counts.
        calibration: what :func:`qkv.calibrate` collected from this model; scales are searched by it.

    Returns:
        What was quantized and what was not, in bytes, and why.

    Raises:
        QkvError: nothing to quantize, a weight without values (meta device), NaN or infinity, a
            pattern that matches nothing, or a calibration of another model.
    """
    settings = Settings.parse(format, skip, embeddings, overrides)
    targets, kept = select(model, settings)
    if not targets:
        raise QkvError(_nothing_to_do(model))
    for target in targets:
        for name in target.formats:
            check_quantizable(_parameter(target.module, name), f"{target.name}.{name}".lstrip("."))
    if calibration is not None:
        _check_calibration(calibration, targets)
    rows = _quantize_targets(targets, calibration)
    detach_from_files(model)
    return_freed_memory()
    announce(model)
    known = {} if calibration is None else calibration.importance
    missing = [row.name for row in rows if row.name not in known] if calibration is not None else []
    return PatchReport(rows, kept, missing)


def _check_calibration(calibration: Calibration, targets: list[Target]) -> None:
    parameters = {_join(t.name, name): _parameter(t.module, name) for t in targets for name in t.formats}
    calibration.check_covers(parameters)
    for name, parameter in parameters.items():
        calibration.check_weight(name, parameter)


def dequantize_(model: Model) -> Model:
    """Give every quantized module of ``model`` its own class and a float weight back, in place.

    The weights are those the quantized ones stand for, not the originals; :func:`patched` restores those.
    """
    holders = [module for module in model.modules() if isinstance(module, Holder)]
    uses = Counter(id(module._buffers[name]) for module in holders for name in module.specs)
    shared: dict[int, tuple[Tensor | None, nn.Parameter]] = {}
    for module in holders:
        parameters = {name: _float_parameter(module, name, uses, shared) for name in module.specs}
        unbecome(module, parameters)
    return_freed_memory()
    withdraw(model)
    return model


def _float_parameter(
    module: Holder, name: str, uses: Counter[int], shared: dict[int, tuple[Tensor | None, nn.Parameter]]
) -> nn.Parameter:
    """The parameter, made once where several modules share its codes (kept alive, so that ids stay theirs)."""
    codes = module._buffers[name]
    if uses[id(codes)] == 1:
        return module.float_parameter(name)
    if id(codes) not in shared:
        shared[id(codes)] = (codes, module.float_parameter(name))
    return shared[id(codes)][1]


@contextmanager
def patched(model: Model, format: str | Format = "nf4", **options: Any) -> Iterator[Model]:
    """Quantize ``model`` for the length of a ``with`` block; afterwards the original modules are back.

    The original weights stay in memory meanwhile, so this compares formats; it saves nothing.

    Args:
        model: any module.
        format: see :meth:`Format.parse`.
        **options: those of :func:`quantize_`.
    """
    before = {module: (type(module), dict(module._parameters), dict(module._buffers)) for module in model.modules()}
    marks = take_marks(model)
    try:
        quantize_(model, format, **options)
        yield model
    finally:
        for module, (source, parameters, buffers) in before.items():
            if type(module) is not source:
                assert isinstance(module, Holder)
                unbecome(module, {})
                module._parameters, module._buffers = parameters, buffers
        put_marks(model, marks)


def _quantize_targets(targets: list[Target], calibration: Calibration | None) -> list[PatchedRow]:
    """Quantize one parameter at a time, once for all modules that share it, letting each float weight go."""
    uses = Counter(memory_key(_parameter(t.module, name)) for t in targets for name in t.formats)
    shared: dict[tuple[int, ...], tuple[nn.Parameter, QuantizedTensor]] = {}
    rows = []
    with Progress("quantizing", len(targets)) as progress:
        for target in targets:
            become(target.module, target.new_class, target.format)
            for name, format in target.formats.items():
                parameter = _parameter(target.module, name)
                key = memory_key(parameter)
                first = key not in shared
                importance = None if calibration is None else calibration.importance.get(_join(target.name, name))
                weight = _quantize(target, parameter, format, importance) if first else shared[key][1]
                if uses[key] > 1:
                    shared[key] = (parameter, weight)
                _hold(target, name, parameter, weight)
                if first:
                    rows.append(PatchedRow(_join(target.name, name), str(format), parameter.nbytes, weight.nbytes))
                del parameter
            progress.advance(target.name)
    return rows


def _quantize(target: Target, parameter: nn.Parameter, format: Format, importance: Tensor | None) -> QuantizedTensor:
    value = parameter.detach().transpose(-1, -2) if target.transposed else parameter.detach()
    return quantize_tensor(value, format, importance=importance, name=target.name)


def _hold(target: Target, name: str, parameter: nn.Parameter, weight: QuantizedTensor) -> None:
    module = target.module
    assert isinstance(module, Holder)
    spec = Spec(weight.format, weight.shape, weight.dtype, target.transposed, parameter.requires_grad)
    state = weight.state(name)
    module.hold(name, spec, state)
    if isinstance(module, nn.Linear) and target.transposed:
        module.out_features, module.in_features = weight.shape


def _parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def _join(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _nothing_to_do(model: nn.Module) -> str:
    if any(isinstance(module, Holder) for module in model.modules()):
        return "every linear layer of the model is quantized already; dequantize_(model) undoes it"
    return f"{type(model).__name__} has no linear layer that the settings let be quantized; see skip and embeddings"
