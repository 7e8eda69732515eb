from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qkv.checkpoint.load import load
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.checkpoint.writer import StreamWriter
from qkv.errors import CheckpointError, QkvError
from qkv.integration.patch import quantize_
from qkv.memory.footprint import footprint
from qkv.quantizers.kernels import native
from tests.helpers import (
    FAMILIES,
    assert_same_model,
    assert_same_tensors,
    run_python,
    tensor_nbytes_in,
    tensors_in,
    tiny,
)

Checkpoint = Callable[..., Path]
SETTINGS = [("nf4", None), ("int8:asym", "int8"), ("nf4:double", "int8:row"), ("int4:row", None), ("int8:tensor", None)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("text", "embeddings"), SETTINGS)
def test_to_quantize_the_files_is_to_patch_the_model(
    family: str, text: str, embeddings: str | None, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = checkpoint(family)
    before = tree(source)
    report = quantize_checkpoint(source, tmp_path / "q", text, embeddings=embeddings)
    model = tiny(family)
    quantize_(model, text, embeddings=embeddings)
    again = load(tmp_path / "q")
    assert_same_model(model, again)
    assert not report.note and tree(source) == before
    again.save_pretrained(tmp_path / "saved")
    assert_same_tensors(tensors_in(tmp_path / "q"), tensors_in(tmp_path / "saved"))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_shards_in_and_shards_out(family: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    quantize_checkpoint(checkpoint(family), tmp_path / "one", "nf4:double")
    quantize_checkpoint(checkpoint(family, shard="8KB"), tmp_path / "many", "nf4:double", max_shard_size="4KB")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert_same_tensors(tensors_in(tmp_path / "one"), tensors_in(tmp_path / "many"))
    assert index["metadata"]["total_size"] == tensor_nbytes_in(tmp_path / "many")
    assert set(index["weight_map"]) == set(tensors_in(tmp_path / "one"))
    for name in (n for n in index["weight_map"] if n.endswith("_scale")):  # a weight and its scales share a file
        assert index["weight_map"][name] == index["weight_map"][name.removesuffix("_scale")]
    assert_same_model(load(tmp_path / "one"), load(tmp_path / "many"))


def test_skip_overrides_and_embeddings_are_those_of_the_patch(checkpoint: Checkpoint, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "skip": ["layers.0.mlp", "o_proj"],
        "overrides": {"self_attn": "int8:g16:asym", "layers.1.mlp.up_proj": "keep"},
        "embeddings": "int8",
    }
    for family in ("llama", "llama_tied", "qwen3_moe"):
        if family == "qwen3_moe":
            options["overrides"] = {"experts": "int8", "self_attn": "keep"}
        quantize_checkpoint(checkpoint(family), tmp_path / family, "nf4", **options)
        model = tiny(family)
        quantize_(model, "nf4", **options)
        assert_same_model(model, load(tmp_path / family))


@pytest.mark.parametrize("columns", [33, 100, 122])
def test_ragged_rows(columns: int, checkpoint: Checkpoint, tmp_path: Path) -> None:
    for family, change in (("llama", "intermediate_size"), ("qwen3_moe", "moe_intermediate_size")):
        if family == "qwen3_moe" and columns % 2:
            continue
        for text in ("nf4", "int8:asym", "int4:g16:double"):
            target = tmp_path / f"{family}-{text.replace(':', '-')}"
            changes: dict[str, Any] = {change: columns}
            quantize_checkpoint(checkpoint(family, **changes), target, text)
            model = tiny(family, **changes)
            quantize_(model, text)
            assert_same_model(model, load(target))


def test_odd_rows_of_experts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Four bits and an odd number of columns; transformers itself cannot run such a model, so tensors only."""
    for text in ("nf4", "int8"):
        quantize_checkpoint(checkpoint("qwen3_moe", moe_intermediate_size=33), tmp_path / text, text)
        model = tiny("qwen3_moe", moe_intermediate_size=33)
        quantize_(model, text)
        assert_same_tensors(model.state_dict(), load(tmp_path / text).state_dict())


def test_each_tensor_keeps_its_own_dtype(tmp_path: Path) -> None:
    """A model in bfloat16 with some float32: what is not quantized comes through bit for bit."""
    model = tiny("llama", dtype=torch.bfloat16)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"] = state["model.norm.weight"].float() + 1e-5
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].float()
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"].half()
    model.config.save_pretrained(tmp_path / "src")
    save_file(state, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int8")
    stored = tensors_in(tmp_path / "q")
    for name, tensor in state.items():
        if name + "_scale" not in stored:
            assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor)
    assert {name for name in state if name + "_scale" in stored} == {n for n in state if n.endswith("_proj.weight")}


def test_a_redundant_head_on_disk_stays_equal_to_the_table(tmp_path: Path) -> None:
    """Megatron-Bridge#919, llm-compressor PR#2798: a duplicate lm_head that ends up different."""
    model = tiny("llama_tied")
    model.save_pretrained(tmp_path / "src")
    state = tensors_in(tmp_path / "src")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    for text in (None, "int8"):
        target = tmp_path / f"q-{text}"
        report = quantize_checkpoint(tmp_path / "src", target, "nf4", embeddings=text)
        stored = tensors_in(target)
        if "lm_head.weight" in stored:
            assert torch.equal(stored["lm_head.weight"], stored["model.embed_tokens.weight"])
        if text is None:
            assert torch.equal(stored["model.embed_tokens.weight"], model.model.embed_tokens.weight)
        patched = tiny("llama_tied")
        quantize_(patched, "nf4", embeddings=text)
        assert_same_model(patched, load(target))
        assert report.footprint.weight_nbytes == tensor_nbytes_in(target)  # what is in the file


def test_everything_else_comes_along_and_no_source_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """SkyRL PR#2024 (auxiliary copy overwrote converted shards), safetensors#549 (no format: pt)."""
    shutil.copytree(checkpoint("llama"), tmp_path / "src")
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE")
    for name in names:
        (tmp_path / "src" / name).write_text("{}")
    weights = (tmp_path / "src" / "model.safetensors").read_bytes()
    (tmp_path / "src" / "consolidated.safetensors").write_bytes(weights)
    (tmp_path / "src" / "pytorch_model.bin").write_bytes(b"x" * 99)
    report = quantize_checkpoint(tmp_path / "src", tmp_path / "q", "nf4")
    assert {p.name for p in (tmp_path / "q").iterdir()} == {*names, "config.json", "model.safetensors"}
    header = (tmp_path / "q" / "model.safetensors").read_bytes()[8:60]
    assert b'"format":"pt"' in header
    assert report.left_behind["pytorch_model.bin"] == "weights" and "not copied" not in str(report)
    assert "bits/weight" in str(report) and str(report).startswith("weights ")


def test_what_is_done_without_the_native_library_says_so_once(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.unavailable() is not None:
        pytest.skip("needs the native library")
    assert "native" not in str(quantize_checkpoint(checkpoint("llama"), tmp_path / "with", "nf4"))
    monkeypatch.setattr(native, "unavailable", lambda: "not compiled: no C compiler")
    report = quantize_checkpoint(checkpoint("llama"), tmp_path / "without", "nf4")
    assert str(report).count("without the native library, more slowly: not compiled: no C compiler") == 1
    assert tree(tmp_path / "with") == tree(tmp_path / "without")


EXPERTS = {
    "model.embed_tokens.weight": (64, 32),
    "model.layers.0.mlp.gate.weight": (8, 32),
    "model.layers.0.mlp.experts.gate_up_proj": (8, 128, 32),
    "model.layers.0.mlp.experts.down_proj": (8, 32, 64),
    "lm_head.weight": (64, 32),
}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "no_such"])
def test_fused_experts_are_quantized_each_for_itself(model_type: str, tmp_path: Path) -> None:
    """bitsandbytes#1849, Model-Optimizer#1173 (46 GB instead of 16), GPTQModel PR#1508."""
    state = {name: torch.randn(shape) for name, shape in EXPERTS.items()}
    state["model.layers.0.mlp.experts.down_proj"][3] *= 1000
    (tmp_path / "src").mkdir()
    save_file(state, tmp_path / "src" / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": model_type, "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "num_experts": 8}
    more = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64, "moe_intermediate_size": 64}
    (tmp_path / "src" / "config.json").write_text(json.dumps({**config, **more}))
    quantize_checkpoint(tmp_path / "src", tmp_path / "q", "int8")
    assert footprint(tmp_path / "q").weight_nbytes < 0.6 * footprint(tmp_path / "src").weight_nbytes
    from qkv.checkpoint.dequantize import dequantize_checkpoint

    dequantize_checkpoint(tmp_path / "q", tmp_path / "d")
    back = tensors_in(tmp_path / "d")
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in state.items()}
    for name, tensor in state.items():
        for one, other in zip(tensor, back[name], strict=True):
            noise = (one - other).double().pow(2).sum()
            assert float(noise) <= 1e-3 * float(one.double().pow(2).sum())


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "qkv"])
def test_what_is_quantized_already_is_refused(method: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """llm-compressor#2907 ("min_values_cuda not implemented" instead of a reason), HF PR#27500."""
    shutil.copytree(checkpoint("llama"), tmp_path / "src")
    config = json.loads((tmp_path / "src" / "config.json").read_text())
    for place in ({}, {"text_config": config}):
        nested = {"quantization_config": {"quant_method": method, "bits": 4}}
        changed = {**config, **nested} if not place else {**config, "text_config": nested}
        (tmp_path / "src" / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=f"quantized already.*{method}"):
            quantize_checkpoint(tmp_path / "src", tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_packed_tensors_without_a_config_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path / "src")
    state = tensors_in(tmp_path / "src") | {"model.layers.0.mlp.up_proj.qweight": torch.ones(4, dtype=torch.int32)}
    save_file(state, tmp_path / "src" / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(tmp_path / "src", tmp_path / "q")


def test_damage_is_refused_before_anything_is_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """sglang PR#32279, vmlx-swift PR#217, airllm#137, ComfyUI#15602: missing, cut or lengthened shards."""
    shutil.copytree(checkpoint("llama", shard="8KB"), tmp_path / "src")
    shard = sorted((tmp_path / "src").glob("model-*.safetensors"))[1]
    good = shard.read_bytes()
    for bad in (None, good[:-7], good[: len(good) // 2], good[:20], b"", good + b"\0" * 16):
        shard.unlink(missing_ok=True)
        if bad is not None:
            shard.write_bytes(bad)
        for read in (
            lambda: quantize_checkpoint(tmp_path / "src", tmp_path / "q"),
            lambda: footprint(tmp_path / "src"),
        ):
            with pytest.raises(CheckpointError, match=shard.name) as caught:
                read()
            assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("evil", ["../secret/model.safetensors", "/secret.safetensors", "a/../../x.safetensors"])
def test_an_index_cannot_leave_the_folder(evil: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers#47176, #46913, diffusers#14175: weight_map values are a stranger's text."""
    shutil.copytree(checkpoint("llama", shard="8KB"), tmp_path / "src")
    shutil.copytree(checkpoint("llama"), tmp_path / "secret")
    path = tmp_path / "src" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = evil
    path.write_text(json.dumps(index))
    for read in (lambda: quantize_checkpoint(tmp_path / "src", tmp_path / "q"), lambda: footprint(tmp_path / "src")):
        with pytest.raises(CheckpointError, match="file"):
            read()
    assert not (tmp_path / "q").exists()


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    """anemoi-core#1416, synthefy-nori PR#54, NeMo Automodel PR#3240: a .bin runs code."""

    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    for name in ("pytorch_model.bin", "model.pt"):
        source = tmp_path / name.replace(".", "-")
        tiny("llama").config.save_pretrained(source)
        torch.save({"x": Evil()}, source / name)
        with pytest.raises(CheckpointError, match=r"\.bin"):
            quantize_checkpoint(source, tmp_path / "q")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "q").exists()


def test_the_source_is_never_the_destination(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """llama.cpp#12753: quantizing onto the input destroyed it."""
    source = tmp_path / "p" / "src"
    shutil.copytree(checkpoint("llama"), source)
    (tmp_path / "link").symlink_to(source)
    before = tree(source)
    for target in (source, tmp_path / "link", source / "out", tmp_path / "p", Path(f"{source}/.")):
        for overwrite in (False, True):
            with pytest.raises(CheckpointError):
                quantize_checkpoint(source, target, overwrite=overwrite)
    assert tree(source) == before


def poisoned(source: Path, target: Path) -> Path:
    """A copy whose last tensor to be quantized holds a NaN."""
    shutil.copytree(source, target)
    state = tensors_in(target)
    name = [name for name in state if name.endswith("_proj.weight")][-1]
    state[name][-1, -1] = float("nan")
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_run_that_would_fail_again_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path) -> None:
    bad = poisoned(checkpoint("llama"), tmp_path / "bad")
    with pytest.raises(QkvError, match=r"_proj\.weight has 1 values"):
        quantize_checkpoint(bad, tmp_path / "q")
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_a_full_disk_leaves_what_is_done_to_go_on_with(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_checkpoint(checkpoint("llama"), tmp_path / "whole", "nf4")
    quantize_checkpoint(checkpoint("llama"), tmp_path / "old", "int8")
    before = tree(tmp_path / "old")
    put = StreamWriter._put
    calls = iter(range(1000))

    def full(self: StreamWriter, data: memoryview, position: int) -> None:
        if next(calls) in (10, 20):
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, data, position)

    monkeypatch.setattr(StreamWriter, "_put", full)
    for target in ("q", "old"):
        calls = iter(range(1000))
        for _ in range(2):
            told = rf"No space left on device; what is done is in .*\.{target}\.partial: .* to go on"
            with pytest.raises(CheckpointError, match=told):
                quantize_checkpoint(checkpoint("llama"), tmp_path / target, overwrite=True)
        assert (tmp_path / target).exists() == (target == "old") and tree(tmp_path / "old") == before
        quantize_checkpoint(checkpoint("llama"), tmp_path / target, overwrite=True)
        assert tree(tmp_path / target) == tree(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["old", "q", "whole"]


def test_a_full_disk_is_told(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A real one: the process may write no file beyond 20 kB (RLIMIT_FSIZE)."""
    code = (
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\nfrom qkv.cli.main import main\n"
        "sys.exit(main(['quantize', sys.argv[1], sys.argv[2], '--format', 'int8']))"
    )
    result = run_python(code, str(checkpoint("llama", hidden_size=64)), str(tmp_path / "q"))
    assert result.returncode == 2 and [p.name for p in tmp_path.iterdir()] == [".q.partial"], result.stderr
    assert "too large" in result.stderr and result.stderr.count("\n") == 1


PEAK = """
import resource, sys
import torch
torch.set_num_threads(1)
from qkv import quantize_checkpoint
import qkv.integration.skeleton, transformers
from transformers import LlamaForCausalLM, AutoConfig
quantize_checkpoint(sys.argv[1], sys.argv[3], sys.argv[4])
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
quantize_checkpoint(sys.argv[2], sys.argv[3], sys.argv[4], overwrite=True)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024)
"""


def big_model(folder: Path, num_layers: int) -> Path:
    """A Llama of about 25 MB a layer in bfloat16, its matrices written without being held."""
    from qkv.checkpoint.writer import TensorSpec

    model = tiny("llama", num_hidden_layers=num_layers, hidden_size=1024, intermediate_size=3072).config
    model.save_pretrained(folder)
    shapes = {"model.embed_tokens.weight": (64, 1024), "lm_head.weight": (64, 1024), "model.norm.weight": (1024,)}
    for layer in range(num_layers):
        shapes |= {f"model.layers.{layer}.mlp.{n}_proj.weight": (3072, 1024) for n in ("up", "gate")}
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (1024, 3072)
        shapes |= {f"model.layers.{layer}.self_attn.{n}_proj.weight": (1024, 1024) for n in "qo"}
        shapes |= {f"model.layers.{layer}.self_attn.{n}_proj.weight": (512, 1024) for n in "kv"}
    block = torch.randn(3072, 1024).bfloat16()
    specs = [TensorSpec(name, torch.bfloat16, shape) for name, shape in shapes.items()]
    with StreamWriter(folder / "model.safetensors", specs) as writer:
        for name, shape in shapes.items():
            writer.write(name, block.flatten()[: torch.Size(shape).numel()].reshape(shape))
    return folder


@pytest.mark.parametrize("text", ["nf4", "int8:asym:double"])
def test_the_peak_of_memory_is_a_tensor_not_the_model(text: str, short_folder: Path) -> None:
    """optimum#2334, CTranslate2#1411, auto-round#2210: publish the peak. ru_maxrss, for tracemalloc sees no tensors."""
    small, large = big_model(short_folder / "small", 1), big_model(short_folder / "large", 16)
    arguments = [str(small), str(large), str(short_folder / "out"), text]
    result = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert result.returncode == 0, result.stderr
    largest = 3072 * 1024 * 2
    assert int(result.stdout.split()[-1]) <= 3 * largest + 60e6
    assert (large / "model.safetensors").stat().st_size > 380e6
