from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qkv.checkpoint.load import load, load_tokenizer
from qkv.checkpoint.quantize import quantize_checkpoint
from qkv.errors import QkvError
from qkv.integration.generate import encode_prompt, generate_text, sampling_options
from qkv.integration.patch import quantize_
from qkv.memory.footprint import footprint
from tests.helpers import assert_same_tensors, live_nbytes, tensor_nbytes_in


def test_sampling_options_are_checked() -> None:
    assert sampling_options(0, 1)["do_sample"] is False
    assert sampling_options(0.7, 0.9) == {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 0}
    for temperature, top_p in ((-1, 1), (float("nan"), 1), (float("inf"), 1), (1, 0), (1, 1.1), (1, float("nan"))):
        with pytest.raises(QkvError):
            sampling_options(temperature, top_p)


def test_the_main_job_on_a_real_model(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quantize a directory, load it, generate: the same as to patch the loaded model; the bytes add up."""
    report = quantize_checkpoint(smollm2, tmp_path / "nf4", "nf4", embeddings="int8")
    # facts/weights.md section 4: smollm2 116 MB in nf4, 88 MB with its embedding in int8
    assert report.before_nbytes == 269_030_016 and 86e6 < report.footprint.weight_nbytes < 92e6
    model = load(tmp_path / "nf4")
    patched = load(smollm2)
    quantize_(patched, "nf4", embeddings="int8")
    assert_same_tensors(model.state_dict(), patched.state_dict())
    words = load_tokenizer(tmp_path / "nf4")
    inputs = encode_prompt(words, "What is the capital of France?", chat=True)
    answers = [m.generate(**inputs, max_new_tokens=12, do_sample=False)[0] for m in (model, patched)]
    assert torch.equal(*answers) and "Paris" in words.decode(answers[0])
    counts = {
        report.footprint.weight_nbytes,
        footprint(model).weight_nbytes,
        footprint(tmp_path / "nf4").weight_nbytes,
        tensor_nbytes_in(tmp_path / "nf4"),
        live_nbytes(model),
    }
    assert len(counts) == 1 and footprint(model).num_parameters == 134_515_008
    generate_text(
        load(tmp_path / "nf4"),
        load_tokenizer(tmp_path / "nf4"),
        "What is the capital of France?",
        chat=True,
        max_new_tokens=12,
    )
    printed = capsys.readouterr()
    assert "Paris" in printed.out and printed.err.strip().endswith("tokens/s")


def test_prompts_without_tokens_or_template_are_refused(smollm2: Path) -> None:
    words = load_tokenizer(smollm2)
    with pytest.raises(QkvError, match="no tokens"):
        encode_prompt(words, "", chat=False)
    words.chat_template = None
    with pytest.raises(QkvError, match="chat template"):
        encode_prompt(words, "hello", chat=True)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(QkvError, match="no tokenizer"):
        load_tokenizer(tmp_path)
