"""The config block of compressed-tensors: which modules have which scheme, in words that every loader takes alike."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from qkv.checkpoint.layouts.base import Plan
from qkv.errors import QkvError
from qkv.quantizers.format import Format

EXPERTS: Final = "re:.*[.]experts[.].*"
FUSED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers that servers run as one, which need one format."""


def config_groups(plan: Plan) -> dict[str, Any]:
    """``{"group_0": ...}``, one a format.

    A single format targets every ``Linear`` that is not ignored. Several name their modules, because a
    server that fuses layers looks for the class before it looks for the names of the parts; experts are
    meant by a pattern, by which transformers knows their group.
    """
    members: dict[Format, set[str]] = defaultdict(set)
    for weight in plan.weights.values():
        members[weight.format].add(EXPERTS if weight.is_expert else weight.module)
    single = len(members) == 1
    return {
        f"group_{index}": _group(format, ["Linear"] if single else sorted(names))
        for index, (format, names) in enumerate(members.items())
    }


def ignored(plan: Plan) -> list[str]:
    """Modules that a target may mean and that are not quantized; of experts each, for they lie apart in the files."""
    apart = [EXPERTS] if any(name.endswith(".experts") for name in plan.kept) else []
    return [*plan.kept, *apart]


def refuse_split(plan: Plan) -> None:
    """Layers that are fused, and experts among each other, must have one format.

    Raises:
        QkvError: they have several.
    """
    formats: dict[str, dict[str, str]] = defaultdict(dict)
    for weight in plan.weights.values():
        if weight.is_expert:
            formats["the experts"][weight.name] = str(weight.format)
    by_module = {weight.module: str(weight.format) for weight in plan.weights.values()}
    by_module |= {name: "keep" for name in plan.kept}
    for name, format in by_module.items():
        parent, _, leaf = name.rpartition(".")
        for parts in FUSED:
            if leaf in parts:
                formats[f"{parent}.{'|'.join(parts)}"][name] = format
    for what, found in formats.items():
        if len(set(found.values())) > 1:
            first, *_ = found
            other = next(name for name in found if found[name] != found[first])
            raise QkvError(
                f"vLLM and SGLang run {what} as one layer, and {first} is to be {found[first]} and {other} "
                f"{found[other]}; give them one format, or skip them all"
            )


def _group(format: Format, targets: list[str]) -> dict[str, Any]:
    row = format.group_size == "row"
    weights = {
        "num_bits": format.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "channel" if row else "group",
        "group_size": None if row else format.group_size,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "block_structure": None,
    }
    return {
        "targets": targets,
        "format": "pack-quantized",
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
