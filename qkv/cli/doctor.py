"""Show which kernels are live on this machine, and why the others are not."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``qkv doctor``."""
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> None:
    """Print a line a back end, the fastest first, and the versions that matter."""
    import importlib.metadata
    import platform

    from qkv import __version__
    from qkv.cache import attention
    from qkv.quantizers.kernels import status

    tables = {"products": status(), "attention over cache blocks": attention.status()}
    packages = ("torch", "transformers", "safetensors", "bitsandbytes", "numpy")
    versions = {"qkv": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if options.json:
        backends, attentions = ([row._asdict() for row in rows] for rows in tables.values())
        print(json.dumps({"versions": versions, "backends": backends, "attention": attentions}, indent=2))
        return
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    for subject, rows in tables.items():
        print(f"{subject}, in the order in which kernels are tried:")
        for row in rows:
            state = "live" if row.reason is None else f"not live: {row.reason}"
            print(f"  {row.name:13} {state}\n{'':16}{row.serves}")
