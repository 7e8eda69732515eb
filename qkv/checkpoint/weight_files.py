"""Which files of a model directory are weights, and which of them to read."""

from __future__ import annotations

import re
from pathlib import Path

from qkv.checkpoint.index import INDEX_NAME, read_index
from qkv.checkpoint.paths import check_inside, model_home
from qkv.errors import CheckpointError

PART_NAME = "qkv_part.json"
"""What marks a directory as a part of a model (`qkv quantize --shard I/N`)."""
_PICKLES = ("bin", "pt", "pth", "ckpt", "pkl", "pickle")
_OTHERS = (
    "safetensors",
    "h5",
    "msgpack",
    "gguf",
    "ggml",
    "onnx",
    "onnx[._]data",
    "npz",
    "npy",
    "ot",
    "tflite",
)
_PICKLE_NAME = re.compile(rf"\.({'|'.join(_PICKLES)})(\.index\.json)?$", re.IGNORECASE)
_WEIGHT_NAME = re.compile(
    rf"\.({'|'.join(_PICKLES + _OTHERS)})(\.index(\..+)?\.json|\.?part.*|-split-.*|[._]\d+)?$", re.IGNORECASE
)


def is_weight_file(name: str) -> bool:
    """Say whether a file name is that of weights, of their index, or of a part of them, in any format.

    >>> [is_weight_file(name) for name in ("consolidated.00.pth", "tokenizer.model", "README.pt.md")]
    [True, False, False]
    """
    return _WEIGHT_NAME.search(name) is not None


def find_weights(directory: Path) -> tuple[list[Path], dict[str, Path] | None]:
    """Return the safetensors files to read, by name, and the shard of each tensor where an index says so.

    `model.safetensors` wins over an index, as it does in transformers, and both win over a single file of
    another name.

    Raises:
        CheckpointError: no safetensors (pickles are never opened), or several and no index, or a bad index;
            a part of a model.
    """
    if (directory / PART_NAME).is_file():
        raise CheckpointError(f"{directory} is a part of a model; join all parts first: qkv merge PART... DST")
    home = model_home(directory)
    index = directory / INDEX_NAME
    if index.is_file() and not (directory / "model.safetensors").exists():
        weight_map = read_index(index, home)
        return sorted({id(shard): shard for shard in weight_map.values()}.values()), weight_map
    shard = _only_file(directory)
    check_inside(shard, home)
    return [shard], None


def refuse_pickle(path: Path) -> CheckpointError:
    """Return the error for a path whose weights are a pickle, saying how to convert them."""
    return CheckpointError(
        f"{path} holds its weights as a pickle (.bin, .pt), which can run code and is never opened; "
        "convert it where you trust it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
    )


def is_pickle(name: str) -> bool:
    """Say whether a file name is that of a pickle or of an index of pickles."""
    return _PICKLE_NAME.search(name) is not None


def _only_file(directory: Path) -> Path:
    found = _safetensors_in(directory)
    if directory / "model.safetensors" in found:
        return directory / "model.safetensors"
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:3]) + (", ..." if len(found) > 3 else "")
        raise CheckpointError(
            f"{directory} holds {len(found)} safetensors files ({names}) but no {INDEX_NAME} to say which "
            "belong together; restore the index, or name one of the files"
        )
    if not found:
        raise _nothing_found(directory)
    return found[0]


def _safetensors_in(directory: Path) -> list[Path]:
    """List the weight files that could be a model: not hidden ones, and not a LoRA adapter beside it."""
    ignored = (".", "adapter_model.")
    return sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(ignored))


def _nothing_found(directory: Path) -> CheckpointError:
    if any(is_pickle(path.name) for path in directory.iterdir()):
        return refuse_pickle(directory)
    return CheckpointError(f"{directory} holds no model: expected model.safetensors or {INDEX_NAME} in it")
