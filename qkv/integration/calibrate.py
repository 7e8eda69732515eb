"""``calibrate``: run a model over a text and collect what its linear layers are fed, as sums, not as activations."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.calibration import Calibration, first_values
from qkv.integration.select import Target, memory_key, select
from qkv.integration.settings import Settings
from qkv.progress import Progress
from qkv.quantizers.embedding import QuantizedEmbedding
from qkv.quantizers.experts import DOWN_NAME, QuantizedExperts
from qkv.quantizers.format import Format

WINDOW = 512
"""Tokens of a piece of text."""
CHARACTERS_A_TOKEN = 8
"""More than a token has in any language on average, so that a piece of text fills its window."""
COST_TOKENS = 64
"""Worked on at once where gradients are as wide as the vocabulary."""
PRIOR_TOKENS = 8
"""As many tokens of the average expert are added to each expert's own, of which rare ones see few."""


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: str | Sequence[str],
    *,
    samples: int = 32,
    window: int = WINDOW,
    gradients: bool = False,
) -> Calibration:
    """Collect the mean squares of every linear layer's inputs, for :func:`qkv.quantize_` to choose scales by.

    Args:
        model: a transformers causal model with float weights. It is run, and left as it was.
        tokenizer: its tokenizer.
        texts: one text, or several; pieces evenly spread over them are read.
        samples: pieces of text.
        window: tokens of a piece, at most.
        gradients: collect what errors cost in loss, too, which planning weighs layers by (``columns`` and
            ``outputs``). Takes a backward pass and the memory of one window's activations.

    Raises:
        QkvError: no linear layer with float weights, too little text, or inputs that are not finite.
    """
    targets, _ = select(model, Settings(Format("int8"), embeddings=Format("int8")))
    tables = [target for target in targets if issubclass(target.new_class, QuantizedEmbedding)]
    targets = [target for target in targets if target not in tables]
    if not targets:
        raise QkvError(f"{type(model).__name__} has no linear layer with float weights to calibrate")
    windows = list(token_windows(tokenizer, texts, samples, window))
    collector = _Collector(gradients)
    with collector.attached(model, targets, tables), Progress("calibrating", len(windows)) as progress:
        for ids in windows:
            collector.read(model, ids.to(model.device))
            progress.advance()
    return Calibration(
        _for_tied(model, collector.importance()),
        {f"{t.name}.{n}": first_values(p) for t in targets for n, p in _matrices(t)},
        sum(len(ids) for ids in windows),
        hashlib.sha256(b"".join(ids.numpy().tobytes() for ids in windows)).hexdigest(),
        *collector.costs(),
    )


