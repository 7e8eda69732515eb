"""What to quantize to what, as users say it: formats, and patterns over modules' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from qkv.errors import QkvError
from qkv.quantizers.format import Format

FORMAT_VERSION = 1
"""Of what is written: ``quantization_config`` in config.json and the tensors that it describes."""
KEEP = "keep"


@dataclass(frozen=True)
class Settings:
    """What to quantize, checked.

    Args:
        format: of the linear layers and experts.
        skip: names or patterns of modules to leave alone, see :func:`matches`.
        embeddings: format of embedding tables and of the output head; None leaves them as they are.
        overrides: other formats for modules by pattern, or ``"keep"``; the first that matches counts.
    """

    format: Format
    skip: tuple[str, ...] = ()
    embeddings: Format | None = None
    overrides: Mapping[str, Format | str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        format: str | Format,
        skip: str | list[str] | tuple[str, ...] | None = None,
        embeddings: str | Format | None = None,
        overrides: Mapping[str, str | Format] | None = None,
    ) -> Settings:
        """Read settings as users spell them."""
        names = (skip,) if isinstance(skip, str) else tuple(skip or ())
        for name in (*names, *(overrides or {})):
            if not isinstance(name, str) or not name.strip("."):
                raise QkvError(f"skip and overrides take module names or patterns such as 'mlp.gate'; got {name!r}")
        parsed = {k: v if v == KEEP else Format.parse(v) for k, v in (overrides or {}).items()}
        table = None if embeddings is None else Format.parse(embeddings)
        if table is not None and table.double_quant:
            raise QkvError(f"embeddings take no double quantization (a row is read at a time); got {table}")
        return cls(Format.parse(format), names, table, parsed)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON takes them; :meth:`parse` reads them again."""
        return {
            "format": str(self.format),
            "skip": list(self.skip),
            "embeddings": None if self.embeddings is None else str(self.embeddings),
            "overrides": {pattern: str(value) for pattern, value in self.overrides.items()},
        }

    def format_for(self, name: str, default: Format) -> Format | str:
        """The format of module ``name``, or why it is left alone."""
        pattern = next((p for p in self.skip if matches(p, name)), None)
        if pattern is not None:
            return f"skipped: matches {pattern!r}"
        found = next((f for p, f in self.overrides.items() if matches(p, name)), default)
        return found if isinstance(found, Format) else "kept: overrides say so"

    def override_for(self, name: str) -> Format | None:
        """The format that ``overrides`` give ``name``, if any."""
        return next((f for p, f in self.overrides.items() if isinstance(f, Format) and matches(p, name)), None)

    def check_patterns(self, names: Iterable[str]) -> None:
        """Raise QkvError for a pattern that matches none of ``names``: most likely a slip of the pen."""
        known = list(names)
        for pattern in (*self.skip, *self.overrides):
            if not any(matches(pattern, name) for name in known):
                example = repr(known[-1]) if known else "none here"
                raise QkvError(
                    f"{pattern!r} matches no module; patterns match whole components of names such as {example}"
                )


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches whole components of a dotted ``name``, at any place.

    ``"mlp"`` matches ``model.layers.0.mlp.up_proj``, ``"layers.*.mlp"`` too; ``"proj"`` matches neither
    ``q_proj`` nor anything but a component that is called ``proj``.
    """
    wanted, parts = pattern.strip(".").split("."), name.split(".")
    return any(
        all(fnmatchcase(part, want) for part, want in zip(parts[start:], wanted, strict=False))
        for start in range(len(parts) - len(wanted) + 1)
    )
