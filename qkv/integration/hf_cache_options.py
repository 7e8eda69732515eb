"""A cache from what the command line says: ``--kv int8 --window 2048 --sinks 4 --budget 512MB``."""

from __future__ import annotations

from typing import Any

from qkv.cache.retention import Importance, Retention, Window
from qkv.errors import QkvError
from qkv.integration.hf_cache import KVCache


def cache_settings(
    *,
    kv: str | None = None,
    keys: str | None = None,
    values: str | None = None,
    window: int | None = None,
    sinks: int = 4,
    summary: int = 0,
    budget: str | None = None,
) -> dict[str, Any]:
    """Arguments of :class:`KVCache` for these options; empty where none of them was given.

    Args:
        kv: codec of keys and values; ``keys`` and ``values`` override it, each on its own side.
        window, sinks, summary: a :class:`Window`.
        budget: an :class:`Importance`; see :func:`read_budget`.

    Raises:
        QkvError: a window together with a budget, or values that do not exist.
    """
    if window is not None and budget is not None:
        raise QkvError("--window and --budget are two ways to decide what stays; give one of them")
    retain: Retention | None = None
    if window is not None:
        retain = Window(window, sinks=sinks, summary=summary)
    elif budget is not None:
        retain = Importance(read_budget(budget), sinks=sinks)
    if kv is None and keys is None and values is None and retain is None:
        return {}
    side = kv or "exact"
    return {"keys": keys or side, "values": values or side, "retain": retain}


def cache_from_options(config: Any, *, sizes: dict[str, Any] | None = None, **options: Any) -> KVCache | None:
    """The cache that the options of :func:`cache_settings` ask for; None where none of them was given.

    Args:
        config: the model's configuration.
        sizes: ``block_size``, ``residual`` and the other arguments of :class:`KVCache`.
        **options: those of :func:`cache_settings`.
    """
    settings = cache_settings(**options)
    return KVCache(config, **settings, **(sizes or {})) if settings else None


def read_budget(text: str) -> int | float | str:
    """``"1024"`` is tokens, ``"0.5"`` a fraction of those seen, ``"512MB"`` bytes."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text
