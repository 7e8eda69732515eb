from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.patch import dequantize_, patched, quantize_
from qkv.memory.footprint import footprint
from qkv.quantizers.format import FORMATS
from qkv.quantizers.holder import Holder
from qkv.quantizers.linear import QuantizedLinear
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import FAMILIES, MIXTURES, TOLERANCES, assert_same_tensors, frozen, live_nbytes, logits, prompt, tiny
from tests.laws import check_forward_is_pure

SEVERAL = ("llama", "llama_tied", "gpt2", "gemma3", "qwen3_moe", "gpt_oss")


class Tied(nn.Module):
    """A head that shares the table's weight and is called nothing known."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(64, 64)
        self.body = nn.Linear(64, 64)
        self.out = nn.Linear(64, 64, bias=False)
        self.out.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(self.body(self.tok(ids)))
        return result


def holders(model: nn.Module) -> dict[str, Holder]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Holder)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", ["int8", "nf4"])
def test_a_patched_model_computes_what_its_dequantized_twin_computes(family: str, text: str) -> None:
    model = tiny(family)
    exact = logits(model)
    quantize_(model, text)
    got = logits(model)
    twin = dequantize_(copy.deepcopy(model))
    assert not holders(twin) and torch.allclose(got, logits(twin), atol=TOLERANCES["logits"], rtol=1e-4)
    if text == "int8" and family not in MIXTURES:  # their routers may send a token elsewhere
        assert float((got - exact).abs().max()) < TOLERANCES["int8_logits"] * float(exact.abs().max())


def test_the_report_names_every_weight_in_bytes() -> None:
    model = tiny("llama")
    before = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    report = quantize_(model, "nf4", skip="o_proj", embeddings="int8")
    assert {row.name: row.before_nbytes for row in report.quantized} == {
        name: nbytes
        for name, nbytes in before.items()
        if name.endswith("weight") and "norm" not in name and "o_proj" not in name
    }
    assert [row.reason for row in report.kept] == ["skipped: matches 'o_proj'"] * 2
    assert report.after_nbytes == sum(m.quantized(n).nbytes for m in holders(model).values() for n in m.specs)
    values = report.to_dict()
    assert values["before_nbytes"] == report.before_nbytes and len(values["quantized"]) == len(report.quantized)
    assert str(report).startswith(f"{len(report.quantized)} weights quantized to int8:g64, nf4:g64: ")


@pytest.mark.parametrize("family", SEVERAL)
@pytest.mark.parametrize("options", [{}, {"embeddings": "int8"}, {"skip": "0", "embeddings": "int8:row"}])
def test_patched_puts_everything_back_bit_for_bit(family: str, options: dict[str, Any]) -> None:
    model = tiny(family).train()
    before, keys = frozen(model), list(model.state_dict())
    identities = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    classes = {name: type(module) for name, module in model.named_modules()}
    config = model.config.to_dict()
    with pytest.raises(ZeroDivisionError), patched(model, "nf4", **options) as same:
        assert same is model and holders(model)
        model.zero_grad()
        raise ZeroDivisionError
    for _ in range(2):
        assert_same_tensors(before, model.state_dict())
        assert list(model.state_dict()) == keys and model.config.to_dict() == config and model.training
        assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == identities
        assert {name: type(module) for name, module in model.named_modules()} == classes
        if family != "gpt2":
            assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
        with patched(model, "int8", **options):
            logits(model)


def test_patched_leaves_no_attribute_behind_on_conv1d() -> None:
    model = tiny("gpt2")
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    with patched(model, "nf4"):
        pass
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes


def test_patched_undoes_a_patch_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    before, calls = frozen(model), iter(range(100))

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 5:
            raise MemoryError
        return quantize_tensor(*arguments, **options)

    monkeypatch.setattr("qkv.integration.patch.quantize_tensor", fail)
    with pytest.raises(MemoryError), patched(model, "nf4"):
        pass
    assert not holders(model)
    assert_same_tensors(before, model.state_dict())


def test_patched_over_a_patched_model_keeps_what_was_quantized() -> None:
    model = tiny("llama")
    quantize_(model, "int8", skip="mlp")
    before, config = frozen(model), model.config.quantization_config.to_dict()
    with patched(model, "nf4"):
        assert len(holders(model)) == 14
    assert len(holders(model)) == 8 and model.config.quantization_config.to_dict() == config
    assert_same_tensors(before, model.state_dict())


def test_hooks_fire_and_their_handles_remove_them() -> None:
    """pytorch#37151, auto-round#1308, unsloth PR#10509: hooks vanish when a module is swapped."""
    model, seen = tiny("llama"), []
    layer = model.model.layers[0].self_attn.q_proj
    handles = [
        layer.register_forward_hook(lambda module, inputs, output: seen.append("forward")),
        layer.register_forward_pre_hook(lambda module, inputs: seen.append("pre")),
        layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append("backward")),
    ]
    quantize_(model, "int8")
    assert model.model.layers[0].self_attn.q_proj is layer
    model(prompt(), labels=prompt()).loss.backward()
    assert seen == ["pre", "forward", "backward"]
    dequantize_(model)
    logits(model)
    assert seen == ["pre", "forward", "backward", "pre", "forward"]
    for handle in handles:
        handle.remove()
    logits(model)
    assert len(seen) == 5


