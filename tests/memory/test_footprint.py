from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import CheckpointError
from qkv.integration.patch import quantize_
from qkv.integration.skeleton import build_skeleton
from qkv.memory.footprint import footprint
from qkv.memory.items import Item
from qkv.quantizers.format import Format
from tests.helpers import FAMILIES, MIXTURES, live_nbytes, tensor_nbytes_in, tensors_in, tiny

Checkpoint = Callable[..., Path]
SETTINGS = [("nf4", None), ("nf4:double", None), ("int8:asym", "int8"), ("int8", "int8:row")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("text", "embeddings"), SETTINGS)
def test_three_ways_one_truth(
    family: str, text: str, embeddings: str | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Live storages, headers, and the quantizer's own report; and the bytes of the files themselves."""
    source = checkpoint(family, dtype=torch.bfloat16)
    report = quantize_checkpoint(source, tmp_path / "q", text, embeddings=embeddings).footprint
    model = load(tmp_path / "q")
    patched = tiny(family, dtype=torch.bfloat16)
    quantize_(patched, text, embeddings=embeddings)
    ways = [report, footprint(tmp_path / "q"), footprint(model), footprint(patched)]
    assert {way.weight_nbytes for way in ways} == {tensor_nbytes_in(tmp_path / "q")} == {live_nbytes(model)}
    assert {way.num_parameters for way in ways} == {footprint(source).num_parameters}
    assert len({way.bits_per_weight for way in ways}) == len({way.overhead_nbytes for way in ways}) == 1
    assert report.rows == ways[1].rows
    if family not in MIXTURES:  # whose experts are apart in the files and one stack in the model
        assert report.rows == ways[2].rows == ways[3].rows
    else:
        for way in ways:
            by_role = [(r.role, r.nbytes, r.num_parameters, r.overhead_nbytes) for r in way.rows if r.format]
            assert by_role == [(r.role, r.nbytes, r.num_parameters, r.overhead_nbytes) for r in report.rows if r.format]
    kept = {name: tensor.nbytes for name, tensor in tensors_in(tmp_path / "q").items() if tensor.is_floating_point()}
    for note in report.kept:
        assert kept[note.name] == note.nbytes and note.reason


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_add_up_and_name_roles(family: str) -> None:
    model = tiny(family)
    quantize_(model, "int8:asym", embeddings="int8")
    result = footprint(model)
    assert sum(row.nbytes for row in result.rows) == result.weight_nbytes == live_nbytes(model)
    assert result.total_nbytes == result.weight_nbytes + result.buffer_nbytes and result.unused_nbytes == 0
    roles = {row.role for row in result.rows}
    assert "attention" in roles and "norm" in roles and "other" not in roles, roles
    assert {"experts", "router"} <= roles if family in MIXTURES else "mlp" in roles
    for row in result.rows:
        assert (row.format is None) == (row.overhead_nbytes == 0)
        assert row.bits_per_weight == 8 * row.nbytes / row.num_parameters
    values = json.loads(json.dumps(result.to_dict()))
    assert values["total_nbytes"] == result.total_nbytes and len(values["rows"]) == len(result.rows)
    text = str(result)
    assert all(role in text for role in roles) and "all weights" in text


def test_tied_weights_count_once(checkpoint: Checkpoint) -> None:
    """accelerate test_get_module_size_with_ties, Megatron-Bridge#919."""
    tied, apart = tiny("llama_tied"), tiny("llama_tied", tie_word_embeddings=False)
    count = sum(parameter.numel() for parameter in tied.parameters())
    assert footprint(tied).num_parameters == count and footprint(tied).weight_nbytes == 4 * count
    assert footprint(apart).num_parameters == count + 64 * 32
    on_disk = footprint(checkpoint("llama_tied"))
    assert on_disk.num_parameters == count and on_disk.weight_nbytes == 4 * count


def test_a_real_model_is_reported_exactly(smollm2: Path) -> None:
    result = footprint(smollm2)
    assert (result.weight_nbytes, result.num_parameters) == (269_030_016, 134_515_008)
    for text, embeddings in SETTINGS[:3]:
        model = build_skeleton(smollm2).to(torch.bfloat16)
        assert footprint(model).weight_nbytes == 269_030_016
        del model, text, embeddings
    live = load(smollm2)
    assert footprint(live).weight_nbytes == 269_030_016 and footprint(live).num_parameters == 134_515_008


def test_meta_reports_the_numbers_of_the_real_one(checkpoint: Checkpoint) -> None:
    for family in ("llama", "llama_tied", "gemma3", "qwen3_moe"):
        meta, real = footprint(build_skeleton(checkpoint(family))), footprint(tiny(family))
        assert meta.rows == real.rows and meta.buffer_nbytes == real.buffer_nbytes


def test_buffers_are_apart_and_dtypes_their_own() -> None:
    """accelerate test_compute_module_total_buffer_size; frozen and mixed dtypes."""
    model = nn.Module()
    model.a = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    model.b = nn.Linear(64, 64, bias=False)
    model.b.weight.requires_grad_(False)
    shared = torch.zeros(1000)
    model.register_buffer("x", shared)
    model.register_buffer("y", torch.zeros(10), persistent=False)
    model.register_buffer("same", shared)
    result = footprint(model)
    assert (result.num_parameters, result.weight_nbytes, result.buffer_nbytes) == (8192, 4096 * 6, 4040)


def test_storage_that_no_weight_uses_is_told() -> None:
    model = nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(torch.randn(128, 64)[:64])
    result = footprint(model)
    assert (result.weight_nbytes, result.unused_nbytes) == (64 * 64 * 4, 64 * 64 * 4)
    assert result.total_nbytes == 128 * 64 * 4 and "storage no weight uses" in str(result)


def test_forty_gigabytes_are_reported_from_their_headers(tmp_path: Path) -> None:
    """hf-mem, accelerate estimate-memory: sizes come from the header; the shards are sparse."""
    weight_map, nbytes = {}, 20_000_000_000
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        entry = {f"w{number}": {"dtype": "BF16", "shape": [nbytes // 4, 2], "data_offsets": [0, nbytes]}}
        header = json.dumps(entry).encode()
        with (tmp_path / name).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + nbytes)
        weight_map[f"w{number}"] = name
    index = {"metadata": {"total_size": 2 * nbytes}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    result = footprint(tmp_path)
    assert (result.weight_nbytes, result.num_parameters) == (2 * nbytes, nbytes)
    assert time.perf_counter() - start < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000


@pytest.mark.parametrize("text", ["nf4", "int8:asym", "int4:g33:double", "nf4:tensor"])
def test_an_items_overhead_is_all_but_its_codes(text: str) -> None:
    item = Item.quantized("w", Format.parse(text), (5, 100))
    layout = Format.parse(text).layout((5, 100))
    codes = torch.Size(layout[""][0]).numel()
    assert item.nbytes - item.overhead_nbytes == codes and item.nbytes == Format.parse(text).stored_nbytes((5, 100))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError):
            footprint(path)
