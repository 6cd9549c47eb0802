from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from test_attempt import only_leg, planned, train
from test_evals import store_values

from orchestrator.evals import Ledger
from orchestrator.query import Store
from orchestrator.store.layout import StoreLayout
from orchestrator.trialpage import read_trial, show, sparkline
from trainers.errors import InputError


def test_one_cell_is_shown_from_its_recipe_to_its_events(store_root: Path) -> None:
    plan = planned(store_root)
    train(store_root, only_leg(store_root, plan))
    id = plan.trials[0].id
    for owed in Ledger(StoreLayout(store_root), plan.evaluations).owed(plan.trials[0].chain):
        store_values(store_root, owed)
    with Store(store_root) as store:
        trial = read_trial(store, id[:20])
    assert (trial.trial, trial.state) == (id, "complete")
    assert [segment["to_tokens"] for segment in trial.segments] == [0, 4096, 8192]
    assert [tokens for tokens, _ in trial.curve] == list(range(256, 8193, 256))
    assert [event["kind"] for event in trial.events] == ["started", "committed", "committed", "committed"]
    printed = StringIO()
    show(trial, Console(file=printed, width=160))
    for text in (id, "complete", "batch_size 8", "effective_rank", "8,192", "started"):
        assert text in printed.getvalue()


def test_an_unknown_trial_and_an_unclear_one_are_refused(store_root: Path) -> None:
    planned(store_root, grids=[{"name": "two", "axes": {"seed": [0, 1]}}])
    with Store(store_root) as store:
        with pytest.raises(InputError, match="2 trials begin with 'tiny'"):
            read_trial(store, "tiny")
        with pytest.raises(InputError, match="no trial 'tony'"):
            read_trial(store, "tony")


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 2.0], "▁█"), ([3.0], "▁"), ([2.0, 2.0, 2.0], "▁▁▁"), ([0.0, 7.0, 1.0, 6.0], "▁█▂▇")],
)
def test_a_sparkline_has_a_bar_a_value_from_lowest_to_highest(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_a_long_curve_is_averaged_into_the_width() -> None:
    assert sparkline([0.0, 2.0, 4.0, 6.0], width=2) == "▁█"
