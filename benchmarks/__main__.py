"""Where qkv stands: a table a subject, every row beside its peers in the same run.

    python -m benchmarks [SUBJECT...] [--rounds N] [--json FILE] [--compare FILE] [--plot DIR]

Subjects: linear, attention, quantize, load, decode; all of them unless named. Sizes are the usual ones, and random
models of three sizes; ``qkv bench MODEL`` takes a model's own. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import sys

from qkv.bench.plan import Plan
from qkv.cli.bench import add_measuring_options, measure_and_print
from qkv.errors import QkvError


def main() -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subjects", metavar="SUBJECT", nargs="*")
    add_measuring_options(parser)
    options = parser.parse_args()
    try:
        measure_and_print(Plan(), options.subjects, options)
    except QkvError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
