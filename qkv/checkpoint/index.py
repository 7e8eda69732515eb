"""`model.safetensors.index.json`: which shard holds which tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from qkv.checkpoint.paths import check_inside, check_plain_name
from qkv.checkpoint.strict_json import read_object
from qkv.errors import CheckpointError, shown

INDEX_NAME = "model.safetensors.index.json"


def read_index(path: Path, home: Path) -> dict[str, Path]:
    """Return the shard of every tensor, each known to exist within `home`, the model's real folder.

    The file names are a stranger's text: they are judged as text, then by their links, then by their
    existence, and no shard is opened before all have passed.

    Raises:
        CheckpointError: for a malformed index, a name that leaves the folder, or a missing shard.
    """
    check_inside(path, home)
    weight_map = _checked_weight_map(path, read_object(path, unique_keys=True).get("weight_map"))
    names = sorted(set(weight_map.values()))
    for name in names:
        check_plain_name(name, str(path))
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {shown(name)}, which is not a .safetensors file")
        check_inside(path.parent / name, home)
    _check_present(path, names)
    shards = {name: path.parent / name for name in names}  # one Path a file, however many tensors it holds
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def write_index(directory: Path, weight_map: Mapping[str, str], total_nbytes: int) -> Path:
    """Write the index of a directory, last of its weight files, and return its path.

    Args:
        directory: where the shards are.
        weight_map: tensor name to shard file name.
        total_nbytes: the sum of the tensors' bytes, headers not counted.
    """
    path = directory / INDEX_NAME
    content = {"metadata": {"total_size": total_nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path


def _checked_weight_map(path: Path, weight_map: object) -> dict[str, str]:
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map of tensor names to file names")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: the file of tensor {shown(tensor)} must be a name, not {shown(name)}")
    return weight_map


def _check_present(path: Path, names: list[str]) -> None:
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {len(names)} files that its index names: "
            f"{', '.join(missing[:3])}{more}; get them again"
        )
