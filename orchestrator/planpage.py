"""A plan as a page for people and as JSON for programs.

plan -> [planpage] -> terminal
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.plan import Plan, Trial
from trainers.errors import InputError, nearest
from trainers.scales import count_parameters

SHOWN_TRIALS = 40


def show(plan: Plan, out: Console) -> None:
    """Print what varies, the trials, what the preset filled, and the totals."""
    axes = varied_values(plan)
    product = " x ".join(f"{name} ({len(values)})" for name, values in axes.items()) or "nothing"
    out.print(f"{plan.sweep}: {len(plan.trials)} trials vary {product}", markup=False)
    out.print(f"question: {plan.question}\n", markup=False, style="italic")
    out.print(_trial_table(plan, list(axes)))
    _show_filled(plan, out)
    out.print(totals(plan), markup=False)
    for name in plan.provisional:
        out.print(
            f"corpus '{name}' is not prepared: a vocabulary of 50,280 is assumed and ids will change; "
            f"prepare it: geosweep data prepare {name}",
            markup=False,
            style="yellow",
        )


def totals(plan: Plan) -> str:
    """The sums of a plan in three lines."""
    saved = plan.tokens_asked - plan.tokens_trained
    shared = sum(len(segment.trials) > 1 for segment in plan.segments)
    evaluations = ", ".join(f"{count} {name}" for name, count in evaluations_by_kind(plan).items()) or "none"
    return (
        f"{plan.cells} cells, {len(plan.trials)} unique trials; "
        f"{len(plan.segments)} segments, {shared} of them shared\n"
        f"{plan.tokens_asked:,} tokens asked, {plan.tokens_trained:,} trained ({saved:,} shared); "
        f"{sum(segment.flops for segment in plan.segments):.3g} FLOPs (6 N + attention, head counted)\n"
        f"evaluations: {evaluations}"
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan for programs: totals, and every trial with its filled recipe."""
    return {
        "sweep": plan.sweep,
        "revision": plan.revision,
        "question": plan.question,
        "cells": plan.cells,
        "unique_trials": len(plan.trials),
        "segments": len(plan.segments),
        "shared_segments": sum(len(segment.trials) > 1 for segment in plan.segments),
        "tokens_asked": plan.tokens_asked,
        "tokens_trained": plan.tokens_trained,
        "flops": sum(segment.flops for segment in plan.segments),
        "evaluations": evaluations_by_kind(plan),
        "not_prepared": list(plan.provisional),
        "trials": [
            {
                "trial": trial.id,
                "grids": list(trial.grids),
                "varied": dict(trial.varied),
                "recipe": trial.recipe.model_dump(mode="json"),
                "sources": dict(trial.sources),
                "segments": list(trial.chain),
            }
            for trial in plan.trials
        ],
    }


def trial_file(plan: Plan, id: str, store: Path) -> str:
    """One trial as the file that `python -m trainers` takes.

    id      of a trial, or the start of one
    raises  InputError if no trial, or more than one, begins like that
    """
    found = [trial for trial in plan.trials if trial.id.startswith(id)]
    if len(found) != 1:
        ids = [trial.id for trial in plan.trials]
        problem = f"{len(found)} trials begin with '{id}'" if found else f"no trial '{id}'{nearest(id, ids)}"
        raise InputError(f"{plan.sweep}: {problem}")
    trial = found[0]
    content = {
        "corpus": str(store.resolve() / "corpora" / trial.recipe.data.corpus),
        "checkpoints": [plan.segment_by_id[segment].to_tokens for segment in trial.chain],
        "recipe": trial.recipe.model_dump(mode="json"),
    }
    return yaml.safe_dump(content, sort_keys=False)


def varied_values(plan: Plan) -> dict[str, list[Any]]:
    """Each field that the grids vary, with its values in the order of the file."""
    values: dict[str, list[Any]] = {}
    for trial in plan.trials:
        for name, value in trial.varied.items():
            if value not in values.setdefault(name, []):
                values[name].append(value)
    return {name: found for name, found in values.items() if len(found) > 1}


def evaluations_by_kind(plan: Plan) -> dict[str, int]:
    return dict(Counter(evaluation.evaluator for evaluation in plan.evaluations))


def _trial_table(plan: Plan, axes: list[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("trial", *axes, "N", "steps", "grids"):
        table.add_column(name, justify="left" if name in ("trial", "grids") else "right", no_wrap=True)
    for trial in plan.trials[:SHOWN_TRIALS]:
        table.add_row(*_trial_cells(trial, axes))
    if len(plan.trials) > SHOWN_TRIALS:
        table.caption = f"... {len(plan.trials) - SHOWN_TRIALS} more trials (--json has all)"
    return table


def _trial_cells(trial: Trial, axes: list[str]) -> list[str]:
    parameters = count_parameters(trial.recipe.model).no_input_embedding
    varied = [_text(trial.varied.get(name)) for name in axes]
    return [trial.id, *varied, f"{parameters:,}", f"{trial.recipe.steps:,}", ", ".join(trial.grids)]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _show_filled(plan: Plan, out: Console) -> None:
    """What the preset filled, for the first trial; a value that differs between trials says so."""
    first = plan.trials[0]
    out.print("filled from the preset:", markup=False)
    flat = _flat(first.recipe.model_dump(mode="json"))
    for name, source in first.sources.items():
        value = flat.get(_IN_RECIPE.get(name, name.split(".")[-1]))
        out.print(f"  {name} = {_text(value)}   [{source}]", markup=False, soft_wrap=True)
    out.print("")


_IN_RECIPE: Mapping[str, str] = {"learning_rate": "peak_lr"}


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return flat
