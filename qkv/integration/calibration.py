"""Calibration: what the weights of one model meet on one text, as a value and as a small safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qkv.errors import CheckpointError, QkvError, shown

VERSION: Final = "1"
NUM_FIRST: Final = 16
"""Values of each weight that a calibration remembers, to know its model by."""
FIRST, COLUMNS, OUTPUTS = "#first", "#columns", "#outputs"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Statistics of a model's weights by parameter name; made by :func:`qkv.calibrate`.

    Attributes:
        importance: mean squares of the inputs of each column, float32 ``[in]``, or ``[experts, in]``.
        first_values: the first values of each two-dimensional weight, bfloat16: the model's fingerprint.
        num_tokens: read for it.
        text: SHA-256 of the token ids that were read.
        columns: what errors of a column cost, for planning: mean squares of its inputs, each token weighed by the
            square of the loss's gradient at the layer's outputs, float32 ``[in]``; of a table ``[dim]``; of a stack
            of experts a single number, that cost of all they compute. Empty unless asked for.
        outputs: each output's share of those gradients, float32 ``[out]``; none for tables and experts.
    """

    importance: Mapping[str, Tensor]
    first_values: Mapping[str, Tensor]
    num_tokens: int
    text: str
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Mapping[str, Tensor] = field(default_factory=dict)

    def check_weight(self, name: str, weight: Tensor) -> None:
        """Raise unless the first row of parameter ``name`` ``[out, in]`` (``weight`` holds it) is that calibrated.

        Raises:
            QkvError: another shape or other values.
        """
        known = self.first_values.get(name)
        if known is not None and not torch.equal(first_values(weight), known.to(weight.device)):
            raise QkvError(
                f"the calibration was made with another model: {name} begins with other values; "
                "calibrate with the model that is quantized"
            )

    def check_covers(self, names: Iterable[str]) -> None:
        """Raise where the calibration knows none of the parameters ``names``.

        Raises:
            QkvError: naming one of each.
        """
        names = list(names)
        if names and not any(name in self.importance for name in names):
            known = next(iter(self.importance), "nothing")
            raise QkvError(
                f"the calibration was made with another model: it knows {known}, and of {names[0]} and "
                f"{len(names) - 1} more to be quantized none; calibrate with the model that is quantized"
            )

    def save(self, path: str | Path) -> None:
        """Write one safetensors file; weights with the same inputs share a tensor."""
        tensors: dict[str, Tensor] = {}
        same_as: dict[str, str] = {}
        seen: dict[bytes, str] = {}
        for name, tensor in self.importance.items():
            twin = seen.setdefault(tensor.numpy().tobytes(), name)
            if twin != name and tensors[twin].shape == tensor.shape:
                same_as[name] = twin
            else:
                tensors[name] = tensor.contiguous().clone()
        for suffix, found in ((FIRST, self.first_values), (COLUMNS, self.columns), (OUTPUTS, self.outputs)):
            tensors |= {name + suffix: tensor.contiguous().clone() for name, tensor in found.items()}
        header = {"num_tokens": self.num_tokens, "text": self.text, "same_as": same_as}
        partial = Path(f"{path}.partial")
        try:
            save_file(tensors, partial, metadata={"qkv_calibration": VERSION, "qkv": json.dumps(header)})
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote.

        Raises:
            CheckpointError: no such file, or not such a file.
        """
        header, tensors = _read(Path(path))
        first, columns, outputs = (
            {name.removesuffix(suffix): tensor for name, tensor in tensors.items() if name.endswith(suffix)}
            for suffix in (FIRST, COLUMNS, OUTPUTS)
        )
        importance = {name: tensor for name, tensor in tensors.items() if "#" not in name}
        importance |= {name: importance[twin] for name, twin in header["same_as"].items()}
        return cls(importance, first, header["num_tokens"], header["text"], columns, outputs)


def first_values(weight: Tensor) -> Tensor:
    """The first values of a weight's first row, rounded to bfloat16 so that they are the same from any dtype."""
    return weight.detach()[0, :NUM_FIRST].to(torch.float32).to(torch.bfloat16).clone()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; name a calibration file, or a text to calibrate with")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("qkv_calibration") != VERSION:
                raise CheckpointError(
                    f"{path} is no calibration of version {VERSION}; make one with --save-calibration"
                )
            header = json.loads(metadata["qkv"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            if not set(header["same_as"].values()) <= tensors.keys() or not isinstance(header["num_tokens"], int):
                raise KeyError("same_as")
    except (SafetensorError, KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged ({shown(str(error))}); calibrate again") from error
    return header, tensors
