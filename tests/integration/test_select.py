from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from qkv.errors import QkvError
from qkv.integration.patch import quantize_
from qkv.integration.select import select
from qkv.integration.settings import Settings, matches
from qkv.quantizers.format import Format
from qkv.quantizers.linear import QuantizedLinear
from tests.helpers import FAMILIES, tiny


@pytest.mark.parametrize(
    ("pattern", "name", "found"),
    [
        ("proj", "model.layers.0.self_attn.q_proj", False),  # transformers' should_convert_module: endswith
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("mlp", "model.layers.0.mlp.up_proj", True),
        ("mlp.up_proj", "model.layers.0.mlp.up_proj", True),
        ("layers.0", "model.layers.0.mlp", True),
        ("layers.0", "model.layers.10.mlp", False),
        ("layers.1", "model.layers.10.mlp", False),  # accelerate#3308: "1" and "10"
        ("layers.*.mlp", "model.layers.7.mlp.down_proj", True),
        ("layers.*.q_proj", "model.layers.7.self_attn.q_proj", False),
        ("layers.?.mlp", "model.layers.10.mlp", False),
        ("*_proj", "model.layers.0.mlp.up_proj", True),
        ("[kq]_proj", "a.k_proj", True),
        ("MLP", "a.mlp", False),
        ("a.b.c.d", "a.b.c", False),
        ("model", "model", True),
        (".mlp.", "a.mlp", True),
        ("mlp", "", False),
    ],
)
def test_patterns_match_whole_components(pattern: str, name: str, found: bool) -> None:
    assert matches(pattern, name) is found


class Odd(nn.Module):
    """Modules that may not be quantized, beside one that may."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32)
        self.conv = nn.Conv1d(16, 16, 1)
        self.recurrent = nn.LSTM(16, 16)
        self.bilinear = nn.Bilinear(16, 16, 16)
        self.variant = Variant(16, 16)
        self.plain = nn.Linear(16, 16)
        self.raw = nn.Parameter(torch.randn(16, 16))


class Variant(nn.Linear):
    """A linear layer whose forward is its own."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight


def test_what_reads_its_weight_itself_is_kept_and_named() -> None:
    model = Odd()
    targets, kept = select(model, Settings.parse("nf4"))
    assert [target.name for target in targets] == ["plain"]
    names = {row.name for row in kept}
    assert {"attention", "attention.out_proj", "layer.linear1", "conv", "recurrent", "bilinear", "variant", ""} <= names
    assert all(row.reason and row.nbytes for row in kept)
    matrices = sum(p.nbytes for p in model.parameters() if p.dim() > 1)
    vectors = sum(p.nbytes for m in model.modules() for p in m._parameters.values() if p is not None and p.dim() == 1)
    total = sum(row.nbytes for row in kept) + sum(
        p.nbytes for t in targets for p in t.module.parameters() if p.dim() > 1
    )
    assert matrices <= total <= matrices + vectors
    quantize_(model, "nf4")
    model.layer(torch.randn(3, 2, 16))
    model.attention(*[torch.randn(3, 2, 16)] * 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_a_family_is_quantized_or_named(family: str) -> None:
    """Model-Optimizer#1173: "silently skips 91 % of weights"."""
    model = tiny(family)
    matrices = sum(p.nbytes for n, p in model.named_parameters() if p.dim() > 1 and not n.endswith("bias"))
    with_vectors = sum(p.nbytes for p in model.parameters())
    report = quantize_(model, "int8")
    assert matrices <= report.before_nbytes + report.kept_nbytes <= with_vectors
    kept = [row.name for row in report.kept]
    allowed = ("embed_tokens", "lm_head", "wte", "wpe", "router", "gate")
    assert all(name.split(".")[-1] in allowed for name in kept), kept
    assert not report.kept or str(report).count("not quantized") >= 1


def twice(first: nn.Module, second: nn.Module) -> nn.Sequential:
    second.weight = first.weight
    return nn.Sequential(first, second)


def test_weights_without_names_of_their_own_are_kept() -> None:
    """prune, weight_norm and spectral_norm compute ``weight`` from other parameters of a plain nn.Linear."""
    from torch.nn.utils import prune, spectral_norm, weight_norm

    computed: list[Callable[[nn.Module], object]] = [
        lambda m: prune.l1_unstructured(m, "weight", 0.5),  # type: ignore[no-untyped-call]
        lambda m: spectral_norm(m),
        lambda m: weight_norm(m),
        lambda m: nn.utils.parametrizations.weight_norm(m),
    ]
    for compute in computed:
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compute(model[0])
        x = torch.randn(2, 32)
        model.eval()
        want = model[0](x)
        report = quantize_(model, "int8")
        assert isinstance(model[1], QuantizedLinear) and len(report.quantized) == 1
        assert any(row.name.startswith("0") for row in report.kept)
        assert torch.equal(model[0](x), want)


def test_an_uninitialized_layer_is_named() -> None:
    with pytest.raises(QkvError):
        quantize_(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)), "int8")


@pytest.mark.parametrize("setting", ["skip", "keep"])
def test_a_shared_weight_is_quantized_by_all_or_none(setting: str) -> None:
    """To skip one of those who share a weight is to skip them all: else the tie is broken without a word."""
    for name in ("0", "1"):
        model = twice(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).append(nn.Linear(32, 32))
        options = {"skip": name} if setting == "skip" else {"overrides": {name: "keep"}}
        quantize_(model, "int8", **options)  # type: ignore[arg-type]
        assert type(model[0]) is type(model[1]) is nn.Linear
        assert model[0].weight is model[1].weight and isinstance(model[2], QuantizedLinear)
    tied = tiny("llama_tied")
    quantize_(tied, "int8", embeddings="int8", skip="lm_head")
    assert tied.lm_head.weight is tied.model.embed_tokens.weight and type(tied.lm_head) is nn.Linear


def test_two_formats_for_one_weight_are_refused_or_one() -> None:
    tied = tiny("llama_tied")
    try:
        quantize_(tied, "int8", embeddings="int8", overrides={"lm_head": "nf4"})
    except QkvError as error:
        assert "lm_head" in str(error) and type(tied.lm_head) is nn.Linear
        return
    assert tied.lm_head.format == tied.model.embed_tokens.format == tied.lm_head.specs["weight"].format


@pytest.mark.parametrize("options", [{"skip": "no_such"}, {"skip": ["mlp", "proj"]}, {"overrides": {"x.y": "int8"}}])
def test_a_pattern_without_a_match_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(QkvError, match="matches no module"):
        quantize_(tiny("llama"), "nf4", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"skip": [""]},
        {"skip": ["."]},
        {"skip": [5]},
        {"overrides": {"mlp": "nf5"}},
        {"embeddings": "int8:double"},
        {"embeddings": "x"},
    ],
)
def test_settings_are_checked(options: dict[str, object]) -> None:
    with pytest.raises(QkvError):
        quantize_(tiny("llama"), "nf4", **options)  # type: ignore[arg-type]


def test_overrides_choose_by_the_first_match() -> None:
    model = tiny("llama")
    quantize_(model, "nf4", skip="o_proj", overrides={"layers.0.mlp": "keep", "mlp": "int4:g16", "q_proj": "int8"})
    first, second = model.model.layers
    assert type(first.mlp.up_proj) is nn.Linear and type(second.self_attn.o_proj) is nn.Linear
    assert second.mlp.up_proj.format == Format("int4", 16) and second.self_attn.q_proj.format == Format("int8")
    assert second.self_attn.k_proj.format == Format("nf4")
