from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qkv.errors import CheckpointError, QkvError
from qkv.integration.calibrate import PRIOR_TOKENS, calibrate, token_windows
from qkv.integration.calibration import Calibration
from qkv.integration.patch import patched, quantize_
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import FAMILIES, MIXTURES, assert_same_tensors, frozen, letters_tokenizer, logits, tiny

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 9
TOKENIZER = letters_tokenizer()


def made(model: Any, **options: Any) -> Calibration:
    return calibrate(model, TOKENIZER, TEXT, **{"samples": 3, "window": 16, **options})


def linears(model: Any) -> dict[str, Any]:
    return {f"{n}.weight": m for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}


@pytest.mark.parametrize("family", FAMILIES)
def test_mean_squares_of_the_inputs_by_hand(family: str) -> None:
    model = tiny(family)
    calibration = made(model)
    seen: dict[str, list[Tensor]] = {name: [] for name in linears(model)}
    hooks = [
        m.register_forward_pre_hook(lambda m, args, name=n: seen[name].append(args[0].double().flatten(0, -2)))
        for n, m in linears(model).items()
    ]
    for ids in token_windows(TOKENIZER, TEXT, 3, 16):
        logits(model, ids[None])
    for hook in hooks:
        hook.remove()
    assert calibration.num_tokens == 48
    for name, inputs in seen.items():
        if inputs and "router" not in name and not name.endswith("mlp.gate.weight"):
            want = torch.cat(inputs).square().mean(0)
            assert torch.allclose(calibration.importance[name].double(), want, rtol=1e-4), name


@pytest.mark.parametrize("family", MIXTURES)
def test_each_expert_by_hand(family: str) -> None:
    model = tiny(family)
    name, experts = next((n, m) for n, m in model.named_modules() if n.endswith("experts"))
    seen: list[tuple[Tensor, Tensor]] = []
    handle = experts.register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(tuple([*args, *kwargs.values()][:2])),  # type: ignore[arg-type]
        with_kwargs=True,
    )
    calibration = made(model)
    handle.remove()
    hidden = torch.cat([x.flatten(0, -2) for x, _ in seen]).double()
    index = torch.cat([i.flatten(0, -2) for _, i in seen])
    own = [hidden[(index == expert).any(-1)] for expert in range(4)]
    average = torch.cat(own).square().mean(0)
    for expert, x in enumerate(own):
        want = (x.square().sum(0) + PRIOR_TOKENS * average) / (len(x) + PRIOR_TOKENS)
        assert torch.allclose(calibration.importance[f"{name}.gate_up_proj"][expert].double(), want, rtol=1e-4)
    down = calibration.importance[f"{name}.down_proj"]
    assert down.shape == (4, experts.down_proj.shape[2 - experts.is_transposed]) and bool((down > 0).all())


def test_an_experts_inner_inputs_are_those_of_its_own_products() -> None:
    """One expert for all tokens makes the layer a plain MLP, whose middle can be told."""
    model = tiny("qwen3_moe", num_experts=1, num_experts_per_tok=1, num_hidden_layers=1)
    experts, middle = model.model.layers[0].mlp.experts, []
    handle = experts.register_forward_pre_hook(lambda m, args: middle.append(args[0].detach()))
    calibration = made(model)
    handle.remove()
    gate, up = (torch.cat(middle) @ experts.gate_up_proj[0].mT).chunk(2, -1)
    want = (torch.nn.functional.silu(gate) * up).square().mean(0)
    found = calibration.importance["model.layers.0.mlp.experts.down_proj"][0]
    assert torch.allclose(found, want, rtol=1e-4)


def test_the_model_is_left_as_it_was_and_the_result_is_the_same_each_time() -> None:
    model = tiny("llama_tied").train()
    model.model.norm.weight.requires_grad_(False)
    before = frozen(model)
    first, second = made(model), made(model, gradients=True)
    assert model.training and not model.model.norm.weight.requires_grad and model.lm_head.weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert_same_tensors(before, model.state_dict())
    assert_same_tensors(first.importance, second.importance)
    assert first.text == second.text and not first.columns and not first.outputs
    assert set(second.columns) == set(second.importance)
    assert torch.equal(first.importance["lm_head.weight"], first.importance["model.embed_tokens.weight"])


def test_costs_by_hand() -> None:
    """Of columns: inputs squared, each token weighed by its gradients; of outputs: their share of the gradients."""
    model = tiny("llama_tied")
    calibration = made(model, gradients=True)
    layer, table = model.model.layers[0].mlp.down_proj, model.model.embed_tokens
    columns, outputs, lookups = (torch.zeros(size, dtype=torch.float64) for size in (64, 32, 32))
    for ids in token_windows(TOKENIZER, TEXT, 3, 16):
        kept: list[Tensor] = []

        def keep(module: Any, inputs: Any, output: Tensor, kept: list[Tensor] = kept) -> None:
            output.retain_grad()  # type: ignore[no-untyped-call]
            kept.extend((inputs[0].detach(), output))

        handles = [module.register_forward_hook(keep) for module in (table, layer)]
        loss = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="sum")
        loss.backward()  # type: ignore[no-untyped-call]
        for handle in handles:
            handle.remove()
        _, looked_up, x, y = kept
        assert looked_up.grad is not None and y.grad is not None
        squares = y.grad[0].double().square()
        columns += squares.sum(-1) @ x[0].double().square()
        outputs += squares.sum(0)
        lookups += looked_up.grad[0].double().square().sum(0)
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.allclose(calibration.columns[name].double(), columns / 48, rtol=1e-4)
    assert torch.allclose(calibration.outputs[name].double(), outputs / outputs.sum(), rtol=1e-4)
    assert torch.allclose(calibration.columns["model.embed_tokens.weight"].double(), lookups / 48, rtol=1e-4)
    assert (
        calibration.outputs["lm_head.weight"].shape == (64,) and "model.embed_tokens.weight" not in calibration.outputs
    )


