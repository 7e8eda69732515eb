"""Loading a model to its first token, each time in a new process: seconds and memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from qkv.bench.linear_peers import installed
from qkv.bench.models import directories, parameters_of
from qkv.bench.plan import Plan
from qkv.bench.table import Row, Table, rows_of
from qkv.bench.timing import Entrant, Measured, Turn
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import QkvError

MAX_ROUNDS: Final = 3
WAYS: Final[dict[str, str]] = {
    "from_pretrained bf16": "AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)",
    "qkv.load bf16": "qkv.load(source)",
    "qkv.load nf4": "qkv.load(nf4)",
    "qkv.load int8": "qkv.load(int8)",
    "from_pretrained, QkvConfig nf4": (
        "AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=qkv.QkvConfig('nf4'))"
    ),
    "bitsandbytes nf4": (
        "AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config="
        "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16))"
    ),
}
"""How a model gets into memory, by what the table calls it; the yardstick first."""
_CHILD: Final = """
import json, pathlib, sys, time
import torch, transformers, qkv
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.models.auto import modeling_auto
import qkv.integration.hf_quantizer, qkv.checkpoint.load
source, nf4, int8, threads, way = sys.argv[1:]
torch.set_num_threads(int(threads))
transformers.logging.set_verbosity_error()
def resident(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
getattr(transformers, transformers.AutoConfig.from_pretrained(source).architectures[0])
torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, start = resident("VmRSS"), time.perf_counter()
model = eval(way).eval()
loaded = time.perf_counter()
with torch.inference_mode():
    model(torch.tensor([[5]]))
end = time.perf_counter()
print(json.dumps({"load s": loaded - start, "first token s": end - start,
    "peak MB": (resident("VmHWM") - before) / 1e6, "after MB": (resident("VmRSS") - before) / 1e6}))
"""
"""A fixed text of ours, one of :data:`WAYS` and paths as its arguments: what is loaded here is loaded alone."""


def table(plan: Plan, say: Callable[[str], object]) -> Table:
    """Every model by every way that is installed."""
    if not Path("/proc/self/clear_refs").exists():
        raise QkvError("the subject load reads its memory from Linux's /proc, which is not here; leave it out")
    ways = [name for name in WAYS if not name.startswith("bitsandbytes") or (plan.peers and installed("bitsandbytes"))]
    found: list[Row] = []
    with directories(plan) as models:
        for directory in models:
            parameters = parameters_of(directory)
            say(f"{parameters:,} parameters")
            found += measure(directory, ways, min(plan.rounds, MAX_ROUNDS), {"parameters": parameters})
    title = "import to first token in a new process, files in the system's cache; memory above the imports"
    return Table("load", title, "parameters", found)


def measure(directory: Path, ways: list[str], rounds: int, sizes: dict[str, int]) -> list[Row]:
    """Each way in turn, ``rounds`` times."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory(prefix="qkv-bench-") as folder:
        quantized = [Path(folder) / name for name in ("nf4", "int8")]
        for path in quantized:
            quantize_checkpoint(directory, path, format=path.name)
        for _ in range(rounds):
            for name in ways:
                taken[name].append(_load([directory, *quantized], WAYS[name]))
    seconds = [[Turn(t["first token s"], t["first token s"]) for t in turns] for turns in taken.values()]
    medians = [{key: sorted(t[key] for t in turns)[rounds // 2] for key in turns[0]} for turns in taken.values()]
    numbers = [{key: value for key, value in median.items() if key != "first token s"} for median in medians]
    entrants = [Entrant(name, lambda: None) for name in ways]
    return rows_of(entrants, Measured(seconds, None), sizes, numbers=numbers)


def _load(paths: list[Path], way: str) -> dict[str, float]:
    arguments = [*map(str, paths), str(torch.get_num_threads()), way]
    result = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise QkvError(f"loading by {way} failed: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    found: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return found
