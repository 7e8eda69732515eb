"""What tells one run from another: its source and its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qkv.checkpoint.header import header_bytes
from qkv.checkpoint.job import Job


def identity_of(job: Job, max_shard_nbytes: int, part: str | None) -> dict[str, Any]:
    """Everything that decides the bytes of a run, as JSON, from headers and file times alone.

    Tensors are not read, so that a terabyte is told in a second: a file of the same name, size, time and
    header counts as the same.
    """
    from qkv import __version__

    identity = {
        "qkv": __version__,
        "job": job.title,
        "source": {path.name: _file(path) for path in job.source.shards},
        "config": _hash(json.dumps(job.source.config, sort_keys=True).encode()),
        "settings": dict(job.settings),
        "max_shard_nbytes": max_shard_nbytes,
        "part": part,
    }
    return dict(json.loads(json.dumps(identity)))  # as a journal gives it back: a tuple is a list


def without_times(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity for comparing parts, which may have been written from copies of one source."""
    source = {
        name: {**file, "modified_ns": 0} if isinstance(file, dict) else file
        for name, file in identity["source"].items()
    }
    return {**identity, "source": source, "part": None}


def _file(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"nbytes": stat.st_size, "modified_ns": stat.st_mtime_ns, "header": _hash(header_bytes(path))}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
