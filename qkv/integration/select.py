"""Which modules of a model are quantized and to what, and why the others are not. Works on meta models too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.compat import conv1d_class
from qkv.quantizers.embedding import QuantizedEmbedding, QuantizedScaledEmbedding
from qkv.quantizers.experts import QuantizedExperts, expert_parameters, parameter_format
from qkv.quantizers.format import Format
from qkv.quantizers.holder import Holder, combine
from qkv.quantizers.linear import QuantizedLinear

KEEP = "keep"
ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
HEADS = ("lm_head", "embed_out", "output_layer")
READS_WEIGHTS_ITSELF = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class Settings:
    """What to quantize, checked.

    Args:
        format: of the linear layers and experts.
        skip: names or patterns of modules to leave alone, see :func:`matches`.
        embeddings: format of embedding tables and of the output head; None leaves them as they are.
        overrides: other formats for modules by pattern, or ``"keep"``; the first that matches counts.
    """

    format: Format
    skip: tuple[str, ...] = ()
    embeddings: Format | None = None
    overrides: Mapping[str, Format | str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        format: str | Format,
        skip: str | list[str] | tuple[str, ...] | None = None,
        embeddings: str | Format | None = None,
        overrides: Mapping[str, str | Format] | None = None,
    ) -> Settings:
        """Read settings as users spell them."""
        names = (skip,) if isinstance(skip, str) else tuple(skip or ())
        for name in (*names, *(overrides or {})):
            if not isinstance(name, str) or not name.strip("."):
                raise QkvError(f"skip and overrides take module names or patterns such as 'mlp.gate'; got {name!r}")
        parsed = {k: v if v == KEEP else Format.parse(v) for k, v in (overrides or {}).items()}
        table = None if embeddings is None else Format.parse(embeddings)
        if table is not None and table.double_quant:
            raise QkvError(f"embeddings take no double quantization (a row is read at a time); got {table}")
        return cls(Format.parse(format), names, table, parsed)

    def format_for(self, name: str, default: Format) -> Format | str:
        """The format of module ``name``, or why it is left alone."""
        pattern = next((p for p in self.skip if matches(p, name)), None)
        if pattern is not None:
            return f"skipped: matches {pattern!r}"
        found = next((f for p, f in self.overrides.items() if matches(p, name)), default)
        return found if isinstance(found, Format) else "kept: overrides say so"

    def override_for(self, name: str) -> Format | None:
        """The format that ``overrides`` give ``name``, if any."""
        return next((f for p, f in self.overrides.items() if isinstance(f, Format) and matches(p, name)), None)


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


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches whole components of a dotted ``name``, at any place.

    ``"mlp"`` matches ``model.layers.0.mlp.up_proj``, ``"layers.*.mlp"`` too; ``"proj"`` matches neither
    ``q_proj`` nor anything but a component that is called ``proj``.
    """
    wanted, parts = pattern.strip(".").split("."), name.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[start:], wanted, strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )


def select(model: nn.Module, settings: Settings) -> tuple[list[Target], list[Kept]]:
    """Split a model's modules into those to quantize and those to keep, each once, in the model's order."""
    _check_patterns(model, settings)
    users = _users(model)
    head = output_head(model)
    opaque = _inside_opaque(model)
    targets, kept = [], []
    counted: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, Holder) or not any(p is not None for p in module._parameters.values()):
            continue
        if name in opaque:
            answer: Target | str = f"inside {opaque[name]}, which reads the weight itself"
        else:
            answer = _target(name, module, settings, users, head)
        if isinstance(answer, Target):
            targets.append(answer)
        elif any(p is not None and p.dim() > 1 for p in module._parameters.values()):
            own = {id(users[id(p)]): p for p in module._parameters.values() if p is not None}
            nbytes = sum(p.nbytes for key, p in own.items() if key not in counted)
            kept.append(Kept(name, nbytes, answer if nbytes else f"{answer}, tied"))
            counted |= own.keys()
    return targets, kept


def _check_patterns(model: nn.Module, settings: Settings) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in (*settings.skip, *settings.overrides):
        if not any(matches(pattern, name) for name in names):
            raise QkvError(
                f"{pattern!r} matches no module; patterns match whole components of names such as {names[-1]!r}"
            )


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
    if any(isinstance(_kind(user), str) for user in tied):
        return "shares its weight with a module that cannot be quantized"
    if set(name.split(".")) & set(ADAPTERS):
        return "adapter, trained in full precision"
    format = settings.format_for(name, default)
    if isinstance(format, str):
        return format
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
    if source is nn.Linear:
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


def _users(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Modules by the id of the parameters they hold, so that sharing is seen whatever the names.

    Parameters that are different objects over the same storage count as the same one.
    """
    by_storage: dict[tuple[int, int], list[nn.Module]] = {}
    keys: dict[int, tuple[int, int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            key = (id(parameter), 0)
            if parameter.device.type != "meta" and parameter.numel():
                key = (parameter.data_ptr(), parameter.numel())
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
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, READS_WEIGHTS_ITSELF):
            prefix = f"{name}." if name else ""
            found |= {prefix + child: type(module).__name__ for child, _ in module.named_modules() if child}
    return found

