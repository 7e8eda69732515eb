"""The speculative decoder against transformers' own greedy decoding and its prompt lookup: ratios of time.

    python -m benchmarks.decode MODEL [--dtype bfloat16] [--weights int8] [--prepared] [--tokens 160]
                                [--rounds 1] [--threads 1] [--kinds copy story] [--texts 1]
                                [--variants none lookup] [--json FILE]
    python -m benchmarks.decode --device cuda [--tokens 160] [--json FILE]

All variants take turns in every round; the ratio is the time of transformers' greedy over that of the variant, CPU
time on a CPU, median of the rounds. Each run starts from a new decoder that has learnt nothing. Outputs are compared
with greedy; in bfloat16 they may part at near ties, because a block of tokens rounds otherwise than one. At the end
stands the ratio over all texts of a kind: greedy's time for all of them over that of the variant. Beside prompt lookup
stands prompt lookup's time over the variant's, until the token where the two outputs part. ``--json FILE`` keeps
the rows and takes the place of earlier ones of the same text, weights and variant, so that a table can be measured in
pieces.

On a GPU the target has random weights and the shape of a model of 1.2 billion parameters. In float32 every output must
be that of transformers' greedy, or the exit status is 1; bfloat16 shows the speed. Everything runs once before it is
timed, and the file (``benchmarks/results/decode-CARD.json`` unless named) is written text by text.
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
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import qkv
from benchmarks.decode_prompts import PROMPTS
from qkv.integration.decoder import SpeculativeDecoder

LOOKUP = "stock lookup"


class Watch:
    """A streamer that notes when each token came."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seen = device, 0
        self.start, self.times = clock(device), [0.0]

    def put(self, tokens: Tensor) -> None:
        """The prompt first, then one token or several."""
        self._seen += tokens.numel()
        self.times += [clock(self._device) - self.start] * (self._seen - len(self.times) + 1)

    def end(self) -> None:
        """Nothing is left to note."""


Run = Callable[[Watch], tuple[Tensor, str]]
BILLION = LlamaConfig(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, tie_word_embeddings=True, max_position_embeddings=4096,
)  # fmt: skip


def variants(model: Any, ids: Tensor, tokens: int, chosen: list[str]) -> dict[str, Run]:
    """Everything that is timed, by name; the yardstick first."""
    common: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)

    def stock(**options: Any) -> Run:
        return lambda watch: (model.generate(ids, attention_mask=mask, streamer=watch, **common, **options), "")

    def ours(source: Any) -> Run:
        def run(watch: Watch) -> tuple[Tensor, str]:
            decoder = SpeculativeDecoder(model, source=source)
            return decoder.generate(ids, streamer=watch, **common), str(decoder.stats)

        return run

    found = {"greedy": stock(), LOOKUP: stock(prompt_lookup_num_tokens=10)}
    for name in chosen:
        if name not in found:
            # a draft model is made once: quantizing is not decoding
            found[name] = ours(SpeculativeDecoder(model, source=name).source if name.startswith("self") else name)
    return {name: run for name, run in found.items() if name in ("greedy", *chosen)}


