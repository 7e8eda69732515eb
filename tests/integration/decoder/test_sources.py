"""Sources, lengths and drafts by themselves."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qkv.errors import QkvError
from qkv.integration.decoder import SpeculativeDecoder
from qkv.integration.draft import Draft
from qkv.integration.length import Adaptive, Fixed, Length, Outcome, make_length
from qkv.integration.length.adaptive import BLOCKS
from qkv.integration.length.costs import Costs
from qkv.integration.length.record import Record
from qkv.integration.sources import Lookup, ModelSource, NGram, Source, make_source
from qkv.integration.sources.lookup import Index
from qkv.integration.sources.model import check_vocabulary
from qkv.integration.walk import Row
from tests.helpers import prompt, tiny
from tests.integration.decoder.cases import Adversary, Moody, continued, related, target


def looked_up(ids: list[int], limit: int = 4, **options: int) -> list[int]:
    source, rows = Lookup(**options), [Row(torch.tensor(ids))]
    source.begin(rows)
    found: list[int] = source.draft(rows, [limit])[0].tokens.tolist()
    return found


def test_a_draft_is_a_tree() -> None:
    tree = Draft(torch.tensor([4, 5, 6, 7]), (-1, 0, 0, 2))
    assert tree.children(-1) == (0,) and tree.children(0) == (1, 2) and tree.depths == (0, 1, 1, 2)
    assert (
        not tree.is_chain and tree.truncate(2).is_chain and Draft.chain([1, 2]).is_chain and len(Draft.chain([])) == 0
    )
    for parents in ((0, 1), (-1, 1), (-2, 0), (-1,)):
        with pytest.raises(QkvError):
            Draft(torch.tensor([1, 2]), parents)


def test_lookup_takes_the_longest_then_the_most_recent_match() -> None:
    assert looked_up([1, 2, 3, 9, 8, 2, 3, 7, 6, 1, 2, 3]) == [9, 8, 2, 3]
    assert looked_up([2, 3, 9, 8, 2, 3, 7, 6, 2, 3]) == [7, 6, 2, 3]
    assert looked_up([5, 6, 4, 5], 3) == [6, 4, 5]
    assert looked_up([5, 6, 4, 5], 3, shortest=2) == [] and looked_up([1, 2, 3]) == [] and looked_up([1]) == []
    assert looked_up([1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]  # goes on as if it repeated itself
    assert looked_up([7, 7], 3) == [7, 7, 7]


def test_lookup_takes_what_most_places_share() -> None:
    assert looked_up([1, 7, 9, 9, 1, 7, 9, 1, 8, 4, 1], 2) == [7, 9]
    assert looked_up([1, 7, 9, 9, 1, 8, 4, 1], 2) == [8, 4]


def test_lookup_goes_on_behind_a_change() -> None:
    """A passage copied with a word changed: of equal places the one after where was copied from, not the latest."""
    passage = [1, 2, 3, 4, 60, 5, 6, 7, 8]
    source, row = Lookup(), Row(torch.tensor([*passage, 50, 5, 9, 51, 5, 9, 52, 2, 3]))
    source.begin([row])
    assert source.draft([row], [4])[0].tokens.tolist() == [4, 60, 5, 6]
    for token in (4, 61, 5):
        row.emit(token)
    assert source.draft([row], [3])[0].tokens.tolist() == [6, 7, 8]
    assert looked_up(row.ids, 3) == [9, 52, 2], "had nothing been copied"


def test_lookup_index_grows_with_the_row() -> None:
    ids = torch.randint(4, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    grown = Index(32, 128)
    for end in range(0, 201, 3):
        grown.extend(ids[:end])
        at_once = Index(32, 128)
        at_once.extend(ids[:end])
        assert copy.deepcopy(grown).match() == at_once.match()


def test_ngram_backs_off_and_prefers_the_newest_of_equals(tmp_path: Path) -> None:
    source = NGram(order=3).fit([[1, 2, 3, 4], [9, 2, 3, 5], [9, 2, 3, 5]])
    assert source.predict([1, 2, 3]) == (4, 3)
    assert source.predict([8, 2, 3]) == (5, 2)
    assert source.predict([8, 8, 3]) == (5, 1)
    assert source.predict([8]) is None
    assert NGram(order=1).fit([[1, 2, 1, 3]]).predict([1]) == (3, 1)
    source.save(tmp_path / "counts.json")
    assert NGram.load(tmp_path / "counts.json").predict([8, 2, 3]) == (5, 2)
    made = make_source(f"ngram:{tmp_path / 'counts.json'}", tiny("llama"))
    assert isinstance(made, NGram) and made.predict([1, 2, 3]) == (4, 3)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(QkvError, match="no saved n-grams"):
        NGram.load(tmp_path / "other.json")


def test_ngram_learns_from_its_own_row() -> None:
    source, row = NGram(order=2), Row(torch.tensor([1, 2, 3, 1, 2]))
    source.begin([row])
    assert source.draft([row], [3])[0].tokens.tolist() == [3, 1, 2]
    source.begin([row])
    assert source.draft([row], [1])[0].tokens.tolist() == [3]


def test_a_draft_directory_and_its_tokenizer(tmp_path: Path) -> None:
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    model = tiny("llama")
    decoder = SpeculativeDecoder(model, source=f"model:{tmp_path}", length=3)
    expected = model.generate(prompt(), max_new_tokens=8, do_sample=False)
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=8), expected)

    class Vocabulary:
        def __init__(self, *tokens: str) -> None:
            self.tokens = tokens

        def get_vocab(self) -> dict[str, int]:
            return {token: number for number, token in enumerate(self.tokens)}

    check_vocabulary(4, 3, Vocabulary("a", "b", "c", "pad"), Vocabulary("a", "b", "c"))
    with pytest.raises(QkvError, match=r"differs .* in 2"):
        check_vocabulary(3, 3, Vocabulary("b", "a", "c"), Vocabulary("a", "b", "c"))


def test_a_quantized_target_drafts_for_itself() -> None:
    from qkv.integration.patch import quantize_

    model = tiny("llama")
    quantize_(model, "int8")
    expected = model.generate(prompt(), max_new_tokens=12, do_sample=False)
    decoder = SpeculativeDecoder(model, source="self:nf4", length=3)
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=12), expected)
    assert torch.equal(model.generate(prompt(), max_new_tokens=12, do_sample=False), expected)


def test_accepted_tokens_are_never_computed_again() -> None:
    """Of one row: tokens fed to target and draft, prompt and all."""
    fed: dict[str, int] = {"target": 0, "draft": 0}
    model, draft = tiny("llama"), tiny("llama")

    def counter(name: str) -> object:
        def count(module: object, args: tuple[torch.Tensor, ...], kwargs: object) -> None:
            fed[name] += args[0].shape[1]

        return count

    for name, each in (("target", model), ("draft", draft)):
        each.register_forward_pre_hook(counter(name), with_kwargs=True)
    SpeculativeDecoder(model, source=draft, length=4).generate(prompt(9), max_new_tokens=25)
    assert fed == {"target": 9 - 1 + 25, "draft": 9 - 1 + 25 - 1}


def test_names_and_protocols() -> None:
    assert isinstance(Lookup(), Source) and isinstance(Adversary(), Source) and isinstance(Moody(), Length)
    assert make_source("none", None) is None and make_source(None, None) is None
    assert make_length(3) == Fixed(3) and isinstance(make_length("adaptive"), Adaptive)
    assert isinstance(make_source(related(), target()), ModelSource)


def lasting(policy: Adaptive, right: int, cost: Callable[[int], float], steps: int, confidence: int = 1) -> list[int]:
    """What a policy submits step by step of drafts of 63 tokens of which the first ``right`` are."""
    submitted, draft = [], Draft.chain([1] * 63, confidence=confidence)
    for _ in range(steps):
        kept = policy.keep(draft.truncate(policy.budget(63)))
        submitted.append(kept)
        policy.update(Outcome((kept,), (min(kept, right),), (confidence,), kept + 1, 1e-6 * kept, cost(kept + 1)))
    return submitted


def test_adaptive_drafts_where_it_pays_and_stops_where_it_does_not() -> None:
    policy = Adaptive()
    assert lasting(policy, 63, lambda n: 1 + 0.02 * n, 30, confidence=40)[-1] >= 47
    wrong = lasting(policy, 0, lambda n: 1.0 if n == 1 else 1.6, 400)
    assert sum(kept > 0 for kept in wrong) < 50
    assert sum(kept > 0 for kept in lasting(policy, 0, lambda n: 1.0 if n == 1 else 1.6, 128)) == 2  # one in 64


def test_adaptive_asks_for_few_sizes() -> None:
    assert {kept + 1 for kept in lasting(Adaptive(), 9, lambda n: 1 + 0.02 * n, 40)} <= {1, *BLOCKS}


def test_adaptive_is_not_misled_by_spikes() -> None:
    """One step in seven takes four times as long, those of a plain step among them."""
    number = itertools.count()
    submitted = lasting(Adaptive(), 12, lambda n: (1 + 0.02 * n) * (4 if next(number) % 7 == 3 else 1), 80)
    assert statistics.median(submitted[40:]) in (11, 15)


def test_adaptive_keeps_a_doubtful_draft_short_where_copying_is_quick() -> None:
    """The time of a long draft is worth what it buys on this text; what is cut off is drafted again."""
    quick, slow = Adaptive(), Adaptive()

    def cost(n: int) -> float:
        return 1 + 0.02 * max(0, n - 4)

    lasting(quick, 63, cost, 30, confidence=40)
    for verified in (4, 8, 12, 16, *[1] * 30):
        drafted = verified - 1
        slow.update(Outcome((drafted,), (min(drafted, 4),), (0,), verified, 1e-6 * drafted, cost(verified)))
    doubtful = Draft.chain(range(15), confidence=1)
    assert quick.keep(doubtful) == 3 and slow.keep(doubtful) >= 11


def test_adaptive_reaches_further_as_drafts_come_true() -> None:
    grown = lasting(Adaptive(), 63, lambda n: 1 + 0.001 * n, 6, confidence=4)
    assert grown[:3] == [3, 11, 23]
    failing = lasting(Adaptive(), 1, lambda n: 1 + 0.001 * n, 12, confidence=4)
    assert max(failing) == 3


def test_adaptive_follows_a_long_match_at_once() -> None:
    assert lasting(Adaptive(), 63, lambda n: 1 + 0.001 * n, 3, confidence=32) == [3, 31, 63]
    assert max(lasting(Adaptive(), 1, lambda n: 1 + 0.001 * n, 12, confidence=32)) <= 7, "failed, and went on"


def test_costs_are_medians_and_one_row_stands_apart() -> None:
    costs = Costs()
    assert costs.relative(1) == 1 and costs.relative(9) == pytest.approx(1.5) and costs.one is None
    costs.update(4, 1.25)
    assert costs.one == pytest.approx(1.0) and costs.relative(4) == pytest.approx(1.25)
    for seconds in (1.0, 1.0, 9.0):
        costs.update(1, seconds)
    for n, seconds in ((4, 1.5), (4, 1.5), (8, 1.9)):
        costs.update(n, seconds)
    assert costs.one == 1 and costs.relative(2) == costs.relative(4) == 1.5  # not drawn towards one row
    assert costs.relative(6) == pytest.approx(1.7) and costs.relative(10) == pytest.approx(2.0)


def test_acceptance_is_learnt_by_agreement() -> None:
    record = Record()
    fresh = record.acceptances(1, 4)
    assert fresh == sorted(fresh) and record.acceptances(3, 1)[0] == fresh[2] == pytest.approx(1 - 0.8 / 3)
    for _ in range(20):
        record.update(1, 3, 3)
    assert record.acceptances(1, 1)[0] > 0.7 and record.acceptances(2, 1)[0] > 0.7  # its second token agreed on two
    for _ in range(20):
        record.update(0, 3, 1)
    assert record.acceptances(0, 2)[0] > 0.8 and record.acceptances(0, 2)[1] < 0.2


def test_adaptive_weighs_the_cost_of_drafting() -> None:
    for cost, expected in ((0.1, True), (3.0, False)):
        policy = Adaptive()
        policy.update(Outcome((0,), (0,), (0,), 1, 0.0, 1.0))
        asked = 0
        for _ in range(60):
            budget = policy.budget(8)
            asked += budget
            policy.update(Outcome((budget,), (min(budget, 3),), (0,), budget + 1, cost * budget, 1 + 0.05 * budget))
        assert (asked > 120) is expected


def test_a_tree_is_refused_not_cut() -> None:
    class Tree(Adversary):
        def draft(self, rows: object, limits: object) -> list[Draft]:
            return [Draft(torch.tensor([1, 2]), (-1, -1))]

    with pytest.raises(QkvError, match="chains"):
        continued(SpeculativeDecoder(target(), source=Tree(), length=3), prompt(), max_new_tokens=4)
