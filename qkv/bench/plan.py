"""What is measured: the sizes of every subject, the usual ones or those of a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Final, NamedTuple

from qkv.errors import QkvError
from qkv.quantizers.format import Format


class Heads(NamedTuple):
    """An attention layer's shape."""

    query: int
    kv: int
    dim: int


LLAMA_3_8B: Final = Heads(32, 8, 128)


@dataclass(frozen=True)
class Plan:
    """The sizes of every subject.

    Args:
        shapes: ``(out, in)`` of the linear layers.
        rows: rows of x.
        formats: of the weights.
        heads: of the attention; ``contexts`` the tokens it reads, ``queries`` how many read them at once.
        quantize: ``(out, in)`` of the tensors to quantize.
        models: directories to load and decode with; where there are none, ``widths`` of random models.
        new_tokens, prefill: tokens to generate, and to read at once.
        rounds: turns of each entrant.
        peers: whether what else is installed runs beside.
    """

    shapes: tuple[tuple[int, int], ...] = ((576, 576), (1536, 576), (4096, 4096), (11008, 4096))
    rows: tuple[int, ...] = (1, 4, 8, 16, 64)
    formats: tuple[str, ...] = ("nf4", "int4", "int8", "int8:asym")
    heads: Heads = LLAMA_3_8B
    contexts: tuple[int, ...] = (4096, 16384, 65536)
    queries: tuple[int, ...] = (1, 4, 8, 16)
    quantize: tuple[tuple[int, int], ...] = ((1536, 576), (4096, 4096))
    models: tuple[Path, ...] = ()
    widths: tuple[int, ...] = (512, 1024, 2048)
    new_tokens: int = 32
    prefill: int = 256
    rounds: int = 9
    peers: bool = True

    def __post_init__(self) -> None:
        for name in ("shapes", "rows", "formats", "contexts", "queries", "quantize"):
            if not getattr(self, name):
                raise QkvError(f"nothing to measure: {name} is empty")
        if min(self.rows + self.contexts + self.queries) < 1 or self.rounds < 1:
            raise QkvError("rows, contexts, queries and rounds are whole numbers from 1")


MAX_SHAPES: Final = 4


def plan_of_model(path: str | Path) -> Plan:
    """The usual plan with a model's own shapes: its linear layers, heads and weights.

    Raises:
        QkvError: no directory, or one that transformers cannot build a model from.
    """
    from qkv.checkpoint.source import Source
    from qkv.integration.select import select
    from qkv.integration.settings import Settings
    from qkv.integration.skeleton import build_skeleton

    directory = Path(path)
    Source.open(directory).require_config()
    try:
        model = build_skeleton(directory)
    except Exception as error:  # transformers raises anything for a model that it cannot build
        raise QkvError(f"{directory}: transformers cannot build this model ({str(error).splitlines()[0]})") from error
    targets, _ = select(model, Settings(Format("nf4")))
    shapes = _commonest([tuple(t.module._parameters[name].shape) for t in targets for name in t.formats])  # type: ignore[union-attr]
    plan = replace(
        Plan(), shapes=shapes, quantize=(max(shapes, key=prod),), models=(directory,), formats=("nf4", "int8")
    )
    config = model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]
    query = getattr(config, "num_attention_heads", None)
    if not query:
        return plan
    kv = getattr(config, "num_key_value_heads", None) or query
    dim = getattr(config, "head_dim", None) or config.hidden_size // query
    longest = getattr(config, "max_position_embeddings", None) or max(plan.contexts)
    contexts = tuple(n for n in plan.contexts if n <= longest) or (longest,)
    return replace(plan, heads=Heads(query, kv, dim), contexts=contexts)


def _commonest(shapes: list[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """The shapes with the most elements in all, largest share first."""
    weight: dict[tuple[int, int], int] = {}
    for shape in shapes:
        if len(shape) == 2:
            weight[shape[0], shape[1]] = weight.get((shape[0], shape[1]), 0) + prod(shape)
    if not weight:
        raise QkvError("this model has no linear layer that can be quantized")
    return tuple(sorted(weight, key=lambda shape: -weight[shape])[:MAX_SHAPES])
