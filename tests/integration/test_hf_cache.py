"""KVCache inside transformers' models and ``generate``: equal to DynamicCache where exact."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from qkv.cache.retention import Importance, Window
from qkv.errors import QkvError
from qkv.integration.compat import cache_argument
from qkv.integration.hf_cache import KVCache
from qkv.integration.hf_cache_options import cache_from_options

BASE: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    initializer_range=0.2,
)  # fmt: skip
EXACT: dict[str, Any] = dict(keys="exact", values="exact", block_size=8, residual=5)
INT8: dict[str, Any] = dict(keys="int8", values="int8", block_size=16, residual=8)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **changes})).eval()


def gemma3(window: int = 8, **changes: Any) -> Any:
    torch.manual_seed(0)
    types = ["sliding_attention"] * 3 + ["full_attention"]
    config = {
        **BASE,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "sliding_window": window,
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**config, "layer_types": types, **changes})).eval()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2)
    config.eos_token_id = config.bos_token_id = None
    return GPT2LMHeadModel(config).eval()


def mistral() -> Any:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**{**BASE, "sliding_window": 12})).eval()


MODELS = {"llama": llama, "gemma3": gemma3}


def ids(count: int, batch: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(1, 64, (batch, count), generator=torch.Generator().manual_seed(seed))


def generate(model: Any, prompt: Tensor, cache: Any, count: int = 24, **options: Any) -> Tensor:
    mask = options.pop("attention_mask", torch.ones_like(prompt))
    options.setdefault("do_sample", False)
    config = GenerationConfig(max_new_tokens=count, pad_token_id=0, **options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {cache_argument(model): cache}
        found: Tensor = model.generate(prompt, attention_mask=mask, generation_config=config, **given)
    return found


def forward(model: Any, part: Tensor, cache: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(part, use_cache=True, **{cache_argument(model): cache}, **options).logits
    return logits


def feed(model: Any, tokens: Tensor, cache: Any, chunks: list[int]) -> Tensor:
    parts, at = [], 0
    for count in chunks:
        parts.append(forward(model, tokens[:, at : at + count], cache))
        at += count
    return torch.cat(parts, 1)


def made(model: Any, attached: bool, **settings: Any) -> KVCache:
    cache = KVCache(model.config, **settings)
    return cache.attach(model) if attached else cache


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams, two returned": {"num_beams": 4, "num_return_sequences": 2},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "chunked prefill": {"prefill_chunk_size": 16},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
}


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_exact_generation_equals_dynamic_cache(name: str, mode: str, attached: bool) -> None:
    model, prompt = MODELS[name](), ids(45)
    torch.manual_seed(3)
    expected = generate(model, prompt, DynamicCache(config=model.config), **MODES[mode])
    torch.manual_seed(3)
    cache = made(model, attached, **EXACT)
    found = generate(model, prompt, cache, **MODES[mode])
    cache.detach()
    assert torch.equal(found, expected)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
@pytest.mark.parametrize("name", MODELS)
def test_exact_dense_logits_are_bit_equal(name: str, attached: bool) -> None:
    model, tokens = MODELS[name](), ids(70)
    chunks = [20, 1, 1, 13, 1, 34]
    expected = feed(model, tokens, DynamicCache(config=model.config), chunks)
    found = feed(model, tokens, made(model, attached, **EXACT), chunks)
    assert torch.allclose(found, expected, atol=2e-4) if attached else torch.equal(found, expected)


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
@pytest.mark.parametrize("name", MODELS)
def test_a_left_padded_batch_gives_each_row_its_own(name: str, attached: bool) -> None:
    model = MODELS[name]()
    prompt, mask = ids(40, 3), torch.ones(3, 40, dtype=torch.long)
    for row, pads in enumerate((0, 7, 29)):
        prompt[row, :pads], mask[row, :pads] = 0, 0
    told = attached or cache_argument(model) == "cache"  # older models do not tell a cache their positions
    for settings in (EXACT, INT8) if told else (EXACT,):
        found = generate(model, prompt, made(model, attached, **settings), attention_mask=mask)
        for row, pads in enumerate((0, 7, 29)):
            alone = generate(model, prompt[row : row + 1, pads:], made(model, attached, **settings))
            assert torch.equal(found[row, pads:], alone[0])


@pytest.mark.parametrize(
    "retain",
    [Window(20, sinks=3), Window(18, sinks=3, summary=6), Importance(44, sinks=3)],
    ids=lambda p: type(p).__name__,
)
def test_a_padded_row_evicts_as_it_would_alone(retain: Any) -> None:
    """Attached; unattached, the model's one mask cannot express it, and that is said."""
    model = llama()
    prompt, mask = ids(60, 2), torch.ones(2, 60, dtype=torch.long)
    prompt[1, :23], mask[1, :23] = 0, 0
    settings = {**EXACT, "retain": retain}
    found = generate(model, prompt, made(model, True, **settings), attention_mask=mask)
    assert torch.equal(found[1, 23:], generate(model, prompt[1:, 23:], made(model, True, **settings))[0])
    assert torch.equal(found[0], generate(model, prompt[:1], made(model, True, **settings))[0])
    model.set_attn_implementation("sdpa")
    with pytest.raises(QkvError, match="attach"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(model, prompt, made(model, False, **settings), attention_mask=mask)


def test_padding_inside_a_second_turn() -> None:
    """A shorter second turn is padded on its left, in the middle of the sequence."""
    model, first, second = llama(), ids(20, 2), ids(9, 2, seed=5)
    mask = torch.ones(2, 29, dtype=torch.long)
    mask[1, :4] = mask[1, 20:23] = 0
    cache = made(model, True, **EXACT)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    forward(model, first, cache, attention_mask=mask[:, :20], position_ids=positions[:, :20])
    found = forward(model, second, cache, attention_mask=mask, position_ids=positions[:, 20:])
    assert cache.block_layers[0].lengths == [29, 22]
    alone = forward(model, torch.cat((first[1, 4:], second[1, 3:]))[None], DynamicCache(config=model.config))
    assert torch.allclose(found[1, 3:], alone[0, 16:], atol=1e-4)


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
def test_a_next_turn_reuses_what_is_held(attached: bool) -> None:
    model, prompt, more = llama(), ids(30), ids(20, seed=3)
    for settings in (EXACT, {**EXACT, "retain": Window(500)}, {**EXACT, "retain": Importance(500)}):
        cache = made(model, attached, **settings)
        first = generate(model, prompt, cache, 12)
        assert cache.get_seq_length() == 41
        history = torch.cat((first, more), 1)
        found = generate(model, history, cache, 12)
        assert torch.equal(found, generate(model, history, DynamicCache(config=model.config), 12))
        assert cache.get_seq_length() == 73
        cache.detach()


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
def test_assisted_decoding_over_a_quantized_cache_is_plain_decoding(attached: bool) -> None:
    """transformers' own quantized cache refuses this; int8 over int8 must give the same tokens."""
    model, draft = llama(), llama(num_hidden_layers=1)
    prompt = ids(30).repeat(1, 2)
    plain = generate(model, prompt, made(model, attached, **INT8), 30)
    cache = made(model, attached, **INT8)
    assert torch.equal(generate(model, prompt, cache, 30, prompt_lookup_num_tokens=4), plain)
    cache.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {cache_argument(model): cache}
        found = model.generate(
            prompt, assistant_model=draft, max_new_tokens=30, do_sample=False, pad_token_id=0,
            attention_mask=torch.ones_like(prompt), **given,
        )  # fmt: skip
    assert torch.equal(found, plain)


@pytest.mark.parametrize("count", [100, 10, 64])
@pytest.mark.parametrize("cut", [0, 1, 3, 33, 40, 64, 100, 150])
def test_crop_then_go_on(count: int, cut: int) -> None:
    """HF#47433: crop(0) kept all, an oversized crop kept one."""
    model = llama()
    cache = KVCache(model.config, keys="int8", values="int8:g32", block_size=32, residual=16)
    keys, values = torch.randn(2, 1, 2, count, 8).unbind()
    for layer in cache.layers:
        layer.update(keys, values)
    cache.crop(-cut)
    left = max(count - cut, 0)
    assert cache.get_seq_length() == left
    new = torch.randn(1, 2, 3, 8)
    found, _ = cache.layers[0].update(new, new)
    assert found.shape[-2] == left + 3 and torch.equal(found[:, :, left:], new)
    if left:
        assert float((found[:, :, :left] - keys[:, :, :left]).abs().max()) < 0.08
    with pytest.raises(QkvError, match="minus the number"):
        cache.crop(5)


def test_reset_and_a_fresh_cache() -> None:
    model = llama()
    for settings in (INT8, {**EXACT, "retain": Window(16, sinks=0)}, {**EXACT, "retain": Importance(40)}):
        cache = made(model, True, **settings)
        cache.reset()
        cache.reorder_cache(torch.tensor([0]))
        cache.crop(0)
        assert cache.get_seq_length() == cache.nbytes == 0
        generate(model, ids(70), cache, 10)
        cache.reset()
        assert cache.get_seq_length() == cache.nbytes == 0
        again = generate(model, ids(50, seed=4), cache, 10)
        assert torch.equal(again, generate(model, ids(50, seed=4), made(model, True, **settings), 10))


def test_reorder_moves_blocks_and_tail() -> None:
    """HF#48700, #45510: only the residual moved, and beams were crossed without an error."""
    model = llama()
    cache = KVCache(model.config, keys="int8", values="int8:g32", block_size=32, residual=16)
    keys = torch.randn(4, 2, 100, 8) + torch.arange(4.0).view(4, 1, 1, 1) * 10
    for at in range(0, 100, 20):
        cache.layers[0].update(keys[:, :, at : at + 20], -keys[:, :, at : at + 20])
    held = cache.block_layers[0].nbytes
    order = torch.tensor([2, 0, 0, 1])
    cache.layers[0].reorder_cache(order)
    assert cache.block_layers[0].nbytes <= held
    cache.layers[0].reorder_cache(torch.tensor([1, 0, 2, 3]))
    found, values = cache.layers[0].update(*(torch.zeros(4, 2, 1, 8),) * 2)
    expected = keys[order][[1, 0, 2, 3]]
    assert float((found[:, :, :100] - expected).abs().max()) < 0.2
    assert float((values[:, :, :100] + expected).abs().max()) < 0.2


def test_hybrids_quantize_full_layers_and_keep_windows() -> None:
    model, tokens = gemma3(), ids(60)
    exact = feed(model, tokens, DynamicCache(config=model.config), [20] + [1] * 40)
    cache = KVCache(model.config, **INT8)
    found = feed(model, tokens, cache, [20] + [1] * 40)
    noise = 10 * torch.log10(exact.square().sum() / (exact - found).square().sum())
    assert float(noise) > 20 and cache.get_seq_length() == 60
    assert [type(v).__name__ for v in cache.layers] == ["DynamicSlidingWindowLayer"] * 3 + ["KVLayer"]


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
def test_models_whose_every_layer_slides(attached: bool) -> None:
    model, tokens = mistral(), ids(60)
    expected = feed(model, tokens, DynamicCache(config=model.config), [20] + [1] * 20 + [20])
    cache = made(model, attached, **EXACT)
    assert torch.allclose(feed(model, tokens, cache, [20] + [1] * 20 + [20]), expected, atol=2e-4)
    assert cache.num_held <= 12 + 8 + 5


@pytest.mark.parametrize("attached", [False, True], ids=["dense", "attached"])
def test_learned_positions(attached: bool) -> None:
    model, tokens = gpt2(), ids(50)
    expected = feed(model, tokens, DynamicCache(config=model.config), [20, 1, 29])
    assert torch.allclose(feed(model, tokens, made(model, attached, **EXACT), [20, 1, 29]), expected, atol=2e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 8), (8, 1, 8), (4, 4, 8), (4, 2, 20), (2, 1, 256)])
