"""Patch a small random model in place, look at its memory, save it, load it, generate. A minute on a CPU.

python examples/quantize_and_generate.py
"""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qkv


def main() -> None:
    """Run the example."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    print(qkv.footprint(model), end="\n\n")
    print(qkv.quantize_(model, "nf4", embeddings="int8"), end="\n\n")
    print(qkv.footprint(model, context=2048), end="\n\n")
    prompt = torch.randint(1, 1000, (1, 8))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = qkv.load(folder)
        ids = loaded.generate(prompt, max_new_tokens=8, do_sample=False)
    print("generated:", ids[0, 8:].tolist())


if __name__ == "__main__":
    main()