def token_windows(tokenizer: Any, texts: str | Sequence[str], samples: int, window: int) -> Iterator[Tensor]:
    """Token ids ``[tokens]`` of pieces evenly spread over the texts; the same for the same arguments.

    Raises:
        QkvError: fewer than two tokens in all of them.
    """
    size = window * CHARACTERS_A_TOKEN
    texts = [texts] if isinstance(texts, str) else texts
    places = [(text, start) for text in texts for start in range(0, max(len(text), 1), size)]
    count = min(samples, len(places))
    found = False
    for number in range(count):
        text, start = places[number * len(places) // count]
        ids = tokenizer(text[start : start + size], return_tensors="pt", verbose=False)["input_ids"][0][:window]
        if len(ids) > 1:
            found = True
            yield ids
    if not found:
        raise QkvError("the calibration text has fewer than two tokens in a piece; give prose of some thousand words")


class _Collector:
    """Sums of squares by parameter name, float64, and how many tokens they are over."""

    def __init__(self, gradients: bool) -> None:
        self._gradients = gradients
        self._inputs: dict[str, Tensor] = {}
        self._columns: dict[str, Tensor] = {}
        self._outputs: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._num_tokens = 0
        self._latest: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def attached(self, model: Any, targets: Iterable[Target], tables: Iterable[Target]) -> Iterator[None]:
        """Listen to the targets; the model is in evaluation mode, and its parameters ask for no gradients."""
        with ExitStack() as undo:
            for module in model.modules():
                undo.callback(setattr, module, "training", module.training)
            model.eval()
            for target in targets:
                listen = self._experts if issubclass(target.new_class, QuantizedExperts) else self._linear
                hook = _hook(listen, target)
                undo.callback(target.module.register_forward_hook(hook, with_kwargs=True).remove)
            if self._gradients:
                for parameter in model.parameters():
                    undo.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(False)
                undo.callback(model.get_input_embeddings().register_forward_hook(_ask_for_gradient).remove)
                for target in tables:
                    undo.callback(
                        target.module.register_forward_hook(_hook(self._table, target), with_kwargs=True).remove
                    )
            yield

    def read(self, model: Any, ids: Tensor) -> None:
        """One window ``[tokens]``."""
        self._num_tokens += len(ids)
        with torch.set_grad_enabled(self._gradients):
            logits = model(ids[None], use_cache=False).logits[0, :-1]
        self._latest = None
        if self._gradients:
            with torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum")
                torch.autograd.backward(loss)

    def importance(self) -> dict[str, Tensor]:
        """Means over the tokens.

        Raises:
            QkvError: of a layer whose inputs were not finite.
        """
        result = {}
        for name, total in self._inputs.items():
            mean = total / self._counts[name][..., None].clamp(min=1)
            if total.dim() == 2:
                average = total.sum(0) / self._counts[name].sum().clamp(min=1)
                mean = (total + PRIOR_TOKENS * average) / (self._counts[name][:, None] + PRIOR_TOKENS)
            if not bool(torch.isfinite(mean).all()):
                raise QkvError(f"inputs of {name} were not finite; run the model in float32 to calibrate it")
            result[name] = mean.to(torch.float32).cpu()
        return result

    def costs(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """``columns`` as means over the tokens, ``outputs`` as shares."""
        columns = {name: (total / self._num_tokens).float().cpu() for name, total in self._columns.items()}
        outputs = {n: (total / total.sum().clamp(min=1e-300)).float().cpu() for n, total in self._outputs.items()}
        return columns, outputs

    def _linear(self, target: Target, inputs: Sequence[Any], output: Tensor) -> None:
        x, name = inputs[0], f"{target.name}.weight"
        if self._latest is None or self._latest[0] is not x:  # queries, keys and values read the same tensor
            self._latest = (x, _squares(x))
        self._add(name, self._latest[1], torch.tensor(x.numel() // x.shape[-1]))
        if self._gradients and output.requires_grad:
            kept = x.detach()
            output.register_hook(lambda gradient: self._add_cost(name, kept, gradient))  # type: ignore[no-untyped-call]

    def _experts(self, target: Target, inputs: Sequence[Any], output: Tensor) -> None:
        module: Any = target.module
        hidden, index = inputs[0].detach().flatten(0, -2), inputs[1].flatten(0, -2)
        up_name = next(name for name in target.formats if name != DOWN_NAME)
        sums: dict[str, list[Tensor]] = {name: [] for name in target.formats}
        counts = torch.stack([(index == expert).any(-1).sum() for expert in range(module.num_experts)])
        for expert in range(module.num_experts):
            x = hidden[(index == expert).any(-1)]
            up = _project(module, up_name, expert, x, target.transposed)
            sums[up_name].append(_squares(x))
            sums[DOWN_NAME].append(_squares(module._apply_gate(up) if module.has_gate else module.act_fn(up)))
        for name, each in sums.items():
            self._add(f"{target.name}.{name}", torch.stack(each), counts)
        if self._gradients and output.requires_grad:
            names, kept = [f"{target.name}.{name}" for name in sums], output.detach()
            output.register_hook(lambda gradient: self._add_energy(names, kept, gradient))  # type: ignore[no-untyped-call]

    def _table(self, target: Target, inputs: Sequence[Any], output: Tensor) -> None:
        def add(gradient: Tensor) -> None:
            name = f"{target.name}.weight"
            self._columns[name] = self._columns.get(name, 0) + _squares(gradient)

        if output.requires_grad:
            output.register_hook(add)  # type: ignore[no-untyped-call]

    def _add(self, name: str, total: Tensor, count: Tensor) -> None:
        self._inputs[name] = self._inputs.get(name, 0) + total
        self._counts[name] = self._counts.get(name, 0) + count.to(total.device)

    def _add_cost(self, name: str, x: Tensor, gradient: Tensor) -> None:
        x, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        for start in range(0, len(x), COST_TOKENS):
            inputs, gradients = x[start : start + COST_TOKENS], gradient[start : start + COST_TOKENS]
            squares = gradients.to(torch.float32).square()
            columns = squares.sum(-1) @ inputs.to(torch.float32).square()
            self._columns[name] = self._columns.get(name, 0) + columns.to(torch.float64)
            self._outputs[name] = self._outputs.get(name, 0) + squares.sum(0).to(torch.float64)

    def _add_energy(self, names: Iterable[str], output: Tensor, gradient: Tensor) -> None:
        both = (each.to(torch.float32).flatten(0, -2).square().sum(-1) for each in (output, gradient))
        energy = torch.linalg.vecdot(*both).to(torch.float64) / output.shape[-1]
        for name in names:
            self._columns[name] = self._columns.get(name, 0) + energy


def _hook(listen: Any, target: Target) -> Any:
    signature = inspect.signature(target.module.forward)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        listen(target, list(signature.bind(*args, **kwargs).arguments.values()), output)

    return hook


def _ask_for_gradient(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.requires_grad_(True)


@torch.no_grad()
def _project(module: Any, name: str, expert: int, x: Tensor, transposed: bool) -> Tensor:
    weight, biases = getattr(module, name)[expert], getattr(module, f"{name}_bias", None)
    result: Tensor = x @ (weight if transposed else weight.mT)
    return result if biases is None else result + biases[expert]


def _squares(x: Tensor) -> Tensor:
    """Sums of squares over all but the last dimension, float64."""
    return x.detach().to(torch.float32).flatten(0, -2).square().sum(0).to(torch.float64)


def _matrices(target: Target) -> list[tuple[str, Tensor]]:
    found = [(name, target.module._parameters[name]) for name in target.formats]
    return [(name, parameter) for name, parameter in found if parameter is not None and parameter.dim() == 2]


def _for_tied(model: nn.Module, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same under the names of every parameter over the same memory: of a table, what its head is fed."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    by_memory = {memory_key(parameters[name]): tensor for name, tensor in found.items()}
    twins = {name: by_memory.get(memory_key(parameter)) for name, parameter in parameters.items()}
    return {name: tensor for name, tensor in twins.items() if tensor is not None}