def test_head_shapes(heads: int, kv_heads: int, head_dim: int) -> None:
    changes = dict(hidden_size=heads * 8, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim)
    model, tokens = llama(**changes), ids(60)
    exact = feed(model, tokens, DynamicCache(config=model.config), [40, 20])
    for attached in (False, True):
        cache = made(model, attached, **INT8)
        assert float((feed(model, tokens, cache, [40, 20]) - exact).abs().max()) < 0.5
        layout = cache.block_layers[0].store
        assert layout is not None and layout.layout.heads == kv_heads
        cache.detach()


def test_latent_attention_goes_through_the_dense_read() -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=8, first_k_dense_replace=2, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
        topk_group=1,        bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    model, tokens = DeepseekV3ForCausalLM(config).eval(), ids(50)
    exact = feed(model, tokens, DynamicCache(config=model.config), [30] + [1] * 20)
    assert torch.equal(feed(model, tokens, KVCache(model.config, **EXACT), [30] + [1] * 20), exact)
    near = feed(model, tokens, KVCache(model.config, **INT8), [30] + [1] * 20)
    assert float((near - exact).abs().mean()) < 0.1
    with pytest.raises(QkvError, match="latent"):
        KVCache(model.config).attach(model)


def test_window_positions_token_by_token() -> None:
    """HF#33691, #35350: {j < sinks or j > t - window} at absolute positions."""
    model, tokens = llama(), ids(50)
    t, j = torch.arange(50)[:, None], torch.arange(50)[None]
    for sinks, window in ((0, 8), (0, 1), (4, 12)):
        visible = (j <= t) & ((j < sinks) | (j > t - window))
        mask = torch.zeros(50, 50).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            expected = model(tokens, attention_mask=mask, use_cache=False).logits
        for attached, chunks in ((False, [1] * 50), (True, [1] * 50), (True, [17, 3, 30])):
            cache = made(model, attached, keys="exact", values="exact", retain=Window(window, sinks=sinks))
            assert torch.allclose(feed(model, tokens, cache, chunks), expected, atol=2e-4)
            assert cache.get_seq_length() == 50
            cache.detach()


