"""Which tensor goes into which file."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import groupby

from qkv.checkpoint.writer import TensorSpec
from qkv.errors import QkvError, shown

_UNITS = {prefix + "B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
_UNITS |= {prefix + "IB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?I?B)?")


def parse_size(size: str | int) -> int:
    """Return a size in bytes: a plain number of them, or with a unit of 1000 (`GB`) or of 1024 (`GiB`).

    >>> parse_size("5GB"), parse_size("1.5 kB"), parse_size("2GiB")
    (5000000000, 1500, 2147483648)

    Raises:
        QkvError: naming the value and how to write it.
    """
    match = _SIZE.fullmatch(str(size).strip().upper())
    unit = match[2] or "B" if match else ""
    if match is None or unit not in _UNITS or (nbytes := int(Decimal(match[1]) * _UNITS[unit])) < 1:
        raise QkvError(f"{shown(size)} is not a size of at least one byte; write it as 500MB, 5GB or 2GiB")
    return nbytes


def plan_shards(
    specs: Sequence[TensorSpec], max_shard_nbytes: int, *, group_of: Callable[[str], str] | None = None
) -> list[list[TensorSpec]]:
    """Fill shards in the order given, opening the next one where a tensor no longer fits.

    Neighbours with the same `group_of(name)` share a shard, as a weight's codes and scales must for some
    loaders. A tensor or group larger than the limit has a shard of its own. There is always at least one.
    """
    if max_shard_nbytes < 1:
        raise QkvError(f"a shard of {max_shard_nbytes} bytes cannot hold a tensor; take 5GB, the usual size")
    shards: list[list[TensorSpec]] = [[]]
    used_nbytes = 0
    for _, members in groupby(specs, key=lambda spec: group_of(spec.name) if group_of else spec.name):
        group = list(members)
        nbytes = sum(spec.nbytes for spec in group)
        if shards[-1] and used_nbytes + nbytes > max_shard_nbytes:
            shards.append([])
            used_nbytes = 0
        shards[-1].extend(group)
        used_nbytes += nbytes
    return shards


def shard_names(num_shards: int) -> list[str]:
    """Return the usual file names.

    >>> shard_names(1), shard_names(2)[0]
    (['model.safetensors'], 'model-00001-of-00002.safetensors')
    """
    if num_shards == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
