from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qkv.cli.main import COMMANDS, main
from qkv.memory.footprint import footprint
from tests.helpers import run_python, tensors_in

Checkpoint = Callable[..., Path]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command."""
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        status = int(error.code or 0)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture
def source(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama")


def test_quantize_report_dequantize(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--format", "nf4:double", "--embeddings", "int8", "--skip", "o_proj", "--skip", "layers.1.mlp"]
    status, out, err = run(
        capsys, "quantize", source, tmp_path / "q", *options, "--override", "q_proj=int8", "--max-shard-size", "8KB"
    )
    assert (status, err) == (0, "") and out.endswith(f"written: {tmp_path / 'q'}\n")
    names = {name for name in tensors_in(tmp_path / "q") if name.endswith("_scale")}
    assert not any("o_proj" in name or "layers.1.mlp" in name for name in names) and len(names) == 11
    status, out, err = run(capsys, "report", tmp_path / "q", "--json", "--context", "100", "--batch", "2")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(footprint(tmp_path / "q", context=100, batch=2).to_dict()))
    status, out, err = run(capsys, "report", tmp_path / "q")
    assert (status, err) == (0, "") and out == f"{footprint(tmp_path / 'q')}\n"
    status, out, err = run(capsys, "dequantize", tmp_path / "q", tmp_path / "d", "--dtype", "bfloat16")
    assert (status, out, err) == (0, f"written: {tmp_path / 'd'}\n", "")
    assert set(tensors_in(tmp_path / "d")) == set(tensors_in(source))


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "doctor")
    assert (status, err) == (0, "") and "reference" in out and "torch 2" in out
    status, out, err = run(capsys, "doctor", "--json")
    assert json.loads(out)["backends"][-1] | {"serves": ""} == {"name": "reference", "reason": None, "serves": ""}


def test_generate_and_perplexity(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", smollm2, "--prompt", "The capital of France is", "--max-new-tokens", "4"]
    status, out, err = run(capsys, *arguments)
    assert status == 0 and out.startswith("The capital of France is") and "Paris" in out
    assert err.strip().startswith("4 tokens in ") and err.count("\n") == 1
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 3)
    status, out, err = run(
        capsys, "perplexity", smollm2, "--text", tmp_path / "text", "--length", "16", "--windows", "2"
    )
    assert (status, err) == (0, "") and out.startswith("perplexity ") and "2 windows of 16 tokens" in out


def mistakes(source: Path, folder: Path) -> dict[str, list[object]]:
    (folder / "text").write_text("hello")
    (folder / "binary").write_bytes(b"\xff\xfe\x00\x80")
    (folder / "file").write_text("")
    quantize = ["quantize", source, folder / "q"]
    perplexity = ["perplexity", source, "--text"]
    generate = ["generate", source, "--prompt", "hi"]
    return {
        "no source": ["quantize", folder / "none", folder / "q"],
        "a file as source": ["quantize", source / "model.safetensors", folder / "q"],
        "destination exists": ["quantize", source, folder],
        "destination in a file": ["quantize", source, folder / "file" / "q"],
        "unknown format": [*quantize, "--format", "nf5"],
        "unknown option": [*quantize, "--format", "nf4:g"],
        "no match": [*quantize, "--skip", "zzz"],
        "override without =": [*quantize, "--override", "q_proj"],
        "override to nothing": [*quantize, "--override", "q_proj="],
        "shard size": [*quantize, "--max-shard-size", "0"],
        "not quantized": ["dequantize", source, folder / "d"],
        "dtype": ["dequantize", source, folder / "d", "--dtype", "int8"],
        "report on nothing": ["report", folder / "none"],
        "report on a text": ["report", folder / "text"],
        "report on an empty folder": ["report", folder],
        "generate from nothing": ["generate", folder / "none", "--prompt", "hi"],
        "no tokenizer": [*generate],
        "temperature": [*generate, "--temperature", "-1"],
        "top p": [*generate, "--top-p", "0"],
        "seed": [*generate, "--temperature", "1", "--seed", str(2**70)],
        "no text": [*perplexity, folder / "none"],
        "a folder as text": [*perplexity, folder],
        "a path through a file": [*perplexity, folder / "file" / "x"],
        "a binary as text": [*perplexity, folder / "binary"],
        "unknown dtype": [*perplexity, folder / "text", "--dtype", "float33"],
        "an integer dtype": [*perplexity, folder / "text", "--dtype", "int8"],
        "demo of nothing": ["demo", "--model", folder / "none"],
        "demo in no format": ["demo", "--model", source, "--formats", "nf4,nf5"],
        "demo in an empty format": ["demo", "--model", source, "--formats", ""],
    }


def test_a_mistake_is_one_line_and_status_2(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    faults = {}
    for name, arguments in mistakes(source, tmp_path).items():
        try:
            status, out, err = run(capsys, *arguments)
        except Exception as error:
            faults[name] = repr(error)
            continue
        if (status, out, err.count("\n")) != (2, "", 1) or not err.startswith("qkv: ") or len(err) > 500:
            faults[name] = f"{status} {out!r} {err!r}"
    assert not faults
    assert sorted(p.name for p in tmp_path.iterdir()) == ["binary", "file", "text"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no_such"],
        ["report"],
        ["report", "x", "--context", "0"],
        ["generate", "x"],
        ["quantize", "x"],
        ["demo", "x"],
    ],
)
def test_a_wrong_command_line_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2 and not out and err.startswith("usage: qkv")


def test_help_is_instant() -> None:
    code = (
        "import sys\nfrom qkv.cli.main import main\n"
        "for command in ([], *[[c] for c in sys.argv[1:]]):\n"
        "    try:\n        main([*command, '--help'])\n"
        "    except SystemExit as error:\n        assert error.code == 0\n"
        "loaded = {'torch', 'transformers', 'numpy', 'safetensors', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    result = run_python(code, *COMMANDS)
    assert result.returncode == 0, result.stderr
    assert all(f"usage: qkv {command}" in result.stdout for command in COMMANDS)


def test_a_pipe_gets_no_progress_bar_and_may_close(source: Path, tmp_path: Path) -> None:
    program = f"{sys.executable} -m qkv"
    command = f"{program} quantize {source} {tmp_path / 'q'} && {program} report {source} --json | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.endswith("{\n")
    assert not result.stderr and "\r" not in result.stdout and "\x1b" not in result.stdout


def test_the_program_is_installed() -> None:
    program = shutil.which("qkv", path=str(Path(sys.executable).parent))
    assert program is not None
    result = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.startswith("qkv ")
