"""The calibration for a checkpoint: made of a text, or read; and each file tensor's part of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qkv.checkpoint.load import load, load_tokenizer
from qkv.checkpoint.source import Source
from qkv.checkpoint.strict_json import parse_object
from qkv.errors import CheckpointError, QkvError
from qkv.integration.calibrate import calibrate
from qkv.integration.calibration import Calibration
from qkv.integration.skeleton import Choice

MAX_TEXT_NBYTES = 64 * 10**6
"""Of a longer text only so much is read, from its start."""
EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")


@dataclass(frozen=True)
class Importances:
    """What the columns of each tensor of a checkpoint are worth.

    Attributes:
        by_name: float32 ``[in]`` or ``[experts, in]`` as bytes, by the tensor's name in the file.
        missing: tensors that are quantized and that the calibration says nothing of.
    """

    by_name: Mapping[str, bytes]
    missing: tuple[str, ...] = ()

    def settings(self) -> dict[str, str]:
        """What of it decides the bytes that are written: a hash of all."""
        if not self.by_name:
            return {}
        digest = hashlib.sha256()
        for name, importance in sorted(self.by_name.items()):
            digest.update(name.encode() + b"\0" + importance)
        return {"calibration": digest.hexdigest()}

    @classmethod
    def find(
        cls,
        source: Source,
        choices: Mapping[str, Choice],
        calibrated: Calibration | str | Path | None,
        samples: int,
    ) -> Importances:
        """Match a calibration with the tensors that ``choices`` quantize.

        Raises:
            QkvError: it was made with another model.
        """
        if calibrated is None:
            return cls({})
        quantized = {name: choice for name, choice in choices.items() if choice.format}
        if not all(choice.parameter for choice in quantized.values()):
            raise QkvError(f"{source.path} is a model that transformers cannot build and run; leave calibrate out")
        calibration = find_calibration(source.directory, calibrated, samples)
        calibration.check_covers(choice.parameter for choice in quantized.values())
        found = {name: _part(name, source, choice, calibration) for name, choice in quantized.items()}
        by_name = {name: part.numpy().tobytes() for name, part in found.items() if part is not None}
        return cls(by_name, tuple(name for name in quantized if name not in by_name))


def importance_tensor(importance: bytes, shape: Sequence[int]) -> Tensor:
    """Undo the bytes of :class:`Importances`: float32 ``[in]``, or ``[experts, in]``, of a weight of ``shape``."""
    found = torch.frombuffer(bytearray(importance), dtype=torch.float32)
    return found if len(found) == shape[-1] else found.reshape(-1, shape[-1])


def find_calibration(
    src: str | Path, calibrated: Calibration | str | Path, samples: int = 32, *, gradients: bool = False
) -> Calibration:
    """``calibrated`` itself, read from its file, or made by running the model in ``src`` over a text.

    Raises:
        QkvError: a file that is neither text, JSON lines nor a calibration; no tokenizer in ``src``.
    """
    if isinstance(calibrated, Calibration):
        return calibrated
    path = Path(calibrated)
    if path.suffix == ".safetensors":
        return Calibration.load(path)
    tokenizer = load_tokenizer(src)
    texts = read_texts(path, tokenizer)
    return calibrate(load(src), tokenizer, texts, samples=samples, gradients=gradients)


def read_texts(path: Path, tokenizer: Any) -> list[str]:
    """A text file as one text; of a ``.jsonl`` file the ``text`` of each line, or its ``messages`` as a chat.

    Raises:
        QkvError: no such file, not UTF-8, or a line that has neither.
    """
    if not path.is_file():
        raise QkvError(f"{path} does not exist; --calibrate takes a text, a .jsonl or a saved .safetensors file")
    with path.open("rb") as file:
        raw = file.read(MAX_TEXT_NBYTES)
        whole = not file.read(1)
    if path.suffix != ".jsonl":
        return [_decoded(raw, path, whole)]
    lines = raw.splitlines()[: None if whole else -1]
    return [_text_of(line, f"{path}, line {n}", tokenizer) for n, line in enumerate(lines, 1) if line.strip()]


def _decoded(raw: bytes, path: Path, whole: bool) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if not whole and error.start > len(raw) - 4:  # a character cut in two at the end
            return raw[: error.start].decode("utf-8")
        raise QkvError(f"{path} is not a UTF-8 text (byte {error.start}); convert it first") from error


def _text_of(line: bytes, where: str, tokenizer: Any) -> str:
    value = parse_object(line, where, unique_keys=False)
    if isinstance(value.get("text"), str):
        return str(value["text"])
    messages = value.get("messages")
    if not isinstance(messages, list) or getattr(tokenizer, "chat_template", None) is None:
        raise CheckpointError(f'{where} has no "text", nor "messages" for a model with a chat template')
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # whatever a template raises
        raise CheckpointError(f"{where} has messages that the chat template refuses: {error}") from error


def _part(name: str, source: Source, choice: Choice, calibration: Calibration) -> Tensor | None:
    """The importance of one tensor of the files."""
    found = calibration.importance.get(choice.parameter)
    entry = source.entries[name]
    if len(entry.shape) == 2:
        calibration.check_weight(choice.parameter, source.read_rows(name, 0, min(entry.shape[0], 1)))
    return None if found is None else expert_part(found, name, len(entry.shape))


def expert_part(importance: Tensor, name: str, num_dimensions: int) -> Tensor:
    """Of a stack's importance ``[experts, in]``, the row of the one expert that the file tensor ``name`` is.

    Raises:
        QkvError: an expert beyond those that were calibrated.
    """
    if importance.dim() == 1 or num_dimensions == 3:
        return importance
    found = EXPERT.search(name)
    if found is None or int(found[1]) >= len(importance):
        raise QkvError(f"{name} is none of the {len(importance)} experts of the calibration; calibrate this model")
    return importance[int(found[1])]