def clock(device: torch.device) -> float:
    """Seconds: of the process on a CPU, of the wall elsewhere, once the device has done what it was given."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def measure(model: Any, ids: Tensor, tokens: int, rounds: int, chosen: list[str]) -> list[dict[str, Any]]:
    """A row for each variant."""
    runs = variants(model, ids, tokens, chosen)
    watches: dict[str, list[Watch]] = {name: [] for name in runs}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outputs: dict[str, Tensor] = {}
    notes: dict[str, str] = {}
    for turn in range(rounds):
        for name, run in list(runs.items())[:: -1 if turn % 2 else 1]:
            watch = Watch(ids.device)
            outputs[name], notes[name] = run(watch)
            seconds[name].append(clock(ids.device) - watch.start)
            watches[name].append(watch)

    def beside_lookup(name: str) -> dict[str, Any]:
        if name == LOOKUP or LOOKUP not in runs:
            return {}
        shared = same_until(outputs[LOOKUP], outputs[name])
        pairs = zip(watches[LOOKUP], watches[name], strict=True)
        ratio = statistics.median(theirs.times[shared] / own.times[shared] for theirs, own in pairs)
        return {"shared": shared - ids.shape[1], "beside_lookup": ratio}

    base = seconds["greedy"]
    return [
        beside_lookup(name)
        | {
            "variant": name,
            "seconds": statistics.median(found),
            "ratio": statistics.median(b / s for b, s in zip(base, found, strict=True)),
            "equal": same_until(outputs["greedy"], outputs[name]) - ids.shape[1],
            "tokens": outputs[name].shape[1] - ids.shape[1],
            "note": notes[name],
        }
        for name, found in seconds.items()
    ]


def same_until(first: Tensor, second: Tensor) -> int:
    """Number of tokens that agree."""
    width = min(first.shape[1], second.shape[1])
    differs = (first[0, :width] != second[0, :width]).nonzero()
    return int(differs[0]) if len(differs) else width


def show(row: dict[str, Any]) -> None:
    """One line."""
    print(
        f"{row['prompt']:12} {row['weights']:18} {row['variant']:13} {row['seconds']:7.2f} s {row['ratio']:6.2f}x  "
        f"equal {row['equal']}/{row['tokens']}  "
        + (f"{row['beside_lookup']:.2f}x lookup over {row['shared']}  " if "shared" in row else "")
        + row["note"],
        flush=True,
    )


def pooled(rows: list[dict[str, Any]]) -> list[str]:
    """For each kind, weights and variant greedy's seconds for all texts over the variant's."""
    total: dict[tuple[str, str, str], float] = {}
    for row in rows:
        key = row["prompt"].split()[0], row["weights"], row["variant"]
        total[key] = total.get(key, 0.0) + row["seconds"]
    return [
        f"{kind:12} {weights:18} {variant:13} {total[kind, weights, 'greedy'] / seconds:6.2f}x over all its texts"
        for (kind, weights, variant), seconds in total.items()
    ]


def merged(kept: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier rows with those of the same text, weights and variant replaced."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return row["weights"], row["prompt"], row["variant"]

    return list(({key(row): row for row in kept} | {key(row): row for row in rows}).values())


def save(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """What was measured so far, into the file: a run that is cut short keeps it."""
    if path is not None:
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        path.write_text(json.dumps(merged(kept, rows), indent=1) + "\n", encoding="utf-8")


def on_model(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The texts of :data:`PROMPTS` on a model directory."""
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    if args.weights:
        qkv.quantize_(model, args.weights)
    if args.prepared:
        qkv.prepare_(model)
    weights = f"{args.weights or args.dtype}{', prepared' * args.prepared}"
    rows = []
    for kind in args.kinds:
        for number in args.texts:
            prompt = PROMPTS[kind][number - 1]
            message = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text, return_tensors="pt").input_ids
            if not rows:
                measure(model, ids, 8, 1, args.variants)  # caches are warm, kernels chosen
            for row in measure(model, ids, args.tokens, args.rounds, args.variants):
                rows.append({"prompt": f"{kind} {number}", "weights": weights, **row})
                show(rows[-1])
            save(args.json, rows)
    return rows


def on_device(args: argparse.Namespace, config: LlamaConfig = BILLION) -> list[dict[str, Any]]:
    """A text that repeats itself and one that does not, on random weights; identical outputs in float32."""
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for dtype in ("float32", "bfloat16"):
        torch.manual_seed(0)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        random = torch.randint(3, config.vocab_size, (1, 240), generator=torch.Generator().manual_seed(1)).to(device)
        prompts = {"repeated": torch.cat((random[:, :200], random[:, :40]), 1), "random": random[:, :40]}
        for name, ids in prompts.items():
            measure(model, ids, args.tokens, 1, args.variants)  # kernels are compiled for every length of a draft
            for row in measure(model, ids, args.tokens, args.rounds, args.variants):
                rows.append({"prompt": name, "weights": dtype, **row})
                show(rows[-1])
            save(args.json, rows)
        del model
    return rows


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--weights", help="a format: int8, nf4 …")
    parser.add_argument("--prepared", action="store_true", help="call qkv.prepare_ first, for every variant")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", default=list(PROMPTS), choices=list(PROMPTS))
    parser.add_argument("--texts", nargs="+", type=int, default=[1, 2], choices=[1, 2], help="of each kind")
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.device == "cpu" and args.model is None:
        parser.error("give a model directory, or --device cuda")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no CUDA device here; give a model directory instead")
    if args.device != "cpu" and args.json is None:
        card = torch.cuda.get_device_name(args.device).replace(" ", "-")
        args.json = Path(__file__).parent / "results" / f"decode-{card}.json"
    lookups = [LOOKUP, "none", "lookup"]
    args.variants = args.variants or (lookups if args.device == "cpu" else [*lookups, "ngram", "self:nf4"])
    rows = on_model(args) if args.device == "cpu" else on_device(args)
    for line in pooled(rows):
        print(line)
    odd = [row for row in rows if args.device != "cpu" and row["weights"] == "float32" and row["equal"] < row["tokens"]]
    for row in odd:
        print(f"{row['prompt']}, {row['variant']}: departs from greedy after {row['equal']} tokens", file=sys.stderr)
    return 1 if odd else 0


if __name__ == "__main__":
    sys.exit(main())
