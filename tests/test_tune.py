"""What Tune is given and what follows when it says that an attempt died; no Ray is started."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.tune.search import Searcher
from test_attempt import planned

from orchestrator.legs import Leg, LegQueue
from orchestrator.spec import Execution, Retries
from orchestrator.standing import read_standing
from orchestrator.store.layout import StoreLayout
from orchestrator.tune import _LegSearch


class Session:
    """A search over four legs that do not wait for each other, and what it said."""

    def __init__(self, root: Path, execution: Execution) -> None:
        plan = planned(
            root, grids=[{"name": "seeds", "axes": {"seed": [0, 1, 2, 3]}}], checkpoints={"at_fractions": [1]}
        )
        layout = StoreLayout(root)
        self.queue = LegQueue(read_standing(layout, plan).left)
        self.said: list[tuple[str, Mapping[str, Any]]] = []
        self.search = _LegSearch(self.queue, layout, "small", execution, self._listen)

    def _listen(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        self.said.append((leg.id, progress))

    def states(self) -> list[str]:
        return [progress["state"] for _, progress in self.said]


def killed() -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    return error


def bug() -> BaseException:
    return RayTaskError("step", "Traceback ...\nKeyError: 'x'", KeyError("x")).as_instanceof_cause()


@pytest.fixture
def started(store_root: Path) -> Session:
    return Session(store_root, Execution(retries=Retries(worker_killed=1, unknown=1, equal_faults=3)))


def test_no_more_trials_are_handed_out_than_may_train_at_a_time(store_root: Path) -> None:
    session = Session(store_root, Execution(max_trials=2))
    assert session.search.suggest("a")
    assert session.search.suggest("b")
    assert session.search.suggest("c") is None
    session.search.on_trial_complete("a", {"state": "committed"})
    assert session.search.suggest("c")


def test_a_leg_whose_process_was_killed_comes_again_until_its_budget_is_used_up(started: Session) -> None:
    first = started.search.suggest("a")
    for trial in "bcd":
        started.search.suggest(trial)
        started.search.on_trial_complete(trial, {"state": "committed"})
    started.search.on_trial_complete("a", error=True)
    started.search.died("a", killed())
    assert started.search.suggest("e") == first
    started.search.died("e", killed())
    assert started.search.suggest("f") == Searcher.FINISHED
    assert started.states()[-4:] == ["died", "retrying", "died", "failed"]
    assert started.said[-1][1]["detail"].startswith("worker_killed after 2 attempts")


def test_an_attempt_that_was_outdated_comes_again_and_an_input_error_does_not(started: Session) -> None:
    first = started.search.suggest("a")
    started.search.on_trial_complete("a", {"state": "outdated"})
    for trial in "bcde":
        started.search.suggest(trial)
    assert started.search.suggest("f") is None
    assert Leg.model_validate_json(first["leg"]) in started.search.legs.values()
    assert len(started.search.legs) == 4
    for trial in list(started.search.legs):
        started.search.on_trial_complete(trial, {"state": "failed", "kind": "input_error", "detail": "no"})
    assert started.search.suggest("z") == Searcher.FINISHED
    assert started.states().count("failed") == 4


def test_the_same_fault_in_three_legs_ends_the_sweep_with_its_traceback(started: Session) -> None:
    for trial in "abc":
        started.search.suggest(trial)
    for trial in "abc":
        started.search.died(trial, bug())
    assert started.states() == ["died", "retrying", "died", "retrying", "died", "failed", "hopeless"]
    assert "KeyError: 'x'" in started.said[-1][1]["detail"]


def test_a_trial_asks_for_what_the_sweep_says_of_its_scale(store_root: Path) -> None:
    resources = {"default": {"cpus": 1}, "tiny-32": {"cpus": 2, "gpus": 0.5, "accelerator_type": "H100"}}
    session = Session(store_root, Execution.model_validate({"resources": resources}))
    config = session.search.suggest("a")
    assert config["bundle"] == '{"CPU": 2.0, "GPU": 0.5, "accelerator_type:H100": 0.001}'
    assert all(isinstance(value, str | int | float | None) for value in config.values()), "Tune evaluates mappings"
