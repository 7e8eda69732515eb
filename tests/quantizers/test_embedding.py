from __future__ import annotations

import pytest
import torch
from torch import nn

from qkv.integration.patch import quantize_
from qkv.quantizers.embedding import QuantizedEmbedding, select_rows
from qkv.quantizers.format import FORMATS
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import logits, tiny
from tests.laws import sample


def table(text: str = "int8", *, dtype: torch.dtype = torch.float32) -> QuantizedEmbedding:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 72, padding_idx=0)).to(dtype)
    quantize_(model, "nf4", embeddings=text)
    found = model[0]
    assert isinstance(found, QuantizedEmbedding)
    return found


@pytest.mark.parametrize("text", ["int8", "int8:asym", "int8:row", "int4:g7", "nf4", "int8:tensor", "int8:tensor:asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looks_up_rows_of_the_dequantized_table(text: str, dtype: torch.dtype) -> None:
    embedding = table(text, dtype=dtype)
    whole = embedding.quantized().dequantize()
    for ids in (torch.tensor([[3, 49, 0], [3, 1, 2]]), torch.tensor(7), torch.empty(2, 0, dtype=torch.int64)):
        rows = embedding(ids)
        assert rows.dtype == dtype and torch.equal(rows, whole[ids])
    assert torch.equal(embedding(torch.tensor([4], dtype=torch.int32)), whole[[4]])
    assert embedding.padding_idx == 0 and not embedding(torch.tensor([0])).any()


@pytest.mark.parametrize("index", [-1, -50, 50, 10**9])
def test_an_id_outside_the_table_is_refused(index: int) -> None:
    with pytest.raises(IndexError):
        table()(torch.tensor([1, index]))


@pytest.mark.parametrize("text", FORMATS)
def test_rows_can_be_selected_in_every_format(text: str) -> None:
    weight = quantize_tensor(sample("normal", (20, 100), 0), text)
    ids = torch.tensor([3, 3, 19, 0])
    assert torch.equal(select_rows(weight, ids).dequantize(), weight.dequantize()[ids])


def test_casts_change_what_a_row_comes_back_as() -> None:
    assert table().half()(torch.tensor([1])).dtype == torch.float16
    assert table(dtype=torch.bfloat16).float()(torch.tensor([1])).dtype == torch.float32


def test_gemma_multiplies_what_it_looks_up() -> None:
    """Gemma's embedding scales its rows; the drop-in must too, in the table's dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny("gemma3", dtype=dtype)
        ids = torch.tensor([[1, 5]])
        plain = model.get_input_embeddings()
        scale = plain.embed_scale.to(dtype)
        quantize_(model, "int8", embeddings="int8")
        embedding = model.get_input_embeddings()
        assert torch.equal(embedding(ids), embedding.quantized().dequantize()[ids] * scale)
        assert model.lm_head.weight is embedding.weight and torch.isfinite(logits(model)).all()


def test_a_table_that_renormalizes_its_rows_is_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(10, 8, max_norm=0.1), nn.Linear(8, 8))
    quantize_(model, "int8", embeddings="int8")
    assert float(model[0](torch.tensor([2])).detach().norm()) <= 0.1001
