"""JSON from files that nobody vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qkv.errors import CheckpointError, shown

MAX_JSON_NBYTES = 100_000_000


def parse_object(raw: bytes, where: str, *, unique_keys: bool) -> dict[str, Any]:
    """Parse one UTF-8 JSON object.

    Args:
        raw: the text.
        where: what to call it in an error.
        unique_keys: refuse a key listed twice at any level, where Python would silently keep the last. Right
            for tensor names; hand-edited configs do repeat keys, and every other tool takes them.

    Raises:
        CheckpointError: for anything that is not one JSON object.
    """
    hook = _refuse_duplicates if unique_keys else None
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=hook)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} must hold a JSON object, not {shown(value)}")
    return value


def read_object(path: Path, *, unique_keys: bool) -> dict[str, Any]:
    """Read and parse a JSON file of at most 100 MB, with the errors of `parse_object`."""
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_NBYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_JSON_NBYTES:
        raise CheckpointError(f"{path} is larger than {MAX_JSON_NBYTES} bytes, too large for JSON of a model")
    return parse_object(raw, str(path), unique_keys=unique_keys)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise CheckpointError(f"{shown(key)} is listed twice")
        result[key] = value
    return result
