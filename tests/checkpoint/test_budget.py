from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.checkpoint.budget import load_plan, parse_share, plan_checkpoint, save_plan
from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import QkvError
from qkv.integration.calibrate import calibrate, token_windows
from qkv.integration.patch import quantize_
from qkv.integration.perplexity import negative_log_likelihood
from qkv.integration.trial import Trial
from qkv.memory.footprint import footprint
from tests.cli.test_main import run
from tests.helpers import FAMILIES, assert_same_model, assert_same_tensors, frozen, letters_tokenizer, live_nbytes, tiny

Checkpoint = Callable[..., Path]
TEXT = "She had walked that road before, in winter, when the river was hard and the hedges white. " * 9


def made(model: Any, **options: Any) -> Any:
    return calibrate(model, letters_tokenizer(), TEXT, **{"samples": 2, "window": 16, "gradients": True, **options})


@pytest.fixture
def source(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer."""
    shutil.copytree(checkpoint("llama_tied"), tmp_path / "src")
    letters_tokenizer().save_pretrained(tmp_path / "src")
    return tmp_path / "src"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_takes_to_the_byte_what_it_says(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    calibration, num_parameters = made(tiny(family)), footprint(checkpoint(family)).num_parameters
    for bits in (12.5, 14.0):
        plan = plan_checkpoint(checkpoint(family), calibration, target_bpw=bits)
        assert plan.nbytes <= bits * num_parameters / 8 < plan.nbytes * 1.35
        target = tmp_path / str(bits)
        report = quantize_checkpoint(checkpoint(family), target, **plan.options(), calibrate=calibration)
        model, patched = load(target), tiny(family)
        sizes = {report.footprint.weight_nbytes, footprint(target).weight_nbytes, live_nbytes(model), plan.nbytes}
        assert len(sizes) == 1 and plan.num_parameters == num_parameters
        quantize_(patched, **plan.options(), calibration=calibration)
        assert_same_model(patched, model)
        again = plan_checkpoint(checkpoint(family), calibration, target_size=plan.nbytes)
        assert again == plan


def test_more_bytes_are_never_expected_to_lose_more(checkpoint: Checkpoint) -> None:
    calibration = made(tiny("llama_tied"))
    plans = [plan_checkpoint(checkpoint("llama_tied"), calibration, target_bpw=b) for b in (5.5, 6, 7, 8.5, 10, 32)]
    losses = [plan.loss or 0.0 for plan in plans]
    assert losses == sorted(losses, reverse=True) and losses[0] > 0 and losses[-1] == 0
    with pytest.raises(QkvError, match=r"out of reach: the smallest plan takes 1\d\.\d kB"):
        plan_checkpoint(checkpoint("llama_tied"), calibration, target_size="5KB")


def test_what_is_skipped_stays(checkpoint: Checkpoint, tmp_path: Path) -> None:
    calibration, skip = made(tiny("llama")), ["layers.0", "lm_head"]
    plan = plan_checkpoint(checkpoint("llama"), calibration, target_bpw=24, skip=skip)
    assert not any("layers.0" in name or "lm_head" in name for name in (*plan.layers, *plan.tables))
    quantize_checkpoint(checkpoint("llama"), tmp_path / "q", **plan.options(), skip=skip, calibrate=calibration)
    assert footprint(tmp_path / "q").weight_nbytes == plan.nbytes


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "gpt_oss"])
def test_a_trial_is_the_quantized_model_and_leaves_no_trace(family: str) -> None:
    model, windows = tiny(family), list(token_windows(letters_tokenizer(), TEXT, 2, 16))
    calibration, before = made(tiny(family)), frozen(model)
    patched = tiny(family)
    report = quantize_(patched, "nf4", embeddings="int8" if family == "llama_tied" else None, calibration=calibration)
    formats = {row.name.rpartition(".")[0]: row.format for row in report.quantized}
    formats |= {"model.embed_tokens": "int8", "lm_head": "int8"} if family == "llama_tied" else {}
    with Trial(model, calibration, windows) as trial:
        first = trial.increase(formats)
        assert trial.increase({}) == 0 and trial.increase(formats) == first != 0
    assert_same_tensors(before, model.state_dict())
    with torch.no_grad():
        losses = [sum(negative_log_likelihood(each, ids) for ids in windows) / 30 for each in (model, patched)]
    assert math.isclose(1 + first, math.exp(losses[1] - losses[0]), rel_tol=1e-5)


def test_the_limit_on_loss_is_measured(source: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    sizes = []
    for limit in ("0.1%", "3%", 10):
        plan = plan_checkpoint(source, tmp_path / "t.txt", max_perplexity_increase=limit, samples=2)
        assert plan.measured is not None and plan.measured <= parse_share(limit)
        sizes.append(plan.nbytes)
    assert sizes[0] >= sizes[1] >= sizes[2] and sizes[0] > sizes[2]
    made(tiny("llama_tied")).save(tmp_path / "c.safetensors")
    with pytest.raises(QkvError, match="give the text"):
        plan_checkpoint(source, tmp_path / "c.safetensors", max_perplexity_increase="1%")


def test_a_plan_as_a_file_edited_and_given_back(source: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    file, arguments = tmp_path / "plan.json", ["quantize", source, tmp_path / "q", "--calibrate", tmp_path / "t.txt"]
    status, out, _ = run(capsys, *arguments, "--target-bpw", 8, "--dry-run", "--save-plan", file)
    assert status == 0 and out.startswith("plan: ") and not (tmp_path / "q").exists()
    plan = load_plan(file, source)
    values = json.loads(file.read_text())
    assert (plan.nbytes, plan.layers, plan.tables) == (values["nbytes"], values["layers"], values["tables"])
    values["layers"]["model.layers.0.mlp.up_proj"] = "int4:asym"
    values["layers"]["model.layers.1.mlp.up_proj"] = "keep"
    file.write_text(json.dumps(values))
    edited = load_plan(file, source)
    save_plan(edited, tmp_path / "again.json")
    assert load_plan(tmp_path / "again.json", source) == edited and edited.nbytes != plan.nbytes
    status, out, _ = run(capsys, *arguments, "--plan", file)
    assert status == 0 and footprint(tmp_path / "q").weight_nbytes == edited.nbytes
    assert "int4:g64:asym" in out and footprint(load(tmp_path / "q")).weight_nbytes == edited.nbytes


def test_plans_that_do_not_fit_are_refused(source: Path, checkpoint: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "plan.json"
    plan = plan_checkpoint(source, made(tiny("llama_tied")), target_bpw=8)
    save_plan(plan, file)
    with pytest.raises(QkvError, match="says nothing of"):
        load_plan(file, checkpoint("gpt2"))
    values = json.loads(file.read_text())
    for change, match in (
        ({"qkv_plan": 2}, "no plan of version 1"),
        ({"layers": []}, "no plan of version 1"),
        ({"layers": values["layers"] | {"nobody": "int8"}}, "names nobody"),
        ({"layers": values["layers"] | {"model.layers.0.mlp.up_proj": "int9"}}, "unknown format 'int9'"),
        ({"tables": {"model.embed_tokens": "int8", "lm_head": "keep"}}, "share one weight"),
    ):
        file.write_text(json.dumps(values | change))
        with pytest.raises(QkvError, match=match):
            load_plan(file, source)
    command = ["quantize", source, tmp_path / "q"]
    for arguments, message in (
        (["--plan", file, "--format", "nf4"], "a plan decides every format"),
        (["--target-bpw", "5"], "--target-bpw needs --calibrate TEXT"),
        (["--dry-run"], "are of a plan"),
    ):
        status, _, err = run(capsys, *command, *arguments)
        assert status == 2 and message in err and not (tmp_path / "q").exists()


def test_what_cannot_be_planned_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(QkvError, match="holds no costs"):
        plan_checkpoint(source, made(tiny("llama_tied"), gradients=False), target_bpw=8)
    with pytest.raises(QkvError, match="made with another model"):
        plan_checkpoint(source, made(tiny("llama_tied", seed=1)), target_bpw=8)
    for limits in ({}, {"target_bpw": 5.0, "target_size": "1GB"}):
        with pytest.raises(QkvError, match="takes one limit"):
            plan_checkpoint(source, made(tiny("llama_tied")), **limits)  # type: ignore[arg-type]
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "no_such", "architectures": ["NoSuch"]}))
    with pytest.raises(QkvError, match="cannot be planned"):
        plan_checkpoint(source, made(tiny("llama_tied")), target_bpw=8)


@pytest.mark.parametrize("value", ["-1%", "x", "", "nan", 1e9])
def test_shares_that_are_none(value: Any) -> None:
    assert (parse_share("2%"), parse_share(" 2 %"), parse_share(0.02)) == (0.02, 0.02, 0.02)
    with pytest.raises(QkvError, match="no share"):
        parse_share(value)
