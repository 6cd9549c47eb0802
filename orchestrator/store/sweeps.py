"""Put a submitted sweep into the store: the file unchanged, its plan, and the rows that say what it asks for.

run -> [sweeps] -> inbox -> views
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from evaluators.config import EVALUATOR_VERSIONS, settings_from
from orchestrator.identity import canonical_json, digest, recipe_digest
from orchestrator.plan import Evaluation, Plan, Trial
from orchestrator.schema import ASKED
from orchestrator.store.layout import StoreLayout
from orchestrator.store.registry import record_event
from orchestrator.store.tables import publish_once, read_rows
from trainers.errors import InputError, nearest
from trainers.scales import count_parameters, flops_per_token

_TICK = timedelta(microseconds=1)
IMPORTED = "# imported, not trained here: geosweep import\n"
"""First line of the file that stands for the sweep of an imported model."""


def submit(layout: StoreLayout, text: str, plan: Plan) -> None:
    """Store a sweep file and all that its plan asks for; the same plan again changes nothing.

    The event that makes this revision the sweep's current one is written last.
    """
    layout.files.publish(layout.sweep(plan.sweep, plan.revision), text.encode())
    layout.files.publish(layout.plan(plan.sweep, plan.revision), plan_json(plan).encode())
    publish_once(layout, "trials", [_trial_row(plan, trial) for trial in plan.trials])
    publish_once(layout, "chains", list(_chain_rows(plan)))
    ask(layout, plan.sweep, plan.revision, plan.evaluations)
    if current_revision(layout, plan.sweep) != plan.revision:
        # The newest time counts, so a clock that was set back meanwhile must not make this the older one.
        time = max([datetime.now(UTC), *(row["time"] + _TICK for row in _submissions(layout))])
        record_event(layout, "sweep_submitted", plan.sweep, detail=plan.revision, time=time)


def ask(layout: StoreLayout, sweep: str, revision: str, evaluations: Iterable[Evaluation]) -> None:
    """Store that a revision of a sweep asks for these evaluations; the same ones again change nothing."""
    units: dict[tuple[str, str], list[Evaluation]] = {}
    for evaluation in evaluations:
        units.setdefault((evaluation.evaluator, evaluation.settings_digest), []).append(evaluation)
    for unit in units.values():
        request = digest(sorted(evaluation.segment for evaluation in unit))[:16]
        publish_once(layout, "asked", [_asked_row(sweep, revision, evaluation, request) for evaluation in unit])


def asked_evaluations(layout: StoreLayout, sweep: str, revision: str) -> list[Evaluation]:
    """Every evaluation that a revision asks for: those of its file, and those that `geosweep eval` added later."""
    asked = read_rows(layout, "asked", ASKED.names)
    rows = [row for row in asked if (row["sweep"], row["revision"]) == (sweep, revision)]
    return [
        Evaluation(
            segment=row["segment"],
            tokens=row["tokens"],
            evaluator=row["evaluator"],
            version=row["evaluator_version"],
            settings=settings_from(json.loads(row["settings"])),
            settings_digest=row["settings_digest"],
        )
        for row in rows
        if row["evaluator_version"] == EVALUATOR_VERSIONS.get(row["evaluator"])  # what older code asked is not ours
    ]


def current_revision(layout: StoreLayout, sweep: str) -> str | None:
    """The revision of a sweep that was submitted last; None if it never was."""
    return current_revisions(layout).get(sweep)


def stored_sweep(layout: StoreLayout, sweep: str) -> Path:
    """The file of a sweep's current revision, on this machine; InputError as require_revision."""
    return sweep_file(layout, sweep, require_revision(layout, sweep))


def sweep_file(layout: StoreLayout, sweep: str, revision: str) -> Path:
    """The file of one revision of a sweep, on this machine. raises InputError when the store has lost it"""
    try:
        return layout.files.fetch(layout.sweep(sweep, revision))
    except FileNotFoundError as error:
        raise InputError(f"{layout.files.name(layout.sweep(sweep, revision))}: the file is missing") from error


