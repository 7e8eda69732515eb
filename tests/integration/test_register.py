from __future__ import annotations

import pytest

from tests.helpers import run_python

ASK = "\nfrom transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING\nprint('qkv' in AUTO_QUANTIZER_MAPPING)"


@pytest.mark.parametrize(
    "code",
    [
        "import qkv\nfrom transformers import LlamaForCausalLM",
        "import transformers, qkv\nfrom transformers import LlamaForCausalLM",
        "import transformers.modeling_utils, qkv",
        "import importlib.util, qkv\nimportlib.util.find_spec('transformers.modeling_utils')\n"
        "from transformers import LlamaForCausalLM",  # another library only asks whether it is there
    ],
)
def test_the_plug_in_is_registered_when_models_are_in_use(code: str) -> None:
    result = run_python(code + ASK)
    assert result.stdout.strip() == "True", result.stderr


def test_the_module_that_triggers_it_stays_an_ordinary_module() -> None:
    code = (
        "import qkv, inspect, importlib, sys\nimport transformers.modeling_utils as m\n"
        "print(len(inspect.getsource(m)) > 1000, m.__spec__.name, m.__file__ == m.__spec__.origin)\n"
        "import qkv.integration.register as r\nr.register_plug_in(); r.register_plug_in()\n"
        "print(sum(isinstance(f, r._Finder) for f in sys.meta_path) <= 1)"
    )
    result = run_python(code)
    assert result.stdout.split() == ["True", "transformers.modeling_utils", "True", "True"], result.stderr
