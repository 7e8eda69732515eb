"""Draft sources by name: ``none``, ``lookup``, ``ngram``, ``model:DIR``, ``self:FORMAT``; a model; or one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qkv.errors import QkvError, shown
from qkv.integration.sources.base import Source
from qkv.integration.sources.lookup import Lookup
from qkv.integration.sources.model import ModelSource
from qkv.integration.sources.ngram import NGram
from qkv.integration.sources.self_draft import quantized_copy

SOURCES: dict[str, Callable[[Any, str], Source | None]] = {
    "none": lambda target, rest: None,
    "lookup": lambda target, rest: Lookup(),
    "ngram": lambda target, rest: NGram.load(rest) if rest else NGram(),
    "model": lambda target, rest: _load_draft(target, rest),
    "self": lambda target, rest: ModelSource(quantized_copy(target, rest or "nf4"), target),
}
"""What stands before the colon of a source's name, to how it is made for a target."""

__all__ = ["SOURCES", "Lookup", "ModelSource", "NGram", "Source", "make_source", "quantized_copy"]


def make_source(source: Any, target: Any) -> Source | None:
    """A source of a name, a draft model, or itself; None drafts nothing.

    Raises:
        QkvError: neither of these, or a draft of another vocabulary.
    """
    if source is None:
        return None
    if isinstance(source, str):
        name, _, rest = source.partition(":")
        if name in SOURCES and (not rest or name in ("ngram", "model", "self")):
            return SOURCES[name](target, rest)
        raise QkvError(f"source {shown(source)} is none of {', '.join(SOURCES)} (model:DIR, self:FORMAT)")
    if isinstance(source, Source) and not isinstance(source, type):
        return source
    if hasattr(source, "forward") and hasattr(source, "config"):
        return ModelSource(source, target)
    raise QkvError(f"source {shown(source)} is neither a name, nor a model, nor a Source")


def _load_draft(target: Any, path: str) -> Source:
    """A model directory as a draft, its tokenizer compared with the target's where both can be had."""
    from transformers import AutoModelForCausalLM

    import qkv.integration.hf_quantizer  # noqa: F401 - registers the format

    if not Path(path, "config.json").is_file():
        raise QkvError(f"draft model {shown(path)} is no model directory; write model:DIR")
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval().to(target.device)
    home = getattr(target.config, "_name_or_path", "")
    return ModelSource(model, target, tokenizer=_tokenizer(path), target_tokenizer=_tokenizer(home))


def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not path or not any(Path(path, name).is_file() for name in names):
        return None
    return AutoTokenizer.from_pretrained(path)
