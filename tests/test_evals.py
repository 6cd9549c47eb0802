from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path

from test_attempt import only_leg, planned, train

from evaluators.evaluate import evaluate
from orchestrator.evals import Ledger, OwedEvaluation, metric_rows
from orchestrator.query import Store
from orchestrator.store import registry
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout


def store_values(root: Path, owed: OwedEvaluation) -> None:
    """What the driver does with an actor's answer, with the evaluator called here."""
    values = evaluate(Path(owed.folder), owed.evaluation.settings, corpora=root / "corpora")
    answer = {"values": [asdict(value) for value in values], "failure": None, "wall_s": 0.0}
    publish(StoreLayout(root), "metrics", metric_rows(owed, answer))


def test_what_is_owed_is_what_was_asked_of_a_committed_checkpoint_and_is_not_stored(store_root: Path) -> None:
    plan = planned(store_root)
    ledger = Ledger(StoreLayout(store_root), plan.evaluations)
    assert ledger.owed(()) == []
    train(store_root, only_leg(store_root, plan))
    chain = plan.trials[0].chain
    assert [item.evaluation.segment for item in ledger.owed(chain[:1])] == [chain[0]]
    first, second, third = ledger.owed(chain)
    store_values(store_root, second)
    assert ledger.owed(chain) == [first, third]
    assert ledger.done == 1
    assert Ledger(StoreLayout(store_root), plan.evaluations).owed(chain) == [first, third]
    with Store(store_root) as store:
        assert store.sql("select count(*) as n from owed where ready").rows() == [{"n": 2}]


def test_news_of_the_ledger_is_what_no_look_has_found_before(store_root: Path) -> None:
    plan = planned(store_root)
    train(store_root, only_leg(store_root, plan))
    chain = plan.trials[0].chain
    ledger = Ledger(StoreLayout(store_root), plan.evaluations)
    (first,) = ledger.owed(chain[:1])
    assert ledger.news(chain[:1]) == []
    second, third = ledger.news(chain)
    assert ledger.news(chain) == []
    assert ledger.owing == set(chain)
    store_values(store_root, second)
    ledger.settle(second)
    assert (ledger.done, ledger.owing) == (1, {first.evaluation.segment, third.evaluation.segment})
    assert ledger.owed(chain) == [first, third]


def test_of_equal_checkpoints_of_two_segments_one_is_evaluated_and_both_are_done(store_root: Path) -> None:
    """Trials that train alone leave them."""
    plan = planned(store_root)
    train(store_root, only_leg(store_root, plan))
    chain = plan.trials[0].chain
    shutil.copytree(store_root / "checkpoints" / chain[0], store_root / "checkpoints" / "copy")
    asked = [plan.evaluations[0], replace(plan.evaluations[0], segment="copy")]
    ledger = Ledger(StoreLayout(store_root), asked)
    (only,) = ledger.owed([*chain, "copy"])
    assert (ledger.asked, ledger.done, ledger.owing) == (2, 0, {chain[0], "copy"})
    store_values(store_root, only)
    ledger.settle(only)
    assert (ledger.done, ledger.owing, ledger.owed([*chain, "copy"])) == (2, set(), [])
    assert Ledger(StoreLayout(store_root), asked).owed([*chain, "copy"]) == []


def test_a_checkpoint_that_was_not_kept_still_counts_as_evaluated_and_owes_nothing_that_can_be_done(
    store_root: Path,
) -> None:
    plan = planned(store_root)
    layout = StoreLayout(store_root)
    train(store_root, only_leg(store_root, plan))
    chain = plan.trials[0].chain
    first, *_ = Ledger(layout, plan.evaluations).owed(chain)
    store_values(store_root, first)
    for id in chain[:2]:
        registry.release(layout, plan.segment_by_id[id], plan.sweep)
    ledger = Ledger(layout, plan.evaluations)
    assert [item.evaluation.segment for item in ledger.owed(chain)] == [chain[2]]
    assert (ledger.done, ledger.out_of_reach) == (1, 1)


def test_an_evaluation_that_cannot_be_done_is_a_failure_with_its_reason_until_it_is_asked_for_again(
    store_root: Path,
) -> None:
    plan = planned(store_root)
    layout = StoreLayout(store_root)
    train(store_root, only_leg(store_root, plan))
    chain = plan.trials[0].chain
    ledger = Ledger(layout, plan.evaluations)
    first, *others = ledger.owed(chain)
    ledger.give_up(first, "non_finite: 1 tensors hold nan or inf", tries=1)
    assert ledger.owed(chain) == others
    assert Ledger(layout, plan.evaluations).owed(chain) == others
    assert Ledger(layout, plan.evaluations, retry_failed=True).owed(chain) == [first, *others]
    with Store(store_root) as store:
        assert store.sql("select reason, tries from failures").rows() == [
            {"reason": "non_finite: 1 tensors hold nan or inf", "tries": 1}
        ]
        assert store.sql("select evaluations_failed, evaluations_done from cells").rows() == [
            {"evaluations_failed": 1, "evaluations_done": 0}
        ]
