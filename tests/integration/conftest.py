"""The real model and a long text, for the tests of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    """SmolLM2 in float32."""
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text(smollm2: Path) -> Tensor:
    """A long technical text that every Python carries, ``long [1, tokens]``."""
    from pydoc_data import topics

    names = ("compound", "class", "types", "assignment", "typesmapping")
    whole = "\n".join(topics.topics[name] for name in names)
    return torch.tensor([AutoTokenizer.from_pretrained(smollm2).encode(whole)])
