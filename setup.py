"""Builds the optional native library; everything else about the package is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("qkv/quantizers/kernels/csrc")

setup(
    ext_modules=[
        Extension(
            "qkv.quantizers.kernels._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.c")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
