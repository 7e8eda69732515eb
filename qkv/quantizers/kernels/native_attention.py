"""The native library's attention over cache blocks, called through ctypes.

The structures repeat ``csrc/attention.h`` field for field. Nothing here knows what a cache is: the caller fills in
addresses, strides and sizes, and keeps the tensors behind them alive for the call.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from qkv.quantizers.kernels import native

CODECS: Final = {"exact": 0, "int8": 1, "int4": 2, "int2": 3, "nf4": 4}
MAX_QUERIES: Final = 16
"""Open tokens a call serves."""

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64


class Side(ctypes.Structure):
    """How blocks store their keys or their values; ``dtype`` is that of exact ones, ``by_token`` the axis of scales."""

    _fields_ = (("codec", _INT), ("dtype", _INT), ("by_token", _INT), ("rotated", _INT), ("dim", _INT), ("group", _INT),
                ("row_bytes", _INT))  # fmt: skip


class Exact(ctypes.Structure):
    """Exact keys and values ``[heads, tokens, dim]``; strides in elements, keys first."""

    _fields_ = (("data", _POINTER * 2), ("head_stride", _INT * 2), ("token_stride", _INT * 2), ("tokens", _INT),
                ("dtype", _INT))  # fmt: skip


class Call(ctypes.Structure):
    """Everything about one call: ``struct qkv_attention``."""

    _fields_ = (
        ("side", Side * 2),
        ("runs", _POINTER),
        ("starts", _POINTER),
        ("num_runs", _INT),
        ("num_blocks", _INT),
        ("anchors", Exact),
        ("tail", Exact),
        ("queries", _POINTER),
        ("anchor_queries", _POINTER),
        ("output", _POINTER),
        ("query_head_stride", _INT),
        ("query_token_stride", _INT),
        ("dtype", _INT),
        ("heads", _INT),
        ("group", _INT),
        ("tokens", _INT),
        ("positions", _POINTER),
        ("open_mask", _POINTER),
        ("sink_logits", _POINTER),
        ("mass", _POINTER),
        ("focus", _POINTER),
        ("room", _POINTER),
        ("tail_start", _INT),
        ("num_open", _INT),
        ("hidden", _INT),
        ("sinks", _INT),
        ("reach", _INT),
        ("block_size", _INT),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("threads", _INT),
        ("level", _INT),
    )


def run(call: Call) -> None:
    """Fill ``call.output``, and ``mass`` and ``focus`` where they are given.

    The room for what the threads find apart is taken from torch, so that it is seen by whoever measures memory.

    Raises:
        MemoryError: no memory for a thread's own scratch.
    """
    library = native.library()
    library.qkv_attention_room.restype = _INT
    room = torch.empty(library.qkv_attention_room(ctypes.byref(call)), dtype=torch.float32)
    call.room, call.threads = room.data_ptr(), torch.get_num_threads()
    call.level = native.LEVELS.index(native.level())
    if library.qkv_attention(ctypes.byref(call)):
        raise MemoryError("no memory for the scratch of attention over blocks")
