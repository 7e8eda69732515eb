"""Register the plug-in with transformers at the moment transformers is used, not before.

``import qkv`` must be enough for ``AutoModelForCausalLM.from_pretrained`` to know our checkpoints, and must
not cost the seconds that importing transformers takes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_TRIGGER = "transformers.modeling_utils"
_PLUG_IN = "qkv.integration.hf_quantizer"


def register_plug_in() -> None:
    """Import the plug-in now if transformers' models are in use, otherwise as soon as they are."""
    if _TRIGGER in sys.modules:
        importlib.import_module(_PLUG_IN)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the trigger as the other finders do and has its loader import the plug-in afterwards."""

    _asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The trigger's own spec with our loader; None for every other module."""
        if fullname != _TRIGGER:
            return None
        if self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        importlib.import_module(_PLUG_IN)
