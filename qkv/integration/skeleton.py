"""A model without weights, built from its config.json, that says which tensors of a checkpoint are linear layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qkv.integration.compat import checkpoint_renamer
from qkv.integration.select import Target, select
from qkv.integration.settings import Settings
from qkv.quantizers.experts import expert_parameters, experts_refuse, parameter_format
from qkv.quantizers.format import Format

HEAD_NAMES = ("lm_head", "embed_out", "output_layer")
TABLE_WORDS = ("embed", "wte", "wpe")
OTHER_WORDS = ("norm", "router", "ln_", "conv", "lora_")
OTHER_NAMES = ("gate", "shared_expert_gate", "relative_attention_bias", "score", "classifier")


@dataclass(frozen=True)
class Choice:
    """What becomes of one tensor: a format, or None and the reason; and the parameter that it is, or is part of."""

    format: Format | None
    reason: str = ""
    transposed: bool = False
    parameter: str = ""


class Chooser:
    """Decides, tensor by tensor, what a checkpoint's quantization does.

    Args:
        directory: the model's folder; its config.json says which class of transformers it is. Code that
            comes with a model is never run: such a model's layers are told by their names.
        settings: what to quantize.
        names: of the tensors, to check patterns against where the model is not known.

    Raises:
        QkvError: a pattern that matches no module.
    """

    def __init__(self, directory: Path, settings: Settings, names: Iterable[str] = ()) -> None:
        self.settings = settings
        self.note = ""
        """Why the layers are told by name, if they are."""
        self._targets: dict[str, Target] = {}
        self._reasons: dict[str, str] = {}
        self._covered: set[int] = set()
        self._users: dict[int, list[str]] = {}
        self._renamed: dict[str, Format] = {}
        self._matrices: list[str] = []
        try:
            model = build_skeleton(directory)
            self._rename = checkpoint_renamer(model)
        except Exception as error:  # transformers raises anything for a model that it cannot build
            self.note = f"layers told by name, for transformers cannot build the model: {first_line(error)}"
            settings.check_patterns(name.rpartition(".")[0] for name in names)
            return
        targets, kept = select(model, settings)
        self._targets = {f"{target.name}.{name}": target for target in targets for name in target.formats}
        self._reasons = {row.name: row.reason for row in kept}
        for target in targets:
            for name in target.formats:
                self._users.setdefault(id(target.module._parameters[name]), []).append(target.name)
        self._matrices = [name for name, module in model.named_modules() if _has_matrix(module)]

    def choose(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Choice:
        """The choice for a tensor as it lies in the file."""
        if len(shape) < 2 or not dtype.is_floating_point or prod(shape) == 0:
            return Choice(None, "not a matrix of floats")
        if self.note:
            return _choose_by_name(name, shape, self.settings)
        found, reshaped = self._rename(name)
        target = self._targets.get(found)
        module = found.rpartition(".")[0]
        if target is None:
            return Choice(None, self._reasons.get(module, "not in the model that transformers builds"))
        if reshaped and "experts" not in found.split("."):
            return Choice(None, "transformers takes it apart or together while loading")
        self._covered.add(id(target.module._parameters[found.rpartition(".")[2]]))
        columns = shape[-2] if target.transposed else shape[-1]
        if found != name and target.format != self.settings.format:
            self._renamed[_module_in_file(name)] = target.format
        return Choice(parameter_format(found, target.format, columns), transposed=target.transposed, parameter=found)

    def sharers(self, parameter: str) -> tuple[str, ...]:
        """Names of the modules whose weight the parameter is, in the model's order."""
        weight = self._targets[parameter].module._parameters[parameter.rpartition(".")[2]]
        return tuple(dict.fromkeys(self._users[id(weight)]))

    def kept_modules(self, quantized: Iterable[str]) -> tuple[str, ...]:
        """The model's modules with a matrix, embedding tables aside, less those that are ``quantized``."""
        taken = set(quantized)
        return tuple(name for name in self._matrices if name not in taken)

    def final_settings(self) -> Settings:
        """The settings to write: modules that no tensor of the files could be quantized for are skipped, and those
        whose tensors have other names in the files are named as there, too."""
        uncovered = {
            target.name
            for target in self._targets.values()
            for name in target.formats
            if id(target.module._parameters[name]) not in self._covered
        }
        tables = {t.name: t.format for t in self._targets.values() if _is_table(t, self.settings)}
        s = self.settings
        skip = (*s.skip, *sorted(uncovered))
        return Settings(s.format, skip, s.embeddings, {**s.overrides, **tables, **self._renamed})


def _module_in_file(name: str) -> str:
    """The module of a tensor by its name in a file; of an expert's, all the experts of the layer."""
    parts = name.split(".")
    return ".".join(parts[: parts.index("experts") + 1] if "experts" in parts else parts[:-1])


def build_skeleton(directory: Path) -> nn.Module:
    """The model of a folder's config.json on the meta device, which takes no memory."""
    import transformers

    with warnings.catch_warnings(), torch.device("meta"), _Uninitialized():
        warnings.simplefilter("ignore")
        config: Any = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        architecture = str((getattr(config, "architectures", None) or [""])[0])
        model_class = getattr(transformers, architecture, None) if architecture.isidentifier() else None
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            return model_class(config)  # type: ignore[no-any-return]
        return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


class _Uninitialized(TorchFunctionMode):
    """Leaves weights as they are: on the meta device, random numbers take most of the time and change nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _has_matrix(module: nn.Module) -> bool:
    """Whether a loader that looks for linear layers or experts may mean the module."""
    if isinstance(module, nn.Embedding):
        return False
    weight = module._parameters.get("weight")
    return (weight is not None and weight.dim() == 2) or bool(expert_parameters(module))


def _is_table(target: Target, settings: Settings) -> bool:
    return settings.embeddings is not None and target.format == settings.embeddings != settings.format


def _choose_by_name(name: str, shape: tuple[int, ...], settings: Settings) -> Choice:
    module, _, leaf = name.rpartition(".")
    parts = module.split(".")
    fused_expert = len(shape) == 3 and "experts" in name.split(".") and not leaf.endswith("bias")
    if not fused_expert and (leaf != "weight" or len(shape) != 2):
        return Choice(None, "not a linear layer by its name and shape")
    if any(word in part for part in parts for word in OTHER_WORDS) or parts[-1] in OTHER_NAMES:
        return Choice(None, "not a linear layer by its name")
    default = settings.format
    if parts[-1] in HEAD_NAMES or any(word in parts[-1] for word in TABLE_WORDS):
        if settings.embeddings is None:
            return Choice(None, "embedding table or output head, kept by default")
        default = settings.embeddings
    format = settings.format_for(module, default)
    if isinstance(format, str):
        return Choice(None, format)
    reason = experts_refuse(format, shape[-1]) if "experts" in name.split(".") else None
    return Choice(None if reason else parameter_format(name, format, shape[-1]), reason or "")


def first_line(error: Exception) -> str:
    """What an error says, shortened to a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
