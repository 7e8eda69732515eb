"""Fixtures that several rooms share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

from qkv.quantizers.kernels import native
from tests.helpers import tiny

settings.register_profile(
    "qkv", max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
settings.load_profile("qkv")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Two workers on two cores: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(params=native.LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of the native library that this processor has, in turn."""
    before = native.level()
    if native.set_level(request.param) != request.param:
        native.set_level(before)
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    native.set_level(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("gpt2", dtype=..., shard="8KB")``: a saved double, written once a session; do not change it."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Path] = {}

    def make(family: str, *, shard: str | None = None, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
        key = f"{family}-{shard}-{dtype}-{sorted(changes.items())}"
        if key not in made:
            made[key] = root / str(len(made))
            options = {"max_shard_size": shard} if shard else {}
            tiny(family, dtype=dtype, **changes).save_pretrained(made[key], **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as bfloat16 safetensors, converted once for all workers from the package's file."""
    from qkv.checkpoint.gguf import convert_gguf
    from qkv.demo import packaged_gguf
    from qkv.errors import QkvError

    try:
        source = packaged_gguf()
    except QkvError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    root = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent  # the workers' folders lie side by side
    target = root / "smollm2"
    with (root / "smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            convert_gguf(source, target)
    return target


@pytest.fixture
def short_folder() -> Any:
    """A temporary folder outside pytest's, for tests that measure a subprocess."""
    with tempfile.TemporaryDirectory(prefix="qkv-test-") as name:
        yield Path(name)
