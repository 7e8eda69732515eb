"""bitsandbytes: NF4 in blocks over the flattened weight, and the INT8 rows of LLM.int8.

The files that transformers writes of a model it quantized with bitsandbytes 0.50: codes under the weight's
name, the state of NF4 under that name and a dot (``QuantState.as_dict``), of INT8 in the module
(``Linear8bitLt``). Written here without the library, tensor for tensor the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import ceil, prod
from typing import Any, Final

import torch
from torch import Tensor

from qkv.checkpoint.layouts.base import Layout, Plan, Stored, Weight
from qkv.checkpoint.layouts.bnb_nested import code_by_place
from qkv.checkpoint.layouts.bnb_reading import BLOB, BLOCKS, ROW, decode_blocks, decode_rows, stored_bnb
from qkv.checkpoint.source import Source
from qkv.checkpoint.writer import TensorSpec
from qkv.dtypes import config_dtype
from qkv.errors import QkvError
from qkv.integration.settings import Settings
from qkv.quantizers import nf4
from qkv.quantizers.double_quant import dynamic_map, encode_scale
from qkv.quantizers.format import NESTED_BLOCK, Format
from qkv.quantizers.grouping import row_chunks
from qkv.quantizers.quantize import quantize_tensor
from qkv.quantizers.tensor import QuantizedTensor

LONGEST_FLOAT: Final = 25
"""Characters the shortest spelling of a float can take; the state is padded with spaces to a length known ahead."""


class Bitsandbytes(Layout):
    """``quant_method: bitsandbytes``."""

    method = "bitsandbytes"
    turns_conv1d = True

    def check(self, settings: Settings) -> None:
        """NF4 or INT8 by rows, one of the two, and no embeddings."""
        if settings.embeddings is not None:
            raise QkvError(
                f"the bnb layout has no quantized embedding tables or heads; leave out embeddings "
                f"({settings.embeddings})"
            )
        formats = [settings.format, *(f for f in settings.overrides.values() if isinstance(f, Format))]
        for format in formats:
            _check_format(format)
        if len({format.name for format in formats}) > 1:
            raise QkvError(
                "the bnb layout holds nf4 or int8 in one directory, not both; keep some modules instead "
                "(--override NAME=keep), or use the layout qkv"
            )

    def unfit(self, weight: Weight) -> str | None:
        """Linear layers only."""
        if weight.is_expert:
            return "bitsandbytes and transformers leave fused experts in 16 bits"
        return None if len(weight.shape) == 2 else "bitsandbytes holds linear layers alone"

    def specs(self, weight: Weight) -> list[TensorSpec]:
        """Codes, and what QuantState or Linear8bitLt keep beside them."""
        name, count, format = weight.name, prod(weight.shape), weight.format
        if format == ROW:
            module = name.removesuffix("weight")
            rows = weight.shape[:1]
            return [
                TensorSpec(name, torch.int8, weight.shape),
                TensorSpec(f"{module}SCB", torch.float32, rows),
                TensorSpec(f"{module}weight_format", torch.uint8, ()),
            ]
        blocks = ceil(count / int(format.group_size))
        blob = _blob(weight, offset=0.0 if format.double_quant else None)
        specs = [
            TensorSpec(name, torch.uint8, (ceil(count / 2), 1)),
            TensorSpec(f"{name}.absmax", torch.uint8 if format.double_quant else torch.float32, (blocks,)),
            TensorSpec(f"{name}.quant_map", torch.float32, (16,)),
            TensorSpec(f"{name}{BLOB}nf4", torch.uint8, tuple(blob.shape)),
        ]
        if format.double_quant:
            specs += [
                TensorSpec(f"{name}.nested_absmax", torch.float32, (ceil(blocks / NESTED_BLOCK),)),
                TensorSpec(f"{name}.nested_quant_map", torch.float32, (256,)),
            ]
        return specs

    def encode(self, weight: Weight, value: Tensor, importance: Tensor | None) -> dict[str, Tensor]:
        """Blocks run over the flattened weight, so rows that they do not divide are quantized as one."""
        if weight.format == ROW:
            return _encode_rows(weight, value, importance)
        block = int(weight.format.group_size)
        if value.shape[-1] % block:
            importance = None if importance is None else importance.repeat(weight.shape[0])
            value = value.reshape(1, -1)
        found = quantize_tensor(value, Format("nf4", block), importance=importance, name=weight.name)
        count = prod(weight.shape)
        name, absmax = weight.name, found.scale.reshape(-1)
        codes = found.codes.reshape(-1)[: ceil(count / 2)].reshape(-1, 1)
        parts = {name: codes, f"{name}.quant_map": nf4.levels(value.device)}
        if not weight.format.double_quant:
            return parts | {f"{name}.absmax": absmax, f"{name}{BLOB}nf4": _blob(weight, None)}
        nested = encode_scale(absmax, never_below=False, offset=absmax.mean(), nearest=code_by_place)
        return parts | {
            f"{name}.absmax": nested.codes,
            f"{name}.nested_absmax": nested.absmax,
            f"{name}.nested_quant_map": dynamic_map(value.device),
            f"{name}{BLOB}nf4": _blob(weight, float(nested.offset)),
        }

    def config(self, plan: Plan) -> dict[str, Any]:
        """What BitsAndBytesConfig writes; every linear layer that stays as it is is listed."""
        four = plan.settings.format.name == "nf4"
        _check_skips(plan)
        return {
            "quant_method": self.method,
            "_load_in_4bit": four,
            "_load_in_8bit": not four,
            "load_in_4bit": four,
            "load_in_8bit": not four,
            "bnb_4bit_compute_dtype": str(config_dtype(plan.config)).removeprefix("torch."),
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": "nf4" if four else "fp4",
            "bnb_4bit_use_double_quant": plan.settings.format.double_quant,
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": list(plan.kept),
            "llm_int8_threshold": 6.0,
        }

    def stored(self, source: Source, config: Mapping[str, Any]) -> list[Stored]:
        """NF4 is what has a state, INT8 what has SCB."""
        return stored_bnb(source, self)

    def decode(self, stored: Stored, source: Source) -> QuantizedTensor:
        """Codes by rows, with the blocks' scales; finer groups where a block reaches over the end of a row."""
        return decode_rows(stored, source) if stored.format == ROW else decode_blocks(stored, source)


