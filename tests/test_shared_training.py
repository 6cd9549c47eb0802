"""Training that trials share gives the bits that each of them gives alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from test_attempt import begin, never
from test_spec import sweep_file

from orchestrator.corpora import corpus_facts
from orchestrator.legs import LegQueue
from orchestrator.plan import Plan, load_plan
from orchestrator.query import Store
from orchestrator.retention import kept, removable
from orchestrator.spec import Keep
from orchestrator.standing import read_standing
from orchestrator.store.layout import StoreLayout
from orchestrator.store.sweeps import submit
from trainers.checkpoint import read_manifest

STEP = 256
SCHEDULE = {"shape": "wsd", "warmup_tokens": 2 * STEP, "decay_fraction": 0.25}
BUDGETS = [4 * STEP, 8 * STEP, 12 * STEP, 16 * STEP, 24 * STEP]


def planned(root: Path, budgets: list[int], *, share: bool = True, **changes: Any) -> Plan:
    """A WSD study, submitted to the store at `root`: one checkpoint in the middle of each trial and one at its end."""
    content = {
        "base": {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "schedule": SCHEDULE},
        "grids": [{"name": "budgets", "axes": {"token_budget": budgets}}],
        "checkpoints": {"at_fractions": [0.5, 1]},
    }
    text = sweep_file(**{**content, **changes})
    _, plan = load_plan(text, "wsd.yaml", corpus_facts(root), share=share)
    submit(StoreLayout(root), text, plan)
    return plan


def train_all(root: Path, plan: Plan) -> int:
    """Train what is left of a plan, one leg after the other; returns the tokens that were trained."""
    left = read_standing(StoreLayout(root), plan).left
    queue = LegQueue(left)
    while (leg := queue.take()) is not None:
        assert begin(root, leg).advance(60.0, never).state == "committed"
        queue.committed(leg)
    return sum(segment.tokens for segment in left)


def final_checkpoints(root: Path, plan: Plan) -> dict[str, str]:
    """Trial -> digest over the bits of its last weights and optimizer state."""
    layout = StoreLayout(root)
    return {
        trial.id: read_manifest(layout.checkpoint(trial.chain[-1], trial.recipe.token_budget)).checkpoint
        for trial in plan.trials
    }


@pytest.fixture
def other_root(tmp_path: Path, store_root: Path) -> Path:
    return Path(shutil.copytree(store_root, tmp_path / "other"))


def test_a_wsd_study_of_five_budgets_gives_the_same_bits_shared_and_each_trial_alone(
    store_root: Path, other_root: Path
) -> None:
    shared = planned(store_root, BUDGETS)
    alone = planned(other_root, BUDGETS, share=False)
    # the longest trial whole, of each other its decay: 24 + (1 + 2 + 3 + 4) of 64 steps
    assert train_all(store_root, shared) == 34 * STEP
    assert train_all(other_root, alone) == 64 * STEP
    assert final_checkpoints(store_root, shared) == final_checkpoints(other_root, alone)
    assert read_standing(StoreLayout(store_root), shared).left == ()


def test_shared_and_alone_live_in_one_store_and_are_asked_about_alike(store_root: Path) -> None:
    budgets = BUDGETS[:2]
    for share in (True, False):
        plan = planned(store_root, budgets, share=share)
        train_all(store_root, plan)
        with Store(store_root) as store:
            cells = store.sql("select state, checkpoints_done, checkpoints_asked from cells order by trial").rows()
            tokens = store.sql("select tokens from results order by trial, tokens").rows()
        assert cells == [{"state": "evaluating", "checkpoints_done": 2, "checkpoints_asked": 2}] * 2
        assert [row["tokens"] for row in tokens] == [2 * STEP, 4 * STEP, 4 * STEP, 8 * STEP]  # no forks among them


def test_a_longer_budget_that_is_added_later_starts_from_what_the_store_holds(
    store_root: Path, other_root: Path
) -> None:
    train_all(store_root, planned(store_root, BUDGETS[:3]))
    more = planned(store_root, BUDGETS)
    # the trunk is there up to step 6, where the third trial is in its middle: on from there to 18, and two decays
    assert train_all(store_root, more) == (18 - 6 + 4 + 6) * STEP
    alone = planned(other_root, BUDGETS, share=False)
    train_all(other_root, alone)
    assert final_checkpoints(store_root, more) == final_checkpoints(other_root, alone)


def test_what_retention_lets_go_is_trained_again_only_when_something_new_starts_from_it(
    store_root: Path, other_root: Path
) -> None:
    layout = StoreLayout(store_root)
    plan = planned(store_root, BUDGETS[:2])
    train_all(store_root, plan)
    go = removable(plan, Keep(), read_standing(layout, plan).committed, left=(), owing=())
    for id in go.weights:
        shutil.rmtree(layout.checkpoint(id, 0).parent)
    for id in go.state:
        (layout.checkpoint(id, plan.segment_by_id[id].to_tokens) / "state.parquet").unlink()
    assert read_standing(layout, plan).left == ()
    # at 3 steps the shorter decay begins: no checkpoint of the sweep, so all of it went; another decay needs it again
    axes = {"token_budget": BUDGETS[:1], "schedule.final_fraction": [0.1, 0.5]}
    finals = planned(store_root, [], grids=[{"name": "finals", "axes": axes}])
    assert train_all(store_root, finals) == (3 + 1) * STEP
    alone = planned(other_root, [], share=False, grids=[{"name": "finals", "axes": axes}])
    train_all(other_root, alone)
    assert final_checkpoints(store_root, finals) == final_checkpoints(other_root, alone)


def test_a_checkpoint_whose_state_was_dropped_gets_it_back_with_the_same_bits(store_root: Path) -> None:
    layout = StoreLayout(store_root)
    constant = {"schedule": {"shape": "constant", "warmup_tokens": 0}, "preset": "tiny", "scale": "tiny-32"}
    base = {**constant, "context": 32, "batch_size": 8}
    plan = planned(store_root, BUDGETS[:1], base=base)
    train_all(store_root, plan)
    end = layout.checkpoint(plan.trials[0].chain[-1], BUDGETS[0])
    before = read_manifest(end)
    (end / "state.parquet").unlink()
    longer = planned(store_root, [BUDGETS[1]], base=base, checkpoints={"at_tokens": BUDGETS[:1]})
    assert train_all(store_root, longer) == 6 * STEP  # from the middle of the first trial, whose state is there
    assert read_manifest(end).checkpoint == before.checkpoint
    assert (end / "state.parquet").exists()
    assert kept(longer, Keep()).state == {longer.trials[0].chain[-1]}
