"""Formats side by side are what quantizing gives; pictures are whole, self-contained files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.cli.main import main
from qkv.errors import CheckpointError, QkvError
from qkv.memory.compare import AS_IS, WEIGHTS, compare
from qkv.memory.footprint import footprint
from qkv.memory.plot import check_target, draw
from tests.helpers import tensor_nbytes_in

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("family", ["llama_tied", "gpt2", "qwen3_moe"])
def test_what_is_planned_is_what_is_written(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint(family, dtype=torch.bfloat16)
    result = compare(source)
    assert [choice.weights for choice in result.choices] == list(WEIGHTS)
    for number, choice in enumerate(result.choices):
        if choice.weights == AS_IS:
            assert choice.nbytes == tensor_nbytes_in(source)
            continue
        format, _, embeddings = choice.weights.partition("+")
        quantize_checkpoint(source, tmp_path / str(number), format, embeddings=embeddings or None)
        written = footprint(tmp_path / str(number))
        assert choice.nbytes == written.weight_nbytes == tensor_nbytes_in(tmp_path / str(number))
        assert (choice.scales_nbytes, choice.bits_per_weight) == (written.overhead_nbytes, written.bits_per_weight)


def test_caches_are_those_of_the_report(checkpoint: Checkpoint) -> None:
    source = checkpoint("gemma3")
    result = compare(source, [AS_IS, "nf4"], ["exact", "int8"], context=300, batch=2, memory="1MB")
    for choice in result.choices:
        for cell in choice.cells:
            settings: dict[str, Any] = {} if cell.cache == "exact" else {"keys": "int8", "values": "int8"}
            alone = footprint(source, context=300, batch=2, memory="1MB", **settings)
            assert cell.kv_nbytes == alone.kv_nbytes
            if choice.weights == AS_IS:
                assert alone.workspace is not None and alone.fit is not None
                assert (cell.peak_nbytes, cell.workspace_nbytes) == (alone.peak_nbytes, alone.workspace.nbytes)
                assert (cell.longest_context, cell.largest_batch) == (
                    alone.fit.longest_context,
                    alone.fit.largest_batch,
                )
    text = str(result)
    assert "peak, int8 KV" in text and "fits 1.00 MB" in text and "100%" in text
    values = json.loads(json.dumps(result.to_dict()))
    assert values["schema_version"] == 1 and values["comparison"][1]["caches"][1]["cache"] == "int8"


def test_a_quantized_source_is_refused_and_an_unknown_cache_said(checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint("llama"), tmp_path / "q", "nf4")
    with pytest.raises(CheckpointError, match="quantized already"):
        compare(tmp_path / "q")
    assert compare(tmp_path / "q", [AS_IS]).choices[0].nbytes == tensor_nbytes_in(tmp_path / "q")
    folder = tmp_path / "odd"
    folder.mkdir()
    for path in checkpoint("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mamba_d_state": 16}))
    result = compare(folder, [AS_IS], context=10)
    assert "not known" in str(result) and result.choices[0].cells == ()
    with pytest.raises(QkvError, match="not known"):
        draw(result, tmp_path / "odd.png")
    assert not (tmp_path / "odd.png").exists()


def test_pictures_are_whole_and_ask_nothing_of_the_network(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = compare(checkpoint("llama"), [AS_IS, "nf4"], context=512, memory="1MB")
    for name in ("a.png", "a.svg", "a.html"):
        draw(result, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 1 and "bits/weight" in page
    assert not re.search(r"(?:src|href)=\"(?!#)", page.replace("xlink:href", "href")) and "<script" not in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.png", "a.svg"]
    with pytest.raises(QkvError, match="context"):
        draw(compare(checkpoint("llama"), [AS_IS]), tmp_path / "b.png")


@pytest.mark.parametrize("name", ["picture", "picture.jpeg", "no/such/folder/a.png"])
def test_a_place_for_no_picture_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(QkvError):
        check_target(tmp_path / name)


def test_the_command(checkpoint: Checkpoint, tmp_path: Path, capsys: Any) -> None:
    source = str(checkpoint("llama"))
    assert main(["report", source, "--context", "100", "--memory", "1MB", "--chunk", "10"]) == 0
    text = capsys.readouterr().out
    assert "grouped-query" in text and "in 1.00 MB fit" in text and "reading 10 tokens" in text
    picture = tmp_path / "p.html"
    asked = ["report", source, "--context", "100", "--kv", "int2", "--compare", "int4", "--json"]
    assert main([*asked, "--plot", str(picture)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert [choice["weights"] for choice in values["comparison"]] == [AS_IS, "int4"]
    assert values["comparison"][0]["caches"][0]["cache"] == "int2" and picture.exists()
    for wrong in (
        ["--plot", "x.jpeg"],
        ["--compare", "int9"],
        ["--live", "--compare"],
        ["--live"],
        ["--memory", "1GB"],
    ):
        assert main(["report", source, *wrong]) == 2
        assert capsys.readouterr().err.startswith("qkv: ")
