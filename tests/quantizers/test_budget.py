from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import QkvError
from qkv.quantizers.budget import KEEP, Ladder, Option, Plan, Unit, checked_format
from tests.laws import check_hull, check_ladder, check_within

FORMATS = ("nf4:double", "nf4", "int8", KEEP)


@st.composite
def units(draw: st.DrawFn) -> list[Unit]:
    """A few units whose options differ in size and in loss, ties and useless ones included."""
    result = []
    for number in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 4))
        sizes = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
        losses = draw(st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=count, max_size=count))
        options = zip(FORMATS, sizes, losses, strict=False)
        result.append(Unit((f"m{number}",), tuple(Option(*each) for each in options), table=number == 3))
    return result


@given(some=units(), budget=st.integers(0, 40))
def test_a_plan_fits_its_budget_and_none_is_better_by_more_than_a_step(some: list[Unit], budget: int) -> None:
    check_hull(some)
    check_ladder(some)
    check_within(some, budget)


@given(some=units())
def test_the_ladder_goes_from_the_smallest_to_the_best(some: list[Unit]) -> None:
    plans = [Ladder(some, 7, 10)[index] for index in range(len(Ladder(some, 7, 10)))]
    for first, second in itertools.pairwise(plans):
        assert first.nbytes < second.nbytes and first.loss is not None and second.loss is not None
        assert first.loss > second.loss
    assert plans[0].nbytes == 7 + sum(min(option.nbytes for option in unit.options) for unit in some)
    best = sum(min(option.loss for option in unit.options) for unit in some)
    assert plans[-1].loss == pytest.approx(best)
    turned = Ladder(list(reversed(some)), 7, 10)
    assert [turned[index].layers for index in range(len(turned))] == [plan.layers for plan in plans]


def test_a_budget_out_of_reach_names_the_smallest() -> None:
    unit = Unit(("m",), (Option("nf4", 500, 1.0), Option("int8", 900, 0.0)))
    with pytest.raises(QkvError, match=r"599 B \(4\.79 bits a weight\) .* smallest plan takes 600 B \(4\.80 bits"):
        Ladder([unit], 100, 1000).within(599)
    assert Ladder([unit], 100, 1000).within(600).layers == {"m": "nf4"}


PLAN = Plan({"a.q": "int8", "a.k": "nf4", "b": "nf4", "c": KEEP}, {"embed": "int8", "head": "int8"}, 1000, 1600, 0.5)


def test_what_quantize_is_asked_for() -> None:
    assert PLAN.bits_per_weight == 5.0
    assert PLAN.options() == {"format": "nf4", "embeddings": "int8", "overrides": {"a.q": "int8", "c": KEEP}}
    apart = replace(PLAN, tables={"embed": KEEP, "head": "int8"}).options()
    assert apart["embeddings"] == "int8" and apart["overrides"]["embed"] == KEEP
    kept = replace(PLAN, tables={"embed": KEEP}).options()
    assert kept["embeddings"] is None and "embed" not in kept["overrides"]
    tables = replace(PLAN, layers={"a": KEEP}).options()
    assert (tables["format"], tables["embeddings"], tables["overrides"]) == ("int8", "int8", {"a": KEEP})
    with pytest.raises(QkvError, match="nothing to quantize"):
        replace(PLAN, layers={"a": KEEP}, tables={}).options()


def test_the_plan_for_people() -> None:
    text = str(replace(PLAN, measured=0.0123))
    assert text.startswith("plan: 1.00 kB, 5.00 bits a weight, expected cost 0.5000 nats a token, measured +1.23%")
    assert "tables  embed" in text and "expected cost not known" in str(replace(PLAN, loss=None))


@pytest.mark.parametrize("text", ["int9", 4, None, "nf4:asym"])
def test_formats_that_do_not_exist_are_refused(text: object) -> None:
    with pytest.raises(QkvError):
        checked_format(text, "m")
    assert checked_format("int8", "m") == "int8:g64" and checked_format(KEEP, "m") == KEEP
