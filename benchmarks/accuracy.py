"""Perplexity by format, bitsandbytes' own NF4 beside ours, computed in float32.

python -m benchmarks.accuracy MODEL_DIR TEXT_FILE [--windows 8] [--calibrate OTHER_TEXT] [--only WORD] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import qkv
from qkv.checkpoint.load import load_tokenizer
from qkv.integration.perplexity import perplexity

ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("int8", "int8", {}),
    ("int8:row", "int8:row", {}),
    ("int8:double", "int8:double", {}),
    ("int8, embeddings int8", "int8", {"embeddings": "int8"}),
    ("nf4", "nf4", {}),
    ("nf4:double", "nf4:double", {}),
    ("nf4, embeddings int8", "nf4", {"embeddings": "int8"}),
    ("attention int8, mlp nf4", "nf4", {"overrides": {"self_attn": "int8"}}),
    ("int4", "int4", {}),
    ("int4:asym", "int4:asym", {}),
)
CALIBRATED = ("int8", "nf4", "nf4:double", "int4", "int4:asym")
SAMPLES = 16
"""Pieces of 512 tokens of the other text that scales are searched with."""
RULE: dict[str, Any] = {"format": "nf4", "overrides": {"self_attn": "int8"}}
PLAN_SAMPLES = 32
"""Pieces that plans are made with."""
SMALL_BITS = 5.0


def bitsandbytes_weights_(model: torch.nn.Module, double: bool) -> None:
    """Round every linear weight but the head's through bitsandbytes' own quantizer, in place."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, state = quantize_4bit(module.weight.data, blocksize=64, quant_type="nf4", compress_statistics=double)
            module.weight.data = dequantize_4bit(codes, state)


def calibrate_for_plans(options: argparse.Namespace, tokenizer: Any) -> Any:
    """Statistics with costs, of more text; None where no plan is asked for."""
    if options.only not in "plan, calibrated":
        return None
    text = Path(options.calibrate).read_text(encoding="utf-8")
    return qkv.calibrate(qkv.load(options.model), tokenizer, text, samples=PLAN_SAMPLES, gradients=True)


def measure_plans(model: str, calibration: Any, quantized: Callable[..., Any], measure: Callable[..., Any]) -> None:
    """The simple rule, with and without an INT8 table, beside plans of the same size."""
    if calibration is None:
        return
    for name, table in (("", {}), (", embeddings int8", {"embeddings": "int8"})):
        made = quantized(**RULE, **table, calibration=calibration)
        measure(f"plan, calibrated: attention int8, mlp nf4{name}", partial(lambda found: found, made))
        _measure_plan(model, made[1], calibration, quantized, measure)
    _measure_plan(model, SMALL_BITS, calibration, quantized, measure)


def _measure_plan(
    model: str, bits: float, calibration: Any, quantized: Callable[..., Any], measure: Callable[..., Any]
) -> None:
    plan = qkv.plan_checkpoint(model, calibration, target_bpw=bits)
    print(plan, flush=True)
    measure(f"plan, calibrated: {bits:.2f} bits", partial(quantized, **plan.options(), calibration=calibration))


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--calibrate", help="a text apart from TEXT_FILE")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--json")
    options = parser.parse_args()
    text, tokenizer = Path(options.text).read_text(encoding="utf-8"), load_tokenizer(options.model)
    rows = []

    def measure(name: str, make: Callable[[], tuple[Any, float | None]]) -> None:
        if options.only not in name:
            return
        model, bits = make()
        value = perplexity(model, tokenizer, text, window=512, num_windows=options.windows).value
        rows.append({"weights": name, "bits_per_weight": bits, "perplexity": value})
        print(
            f"{name:28} {'' if bits is None else f'{bits:.2f}':>6} bits a weight   perplexity {value:.3f}", flush=True
        )

    # weights are rounded in bfloat16, as they are stored, and computed with in float32
    def fresh() -> Any:
        return qkv.load(options.model)

    def rounded(double: bool) -> tuple[Any, None]:
        model = fresh()
        bitsandbytes_weights_(model, double)
        return model.float(), None

    def quantized(format: str, **settings: Any) -> tuple[Any, float]:
        model = fresh()
        qkv.quantize_(model, format, **settings)
        bits = qkv.footprint(model).bits_per_weight
        return model.float(), bits

    measure("bfloat16", lambda: (fresh().float(), 16.0))
    measure("bitsandbytes nf4", partial(rounded, False))
    measure("bitsandbytes nf4 double", partial(rounded, True))
    for name, format, settings in ROWS:
        measure(name, partial(quantized, format, **settings))
    if options.calibrate:
        other = Path(options.calibrate).read_text(encoding="utf-8")
        calibration = qkv.calibrate(fresh(), tokenizer, other, samples=SAMPLES)
        for format in CALIBRATED:
            measure(f"{format}, calibrated", partial(quantized, format, calibration=calibration))
        measure_plans(options.model, calibrate_for_plans(options, tokenizer), quantized, measure)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