def require_revision(layout: StoreLayout, sweep: str) -> str:
    """The revision of a sweep that was submitted last; InputError with the nearest name if the store has none."""
    submitted = current_revisions(layout)
    if sweep not in submitted:
        raise InputError(
            f"store {layout.url} has no sweep '{sweep}'{nearest(sweep, submitted)}",
            next_step="start one with `geosweep run SWEEP`",
        )
    return submitted[sweep]


def segments_of_other_sweeps(layout: StoreLayout, sweep: str) -> frozenset[str]:
    """Every segment that a trial of another sweep in the store, in any revision, trains or trained through."""
    chains = read_rows(layout, "chains", ["sweep", "segment"])
    return frozenset(row["segment"] for row in chains if row["sweep"] != sweep)


def current_revisions(layout: StoreLayout) -> dict[str, str]:
    """The revision of each sweep that was submitted last."""
    return {row["sweep"]: row["detail"] for row in sorted(_submissions(layout), key=lambda row: row["time"])}


def _submissions(layout: StoreLayout) -> list[dict[str, Any]]:
    events = read_rows(layout, "events", ["time", "kind", "sweep", "detail"])
    return [row for row in events if row["kind"] == "sweep_submitted"]


def plan_json(plan: Plan) -> str:
    """The filled plan as the store keeps it; `changes` compares a later one with it."""
    trials = [
        {
            "trial": trial.id,
            "grids": list(trial.grids),
            "varied": dict(trial.varied),
            "chain": list(trial.chain),
            "checkpoints": list(trial.checkpoints),
            "recipe": trial.recipe.model_dump(mode="json"),
            "sources": dict(trial.sources),
        }
        for trial in plan.trials
    ]
    return json.dumps({"sweep": plan.sweep, "revision": plan.revision, "question": plan.question, "trials": trials})


def _trial_row(plan: Plan, trial: Trial) -> dict[str, Any]:
    recipe = trial.recipe
    counts = {f"params_{name}": value for name, value in asdict(count_parameters(recipe.model)).items()}
    return {
        "sweep": plan.sweep,
        "revision": plan.revision,
        "trial": trial.id,
        "grids": list(trial.grids),
        "family": recipe.model.family,
        "scale": recipe.model.scale,
        **counts,
        "context": recipe.model.context,
        "batch_size": recipe.batch_size,
        "weight_decay": recipe.optimizer.weight_decay,
        "peak_lr": recipe.schedule.peak_lr,
        "schedule": recipe.schedule.shape,
        "warmup_tokens": recipe.schedule.warmup_tokens,
        "decay_tokens": recipe.schedule.decay_tokens,
        "final_lr_fraction": recipe.schedule.final_fraction,
        "token_budget": recipe.token_budget,
        "seed": recipe.seed,
        "attention": recipe.model.attention,
        "tied": recipe.model.tied,
        "precision": recipe.precision,
        "corpus": recipe.data.corpus,
        "corpus_digest": recipe.data.digest,
        "varied": canonical_json(dict(trial.varied)),
        "recipe": canonical_json(recipe.model_dump(mode="json")),
        "recipe_digest": recipe_digest(recipe),
        "steps": recipe.steps,
        "flops": flops_per_token(recipe.model) * recipe.token_budget,
    }


def _chain_rows(plan: Plan) -> Iterator[dict[str, Any]]:
    for trial in plan.trials:
        asked = set(trial.checkpoints)
        for position, id in enumerate(trial.chain):
            segment = plan.segment_by_id[id]
            yield {
                "sweep": plan.sweep,
                "revision": plan.revision,
                "trial": trial.id,
                "position": position,
                "segment": id,
                "parent": segment.parent,
                "from_tokens": segment.from_tokens,
                "to_tokens": segment.to_tokens,
                "asked": id in asked,
            }


def _asked_row(sweep: str, revision: str, evaluation: Evaluation, request: str) -> dict[str, Any]:
    return {
        "sweep": sweep,
        "revision": revision,
        "segment": evaluation.segment,
        "evaluator": evaluation.evaluator,
        "settings_digest": evaluation.settings_digest,
        "evaluator_version": evaluation.version,
        "tokens": evaluation.tokens,
        "settings": canonical_json(evaluation.settings.model_dump(mode="json")),
        "request": request,
    }
