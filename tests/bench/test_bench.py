from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qkv.bench import keep, machine, plot
from qkv.bench.linear import candidates
from qkv.bench.plan import Heads, Plan, plan_of_model
from qkv.bench.run import SUBJECTS, measure
from qkv.bench.table import Row, Table, format_seconds, rows_of
from qkv.bench.timing import Entrant, Measured, Turn, interleave, rotating
from qkv.errors import QkvError
from tests.helpers import run_python

SMALL = Plan(
    shapes=((64, 64), (32, 128)),
    rows=(1, 3),
    heads=Heads(4, 2, 32),
    contexts=(130, 260),
    quantize=((32, 64), (64, 128)),
    new_tokens=2,
    prefill=4,
    rounds=2,
)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are tested here, not speed."""
    monkeypatch.setattr("qkv.bench.timing.MAX_COPIES", 2)
    monkeypatch.setattr("qkv.bench.timing.MAX_CALLS", 2)
    monkeypatch.setattr("qkv.bench.machine.READ_NBYTES", 2**16)
    machine._memory.cache_clear()


def small_plan(model: Path) -> Plan:
    return replace(SMALL, models=(model,))


@pytest.mark.parametrize("subject", [name for name in SUBJECTS if name != "load"])
def test_a_subject_is_a_table(subject: str, checkpoint: Callable[..., Path]) -> None:
    plan = small_plan(checkpoint("llama", dtype=torch.bfloat16))
    said: list[str] = []
    table = SUBJECTS[subject](plan, said.append)
    assert table.subject == subject and said
    for row in table.rows:
        assert table.grows in row.sizes and 0 < row.fastest <= row.median and row.speed > 0
    firsts = {tuple(row.sizes.items()): row for row in reversed(table.rows)}
    assert all(row.speed == row.fastest_speed == 1 for row in firsts.values())
    text = str(table)
    assert all(row.name in text for row in table.rows)
    assert (f"by {table.grows}" in text) == (len({row.sizes[table.grows] for row in table.rows}) > 1)


@pytest.mark.slow
def test_loading_is_measured_in_processes_of_its_own(checkpoint: Callable[..., Path]) -> None:
    table = SUBJECTS["load"](small_plan(checkpoint("llama", dtype=torch.bfloat16)), str)
    assert "qkv.load nf4" in {row.name for row in table.rows}
    assert all(row.numbers["peak MB"] >= 0 for row in table.rows)


@torch.inference_mode()
def test_every_candidate_computes_the_product() -> None:
    """A peer that multiplied something else would be no peer."""
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128) * 0.05, torch.randn(3, 128).bfloat16()
    want = x.float() @ weight.T
    for candidate in candidates(weight, ("nf4", "int4", "int8", "int8:asym"), peers=True):
        got: Any = candidate.product(x)
        error = (got.float() - want).norm() / want.norm()
        assert error < (0.15 if "4" in candidate.name else 0.02), candidate.name


def test_entrants_take_turns() -> None:
    order: list[str] = []
    entrants = [Entrant(name, lambda name=name: order.append(name)) for name in "ab"]  # type: ignore[misc]
    found = interleave(entrants, 3, round_seconds=0)
    assert "".join(order) == "aabb" + "ab" * 3 and [len(turns) for turns in found.turns] == [3, 3]


def test_copies_take_turns() -> None:
    counts = iter(range(9))

    def make() -> Callable[[], int]:
        number = next(counts)
        return lambda: number

    run = rotating(1, make)
    assert [run() for _ in range(5)] == [0, 1, 0, 1, 0]


def test_ratios_are_of_one_round_and_an_ideal_read_is_told_apart() -> None:
    """The machine was twice as slow in the second round, for both."""
    turns = [[Turn(4.0, 4.0), Turn(8.0, 8.0)], [Turn(1.0, 1.0), Turn(2.0, 2.0)]]
    entrants = [Entrant("bf16", lambda: None, nbytes=160), Entrant("ours", lambda: None, nbytes=45)]
    base, ours = rows_of(entrants, Measured(turns, bandwidth=60.0), {"rows": 1})
    assert (base.speed, ours.speed, ours.fastest_speed, ours.median) == (1, 4, 4, 1.5)
    assert ours.share == 45 / 60 and ours.of_ideal == pytest.approx(160 / 60)
    assert rows_of(entrants, Measured(turns, None), {"rows": 1})[0].share is None


def row(name: str, rows: int, median: float, speed: float = 1.0) -> Row:
    return Row(name, {"out": 64, "rows": rows}, median, median, speed, speed)


def table(*rows: Row) -> Table:
    return Table("linear", "x in bf16", "rows", list(rows))


def test_growth_is_told_by_size() -> None:
    text = table(row("nf4", 1, 2e-3), row("nf4", 8, 5e-3), row("int8", 1, 1e-3)).growth()
    assert (
        "by rows" in text and "2.50" in text.splitlines()[-2] and text.splitlines()[-1].split()[-2:] == ["int8", "1.00"]
    )
    assert table(row("nf4", 1, 2e-3)).growth() == ""


def test_a_kept_table_comes_back_and_says_what_moved(tmp_path: Path) -> None:
    path, here = tmp_path / "a.json", machine.describe()
    then = table(row("bf16", 1, 1.0), row("nf4", 1, 0.25, speed=4.0), row("int8", 1, 0.5, speed=2.0))
    keep.save(path, here, [then])
    assert keep.read(path) == (here, [then]) and [p.name for p in tmp_path.iterdir()] == ["a.json"]
    now = table(row("bf16", 1, 1.0), row("nf4", 1, 0.5, speed=2.0), row("int8", 1, 0.5, speed=2.1))
    text = keep.moved(keep.read(path), here, [now])
    assert text.startswith("of 3 rows that both have, 1 moved") and "-50%" in text and "nf4" in text
    assert "conditions differ: threads" in keep.moved(keep.read(path), {**here, "threads": 64}, [now])


@pytest.mark.parametrize("content", [None, "{", "[]", '{"machine": {}, "tables": [{}]}'])
def test_a_file_that_is_no_measurement_is_named(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(QkvError, match=r"a\.json"):
        measure(SMALL, ["linear"], compare=path)


def test_mistakes_are_told_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QkvError, match="'speed' is no subject; choose from linear"):
        measure(SMALL, ["speed"])
    with pytest.raises(QkvError, match="no directory; make it first"):
        measure(SMALL, ["linear"], keep_in=tmp_path / "none" / "a.json")
    with pytest.raises(QkvError, match="rows is empty"):
        replace(SMALL, rows=())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(QkvError, match=r"qkv\[plot\]"):
        measure(SMALL, ["linear"], pictures=tmp_path)


def test_pictures_are_drawn_and_tables_kept(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pieces = list(measure(SMALL, ["linear", "attention"], keep_in=tmp_path / "a.json", pictures=tmp_path / "pictures"))
    assert pieces[-1] == f"drawn: {tmp_path / 'pictures' / 'attention.png'}"
    assert all((tmp_path / "pictures" / f"{name}.png").stat().st_size > 10_000 for name in plot.PICTURES)
    assert [found.subject for found in keep.read(tmp_path / "a.json")[1]] == ["linear", "attention"]


def test_a_models_plan_has_its_own_sizes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    plan = plan_of_model(checkpoint("llama"))
    assert plan.shapes and plan.heads.query % plan.heads.kv == 0 and len(plan.models) == 1
    assert plan_of_model(checkpoint("gpt2")).shapes
    with pytest.raises(QkvError):
        plan_of_model(tmp_path / "none")


def test_seconds_for_people() -> None:
    assert [format_seconds(s) for s in (12.34, 0.01234, 1.2e-5, 0.4)] == ["12.3 s", "12.3 ms", "12.0 us", "400 ms"]


def test_the_command_line_measures_a_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama", dtype=torch.bfloat16)
    run = (
        "from qkv.bench import timing; timing.MAX_COPIES = 2; from qkv.cli.main import main; raise SystemExit(main(["
        f"'bench', {str(model)!r}, '--subject', 'linear', '--rounds', '1', '--rows', '1', '--no-peers', "
        "'--threads', '1']))"
    )
    result = run_python(run)
    assert result.returncode == 0 and "speed over torch's bf16 product" in result.stdout, result.stderr
    assert result.stderr == ""