@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2", "qwen3_moe", "gpt_oss"])
def test_quantize_searches_each_weight_by_what_it_meets(family: str) -> None:
    model, calibration = tiny(family), made(tiny(family))
    weights = dict(model.named_parameters(remove_duplicate=False))
    report = quantize_(model, "nf4", embeddings="int8", calibration=calibration)
    transposed = {"gpt2", "gpt_oss"}
    for module_name, module in model.named_modules():
        for name in getattr(module, "specs", {}):
            full = f"{module_name}.{name}"
            spec, importance = module.specs[name], calibration.importance.get(full)
            x = weights[full].mT if spec.transposed else weights[full]
            assert not spec.transposed or family in transposed
            want = quantize_tensor(x, spec.format, importance=importance)
            assert torch.equal(module.quantized(name).dequantize(), want.dequantize()), full
            assert (importance is None) == (full in report.uncalibrated)
    assert family == "llama_tied" or "not in the calibration, scales by the largest value: " in str(report)


def test_a_file_and_back(tmp_path: Path) -> None:
    calibration = made(tiny("qwen3_moe"), gradients=True)
    calibration.save(tmp_path / "c.safetensors")
    again = Calibration.load(tmp_path / "c.safetensors")
    assert_same_tensors(calibration.importance, again.importance)
    assert_same_tensors(calibration.first_values, again.first_values)
    assert_same_tensors(calibration.columns, again.columns)
    assert_same_tensors(calibration.outputs, again.outputs)
    assert (calibration.num_tokens, calibration.text) == (again.num_tokens, again.text)
    assert [path.name for path in tmp_path.iterdir()] == ["c.safetensors"]
    from safetensors import safe_open

    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        names = set(file.keys())
    shared = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
    assert len(shared & names) == 1  # what queries, keys and values read is stored once


def test_the_calibration_of_another_model_is_refused(tmp_path: Path) -> None:
    calibration = made(tiny("llama"))
    for other, match in ((tiny("llama", seed=1), "begins with other values"), (tiny("gpt2"), "of transformer.h.0")):
        before = frozen(other)
        with pytest.raises(QkvError, match=match):
            quantize_(other, "nf4", calibration=calibration)
        assert_same_tensors(before, other.state_dict())
    with patched(tiny("llama", dtype=torch.float32), "nf4", calibration=calibration) as same:
        logits(same)
    rounded = tiny("llama").to(torch.bfloat16)
    quantize_(rounded, "nf4", calibration=calibration)  # the same model in another dtype


def test_files_that_are_no_calibrations_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    with pytest.raises(CheckpointError, match="does not exist"):
        Calibration.load(path)
    path.write_bytes(b"x" * 99)
    with pytest.raises(CheckpointError, match="is damaged"):
        Calibration.load(path)
    save_file({"w": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match="no calibration of version 1"):
        Calibration.load(path)
    for header in ("[]", "{}", json.dumps({"num_tokens": 1, "text": "", "same_as": {"a": "b"}}), "{"):
        save_file({"w": torch.ones(2)}, path, metadata={"qkv_calibration": "1", "qkv": header})
        with pytest.raises(CheckpointError, match="is damaged"):
            Calibration.load(path)


def test_what_cannot_be_calibrated_is_said() -> None:
    model = tiny("llama")
    texts: tuple[Any, ...] = ("", "a", [])
    for text in texts:
        with pytest.raises(QkvError, match="fewer than two tokens"):
            calibrate(model, TOKENIZER, text)
    broken = tiny("llama")
    with torch.no_grad():
        broken.model.embed_tokens.weight.fill_(float("inf"))
    with pytest.raises(QkvError, match=r"inputs of model\.layers\.0\.self_attn\.q_proj\.weight were not finite"):
        made(broken)
    quantize_(model, "nf4")
    model.lm_head = torch.nn.Identity()
    with pytest.raises(QkvError, match="no linear layer with float weights"):
        made(model)


def test_pieces_are_spread_evenly_over_the_texts() -> None:
    text = "".join(chr(32 + number // 100 % 60) for number in range(6000))
    found = [int(ids[0]) - 1 for ids in token_windows(TOKENIZER, text, 3, 10)]
    assert found == [0, 20, 40]
    assert [len(ids) for ids in token_windows(TOKENIZER, ["abc", "de", "f"], 9, 10)] == [3, 2]
