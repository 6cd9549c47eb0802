from __future__ import annotations

import json
import os
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from test_attempt import only_leg, planned, train
from test_live import MACHINE

from orchestrator.activity import Activity
from orchestrator.evals import Ledger
from orchestrator.legs import Leg, LegQueue
from orchestrator.plan import Plan
from orchestrator.query import Store
from orchestrator.standing import read_standing
from orchestrator.status import as_json, duration, page, read_status, watch
from orchestrator.store import registry
from orchestrator.store.layout import StoreLayout
from orchestrator.store.live import LiveSession
from trainers.errors import InputError


def printed(root: Path, width: int) -> str:
    with Store(root) as store:
        out = StringIO()
        Console(file=out, width=width).print(page(read_status(store, None)))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_a_sweep_is_shown_with_the_state_of_each_cell_and_how_to_continue(store_root: Path, width: int) -> None:
    plan = planned(store_root, grids=[{"name": "two", "axes": {"seed": [0, 1]}}])
    train(store_root, only_leg(store_root, plan))
    text = printed(store_root, width)
    assert "small" in text
    assert "2 cells: 1 evaluating, 1 waiting; 6 evaluations owed" in text.replace("\n", " ")
    assert "8,192" in text
    assert "0/3" in text
    assert "continue: geosweep resume small" in text


def test_an_empty_store_says_how_to_start(store_root: Path) -> None:
    assert "start one: geosweep run SWEEP" in printed(store_root, 120)


def test_watching_off_a_terminal_prints_the_page_once(store_root: Path) -> None:
    planned(store_root)
    out = StringIO()
    with Store(store_root) as store:
        watch(store, "small", Console(file=out, width=120))
        with pytest.raises(InputError, match="no sweep 'smal'; nearest is 'small'"):
            read_status(store, "smal")
    assert out.getvalue().count("1 waiting") == 1


def at_work(root: Path, plan: Plan) -> LiveSession:
    """A session that trains the first trial."""
    activity = Activity("small", plan.trials, lambda: MACHINE)
    progress = {"attempt": 2, "tokens": 2048, "loss": 4.25, "tokens_per_s": 1024.0}
    leg = only_leg(root, plan)
    activity.leg(leg, {"state": "training", "segment": leg.segments[0].id, **progress})
    activity.evaluations(plan.evaluations[:1])
    return activity.look(5)


def test_what_a_session_does_is_shown_with_speed_loss_time_left_and_the_machine(store_root: Path) -> None:
    plan = planned(store_root, grids=[{"name": "two", "axes": {"seed": [0, 1]}}])
    StoreLayout(store_root).live("small").write_text(at_work(store_root, plan).model_dump_json())
    text = printed(store_root, 160)
    assert "1 training, 1 waiting" in text
    assert "1 in training, 1 in evaluation (geometry)" in text
    assert "CPUs 3 of 4 (70 % busy), GPUs 0.5 of 1, memory 3.0 of 8.0 GB" in text
    (line,) = [line for line in text.splitlines() if "2,048" in line]
    assert line.split()[1:] == ["2,048", "8,192", "1,024", "4.250", "6", "s", "attempt", "2"]
    assert "continue:" not in text  # it is at work


def test_a_session_that_was_killed_is_told_by_the_age_of_its_file(store_root: Path) -> None:
    plan = planned(store_root, grids=[{"name": "two", "axes": {"seed": [0, 1]}}])
    path = StoreLayout(store_root).live("small")
    path.write_text(at_work(store_root, plan).model_dump_json())
    two_hours_ago = time.time() - 7200
    os.utime(path, (two_hours_ago, two_hours_ago))
    text = printed(store_root, 160)
    assert "has said nothing for 2 h 0 min: it was killed" in text
    assert "2 waiting" in text
    assert "continue: geosweep resume small" in text
    with Store(store_root) as store:
        (sweep,) = as_json(read_status(store, "small"))
    assert sweep["session"]["silent"] is True
    assert sweep["session"]["training"][0]["tokens"] == 2048
    json.dumps(sweep)


def test_each_failure_has_its_reason_how_often_and_the_command_that_tries_it_again(store_root: Path) -> None:
    plan = planned(store_root, grids=[{"name": "three", "axes": {"seed": [0, 1, 2]}}])
    layout = StoreLayout(store_root)
    first, second, third = (trial.chain for trial in plan.trials)
    segments = plan.segment_by_id
    registry.commit_failure(layout, segments[first[0]], "corpus 'builtin' is damaged", attempt=1)
    registry.commit_divergence(layout, segments[second[0]], [], 512, "the loss is nan", 1)
    for _ in range(2):
        registry.record_event(layout, "attempt_died", "small", third[0], None, "worker killed")
    train(store_root, next(iter(legs_of(store_root, plan, third[-1]))))
    ledger = Ledger(layout, plan.evaluations)
    for item in ledger.owed(third):
        ledger.give_up(item, "non_finite: 1 tensor holds nan", tries=1)
    with Store(store_root) as store:
        (sweep,) = read_status(store, "small", " --store S")
        failures = {failure.kind: failure for failure in sweep.failures}
    assert (failures["training"].count, failures["training"].retry) == (1, "geosweep resume small --store S")
    assert (failures["evaluation"].count, failures["evaluation"].reason) == (3, "non_finite: 1 tensor holds nan")
    assert failures["evaluation"].retry == "geosweep eval small --evaluators geometry --retry-failed --store S"
    assert (failures["attempt"].count, failures["attempt"].retry) == (2, "")
    assert (failures["diverged"].reason, failures["diverged"].retry) == ("the loss is nan", "")
    text = printed(store_root, 160)
    assert "1 segments failed: corpus 'builtin' is damaged\n  again: geosweep resume small" in text
    assert "3 geometry evaluations failed" in text


def legs_of(root: Path, plan: Plan, last: str) -> list[Leg]:
    """The leg that ends with a segment."""
    queue = LegQueue(read_standing(StoreLayout(root), plan).left)
    legs = []
    while leg := queue.take():
        legs.append(leg)
    return [leg for leg in legs if leg.id == last]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5399, "90 min"), (5400, "1 h 30 min"), (200_000, "2 d 7 h")],
)
def test_durations_are_said_in_the_units_that_people_use(seconds: float, words: str) -> None:
    assert duration(seconds) == words
