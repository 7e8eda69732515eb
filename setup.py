"""Builds the optional native library; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("qkv/quantizers/kernels/csrc")
STAMP = runpy.run_path("qkv/quantizers/kernels/stamp.py")["stamp"](SOURCES)

setup(
    ext_modules=[
        Extension(
            "qkv.quantizers.kernels._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            define_macros=[("QKV_STAMP", f"{STAMP}ULL")],
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