def test_hooks_of_accelerate_survive() -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module

    class Hook(ModelHook):  # type: ignore[misc]
        count = 0

        def pre_forward(self, module: nn.Module, *arguments: Any, **options: Any) -> Any:
            Hook.count += 1
            return arguments, options

    model = tiny("llama")
    layer = model.model.layers[0].mlp.up_proj
    add_hook_to_module(layer, Hook())
    plain = logits(model)
    quantize_(model, "int8")
    assert isinstance(layer, QuantizedLinear)
    packed = logits(model)
    assert Hook.count == 2 and not torch.equal(plain, packed)
    dequantize_(model)
    logits(model)
    remove_hook_from_module(layer)
    assert Hook.count == 3 and torch.allclose(logits(model), packed, atol=1e-4)


def test_a_module_used_twice_is_quantized_once() -> None:
    shared = nn.Linear(32, 32)
    model: Any = nn.Sequential(shared, nn.ReLU(), shared, nn.Sequential(shared))
    report = quantize_(model, "int8")
    assert len(report.quantized) == 1 and model[0] is model[2] is model[3][0]
    assert footprint(model).num_parameters == 32 * 32 + 32


def test_a_shared_parameter_is_quantized_once_and_stays_shared() -> None:
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    model[2].weight = nn.Parameter(model[0].weight.data)  # another Parameter over the same storage
    x = torch.randn(2, 32)
    report = quantize_(model, "nf4:double")
    assert len(report.quantized) == 1
    assert all(model[0]._buffers[n] is model[i]._buffers[n] for n in model[0].held_names() for i in (1, 2))
    y = model(x)
    for cast in (lambda m: m.to(torch.float64), lambda m: copy.deepcopy(m).float()):
        model = cast(model)  # type: ignore[no-untyped-call]
        assert model[0].weight.data_ptr() == model[1].weight.data_ptr() == model[2].weight.data_ptr()
    assert torch.allclose(model(x), y)
    dequantize_(model)
    assert model[0].weight is model[1].weight is model[2].weight and torch.allclose(model(x), y, atol=1e-5)


def test_a_tied_head_under_any_name_stays_tied_and_as_it_is() -> None:
    """HF PR#37905, auto-round PR#101, mobius#671: patching the head quantizes or unties the embedding."""
    for model in (Tied(), tiny("llama_tied")):
        table = model.tok if isinstance(model, Tied) else model.model.embed_tokens
        head = model.out if isinstance(model, Tied) else model.lm_head
        before = table.weight.detach().clone()
        quantize_(model, "int8")
        model(torch.tensor([[1, 2]]))
        assert head.weight is table.weight and torch.equal(table.weight, before) and holders(model)


@pytest.mark.parametrize("text", ["int8", "int8:asym", "nf4", "int8:row"])
def test_a_tied_table_is_quantized_once(text: str) -> None:
    """One storage; llm-compressor PR#2798, GPTQModel#3050: a second copy or a broken tie."""
    models: list[Any] = [Tied(), tiny("llama_tied"), tiny("gemma3"), tiny("gpt2")]
    for model in models:
        tied = isinstance(model, Tied)
        table, head = (model.tok, model.out) if tied else (model.get_input_embeddings(), model.get_output_embeddings())
        report = quantize_(model, "nf4", embeddings=text)
        assert all(table._buffers[name] is head._buffers[name] for name in table.held_names())
        assert sum(row.after_nbytes for row in report.quantized) == live_nbytes(model) - sum(
            parameter.nbytes for parameter in model.parameters()
        )
        dequantize_(model)
        assert head.weight is table.weight


def test_an_untied_table_and_head_are_quantized_each() -> None:
    model = tiny("llama")
    quantize_(model, "nf4", embeddings="int8")
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert str(model.lm_head.format) == str(model.model.embed_tokens.format) == "int8:g64"


