"""The statistics against other ways to the same numbers, and against studies whose answer is known."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from study_cells import AXES, linked_cells, mirrored_cells

from orchestrator.statistics import (
    FOLDS,
    PARTITIONS,
    Association,
    alignment,
    analyse,
    associations,
    design_warnings,
    recipe_keys,
)


def associate(cells: pd.DataFrame, *, mixed: bool = False) -> Association:
    (found,) = associations(
        cells,
        axes=AXES,
        predictors=["effective_rank"],
        outcomes=["loss_docs"],
        mixed=["loss_docs"] if mixed else [],
    )
    return found


# --- studies with a known answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_only_mirrors_the_recipe_correlates_strongly_and_adds_nothing(seed: int) -> None:
    found = associate(mirrored_cells(seed))
    assert (found.n, found.recipes) == (108, 18)
    assert found.raw.value is not None
    assert found.raw.value < -0.5
    assert found.raw.high is not None
    assert found.raw.high < -0.4
    assert found.partial.value == pytest.approx(0, abs=0.15)
    assert found.partial.p is not None
    assert found.partial.p > 0.05
    assert found.increment.value == pytest.approx(0, abs=0.03)
    assert found.beyond_recipe.value == pytest.approx(0, abs=0.015)


@pytest.mark.parametrize("seed", range(4))
def test_a_rank_with_a_link_of_its_own_is_found_by_all_three_forms(seed: int) -> None:
    found = associate(linked_cells(seed), mixed=True)
    for estimate in (found.raw, found.partial, found.mixed):
        assert estimate.high is not None
        assert estimate.high < -0.25
    for estimate in (found.increment, found.beyond_recipe):
        assert estimate.low is not None
        assert estimate.low > 0.02


# --- the same numbers by other ways ---------------------------------------------------------------------------------


def test_raw_correlation_is_that_of_scipy() -> None:
    cells = mirrored_cells()
    expected = stats.spearmanr(cells["effective_rank"], cells["loss_docs"])
    found = associate(cells)
    assert found.raw.value == pytest.approx(expected.statistic, abs=1e-12)
    assert found.raw.p == pytest.approx(expected.pvalue, rel=1e-9)


def test_partial_correlation_is_the_one_from_the_inverse_covariance_of_ranks() -> None:
    cells = linked_cells()
    held = ["params_no_input_embedding", "token_budget", "batch_size", "weight_decay"]
    ranks = cells[["effective_rank", "loss_docs", *held]].rank()
    precision = np.linalg.inv(ranks.cov().to_numpy())
    expected = -precision[0, 1] / np.sqrt(precision[0, 0] * precision[1, 1])
    found = associate(cells)
    assert found.partial.value == pytest.approx(expected, abs=1e-10)
    freedom = 108 - 2 - len(held)
    t = expected * np.sqrt(freedom / (1 - expected**2))
    assert found.partial.p == pytest.approx(2 * stats.t.cdf(-abs(t), freedom), rel=1e-8)


@pytest.mark.parametrize("form", ["increment", "beyond_recipe"])
def test_increment_is_that_of_two_scikit_learn_pipelines(form: str) -> None:
    cells = linked_cells()
    logs = np.log(cells[["params_no_input_embedding", "flops", "token_budget"]].to_numpy())
    if form == "beyond_recipe":
        logs = np.column_stack([logs, np.log(cells[["batch_size", "weight_decay"]].to_numpy())])
    target, groups = cells["loss_docs"].to_numpy(), recipe_keys(cells, AXES)
    full = np.column_stack([logs, cells["effective_rank"]])
    errors = dict.fromkeys(["base", "full", "mean"], 0.0)
    for partition in range(PARTITIONS):
        for train, test in GroupKFold(FOLDS, shuffle=True, random_state=partition).split(logs, groups=groups):
            for name, features in (("base", logs), ("full", full)):
                model = make_pipeline(StandardScaler(), LinearRegression()).fit(features[train], target[train])
                errors[name] += ((target[test] - model.predict(features[test])) ** 2).sum()
            errors["mean"] += ((target[test] - target[train].mean()) ** 2).sum()
    found = associate(cells)
    assert getattr(found, form).value == pytest.approx((errors["base"] - errors["full"]) / errors["mean"], abs=1e-9)
    if form == "increment":
        assert found.baseline_r2 == pytest.approx(1 - errors["base"] / errors["mean"], abs=1e-9)


def test_mixed_effect_maximises_the_restricted_likelihood_written_out_by_hand() -> None:
    cells = linked_cells()
    x, y = (stats.zscore(cells[name].to_numpy()) for name in ("effective_rank", "loss_docs"))
    fixed = stats.zscore(np.log(cells[["token_budget", "batch_size", "weight_decay"]].to_numpy()))
    design = np.column_stack([np.ones(108), fixed, x])
    same_size = (cells["scale"].to_numpy()[:, None] == cells["scale"].to_numpy()).astype(float)

    def fit(log_ratio: float) -> tuple[float, np.ndarray]:
        covariance = np.eye(108) + np.exp(log_ratio) * same_size
        inverse = np.linalg.inv(covariance)
        information = design.T @ inverse @ design
        beta = np.linalg.solve(information, design.T @ inverse @ y)
        left = y - design @ beta
        sigma2 = left @ inverse @ left / (108 - design.shape[1])
        logdets = np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(information)[1]
        return (108 - design.shape[1]) * np.log(sigma2) + logdets, beta

    best = optimize.minimize_scalar(lambda log_ratio: fit(log_ratio)[0], bounds=(-8, 8), method="bounded")
    assert associate(cells, mixed=True).mixed.value == pytest.approx(fit(best.x)[1][-1], abs=2e-3)


def test_intervals_hold_the_true_correlation_about_as_often_as_they_say() -> None:
    # Recipes are independent, cells of one are not: an interval of independent cells would hold it far less often.
    held, studies = 0, 20
    for seed in range(studies):
        random = np.random.default_rng(seed)
        cells = mirrored_cells()
        shared = random.normal(size=(18, 2)) @ np.linalg.cholesky([[1, 0.5], [0.5, 1]]).T
        recipe = pd.factorize(recipe_keys(cells, AXES))[0]
        cells[["effective_rank", "loss_docs"]] = shared[recipe] + 0.3 * random.normal(size=(108, 2))
        raw = associate(cells).raw
        truth = 6 / np.pi * np.arcsin(0.5 / 1.09 / 2)  # Spearman's value of a normal pair with this correlation
        assert raw.low is not None
        assert raw.high is not None
        held += raw.low <= truth <= raw.high
    assert held >= 0.8 * studies


def test_alignment_is_the_rank_correlation_over_cells_that_have_both() -> None:
    cells = mirrored_cells()
    cells.loc[:9, "isotropy"] = np.nan
    matrix = alignment(cells, ["effective_rank", "isotropy"])
    assert matrix.loc["effective_rank", "isotropy"] == pytest.approx(-1)  # isotropy falls with the rank by construction


# --- what the design cannot support ---------------------------------------------------------------------------------


def test_diverged_missing_and_repeated_cells_are_counted() -> None:
    cells = mirrored_cells()
    cells.loc[0, "state"] = "diverged"
    cells.loc[0, ["checkpoint", "effective_rank", "isotropy", "loss_docs", "loss_python"]] = None
    cells.loc[1, "effective_rank"] = np.nan
    cells.loc[2, "checkpoint"] = cells.loc[3, "checkpoint"]
    cells = pd.concat([cells, cells.loc[[5]]], ignore_index=True)
    found = analyse(cells, axes=AXES, predictors=["effective_rank"], outcomes=["loss_docs"])
    assert found.counts.asked == 108
    assert found.counts.states == {"complete": 106, "diverged": 1}
    assert found.counts.used == 106
    assert found.counts.unfinished == 1
    assert found.counts.repeated == 2
    assert found.counts.missing == {"effective_rank": 1}
    assert found.associations[0].n == 105
    assert any("diverged" in warning for warning in found.warnings)
    assert any("repeat" in warning for warning in found.warnings)


def test_axes_that_move_together_are_named() -> None:
    cells = mirrored_cells()
    assert design_warnings(cells, AXES) == ()
    cells["batch_size"] = cells["token_budget"] // 10**8
    assert any("batch_size and token_budget determine one another" in found for found in design_warnings(cells, AXES))


def test_few_recipes_give_no_increment_and_say_so() -> None:
    cells = mirrored_cells().query("batch_size == 32 and token_budget == 8_000_000_000")
    found = associate(cells, mixed=True)
    assert found.recipes == 3
    assert found.raw.value is not None
    assert found.increment.value is None
    assert any("3 unique recipes make no 5 folds" in note for note in found.notes)
    assert any("3 unique recipes" in warning for warning in design_warnings(cells, AXES))


@pytest.mark.parametrize("cells", [0, 1, 3])
def test_too_few_cells_give_no_number_and_say_so(cells: int) -> None:
    found = associate(mirrored_cells().head(cells))
    assert found.raw.value is None
    assert found.notes == (f"{cells} cells have both values, 8 are needed",)


def test_a_metric_without_variation_gives_no_number_and_says_so() -> None:
    cells = mirrored_cells().assign(effective_rank=7.5)
    found = associate(cells)
    assert (found.raw.value, found.partial.value, found.increment.value) == (None, None, None)
    assert found.notes == ("effective_rank is the same in all cells",)


def test_axes_of_words_and_seeds_are_held_fixed_too() -> None:
    cells = mirrored_cells()
    cells["attention"] = np.where(np.arange(108) % 2, "parallel", "sequential")
    cells["seed"] = np.arange(108)
    cells["loss_docs"] += np.where(cells["attention"] == "parallel", 1.0, 0.0)
    cells["effective_rank"] -= np.where(cells["attention"] == "parallel", 100.0, 0.0)
    axes = (*AXES, "attention", "seed")
    (found,) = associations(cells, axes=axes, predictors=["effective_rank"], outcomes=["loss_docs"])
    assert found.raw.value is not None
    assert found.raw.value < -0.5
    assert found.partial.value == pytest.approx(0, abs=0.25)


def test_findings_are_the_same_each_time_and_are_plain_json() -> None:
    def once() -> str:
        found = analyse(
            linked_cells(), axes=AXES, predictors=["effective_rank"], outcomes=["loss_docs"], mixed=["loss_docs"]
        )
        return json.dumps(asdict(found), allow_nan=False)

    assert once() == once()