def _check_format(format: Format) -> None:
    if format.name == "int8" and format != ROW:
        raise QkvError(f"LLM.int8 has one scale a row, so the bnb layout takes int8:row, not {format}")
    if format.name == "int4":
        raise QkvError(f"bitsandbytes has no {format}; take nf4, or the layout compressed-tensors")
    if format.name == "nf4" and format.group_size not in BLOCKS:
        raise QkvError(f"bitsandbytes takes blocks of {', '.join(map(str, BLOCKS))}, not {format}")


def _check_skips(plan: Plan) -> None:
    """transformers skips by the ends and the beginnings of names, which may not reach what is quantized."""
    for weight in plan.weights.values():
        skip = next((s for s in plan.kept if weight.module.endswith(s) or weight.module.startswith(f"{s}.")), None)
        if skip:
            raise QkvError(
                f"transformers would skip {weight.module} along with {skip}, whose name it ends in; keep both or none"
            )


def _blob(weight: Weight, offset: float | None) -> Tensor:
    """The JSON of ``QuantState.as_dict``, padded where its length depends on a value."""
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": weight.format.group_size,
        "dtype": str(_state_dtype(weight.dtype)).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    if offset is not None:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state)
    if offset is not None:
        text = text.ljust(len(text) - len(repr(offset)) + LONGEST_FLOAT)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _state_dtype(dtype: torch.dtype) -> torch.dtype:
    """bitsandbytes knows three dtypes of weights; others become the one that holds them."""
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        return dtype
    return torch.float32 if dtype == torch.float64 else torch.bfloat16


def _encode_rows(weight: Weight, value: Tensor, importance: Tensor | None) -> dict[str, Tensor]:
    """As ``int8_vectorwise_quant`` of the weight cast to float16; with an importance, under searched scales."""
    module, kind = weight.name.removesuffix("weight"), torch.zeros((), dtype=torch.uint8)
    if importance is not None:
        found = quantize_tensor(value, ROW, importance=importance, name=weight.name)
        scale = found.scale[:, 0] * 127
        return {weight.name: found.codes[:, 0], f"{module}SCB": scale, f"{module}weight_format": kind}
    codes = torch.empty(weight.shape, dtype=torch.int8)
    absmax = torch.empty(weight.shape[0], dtype=torch.float32)
    for part in row_chunks(*weight.shape):
        rows = value[part].to(torch.float16).to(torch.float32)
        absmax[part] = rows.abs().amax(1)
        if not bool(torch.isfinite(absmax[part]).all()):
            raise QkvError(
                f"{weight.name} holds NaN, infinity, or a value beyond 65504, the largest of the float16 that LLM.int8 "
                "casts to; take nf4, or skip the module"
            )
        factor = 127.0 / torch.where(absmax[part] > 0, absmax[part], 1.0)
        codes[part] = torch.round(rows * factor[:, None]).to(torch.int8)
    return {weight.name: codes, f"{module}SCB": absmax, f"{module}weight_format": kind}