def test_training_mode_and_requires_grad_are_kept_and_given_back() -> None:
    model = tiny("llama")
    model.train()
    model.model.layers[0].eval()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.bias.requires_grad_(False)
    modes = {name: module.training for name, module in model.named_modules()}
    wants = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    order = list(model.state_dict())
    quantize_(model, "int8", embeddings="int8")
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert all(parameter.requires_grad == wants[name] for name, parameter in model.named_parameters())
    dequantize_(model)
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == wants
    assert list(model.state_dict()) == order


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantize_gives_back_names_order_shapes_and_dtypes(family: str) -> None:
    model = tiny(family, dtype=torch.bfloat16)
    before = [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()]
    classes = [type(module) for module in model.modules()]
    quantize_(model, "int8", embeddings="int8:row")
    assert dequantize_(model) is model
    assert [(name, tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()] == before
    assert [type(module) for module in model.modules()] == classes
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("family", SEVERAL)
@pytest.mark.parametrize("text", FORMATS)
def test_a_forward_changes_nothing_stored(family: str, text: str) -> None:
    """facts/weights.md 2.7: bitsandbytes repacks in forward, and what is saved afterwards is garbage."""
    model = tiny(family)
    quantize_(model, text, embeddings="int8")
    logits(model)
    check_forward_is_pure(model, prompt())


@pytest.mark.parametrize("family", SEVERAL)
def test_copies_and_state_dicts_round_trip(family: str) -> None:
    model, other = tiny(family), tiny(family, seed=1)
    quantize_(model, "nf4:double", embeddings="int8")
    quantize_(other, "nf4:double", embeddings="int8")
    want = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), want) and not torch.equal(logits(other), want)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(logits(other), want)
    with pytest.raises(RuntimeError):
        tiny(family).load_state_dict(model.state_dict(), strict=True)


def test_quantizing_twice_adds_to_what_is_quantized() -> None:
    model = tiny("llama")
    quantize_(model, "int8", skip="mlp")
    first = {name: module.quantized().codes.clone() for name, module in holders(model).items()}
    report = quantize_(model, "nf4")
    assert len(report.quantized) == 6 and all("mlp" in row.name for row in report.quantized)
    assert all(torch.equal(holders(model)[name].quantized().codes, codes) for name, codes in first.items())
    with pytest.raises(QkvError, match="quantized already"):
        quantize_(model, "nf4")


@pytest.mark.parametrize("bad", ["meta", "nan", "int"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2"])
def test_nothing_is_changed_unless_every_weight_can_be_quantized(family: str, bad: str) -> None:
    """accelerate PR#1237, #1711: a half-patched model and confusing errors later."""
    model = tiny(family)
    modules = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D") and m is not model.lm_head]
    last = modules[-1]
    if bad == "meta":
        last.weight = nn.Parameter(last.weight.to("meta"))
    elif bad == "nan":
        last.weight.data[3, 5] = float("nan")
    else:
        last.weight = nn.Parameter(last.weight.data.to(torch.int8), requires_grad=False)
    before = [type(module) for module in model.modules()]
    with pytest.raises(QkvError, match={"meta": "meta", "nan": "row", "int": "int8"}[bad]) as caught:
        quantize_(model, "int8")
    name = next(name for name, module in model.named_modules() if module is last)
    assert name in str(caught.value)
    assert [type(module) for module in model.modules()] == before


def test_nothing_to_quantize_is_said() -> None:
    with pytest.raises(QkvError, match="no linear layer"):
        quantize_(nn.Sequential(nn.LayerNorm(4)), "int8")
    with pytest.raises(QkvError, match="no linear layer"):
        quantize_(tiny("llama"), "int8", skip=["layers"])


def test_the_model_itself_may_be_the_layer() -> None:
    layer = nn.Linear(32, 16)
    report = quantize_(layer, "int8")
    assert [row.name for row in report.quantized] == ["weight"] and isinstance(layer, QuantizedLinear)
    assert type(dequantize_(layer)) is nn.Linear


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_the_float_weights_are_really_freed(family: str) -> None:
    elsewhere = live_matrices()
    model = tiny(family)
    targets = [
        weakref.ref(p.untyped_storage())
        for n, p in model.named_parameters()
        if p.dim() > 1 and not any(word in n for word in ("embed", "lm_head", "wte", "wpe", "gate.weight", "norm"))
    ]
    before = live_nbytes(model)
    report = quantize_(model, "nf4")
    gc.collect()
    assert live_nbytes(model) == before - report.before_nbytes + report.after_nbytes
    kept = {t.untyped_storage().data_ptr() for t in model.state_dict().values()}
    assert targets and len(live_matrices() - kept - elsewhere) < len(targets)


def live_matrices() -> set[int]:
    """Where the storages of all float matrices of the process are; a compiler's stand-ins have none to ask for."""
    real = (Tensor, nn.Parameter)
    live = [t for t in gc.get_objects() if type(t) in real and t.is_floating_point() and t.dim() > 1]
    return {t.untyped_storage().data_ptr() for t in live if t.device.type != "meta"}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_reports_the_same_parameters_before_and_after(family: str) -> None:
    """bitsandbytes#834 ("7B has 3.5B parameters"), HF#25978, unsloth PR#2855."""
    model = tiny(family)
    before = footprint(model)
    report = quantize_(model, "int8")
    after = footprint(model)
    assert after.num_parameters == before.num_parameters == sum(p.numel() for p in tiny(family).parameters())
    assert before.weight_nbytes - after.weight_nbytes == report.before_nbytes - report.after_nbytes


def test_a_whole_model_can_be_pickled(tmp_path: Any) -> None:
    for family in SEVERAL:
        model = tiny(family)
        quantize_(model, "int8", embeddings="int8")
        torch.save(model, tmp_path / "model.pt")
        assert torch.equal(logits(torch.load(tmp_path / "model.pt", weights_only=False)), logits(model))
