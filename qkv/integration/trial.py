"""Trying plans on a live model: what a plan does to its perplexity, measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from qkv.integration.calibration import Calibration
from qkv.integration.perplexity import negative_log_likelihood
from qkv.integration.select import memory_key, select
from qkv.integration.settings import Settings
from qkv.quantizers.budget import KEEP
from qkv.quantizers.experts import parameter_format
from qkv.quantizers.format import Format
from qkv.quantizers.quantize import quantize_tensor


class Trial:
    """``with Trial(model, calibration, windows) as trial: trial.increase(plan.layers | plan.tables)``.

    Weights are rounded in place, as floats, and only where one plan differs from the one before; the originals stay
    in memory meanwhile and are put back at the end.

    Args:
        model: a transformers causal model with float weights.
        calibration: what scales are searched by.
        windows: token ids ``[tokens]`` to measure on.
    """

    def __init__(self, model: Any, calibration: Calibration, windows: Sequence[Tensor]) -> None:
        self._model, self._calibration, self._windows = model, calibration, windows
        targets, _ = select(model, Settings(Format("int8"), embeddings=Format("int8")))
        self._weights: dict[tuple[int, ...], tuple[str, str, bool, Tensor]] = {}
        for target in targets:
            for name in target.formats:
                parameter = target.module._parameters[name]
                assert parameter is not None
                full = f"{target.name}.{name}"
                known = self._weights.get(memory_key(parameter))
                if known is None or (full in calibration.importance and known[1] not in calibration.importance):
                    self._weights[memory_key(parameter)] = (target.name, full, target.transposed, parameter)
        self._originals = {key: entry[3].detach().clone() for key, entry in self._weights.items()}
        self._formats = dict.fromkeys(self._weights, KEEP)
        self._before = self._loss()

    def increase(self, formats: Mapping[str, str]) -> float:
        """Perplexity under ``formats`` by module over that of the original weights, less 1."""
        for key, (module, *_) in self._weights.items():
            self._put(key, formats.get(module, KEEP))
        return math.exp(self._loss() - self._before) - 1

    def __enter__(self) -> Trial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for key in self._weights:
            self._put(key, KEEP)

    @torch.no_grad()
    def _put(self, key: tuple[int, ...], text: str) -> None:
        if self._formats[key] == text:
            return
        _, name, transposed, parameter = self._weights[key]
        value = self._originals[key]
        if text != KEEP:
            x = value.mT if transposed else value
            format = parameter_format(name, Format.parse(text), x.shape[-1])
            importance = self._calibration.importance.get(name)
            back = quantize_tensor(x, format, importance=importance, name=name).dequantize()
            value = back.mT if transposed else back
        parameter.copy_(value)
        self._formats[key] = text

    @torch.no_grad()
    def _loss(self) -> float:
        """Mean negative log likelihood, nats a token."""
        total = sum(negative_log_likelihood(self._model, ids.to(self._model.device)) for ids in self._windows)
        return total / sum(len(ids) - 1 for ids in self._windows)
