"""``python -m qkv``."""

from __future__ import annotations

from qkv.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
