"""The transformers plug-in: ``quant_method: "qkv"`` for ``from_pretrained`` and ``save_pretrained``.

Importing this module registers it; without it, transformers refuses a qkv checkpoint because the shapes of
its packed weights (three dimensions for a matrix) fit no layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from qkv.errors import QkvError
from qkv.integration.announce import announce
from qkv.integration.compat import copy_converter
from qkv.integration.mapped import detach_from_files, return_freed_memory
from qkv.integration.select import Target, select
from qkv.integration.settings import FORMAT_VERSION, Settings, matches
from qkv.quantizers.format import SUFFIXES, Format
from qkv.quantizers.holder import Holder, Spec, become
from qkv.quantizers.quantize import quantize_tensor

METHOD = "qkv"


@register_quantization_config(METHOD)
class QkvConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """``AutoModelForCausalLM.from_pretrained(id, quantization_config=QkvConfig("nf4"))``.

    Args:
        format: of the linear layers and experts.
        skip: names or patterns of modules that stay as they are.
        embeddings: format of embedding tables and the output head; None leaves them.
        overrides: other formats by pattern, or ``"keep"``.
        format_version: of what is written; 1.
    """

    def __init__(
        self,
        format: str | Format = "nf4",
        skip: list[str] | None = None,
        embeddings: str | Format | None = None,
        overrides: dict[str, str] | None = None,
        format_version: int = FORMAT_VERSION,
        **others: Any,
    ) -> None:
        if format_version != FORMAT_VERSION:
            raise QkvError(f"format_version {format_version} is newer than {FORMAT_VERSION}; update qkv to read it")
        settings = Settings.parse(format, skip, embeddings, overrides)
        self.quant_method = METHOD
        self.format_version = format_version
        self.format = str(settings.format)
        self.skip = list(settings.skip)
        self.embeddings = None if settings.embeddings is None else str(settings.embeddings)
        self.overrides = {pattern: str(value) for pattern, value in settings.overrides.items()}
        self.others = others

    @classmethod
    def from_settings(cls, settings: Settings, **others: Any) -> QkvConfig:
        """The config that stands for ``settings``; ``others`` are written along with them."""
        overrides = {pattern: str(value) for pattern, value in settings.overrides.items()}
        return cls(settings.format, list(settings.skip), settings.embeddings, overrides, **others)

    @property
    def settings(self) -> Settings:
        """The checked settings."""
        return Settings.parse(self.format, self.skip, self.embeddings, self.overrides)

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        own = {k: getattr(self, k) for k in ("quant_method", "format_version", "format", "skip", "embeddings")}
        return {**own, "overrides": self.overrides, **self.others}


class QkvQuantize(ConversionOps):  # type: ignore[misc]
    """Quantizes one float parameter as it is read."""

    def __init__(self, hf_quantizer: QkvHfQuantizer) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(self, input_dict: dict[str, Any], model: nn.Module, **others: Any) -> dict[str, Tensor]:
        """One float tensor in, its codes and scales out, under the names of the module's buffers."""
        result: dict[str, Tensor] = {}
        for full_name, value in input_dict.items():
            module, name = _owner(model, full_name)
            tensor = value[0] if isinstance(value, list) else value
            result |= quantize_into(module, name, tensor, full_name)
        return result


def quantize_into(module: Holder, name: str, value: Tensor, full_name: str) -> dict[str, Tensor]:
    """Quantize ``value`` as ``module.specs[name]`` says; full names of its buffers and the tensors for them."""
    spec = module.specs[name]
    weight = quantize_tensor(value.transpose(-1, -2) if spec.transposed else value, spec.format, name=full_name)
    prefix = full_name.removesuffix(name)
    return {prefix + key: tensor.to(value.device) for key, tensor in weight.state(name).items()}


