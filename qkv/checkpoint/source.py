"""A model to read: a Hugging Face directory, or one safetensors file, tensor by tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from qkv.checkpoint.header import TensorEntry, read_header
from qkv.checkpoint.paths import check_inside, model_home
from qkv.checkpoint.raw import read_into
from qkv.checkpoint.strict_json import read_object
from qkv.checkpoint.weight_files import find_weights, is_pickle, refuse_pickle
from qkv.errors import CheckpointError, shown

MAX_CLAIMED = 1000
"""A config.json may claim so many layers or experts, or as many as there are tensors: a module is built for each."""
_COUNTS = re.compile(r"(^|_)(layers?|experts|blocks)$")


@dataclass(frozen=True)
class Source:
    """A model's files, all headers checked and no tensor read.

    Nothing stays open or mapped between reads: a tensor that was read owns its memory, and the files may live
    on a read-only disk or in a hub cache. `with Source.open(path) as source:` marks how long they must stay.

    Attributes:
        path: as it was given, a directory or a file.
        directory: the folder of the weights.
        shards: the safetensors files, by name.
        entries: every tensor by its name, in the order of the files.
        config: what `config.json` says; empty where there is none.
    """

    path: Path
    directory: Path
    shards: list[Path]
    entries: dict[str, TensorEntry]
    config: dict[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Find, check and list a model's tensors.

        Raises:
            CheckpointError: in one line, what is missing, malformed or unsafe, and what to do.
        """
        path = Path(path)
        if path.is_file():
            directory, (shards, weight_map) = path.parent, ([_checked_file(path)], None)
        else:
            directory = _checked_directory(path)
            shards, weight_map = find_weights(directory)
        entries = _merged_entries(shards)
        if weight_map is not None:
            _check_index(directory, weight_map, entries)
        return cls(path, directory, shards, entries, _read_config(directory))

    @staticmethod
    def config_of(directory: str | Path) -> dict[str, Any]:
        """Return what a folder's `config.json` says, for a folder that has no weights yet."""
        return _read_config(_checked_directory(Path(directory)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(entry.nbytes for entry in self.entries.values())

    def require_config(self) -> dict[str, Any]:
        """Return the config, for a model to be built from it.

        Raises:
            CheckpointError: there is none, nothing in it, or it claims more layers than the files can hold.
        """
        if not self.config:
            raise CheckpointError(f"{self.directory} has no config.json that says anything; add the model's own")
        most = max(MAX_CLAIMED, len(self.entries))
        for config in (self.config, *(value for value in self.config.values() if isinstance(value, dict))):
            for key, value in config.items():
                if _COUNTS.search(key) and isinstance(value, int) and value > most:
                    raise CheckpointError(
                        f"{self.directory / 'config.json'} claims {key} = {shown(value)} for {len(self.entries)} "
                        "tensors; get it again"
                    )
        return self.config

    def read(self, name: str) -> torch.Tensor:
        """Return a private copy of one tensor, on the CPU, in its stored dtype and shape."""
        entry = self.entries[name]
        return _read_bytes(entry, entry.offset, entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return a private copy of rows `start` to `stop` along dimension 0, as `read(name)[start:stop]`.

        Raises:
            IndexError: rows that the tensor does not have; a 0-d tensor has none.
        """
        entry = self.entries[name]
        if not entry.shape or not 0 <= start <= stop <= entry.shape[0]:
            raise IndexError(f"rows {start} to {stop} are not within {shown(name)} of shape {list(entry.shape)}")
        row_nbytes = entry.nbytes // max(entry.shape[0], 1)
        return _read_bytes(entry, entry.offset + start * row_nbytes, (stop - start, *entry.shape[1:]))

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _checked_file(path: Path) -> Path:
    if is_pickle(path.name):
        raise refuse_pickle(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file; name one, or a model directory")
    return path


def _checked_directory(path: Path) -> Path:
    if not path.is_dir():
        fault = "is neither a directory nor a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {fault}; expected a model directory or a .safetensors file")
    return path


def _merged_entries(shards: list[Path]) -> dict[str, TensorEntry]:
    merged: dict[str, TensorEntry] = {}
    for shard in shards:
        entries, _ = read_header(shard)
        for name in entries.keys() & merged.keys():
            raise CheckpointError(f"tensor {shown(name)} is in both {merged[name].path} and {shard}; keep one")
        merged.update(entries)
    return merged


def _check_index(directory: Path, weight_map: dict[str, Path], entries: dict[str, TensorEntry]) -> None:
    """Check that the index and the shards tell the same story about every tensor."""
    for name, shard in weight_map.items():
        entry = entries.get(name)
        if entry is None or (entry.path is not shard and entry.path != shard):
            raise CheckpointError(f"{shard} lacks the tensor {shown(name)} that the index lists in it; get it again")
    for name, entry in entries.items():
        if name not in weight_map:
            raise CheckpointError(f"{entry.path} holds the tensor {shown(name)} that the index does not list")


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    if not path.exists():
        return {}
    check_inside(path, model_home(directory))
    return read_object(path, unique_keys=False)


def _read_bytes(entry: TensorEntry, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=entry.dtype)
    if not read_into(entry.path, offset, tensor):
        raise CheckpointError(f"{entry.path} was cut short while it was being read; get it again")
    return tensor
