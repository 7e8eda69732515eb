"""What a model directory holds besides weights: tokenizer, templates, generation config, code, licence."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from qkv.checkpoint.paths import is_inside, model_home
from qkv.checkpoint.weight_files import is_weight_file
from qkv.errors import CheckpointError


def copy_auxiliary(source_dir: Path, target_dir: Path) -> dict[str, str]:
    """Copy what belongs to a model besides its weights, and return what was left behind, path to reason.

    Links are followed within the model's folder (or hub cache folder) and copied as files; one that leaves
    is left behind, so that no downloaded model carries its user's files along. Left behind too: weights in
    any format, a sub-folder that holds some (`original/`, `onnx/`), hidden files, `config.json`, which the
    caller writes, and what `target_dir` has already.
    """
    home = model_home(source_dir)
    left: dict[str, str] = {}
    for path in _files(source_dir, source_dir, left):
        if path == source_dir / "config.json":
            continue
        name = path.relative_to(source_dir)
        target = target_dir / name
        if reason := _reason_against(path, home, target):
            left[str(name)] = reason
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return left


def _files(folder: Path, root: Path, left: dict[str, str]) -> Iterator[Path]:
    """Yield the files below a folder, noting in `left` the sub-folders that stay behind whole."""
    for path in sorted(folder.iterdir()):
        name = str(path.relative_to(root))
        if path.name.startswith(".") or path.name == "__pycache__":
            left[name] = "hidden"
        elif path.is_symlink() and path.is_dir():
            left[name] = "a link to a folder"
        elif not path.is_dir():
            yield path
        elif any(is_weight_file(below.name) for below in path.rglob("*")):
            left[name] = "a folder that holds weights"
        else:
            yield from _files(path, root, left)


def _reason_against(path: Path, home: Path, target: Path) -> str | None:
    if is_weight_file(path.name):
        return "weights"
    if not _inside(path, home):
        return "a link out of the model's folder"
    if not path.is_file():
        return "not a file"
    if target.exists():
        return "written already"
    return None


def _inside(path: Path, home: Path) -> bool:
    try:
        return is_inside(path, home)
    except CheckpointError:  # a link in a circle leads nowhere
        return False
