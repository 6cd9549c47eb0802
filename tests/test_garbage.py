from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from store_rows import metric_row
from test_attempt import BASE, begin, only_leg, planned, train
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.evals import Ledger
from orchestrator.garbage import find_garbage, remove
from orchestrator.plan import Plan
from orchestrator.schema import METRICS
from orchestrator.store.committer import Committer
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout
from orchestrator.store.verify import verify
from trainers.checkpoint import read_manifest
from trainers.errors import InputError

LITTLE: dict[str, Any] = {"keep": {"weights": "last", "state": "none"}, "evaluations": []}
ONE_EVALUATION = {**LITTLE, "evaluations": [{"evaluator": "geometry", "at": "every"}]}


def garbage(root: Path) -> list[str]:
    return [str(item.path.relative_to(root)) for item in find_garbage(StoreLayout(root))]


def ends(plan: Plan) -> list[str]:
    return [f"checkpoints/{segment.id}/{segment.to_tokens}" for segment in plan.segments]


def evaluate_everything(root: Path, plan: Plan) -> None:
    layout = StoreLayout(root)
    ledger = Ledger(layout, plan.evaluations)
    for owed in ledger.owed([segment.id for segment in plan.segments]):
        asked = owed.evaluation
        given = {"evaluator": asked.evaluator, "settings_digest": asked.settings_digest}
        publish(layout, "metrics", [metric_row(owed.checkpoint, "rank", 1.0, **given, evaluator_version=asked.version)])


def test_what_keep_does_not_name_may_go_when_training_is_done(store_root: Path) -> None:
    plan = planned(store_root, **LITTLE)
    train(store_root, only_leg(store_root, plan))
    first, middle, last = ends(plan)
    assert garbage(store_root) == sorted([first, middle, f"{last}/state.parquet"])


def test_nothing_goes_that_a_segment_which_is_left_starts_from(store_root: Path) -> None:
    plan = planned(store_root, **LITTLE)
    steps = iter(range(20))  # of 32
    assert begin(store_root, only_leg(store_root, plan)).advance(60.0, lambda: next(steps, None) is None).tokens > 4096
    first, _, _ = ends(plan)
    assert garbage(store_root) == [first]


def test_nothing_goes_that_owes_an_evaluation_whether_its_rows_are_folded_or_not(store_root: Path) -> None:
    plan = planned(store_root, **ONE_EVALUATION)
    train(store_root, only_leg(store_root, plan))
    first, middle, last = ends(plan)
    states = sorted(f"{path}/state.parquet" for path in (first, middle, last))
    assert garbage(store_root) == states
    evaluate_everything(store_root, plan)
    done = sorted([first, middle, f"{last}/state.parquet"])
    assert garbage(store_root) == done
    Committer(StoreLayout(store_root)).fold(METRICS.name)
    assert garbage(store_root) == done


def test_nothing_goes_that_an_older_revision_or_another_sweep_asked_for(store_root: Path) -> None:
    plan = planned(store_root, **{**LITTLE, "keep": {"weights": "all", "state": "all"}, "name": "other"})
    train(store_root, only_leg(store_root, plan))
    planned(store_root, **LITTLE)
    assert garbage(store_root) == []


def test_dry_run_says_what_would_go_and_removes_nothing_then_it_goes_and_verify_knows(store_root: Path) -> None:
    plan = planned(store_root, **LITTLE)
    train(store_root, only_leg(store_root, plan))
    first, middle, last = ends(plan)
    command = ["store", "gc", "--store", str(store_root)]
    answer = CliRunner().invoke(app, [*command, "--dry-run"])
    assert f"{middle}: " in answer.output
    assert "3 would go" in answer.output
    assert all((store_root / path).exists() for path in (first, middle, f"{last}/state.parquet"))
    answer = CliRunner().invoke(app, command)
    assert "3 removed" in answer.output
    assert not any((store_root / path).exists() for path in (first, middle, f"{last}/state.parquet"))
    assert read_manifest(store_root / last).tokens == BASE["token_budget"]
    assert verify(StoreLayout(store_root)).damaged == []
    assert garbage(store_root) == []


def test_a_kill_between_event_and_removal_is_made_up_by_the_next_call(store_root: Path) -> None:
    plan = planned(store_root, **LITTLE)
    train(store_root, only_leg(store_root, plan))
    layout = StoreLayout(store_root)
    found = find_garbage(layout)
    remove(layout, found[:1])
    assert garbage(store_root) == [str(item.path.relative_to(store_root)) for item in found[1:]]


def test_a_sweep_whose_file_is_lost_stops_the_collection(store_root: Path) -> None:
    plan = planned(store_root, **LITTLE)
    StoreLayout(store_root).sweep("small", plan.revision).unlink()
    with pytest.raises(InputError, match=plan.revision):
        find_garbage(StoreLayout(store_root))
