from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qkv
from qkv.quantizers.format import FORMATS
from tests.helpers import run_python

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("cache", "integration", "quantizers")


def test_every_name_is_there() -> None:
    for name in qkv.__all__:
        assert getattr(qkv, name) is not None
    assert set(dir(qkv)) == set(qkv.__all__) and qkv.FORMATS is FORMATS
    with pytest.raises(AttributeError, match="no_such"):
        qkv.no_such  # noqa: B018


def test_to_import_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, qkv\nprint(sorted({'torch', 'transformers', 'numpy', 'rich', 'bitsandbytes'} & set(sys.modules)))"
    )
    assert run_python(code).stdout == "[]\n"


def test_the_ground_floor_needs_no_transformers() -> None:
    code = (
        "import sys\nsys.modules['transformers'] = None\nimport torch, qkv\n"
        "model = torch.nn.Sequential(torch.nn.Linear(64, 64))\n"
        "qkv.quantize_(model, 'nf4'); model(torch.ones(1, 64)); print(qkv.footprint(model).weight_nbytes)\n"
        "qkv.dequantize_(model); print(qkv.quantize_tensor(torch.ones(2, 64)).nbytes)"
    )
    result = run_python(code)
    assert result.stdout.split() == [str(64 * 32 + 64 * 4 + 64 * 4), "72"], result.stderr


@pytest.mark.parametrize("name", LINKS)
def test_the_links_at_the_top_lead_to_the_packages(name: str) -> None:
    link = ROOT / name
    if not link.is_symlink():
        pytest.skip("checked out without links")
    assert str(link.readlink()) == f"qkv/{name}" and (link / "__init__.py").is_file()


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(str(node.module))
    return found


ABOVE = {
    "quantizers": {"cache", "integration", "checkpoint", "memory", "bench", "cli"},
    "cache": {"integration", "checkpoint", "memory", "bench", "cli"},
}


def test_imports_run_down_only() -> None:
    """quantizers: torch and numpy only; cache: torch and quantizers only; nothing through the links."""
    for path in (ROOT / "qkv").rglob("*.py"):
        names = imports(path)
        assert not {name for name in names if name.split(".")[0] in LINKS}, path
        room = path.relative_to(ROOT / "qkv").parts[0]
        for above in ABOVE.get(room, ()):
            assert not {name for name in names if name.startswith(f"qkv.{above}")}, path
        if room in ABOVE:
            assert not {name for name in names if name.split(".")[0] == "transformers"}, path


@pytest.mark.slow
def test_the_wheel_has_one_name_at_the_top(tmp_path: Path) -> None:
    """hatchling drops linked folders without a word; generic names may never land in site-packages."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    source = tmp_path / "source"
    for name in filter(None, tracked.split("\0")):
        path = ROOT / name
        if path.is_symlink() or not path.exists():
            continue
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(path.read_bytes())
    for name in LINKS:
        (source / name).symlink_to(f"qkv/{name}")
    if not (source / "README.md").exists():
        (source / "README.md").write_text("qkv\n")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named build" in result.stderr or "not installed" in result.stdout + result.stderr:
        pytest.skip("needs the packages build and setuptools")
    assert result.returncode == 0, result.stderr[-2000:] + result.stdout[-2000:]
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qkv"}
    assert {"qkv/py.typed", "qkv/data/demo.txt", "qkv/quantizers/format.py", "qkv/cli/main.py"} <= set(names)
    assert all(name.endswith((".py", ".typed", ".txt", ".so", ".c", ".h")) for name in names if name.startswith("qkv/"))
