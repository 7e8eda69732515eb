"""Parse the command line, run the command, and turn a user's mistake into one line and exit status 2."""

from __future__ import annotations

import argparse
import errno
import importlib
import signal
import sys
from collections.abc import Sequence

USERS_TO_MEND = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM,
    errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
"""Errors of the system that are told in one line."""
STOPPED = "qkv: stopped; nothing is under the final name; quantize and dequantize go on when run again"
COMMANDS = ("quantize", "dequantize", "merge", "generate", "perplexity", "report", "doctor", "bench", "demo")


def build_parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    from qkv import __version__

    parser = argparse.ArgumentParser(
        prog="qkv",
        description="Quantize checkpoints, run them, and see what they take. GB and MB are 10^9 and 10^6.",
    )
    parser.add_argument("--version", action="version", version=f"qkv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"qkv.cli.{name}")
        command = commands.add_parser(name, help=(module.__doc__ or "").split("\n")[0], description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    from qkv.errors import QkvError

    options = build_parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that clean-up runs
    try:
        options.run(options)
    except QkvError as error:
        return _say(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return 0
        if error.errno in USERS_TO_MEND:
            return _say(error)
        raise
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return 130
    return 0


def _say(error: Exception) -> int:
    print(f"qkv: {error}", file=sys.stderr)
    return 2
