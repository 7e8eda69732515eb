"""The Triton kernels on a CUDA GPU: checked against the reference, then timed beside torch's own. Under nine minutes.

    python -m benchmarks.device [--json FILE] [--rounds N]

Needs torch for CUDA with triton, and transformers for the last part, and nothing else. Everything that is timed
is captured in a CUDA graph, each call with weights or blocks that have left the caches; entrants take turns in
every round. The file (``benchmarks/results/device-CARD.json`` unless named) has the card's name. Targets are
those that the project set for an H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_checks import (
    Run,
    blocks,
    check_attention,
    check_codes,
    check_model,
    check_products,
    graph_of,
    table,
)
from qkv.cache.triton_walk import pages, walk_blocks
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import triton_linear, triton_live, triton_quantize
from qkv.quantizers.quantize import quantize_tensor

TARGETS = {
    ("linear 4096 x 14336", 1, "nf4"): 3.0,
    ("linear 4096 x 14336", 1, "int8"): 1.7,
    ("linear 4096 x 14336", 512, "nf4"): 0.85,
    ("linear 4096 x 14336", 512, "int8"): 0.85,
    ("attention 16 x 32768", 1, "int8"): 1.6,
    ("attention 16 x 32768", 1, "int4"): 2.2,
}
"""Speed over torch in bf16 (F.linear, scaled_dot_product_attention)."""
SHARE_TARGET = 0.6
"""Of the measured copy bandwidth, nf4, one row."""
COLD_NBYTES = 400 * 10**6


def interleave(entrants: dict[str, list[Run]], rounds: int) -> dict[str, list[float]]:
    """Seconds a run of each entrant, round by round."""
    graphs = {name: graph_of(runs) for name, runs in entrants.items()}
    taken: dict[str, list[float]] = {name: [] for name in entrants}
    for turn in range(rounds + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first two warm up
                taken[name].append(begin.elapsed_time(end) / 1e3 / len(entrants[name]))
    return taken


def copies(nbytes: int) -> int:
    """How many of something are needed so that none is still in the caches when its turn comes."""
    return max(4, min(64, -(-COLD_NBYTES // nbytes)))


def copy_bandwidth(rounds: int) -> float:
    """Bytes a second, read and written, of a large copy."""
    source = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = interleave({"copy": [lambda: target.copy_(source)]}, rounds)["copy"]
    return 2 * source.numel() / statistics.median(seconds)


def rows_of(
    case: str, rows: int, taken: dict[str, list[float]], nbytes: dict[str, int], bandwidth: float
) -> list[dict[str, Any]]:
    """A line an entrant; the first is the yardstick."""
    base = next(iter(taken.values()))
    found = []
    for name, seconds in taken.items():
        speed = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
        share = nbytes[name] / statistics.median(seconds) / bandwidth
        target = TARGETS.get((case, rows, name))
        met = None if target is None else speed >= target
        if (case, rows, name) == ("linear 4096 x 14336", 1, "nf4"):
            met = bool(met) and share >= SHARE_TARGET
        found.append(
            {"case": case, "rows": rows, "name": name, "us": statistics.median(seconds) * 1e6, "speed": speed}
            | {"share_of_copy": share, "target": target, "met": met}
        )
        said = "" if target is None else f"  target {target}: {'met' if met else 'MISSED'}"
        print(
            f"{case:22} {rows:4d}  {name:10} {found[-1]['us']:9.1f} us {speed:6.2f}x  share {share:4.2f}{said}",
            flush=True,
        )
    return found


def time_linear(shape: tuple[int, int], rows: int, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """Our formats beside F.linear in bf16."""
    floats = (torch.randn(shape, device="cuda") * 0.05).bfloat16()
    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
    entrants: dict[str, list[Run]] = {"bf16": []}
    nbytes = {"bf16": floats.nbytes}
    for _ in range(copies(floats.nbytes)):
        weight = floats.clone()
        entrants["bf16"].append(lambda weight=weight: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
    for text in ("nf4", "int8", "int4"):
        nbytes[text], entrants[text] = quantize_tensor(floats, text).nbytes, []
        for _ in range(copies(nbytes[text])):
            copy = quantize_tensor(floats, text)
            entrants[text].append(lambda copy=copy: triton_linear.linear(x, copy, None))  # type: ignore[misc]
    return rows_of(f"linear {shape[0]} x {shape[1]}", rows, interleave(entrants, rounds), nbytes, bandwidth)


def time_attention(batch: int, tokens: int, rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """One query of 32 heads over 8 key-value heads, beside scaled_dot_product_attention in bf16."""
    shape = (batch, 8, tokens, 128)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    queries = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    grouped = queries.view(batch, 8, 4, 128)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    entrants: dict[str, list[Run]] = {
        "bf16": [lambda: sdpa(grouped, keys, values)],
        "bf16, gqa": [lambda: sdpa(queries, keys, values, enable_gqa=True)],
    }
    nbytes = dict.fromkeys(entrants, keys.nbytes + values.nbytes)
    held = []
    for codec in ("int8", "int4"):
        layout, slabs = blocks(codec, batch, tokens)
        held.append(slabs)
        found = pages(layout, [table(slab) for slab in slabs], torch.device("cuda"))
        nbytes[codec] = sum(t.nbytes for slab in slabs for t in slab.values())
        scaled = grouped.float() * 128**-0.5
        entrants[codec] = [lambda found=found, q=scaled: walk_blocks(q, found, torch.bfloat16)]  # type: ignore[misc]
    taken = interleave(entrants, rounds)
    fastest = min(("bf16", "bf16, gqa"), key=lambda name: statistics.median(taken[name]))
    ordered = {fastest: taken[fastest]} | taken
    return rows_of(f"attention {batch} x {tokens}", 1, ordered, nbytes, bandwidth)


def time_quantize(rounds: int, bandwidth: float) -> list[dict[str, Any]]:
    """Quantizing a bf16 matrix (it looks at its result, so no graph), beside a copy."""
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    runs: dict[str, Run] = {"copy": x.clone}
    for text in ("int8", "int4", "nf4"):
        runs[text] = lambda text=text: triton_quantize.quantize(x, Format.parse(text))  # type: ignore[misc]
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if turn >= 2:
                taken[name].append(time.perf_counter() - start)
    return rows_of("quantize 8192 x 8192", 8192, taken, dict.fromkeys(runs, x.nbytes), bandwidth)


def main() -> int:
    """Check, time, write; 2 where there is no GPU to do it on, 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if triton_live.interpreted() or triton_live.unavailable() is not None:
        reason = triton_live.unavailable() or "TRITON_INTERPRET is set: unset it"
        print(f"benchmarks.device: {reason}; run it where torch has a CUDA device", file=sys.stderr)
        return 2
    card, begin = torch.cuda.get_device_name(), time.monotonic()
    print(f"{card}, torch {torch.__version__}", flush=True)
    found: list[dict[str, Any]] = []
    wrong: list[str] = []
    path = options.json or Path(__file__).parent / "results" / f"device-{card.replace(' ', '-')}.json"
    for name, part in (("products", check_products), ("codes", check_codes), ("attention", check_attention),
                       ("model", check_model)):  # fmt: skip
        wrong += _tried(name, part)
        print(f"checked {name}: {len(wrong)} wrong so far, {time.monotonic() - begin:.0f} s", flush=True)
    with torch.inference_mode():
        bandwidth = copy_bandwidth(options.rounds)
        print(f"copy: {bandwidth / 1e12:.2f} TB/s read and written", flush=True)
        plan: list[Callable[[], list[dict[str, Any]]]] = [
            lambda shape=shape, rows=rows: time_linear(shape, rows, options.rounds, bandwidth)  # type: ignore[misc]
            for shape in ((4096, 14336), (14336, 4096), (4096, 4096))
            for rows in (1, 4, 16, 64, 512)
        ]
        plan += [lambda: time_attention(16, 32768, options.rounds, bandwidth)]
        plan += [lambda: time_attention(1, 32768, options.rounds, bandwidth)]
        plan += [lambda: time_quantize(options.rounds, bandwidth)]
        for part in plan:
            wrong += _tried("timing", lambda part=part: found.extend(part()) or [])  # type: ignore[misc,func-returns-value]
            seconds = time.monotonic() - begin
            _save(path, card, bandwidth, found, wrong, seconds)
            if seconds > 480:
                print("stopped: eight minutes are over", flush=True)
                break
    print("\n".join(wrong) if wrong else "all checks passed")
    print(f"written: {path}, after {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


def _tried(name: str, part: Callable[[], list[str]]) -> list[str]:
    """What a part found wrong; one that fails is wrong, and the others still run."""
    try:
        return part()
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"]


def _save(
    path: Path, card: str, bandwidth: float, found: list[dict[str, Any]], wrong: list[str], seconds: float
) -> None:
    import triton

    what = {"card": card, "torch": torch.__version__, "triton": triton.__version__, "seconds": seconds}
    text = json.dumps(what | {"copy_bytes_per_second": bandwidth, "wrong": wrong, "rows": found}, indent=1)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
