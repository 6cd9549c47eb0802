"""The sweeps that ship: their counts are pinned, and the page about them is current."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from orchestrator.lint import lint
from orchestrator.plan import Plan, load_plan
from orchestrator.reference import documented, reference_page
from orchestrator.spec import SHIPPED, Base, SweepSpec

GOLDEN = Path(__file__).parent / "assets" / "sweeps.json"
NAMES = ("demo", "saturation", "smoke", "study-factorial", "study-legend", "study-text", "study-wsd")


def shipped(name: str) -> tuple[SweepSpec, Plan]:
    path = SHIPPED / f"{name}.yaml"
    return load_plan(path.read_text(), path.name, {})


def counts(name: str) -> dict[str, Any]:
    _, plan = shipped(name)
    return {
        "cells": plan.cells,
        "unique_trials": len(plan.trials),
        "segments": len(plan.segments),
        "forks": len(plan.forks),
        "tokens_asked": plan.tokens_asked,
        "tokens_trained": plan.tokens_trained,
        "evaluations": len(plan.evaluations),
    }


def test_every_shipped_sweep_is_pinned() -> None:
    assert sorted(path.stem for path in SHIPPED.glob("*.yaml")) == list(NAMES) == sorted(json.loads(GOLDEN.read_text()))


@pytest.mark.parametrize("name", NAMES)
def test_the_counts_of_a_shipped_sweep_are_the_pinned_ones(name: str) -> None:
    found = counts(name)
    assert found == json.loads(GOLDEN.read_text())[name], (
        f"the plan of '{name}' has moved; if that is meant, write the new counts into {GOLDEN.name} and a line into "
        f"CHANGELOG.md: {json.dumps(found)}"
    )


@pytest.mark.parametrize("name", ["study-text", "study-legend"])
def test_the_study_is_eighteen_configurations_at_each_of_six_scales(name: str) -> None:
    spec, plan = shipped(name)
    cells = [trial.recipe.model.scale for trial in plan.trials for _ in trial.grids]
    assert plan.cells == len(cells) == 108
    assert Counter(cells) == dict.fromkeys(["4M", "6M", "8M", "14M", "20M", "60M"], 18)
    assert len(plan.trials) == 90  # the default cell of each scale stands in four grids
    assert {"scale", "batch_size", "weight_decay", "token_budget", "learning_rate_multiplier"} <= set(spec.sources)


def test_one_trunk_for_five_budgets_costs_140_parts_of_248() -> None:
    _, plan = shipped("study-wsd")
    recipe = [t for t in plan.trials if t.recipe.model.scale == "14M" and t.recipe.batch_size == 32]
    trained = sum(s.tokens for s in plan.segments if set(s.trials) <= {t.id for t in recipe})
    asked = sum(t.recipe.token_budget for t in recipe)
    assert len(recipe) == 5
    # 8 + 16 + 32 + 64 + 128 asked; the longest whole, and 10 % of each other. A decay begins at a step boundary.
    assert trained / asked == pytest.approx(140 / 248, abs=1e-5)
    assert plan.tokens_trained / plan.tokens_asked <= 0.57


def test_cosine_sweeps_share_their_warm_up_and_claim_no_more() -> None:
    _, plan = shipped("study-text")
    saved = plan.tokens_asked - plan.tokens_trained
    assert 0 < saved / plan.tokens_asked < 0.001
    assert saved < sum(trial.recipe.schedule.warmup_tokens for trial in plan.trials)


def test_the_lint_says_that_the_study_confounds_budget_with_batch() -> None:
    findings = lint(*shipped("study-text"))
    (confounded,) = [finding for finding in findings if finding.code == "confounded"]
    assert confounded.text.startswith("grid 'budget-with-batch': batch_size and token_budget move together")
    assert "another grid varies batch_size alone" in confounded.text
    assert [f.code for f in lint(*shipped("study-wsd"))].count("confounded") == 0


def test_the_page_about_sweep_files_is_what_the_models_say() -> None:
    assert (SHIPPED / "README.md").read_text() == reference_page(), (
        "write it again: python -m orchestrator.reference > sweeps/README.md"
    )


def test_a_docstring_gives_every_field_its_meaning() -> None:
    summary, meanings = documented(Base)
    assert summary == "One recipe; what is not set here, and is no axis, the preset fills."
    assert set(meanings) == set(Base.model_fields)
    assert meanings["beta1"] == meanings["eps"] == "AdamW"