@register_quantizer(METHOD)
class QkvHfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts the drop-in modules into a model before its weights are loaded."""

    requires_calibration = False
    serialized_names: ClassVar = {"weight": ["weight", *("weight" + suffix for suffix in SUFFIXES)]}
    quantization_config: QkvConfig
    _prepared: nn.Module | None = None

    def _process_model_before_weight_loading(self, model: nn.Module, **others: Any) -> None:
        targets, _ = select(model, self._settings_for(model))
        for target in targets:
            _put_holder(target, self.pre_quantized)
        _tie_scales(model)
        self._prepared = model

    def _settings_for(self, model: nn.Module) -> Settings:
        """The settings, less patterns that name modules which transformers fuses or drops while loading."""
        settings = self.quantization_config.settings
        if not self.pre_quantized:
            return settings
        names = [name for name, _ in model.named_modules()]
        skip = tuple(p for p in settings.skip if any(matches(p, name) for name in names))
        overrides = {p: f for p, f in settings.overrides.items() if any(matches(p, name) for name in names)}
        return Settings(settings.format, skip, settings.embeddings, overrides)

    def param_needs_quantization(self, model: nn.Module, param_name: str, **others: Any) -> bool:
        """Whether the float parameter of this name is to be quantized while loading."""
        if self.pre_quantized:
            return False
        module, name = _owner(model, param_name)
        return isinstance(module, Holder) and name in module.specs

    def get_quantize_ops(self) -> QkvQuantize:
        """The operation that quantizes while loading."""
        return QkvQuantize(self)

    def get_weight_conversions(self) -> list[Any]:
        """None: every tensor loads by its name."""
        return []

    def update_weight_conversions(self, weight_conversions: list[Any], model: nn.Module | None = None) -> list[Any]:
        """Let what fuses the experts' weights fuse their scales and zero points too, and split them on saving.

        Older versions of transformers do not pass the model; it is the one that was prepared just before.
        """
        model = model if model is not None else self._prepared
        assert model is not None
        buffers = [name for name, _ in model.named_buffers()]
        updated = []
        known = {tuple(c._original_source_patterns) for c in weight_conversions if isinstance(c, WeightConverter)}
        for converter in weight_conversions:
            updated.append(converter)
            if isinstance(converter, WeightConverter):
                found = _companions(converter, buffers)
                updated += [c for c in found if tuple(c._original_source_patterns) not in known]
        return updated

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Scales keep the dtype they are stored in; so does what the model was not asked to cast."""
        return dtype

    def _process_model_after_weight_loading(self, model: nn.Module, **others: Any) -> nn.Module:
        _settle(model)
        announce(model)
        self._prepared = None
        detach_from_files(model)
        return_freed_memory()
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
        from qkv.integration.patch import dequantize_

        return dequantize_(model)

    def is_serializable(self) -> bool:
        """Yes: everything is a plain tensor."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters on top train; the quantized weights do not."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Yes."""
        return True


def _owner(model: nn.Module, full_name: str) -> tuple[Any, str]:
    path, _, name = full_name.rpartition(".")
    return model.get_submodule(path), name


def _put_holder(target: Target, pre_quantized: bool) -> None:
    """Turn a module whose parameters are on the meta device into its drop-in, buffers on meta too.

    What is quantized while loading keeps its float parameter until then, which tells in what dtype to read it.
    """
    module = become(target.module, target.new_class, target.format)
    for name, format in target.formats.items():
        parameter = module._parameters[name]
        assert parameter is not None
        shape = tuple(parameter.shape)
        if target.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        layout = format.layout(shape)
        state = {name + suffix: torch.empty(s, dtype=d, device="meta") for suffix, (s, d) in layout.items()}
        module.hold(name, Spec(format, shape, parameter.dtype, target.transposed), state)
        if not pre_quantized:
            del module._buffers[name]
            module.register_parameter(name, parameter)
        if target.transposed and isinstance(module, nn.Linear):
            module.out_features, module.in_features = shape


def _tie_scales(model: nn.Module) -> None:
    """A head that shares a quantized table's codes shares its scales as well.

    transformers ties parameters, not buffers, so what is tied is parameters until the loading is over.
    """
    tied: dict[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]
    for name, source in list(tied.items()):
        owner, parameter = _owner(model, source)
        if isinstance(owner, Holder) and parameter in owner.specs:
            spec = owner.specs[parameter]
            for suffix in spec.format.layout(spec.shape):
                tied[name + suffix] = source + suffix
                for full_name in (name + suffix, source + suffix):
                    holder, key = _owner(model, full_name)
                    buffer = holder._buffers.pop(key, None)
                    if buffer is not None:
                        holder.register_parameter(key, nn.Parameter(buffer, requires_grad=False))


def _settle(model: nn.Module) -> None:
    """Make buffers of the quantized tensors that were parameters while loading; what was tied is one tensor still."""
    tensors: dict[int, Tensor] = {}
    for module in model.modules():
        if not isinstance(module, Holder):
            continue
        for key in module.held_names():
            parameter = module._parameters.pop(key, None)
            if parameter is not None:
                module.register_buffer(key, tensors.setdefault(id(parameter), parameter.detach()))
        module.__dict__.pop("_views", None)


def _companions(converter: Any, buffers: list[str]) -> list[Any]:
    """Copies of ``converter`` that carry scales and zero points the way it carries the weights."""
    sources = converter._original_source_patterns
    targets = converter._original_target_patterns
    if not all(source.endswith(".weight") for source in sources):
        return []
    tails = tuple(target.rsplit(".", 1)[-1] for target in targets)
    found = [s for s in ("_scale", "_zero") if any(b.endswith(tuple(t + s for t in tails)) for b in buffers)]
    return [
        copy_converter(converter, [source + s for source in sources], [target + s for target in targets]) for s in found
    ]
