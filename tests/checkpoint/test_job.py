from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv.checkpoint.dequantize as dequantize
import qkv.checkpoint.quantize as quantize
from qkv.checkpoint.job import Job
from qkv.integration.calibrate import calibrate
from tests.helpers import assert_same_tensors, letters_tokenizer, tiny


def whole(made: Any) -> dict[str, Tensor]:
    """What a maker made, rows put together."""
    parts: dict[str, list[Tensor]] = {}
    for rows in [made] if isinstance(made, dict) else made:
        for name, tensor in rows.items():
            parts.setdefault(name, []).append(tensor)
    return {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}


Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_a_job_is_a_value_that_another_process_can_do(
    family: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    for module in (quantize, dequantize):
        write = module.write_model

        def spy(job: Job, target: Any, write: Any = write) -> Any:
            jobs.append(job)
            return write(job, target)

        monkeypatch.setattr(module, "write_model", spy)
    monkeypatch.setattr("qkv.checkpoint.shard_writer.ROWS_NBYTES", 1000)
    calibration = calibrate(tiny(family), letters_tokenizer(), "abc" * 30, samples=2, window=16)
    quantize.quantize_checkpoint(checkpoint(family), tmp_path / "q", "nf4", calibrate=calibration)
    dequantize.dequantize_checkpoint(tmp_path / "q", tmp_path / "d")
    assert len(jobs) == 2
    for job in jobs:
        again: Job = pickle.loads(pickle.dumps(job))
        assert again == job and json.loads(json.dumps(job.settings)) == job.settings
        for name, piece in again.pieces.items():
            if piece.make is not None:
                made = whole(piece.make(again.source))
                assert {(n, t.dtype, tuple(t.shape)) for n, t in made.items()} == {
                    (spec.name, spec.dtype, spec.shape) for spec in piece.specs
                }
                expected = job.pieces[name].make
                assert expected is not None
                assert_same_tensors(made, whole(expected(job.source)))
