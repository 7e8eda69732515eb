"""Which modules of a model are quantized and to what, and why the others are not. Works on meta models too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.compat import conv1d_class
from qkv.integration.settings import Settings
from qkv.quantizers.embedding import QuantizedEmbedding, QuantizedScaledEmbedding
from qkv.quantizers.experts import QuantizedExperts, expert_parameters, experts_refuse, parameter_format
from qkv.quantizers.float_linear import FloatLinear
from qkv.quantizers.format import Format
from qkv.quantizers.holder import Holder, combine
from qkv.quantizers.linear import QuantizedLinear

ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
HEADS = ("lm_head", "embed_out", "output_layer")
READS_WEIGHTS_ITSELF = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Target:
    """A module to quantize: the class it becomes and the formats of its parameters."""

    name: str
    module: nn.Module
    new_class: type[Holder]
    format: Format
    formats: Mapping[str, Format]
    transposed: bool = False


@dataclass(frozen=True)
class Kept:
    """A module that holds parameters of its own and is left alone."""

    name: str
    nbytes: int
    reason: str


def select(model: nn.Module, settings: Settings) -> tuple[list[Target], list[Kept]]:
    """Split a model's modules into those to quantize and those to keep, each once, in the model's order.

    Raises:
        QkvError: a pattern that matches nothing, a weight that is not there yet, or one weight that the
            settings give two formats.
    """
    settings.check_patterns(name for name, _ in model.named_modules())
    _check_initialized(model)
    users = _users(model)
    answers = _agree(_answers(model, settings, users), users)
    kept: list[Kept] = []
    counted: set[int] = set()
    for name, module, answer in answers:
        matrices = [p for p in module._parameters.values() if p is not None and p.dim() > 1]
        if isinstance(answer, str) and matrices:
            own = {id(users[id(p)]): p for p in module._parameters.values() if p is not None}
            nbytes = sum(p.nbytes for key, p in own.items() if key not in counted)
            kept.append(Kept(name, nbytes, answer if nbytes else f"{answer}, tied"))
            counted |= own.keys()
    return [answer for _, _, answer in answers if isinstance(answer, Target)], kept


Answer = tuple[str, nn.Module, "Target | str"]


def _answers(model: nn.Module, settings: Settings, users: dict[int, list[nn.Module]]) -> list[Answer]:
    """Each module that holds parameters, with what it becomes or why it does not."""
    head, opaque = output_head(model), _inside_opaque(model)
    answers: list[Answer] = []
    for name, module in model.named_modules():
        if isinstance(module, Holder) or not any(p is not None for p in module._parameters.values()):
            continue
        if name in opaque:
            answers.append((name, module, f"inside {opaque[name]}, which reads the weight itself"))
        else:
            answers.append((name, module, _target(name, module, settings, users, head)))
    return answers


def _agree(answers: list[Answer], users: dict[int, list[nn.Module]]) -> list[Answer]:
    """Make modules that share a weight agree: one that is kept keeps all, so that nothing is untied."""
    by_module = {id(module): (name, answer) for name, module, answer in answers}
    agreed: list[Answer] = []
    for name, module, answer in answers:
        if isinstance(answer, Target):
            for parameter in answer.formats:
                sharers = [by_module.get(id(u), ("", "")) for u in users[id(module._parameters[parameter])]]
                answer = _agreed(answer, sharers)
                if isinstance(answer, str):
                    break
        agreed.append((name, module, answer))
    return agreed


def _agreed(target: Target, sharers: list[tuple[str, Target | str]]) -> Target | str:
    for name, answer in sharers:
        if isinstance(answer, str):
            return f"shares its weight with {name}, which is kept"
        if answer.format != target.format:
            raise QkvError(
                f"{target.name} and {name} share one weight, and the settings give them {target.format} and "
                f"{answer.format}; name the same format for both"
            )
    return target


def _check_initialized(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter):
            raise QkvError(f"{name} has no shape yet; run the model once before quantizing it")


def _target(
    name: str, module: nn.Module, settings: Settings, users: dict[int, list[nn.Module]], head: nn.Module | None
) -> Target | str:
    kind = _kind(module)
    if isinstance(kind, str):
        return kind
    new_class, parameters, transposed = kind
    table = issubclass(new_class, QuantizedEmbedding)
    tied = [user for p in parameters for user in users[id(module._parameters[p])] if user is not module]
    is_head = module is head or name.split(".")[-1] in HEADS or any(isinstance(user, nn.Embedding) for user in tied)
    default = settings.format
    if table or is_head:
        if settings.embeddings is None:
            return "embedding table, kept by default" if table else "output head, kept by default"
        default = settings.embeddings
    if set(name.split(".")) & set(ADAPTERS):
        return "adapter, trained in full precision"
    format = settings.format_for(name, default)
    if isinstance(format, str):
        return format
    columns = [_size(module._parameters[p], -2 if transposed else -1) for p in parameters]
    reason = next((r for c in columns if (r := experts_refuse(format, c))), None)
    if reason and issubclass(new_class, QuantizedExperts):
        return reason
    return Target(name, module, new_class, format, _formats(name, module, parameters, format, transposed), transposed)


def _formats(
    name: str, module: nn.Module, parameters: list[str], format: Format, transposed: bool
) -> dict[str, Format]:
    columns = {p: _size(module._parameters[p], -2 if transposed else -1) for p in parameters}
    return {p: parameter_format(f"{name}.{p}", format, columns[p]) for p in parameters}


def _size(parameter: Tensor | None, dim: int) -> int:
    assert parameter is not None
    return parameter.shape[dim]


def _kind(module: nn.Module) -> tuple[type[Holder], list[str], bool] | str:
    """The class a module becomes, its parameters to quantize, whether they are transposed; or why none."""
    source = type(module)
    if isinstance(module, nn.Linear | nn.Embedding) and module._parameters.get("weight") is None:
        return f"{source.__name__} whose weight is computed, not stored"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return f"{source.__name__} that changes its rows as it reads them (max_norm)"
    if source in (nn.Linear, FloatLinear):
        return QuantizedLinear, ["weight"], False
    if source is conv1d_class():
        return QuantizedLinear, ["weight"], True
    if source is nn.Embedding:
        return QuantizedEmbedding, ["weight"], False
    if isinstance(module, nn.Embedding) and hasattr(module, "embed_scale"):
        return combine(QuantizedScaledEmbedding, source), ["weight"], False
    experts = expert_parameters(module)
    if experts:
        return combine(QuantizedExperts, source), experts, bool(module.is_transposed)
    if isinstance(module, nn.Linear | nn.Embedding):
        return f"{source.__name__}, a variant of {source.__mro__[1].__name__} that may use its weight itself"
    return f"{source.__name__}, not a linear layer"


def memory_key(tensor: Tensor) -> tuple[int, ...]:
    """Equal for tensors over the same memory; on the meta device, for the same tensor."""
    if tensor.device.type == "meta" or not tensor.numel():
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.nbytes)


def _users(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Modules by the id of the parameters they hold, so that sharing is seen whatever the names.

    Parameters that are different objects over the same storage count as the same one.
    """
    by_storage: dict[tuple[int, ...], list[nn.Module]] = {}
    keys: dict[int, tuple[int, ...]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            key = memory_key(parameter)
            keys[id(parameter)] = key
            by_storage.setdefault(key, []).append(module)
    return {identity: by_storage[key] for identity, key in keys.items()}


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits, as a transformers model names it."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    return head if isinstance(head, nn.Module) else None


def _inside_opaque(model: nn.Module) -> dict[str, str]:
    """Modules below torch's own attention and transformer layers, whose fast paths take the weights directly."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, READS_WEIGHTS_ITSELF):
            prefix = f"{name}." if name else ""
            found |= {prefix + child: type(module).__name__ for child, _ in module.named_modules() if child}
    return found
