"""qkv: make a language model and its context fit the memory you have, and know what it takes.

Names only; each is loaded when it is first used. Importing this package tells transformers, once it is in
use, how to read the checkpoints written here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qkv.integration.register import register_plug_in

if TYPE_CHECKING:
    from qkv.cache.prefix import PrefixCache as PrefixCache
    from qkv.cache.retention import Importance as Importance
    from qkv.cache.retention import KeepAll as KeepAll
    from qkv.cache.retention import RandomBlocks as RandomBlocks
    from qkv.cache.retention import Window as Window
    from qkv.checkpoint.budget import load_plan as load_plan
    from qkv.checkpoint.budget import plan_checkpoint as plan_checkpoint
    from qkv.checkpoint.budget import save_plan as save_plan
    from qkv.checkpoint.dequantize import dequantize_checkpoint as dequantize_checkpoint
    from qkv.checkpoint.load import load as load
    from qkv.checkpoint.merge import merge_checkpoint as merge_checkpoint
    from qkv.checkpoint.quantize import quantize_checkpoint as quantize_checkpoint
    from qkv.errors import CheckpointError as CheckpointError
    from qkv.errors import QkvError as QkvError
    from qkv.integration.calibrate import calibrate as calibrate
    from qkv.integration.calibration import Calibration as Calibration
    from qkv.integration.decoder import SpeculativeDecoder as SpeculativeDecoder
    from qkv.integration.decoding import prepare_ as prepare_
    from qkv.integration.decoding import unprepare_ as unprepare_
    from qkv.integration.draft import Draft as Draft
    from qkv.integration.hf_cache import KVCache as KVCache
    from qkv.integration.hf_quantizer import QkvConfig as QkvConfig
    from qkv.integration.length import Length as Length
    from qkv.integration.patch import dequantize_ as dequantize_
    from qkv.integration.patch import patched as patched
    from qkv.integration.patch import quantize_ as quantize_
    from qkv.integration.perplexity import perplexity as perplexity
    from qkv.integration.sources import Source as Source
    from qkv.memory.footprint import footprint as footprint
    from qkv.memory.items import Footprint as Footprint
    from qkv.quantizers.budget import Plan as Plan
    from qkv.quantizers.format import FORMATS as FORMATS
    from qkv.quantizers.format import Format as Format
    from qkv.quantizers.quantize import quantize_tensor as quantize_tensor
    from qkv.quantizers.tensor import QuantizedTensor as QuantizedTensor

__version__ = "0.1.0"

_HOMES = {
    "Calibration": "qkv.integration.calibration",
    "CheckpointError": "qkv.errors",
    "Draft": "qkv.integration.draft",
    "FORMATS": "qkv.quantizers.format",
    "Footprint": "qkv.memory.items",
    "Format": "qkv.quantizers.format",
    "Importance": "qkv.cache.retention",
    "KVCache": "qkv.integration.hf_cache",
    "KeepAll": "qkv.cache.retention",
    "Length": "qkv.integration.length",
    "Plan": "qkv.quantizers.budget",
    "PrefixCache": "qkv.cache.prefix",
    "QkvConfig": "qkv.integration.hf_quantizer",
    "QkvError": "qkv.errors",
    "QuantizedTensor": "qkv.quantizers.tensor",
    "RandomBlocks": "qkv.cache.retention",
    "Source": "qkv.integration.sources",
    "SpeculativeDecoder": "qkv.integration.decoder",
    "Window": "qkv.cache.retention",
    "calibrate": "qkv.integration.calibrate",
    "dequantize_": "qkv.integration.patch",
    "dequantize_checkpoint": "qkv.checkpoint.dequantize",
    "footprint": "qkv.memory.footprint",
    "load": "qkv.checkpoint.load",
    "load_plan": "qkv.checkpoint.budget",
    "merge_checkpoint": "qkv.checkpoint.merge",
    "patched": "qkv.integration.patch",
    "perplexity": "qkv.integration.perplexity",
    "prepare_": "qkv.integration.decoding",
    "plan_checkpoint": "qkv.checkpoint.budget",
    "quantize_": "qkv.integration.patch",
    "quantize_checkpoint": "qkv.checkpoint.quantize",
    "quantize_tensor": "qkv.quantizers.quantize",
    "save_plan": "qkv.checkpoint.budget",
    "unprepare_": "qkv.integration.decoding",
}

__all__ = [*sorted(_HOMES), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qkv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


register_plug_in()
