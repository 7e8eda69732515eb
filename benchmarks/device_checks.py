"""What :mod:`benchmarks.device` checks on a CUDA GPU before it times: each returns what is wrong, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from qkv.cache.blocks import BlockLayout
from qkv.cache.codec import Codec
from qkv.cache.triton_walk import pages, walk_blocks
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import reference, triton_linear, triton_quantize
from qkv.quantizers.quantize import quantize_tensor

NAMES = ("keys.codes", "values.codes", "keys.scale", "values.scale", "keys.zero", "values.zero")
Run = Callable[[], object]


def check_products() -> list[str]:
    """Products, dequantized weights and codes against the reference; what is wrong."""
    wrong = []
    torch.manual_seed(0)
    for text in ("nf4", "nf4:double", "int8", "int8:asym", "int4", "int4:g16:asym", "int8:row"):
        for shape in ((512, 1024), (100, 4096), (33, 320)):
            floats = (torch.randn(shape, device="cuda") * 0.05).bfloat16()
            weight = quantize_tensor(floats, text)
            exact = reference.dequantize(weight, torch.float64)
            for dtype, bound in ((torch.bfloat16, 8e-3), (torch.float16, 1.1e-3), (torch.float32, 1e-6)):
                if not torch.equal(triton_linear.dequantize(weight, dtype), reference.dequantize(weight, dtype)):
                    wrong.append(f"dequantize {text} {shape} {dtype}")
                for rows in (1, 2, 16, 65, 300):
                    x = torch.randn(rows, shape[1], device="cuda").to(dtype)
                    want = x.double() @ exact.T
                    size = x.double().abs() @ exact.abs().T + 1e-30
                    error = float(((triton_linear.linear(x, weight, None).double() - want).abs() / size).max())
                    if not error <= bound:
                        wrong.append(f"linear {text} {shape} {dtype} {rows} rows: {error:.1e}")
    return wrong


def check_codes() -> list[str]:
    """Quantized on the GPU and on the CPU: the same bytes; what is wrong."""
    wrong = []
    for text in ("nf4", "int8", "int8:asym", "int4", "int4:asym", "int8:row", "nf4:g50"):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.randn(70, 1030).to(dtype)
            format, here = Format.parse(text), quantize_tensor(x, text)
            found = triton_quantize.quantize(x.cuda(), format)
            assert found is not None
            for name, got, want in zip(
                ("codes", "scale", "zero"), found, (here.codes, here.scale, here.zero), strict=True
            ):
                if got is not None and want is not None and not torch.equal(got.cpu(), want):
                    wrong.append(f"quantize {text} {dtype}: {name}")
    return wrong


def blocks(codec: str, batch: int, tokens: int) -> tuple[BlockLayout, list[dict[str, Tensor]]]:
    """Random blocks of 8 heads, 128 wide, 64 tokens each: one slab a batch row."""
    layout = BlockLayout(8, 128, 128, 64, Codec.parse(codec, "channel"), Codec.parse(f"{codec}:token"), torch.bfloat16)
    slabs = []
    for _ in range(batch):
        keys, values = (torch.randn(tokens // 64, 8, 64, 128, device="cuda") for _ in range(2))
        slab = {f"keys.{n}": t for n, t in layout.keys.encode(keys).items()}
        slabs.append(slab | {f"values.{n}": t for n, t in layout.values.encode(values).items()})
    return layout, slabs


def table(slab: dict[str, Tensor]) -> tuple[list[int], list[int]]:
    """The slab as runs of eight blocks, as a cache grows them, and the blocks' positions."""
    count, runs = slab["keys.codes"].shape[0], []
    for first in range(0, count, 8):
        runs += [slab[name][first].data_ptr() for name in NAMES] + [min(8, count - first), 64]
    return runs, [64 * i for i in range(count)]


def check_attention() -> list[str]:
    """Walked blocks against attention over what they decode to; what is wrong."""
    wrong = []
    for codec in ("int8", "int4"):
        layout, slabs = blocks(codec, 2, 1024)
        found = pages(layout, [table(slab) for slab in slabs], torch.device("cuda"))
        for rows in (1, 4, 64):
            queries = (torch.randn(2, 8, rows, 128, device="cuda") / 11).bfloat16().float()
            result = walk_blocks(queries, found, torch.bfloat16)
            output = result.output / result.total[..., None]
            for index, slab in enumerate(slabs):
                want = _dense(queries[index], layout, slab)
                error = float((output[index].double() - want).abs().max() / want.abs().max())
                if not error <= 2e-2:
                    wrong.append(f"attention {codec} {rows} rows: {error:.1e}")
    return wrong


def _dense(queries: Tensor, layout: BlockLayout, slab: dict[str, Tensor]) -> Tensor:
    """The same in float64, the values' rotation left in."""
    keys = layout.keys.decode({n[5:]: t for n, t in slab.items() if n.startswith("keys.")}, 128, torch.float32)
    plain = replace(layout.values, rotate=False)
    values = plain.decode({n[7:]: t for n, t in slab.items() if n.startswith("values.")}, 128, torch.float32)
    keys, values = (t.double().transpose(0, 1).flatten(1, 2) for t in (keys, values))
    return (queries.double() @ keys.transpose(1, 2)).softmax(-1) @ values


def graph_of(runs: list[Run]) -> torch.cuda.CUDAGraph:
    """All the runs, one after another, as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def check_model() -> list[str]:
    """A small patched Llama: eager, compiled and captured give the same logits; what is wrong."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import qkv

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().cuda().eval()
    qkv.quantize_(model, "nf4")
    ids, wrong = torch.randint(0, 512, (1, 16), device="cuda"), []
    with torch.no_grad():
        want = model(ids, use_cache=False).logits.float()
        compiled = torch.compile(model)(ids, use_cache=False).logits.float()
        if not torch.allclose(compiled, want, atol=0.05 * float(want.abs().max())):
            wrong.append(f"compiled model: off by {float((compiled - want).abs().max()):.1e}")
        kept: list[Tensor] = []
        graph = graph_of([lambda: kept.append(model(ids, use_cache=False).logits)])
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(kept[-1].float(), want):
            wrong.append("captured model: other logits than in eager mode")
    return wrong