def test_unequal_layers_need_our_attention() -> None:
    model, tokens = llama(), ids(80)
    retain = Importance(40, layers=[3.0, 1.5], sinks=2)
    settings = {**EXACT, "block_size": 4, "residual": 2, "retain": retain}
    feed(model, tokens, made(model, True, **settings), [40] + [1] * 40)
    model.set_attn_implementation("sdpa")
    with pytest.raises(QkvError, match="attach"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        feed(model, tokens, made(model, False, **settings), [40] + [1] * 40)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_a_budget_in_bytes_is_kept_at_every_step(name: str, batch: int) -> None:
    model, tokens = MODELS[name](), ids(120, batch)
    cache = made(model, True, **{**INT8, "retain": Importance("90kB", sinks=4)})
    for count in (60, 1, 1, 20, 1):
        forward(model, tokens[:, len(cache.block_layers[0]) :][:, :count], cache)
        assert cache.nbytes <= 90_000
    cache.batch_repeat_interleave(2)
    assert cache.nbytes <= 90_000


def test_importance_says_when_it_cannot_see() -> None:
    model = llama()
    with pytest.warns(UserWarning, match="without attention mass"):
        feed(model, ids(20), KVCache(model.config, retain=Importance(400)), [20])


@pytest.mark.parametrize("retain", [None, Window(40, sinks=4), Window(40, sinks=4, summary=8), Importance(70)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_save_and_load_resume_to_the_bit(tmp_path: Path, name: str, retain: Any) -> None:
    model, more = MODELS[name](), ids(30, seed=9)
    cache = made(model, True, **{**INT8, "values": "int4", "retain": retain})
    generate(model, ids(150), cache, 10)
    cache.save(tmp_path / "cache.safetensors")
    loaded = KVCache.load(tmp_path / "cache.safetensors").attach(model)
    forked, copied = cache.fork(), copy.deepcopy(cache)
    expected = forward(model, more, cache)
    for other in (loaded, forked, copied):
        assert torch.equal(forward(model, more, other), expected)
        assert sum(v.nbytes for v in other.block_layers) == sum(v.nbytes for v in cache.block_layers)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match="not a file"):
        KVCache.load(tmp_path / "none")
    (tmp_path / "bad").write_bytes(b"12345678901234567890")
    with pytest.raises(QkvError, match="damaged"):
        KVCache.load(tmp_path / "bad")


def test_report_sums_to_nbytes() -> None:
    model = gemma3()
    cache = made(model, True, **{**INT8, "retain": Importance(60)})
    generate(model, ids(100), cache, 10)
    report = cache.report()
    assert report.nbytes == cache.nbytes == report.to_dict()["nbytes"]
    assert "total" in str(report) and "DynamicSlidingWindowLayer" in str(report)


def test_tokens_leave_the_exact_window_while_decoding() -> None:
    """VeloxQuant#86, #162: no compression at all, billed as such."""
    model = llama()
    cache = KVCache(model.config, keys="int8", values="int8:g32", block_size=32, residual=32)
    keys = torch.randn(1, 2, 600, 64, dtype=torch.bfloat16)
    for layer in cache.layers:
        layer.update(keys[:, :, :32], keys[:, :, :32])
        for at in range(32, 600):
            found, _ = layer.update(keys[:, :, at : at + 1], keys[:, :, at : at + 1])
    assert cache.nbytes < 0.65 * 4 * keys.nbytes
    assert not torch.equal(found[:, :, 40:200], keys[:, :, 40:200])


def test_mistakes_are_named() -> None:
    model = llama()
    cache = KVCache(model.config)
    forward(model, ids(5), cache)
    with pytest.raises(QkvError, match="reorder it first"):
        forward(model, ids(1, 2), cache)
    for wrong in ({"keys": "int3"}, {"block_size": 0}, {"residual": -1}, {"keys": "int8:row"}):
        with pytest.raises(QkvError):
            KVCache(model.config, **wrong)  # type: ignore[arg-type]
    with pytest.raises(QkvError, match="rerotate"):
        KVCache(gpt2().config, retain=Window(100, rerotate=True))


def test_options_of_the_command_line() -> None:
    config = llama().config
    assert cache_from_options(config) is None
    cache = cache_from_options(config, kv="int8", values="int4", window=64, sinks=2)
    assert cache is not None and cache.settings.retain == Window(64, sinks=2)
    assert (str(cache.settings.keys), str(cache.settings.values)) == ("int8:channel", "int4:token")
    for text, budget in (("1024", 1024), ("0.5", 0.5), ("512MB", "512MB")):
        cache = cache_from_options(config, budget=text)
        assert cache is not None and cache.settings.retain == Importance(budget)
        assert cache.settings.keys.is_exact
    with pytest.raises(QkvError, match="one of them"):
        cache_from_options(config, window=5, budget="5")
