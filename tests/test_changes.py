from __future__ import annotations

import json
from typing import Any

from test_plan import CORPUS
from test_spec import sweep_file

from orchestrator.changes import Changes, changes_since
from orchestrator.legs import work_left
from orchestrator.plan import Plan, load_plan
from orchestrator.store.sweeps import plan_json

BASE = {"preset": "tiny", "context": 32, "token_budget": 8192, "batch_size": 8}


def plan_of(**changes: Any) -> Plan:
    return load_plan(sweep_file(**{"base": BASE, **changes}), "small.yaml", CORPUS)[1]


def edited(before: Plan, after: Plan) -> Changes:
    """What a sweep whose first revision is finished has to do again after an edit."""
    done = set(before.segment_by_id) & set(after.segment_by_id)
    return changes_since(json.loads(plan_json(before)), after, work_left(after, done, (), ()))


def test_the_same_plan_has_no_changes() -> None:
    assert edited(plan_of(), plan_of()).nothing


def test_an_edited_field_of_the_base_is_named_with_every_cell_that_it_trains_again() -> None:
    before = plan_of()
    changes = edited(before, plan_of(base={**BASE, "clip": 0.5}))
    (change,) = changes.fields
    assert (change.field, change.before, change.after) == ("optimizer.clip", 1.0, 0.5)
    assert len(change.cells) == len(change.trained_again) == 2
    assert (changes.added, changes.removed, changes.revision) == ((), (), before.revision)


def test_an_edit_that_changes_no_training_names_the_field_and_trains_nothing() -> None:
    (change,) = edited(plan_of(), plan_of(base={**BASE, "repeat": True})).fields
    assert change.field == "data.repeat"
    assert len(change.cells) == 2
    assert change.trained_again == ()


def test_an_edited_value_of_an_axis_is_a_new_cell_and_the_others_stay() -> None:
    before = plan_of()
    after = plan_of(grids=[{"name": "decay", "axes": {"weight_decay": [0.01, 0.2]}}])
    changes = edited(before, after)
    assert changes.fields == ()
    assert changes.added == (after.trials[1].id,)
    assert changes.removed == (before.trials[1].id,)


def test_a_renamed_grid_changes_nothing_that_is_trained() -> None:
    assert edited(plan_of(), plan_of(grids=[{"name": "other", "axes": {"weight_decay": [0.01, 0.1]}}])).nothing


def test_a_longer_budget_names_the_budget_and_trains_those_cells() -> None:
    changes = edited(plan_of(), plan_of(base={**BASE, "token_budget": 16_384}))
    assert {change.field for change in changes.fields} == {"token_budget", "schedule.warmup_tokens"}
    assert all(len(change.trained_again) == 2 for change in changes.fields)
