"""A sweep's plan as a page for people and as JSON for programs.

preview -> [planpage] -> terminal
From top to bottom: what is asked, what varies, what is fixed and why, the trials, the faults of the design, the bill.
The bill stands last, where a terminal leaves the eye.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.changes import Changes
from orchestrator.cost import FLOPS_CONVENTION, Bill, EvaluationCost
from orchestrator.lint import Finding
from orchestrator.plan import Plan, Trial
from orchestrator.preview import Preview
from orchestrator.retention import kept
from orchestrator.spec import axis_fields, axis_values
from orchestrator.store.copies import fetch_corpus
from trainers.errors import InputError, nearest
from trainers.scales import count_parameters

SHOWN_TRIALS = 8


def show(seen: Preview, out: Console, start: str) -> None:
    """Print the page. start: the command that starts the sweep"""
    out.print(_head(seen.plan))
    sections = (
        ("varies", _varies(seen)),
        ("recipe", _recipe(seen.plan)),
        ("trials", _trials(seen.plan)),
        ("changed", _changed(seen.changes)),
        ("design", _design(seen.findings)),
        ("bill", _bill(seen)),
        ("hours", _hours(seen.bill)),
    )
    for title, content in sections:
        if content is not None:
            out.print(Text(f"\n{title}", style="bold cyan"))
            out.print(Padding(content, (0, 0, 0, 2)))
    out.print()
    for line in _last_lines(seen, start):
        out.print(line)


def as_json(seen: Preview) -> dict[str, Any]:
    """The page for programs: totals, and every trial with its filled recipe."""
    plan, bill = seen.plan, seen.bill
    return {
        "sweep": plan.sweep,
        "revision": plan.revision,
        "question": plan.question,
        "cells": plan.cells,
        "unique_trials": len(plan.trials),
        "segments": len(plan.segments),
        "shared_segments": _shared_segments(plan),
        "tokens_asked": bill.tokens_asked,
        "tokens_trained": bill.tokens_trained,
        "flops": bill.flops,
        "gpu_hours": {
            hours.device: {
                "hours": hours.hours,
                "left": hours.hours_left,
                "kind": hours.kind,
                "measured": hours.measured,
                "source": hours.source,
            }
            for hours in bill.hours
        },
        "checkpoint_bytes": {"kept": bill.bytes_kept, "peak": bill.bytes_peak},
        "evaluations": {
            cost.evaluator: {"asked": cost.asked, "owed": cost.owed, "flops": cost.flops} for cost in bill.evaluations
        },
        "stored": {
            "segments": len(seen.standing.committed),
            "diverged": len(seen.standing.diverged),
            "evaluations": sum(cost.asked - cost.owed for cost in bill.evaluations),
            "tokens_left": bill.tokens_left,
        },
        "changed": None if seen.changes is None else asdict(seen.changes),
        "lint": [asdict(finding) for finding in seen.findings],
        "over_limits": list(seen.over),
        "not_prepared": list(plan.provisional),
        "trials": [_trial_json(trial) for trial in plan.trials],
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
        "corpus": str(fetch_corpus(store.resolve(), trial.recipe.data.corpus)),
        "checkpoints": [plan.segment_by_id[segment].to_tokens for segment in trial.checkpoints],
        "recipe": trial.recipe.model_dump(mode="json"),
    }
    return yaml.safe_dump(content, sort_keys=False)


def _trial_json(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.id,
        "grids": list(trial.grids),
        "varied": dict(trial.varied),
        "recipe": trial.recipe.model_dump(mode="json"),
        "sources": dict(trial.sources),
        "segments": list(trial.chain),
        "checkpoints": list(trial.checkpoints),
    }


# --- what is asked --------------------------------------------------------------------------------------------------


def _head(plan: Plan) -> Group:
    counts = f"{plan.cells:,} cells"
    if plan.cells != len(plan.trials):
        counts += f", {len(plan.trials):,} unique trials"
    title = Text.assemble((plan.sweep, "bold"), f"  {counts}  ", (f"revision {plan.revision}", "dim"))
    return Group(title, Text(plan.question, style="italic"))


def _varies(seen: Preview) -> Table:
    """Each grid as a product of its axes; an axis that all grids have alike is shown once."""
    grids = seen.spec.grids
    common = [axis for axis in grids[0].axes.items() if len(grids) > 1 and all(axis in g.axes.items() for g in grids)]
    table = _columns("grid", "cells", "axis", "values", right=("cells",))
    for grid in grids:
        cells = math.prod(len(values) for values in grid.axes.values())
        _add_axes(table, grid.name, f"{cells:,}", [axis for axis in grid.axes.items() if axis not in common])
    if common:
        _add_axes(table, "in each", "", common)
    return table


def _add_axes(table: Table, name: str, cells: str, axes: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
    for key, values in axes or [("", ())]:
        shown = "  ".join(_point_text(key, value) for value in values)
        table.add_row(Text(name, no_wrap=True), cells, Text(", ".join(axis_fields(key)), no_wrap=True), shown)
        name = cells = ""


def _point_text(key: str, value: Any) -> str:
    texts = [short(part) for part in axis_values(key, value)]
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


_IN_RECIPE: Mapping[str, str] = {"learning_rate": "peak_lr", "learning_rate_multiplier": "peak_lr"}
_DERIVED = ("rotary_theta", "rotary_fraction", "norm_eps", "digest", "mlp_size", "hidden_size", "layers", "heads")


def _recipe(plan: Plan) -> Table:
    """Every field with where its value comes from: what the file says of it, or the preset that filled it."""
    table = _columns("field", "from")
    sources = plan.trials[0].sources
    varied = {name for trial in plan.trials for name in trial.varied}
    recipes = [_flat(trial.recipe.model_dump(mode="json")) for trial in plan.trials]
    by_source: dict[str, list[str]] = {}
    known = {_IN_RECIPE.get(field, field.split(".")[-1]): field for field in sources}
    for name in (name for name in recipes[0] if name not in _DERIVED):
        field = known.get(name, name)
        values = list(dict.fromkeys(recipe[name] for recipe in recipes))
        if values != [None]:
            given = field if field in varied else f"{field} {_range(values)}"
            source = "the corpus" if name.startswith("vocab") else sources.get(field, "the sweep file")
            if name == "decay_tokens":
                source = sources.get("schedule.decay_fraction", source)
            by_source.setdefault(source, []).append(given)
    for source, fields in by_source.items():
        table.add_row(", ".join(fields), Text(source, style="dim"))
    return table


def _range(values: Sequence[Any]) -> str:
    return short(values[0]) if len(values) == 1 else f"{short(min(values))} to {short(max(values))}"


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        flat.update(value if isinstance(value, Mapping) else {name: value})
    return flat


_IN_TRIAL_ID = ("scale", "batch_size", "weight_decay", "token_budget", "seed")


def _trials(plan: Plan) -> Table:
    """The first trials; besides: what varies and does not stand in the id."""
    varying = [name for name, values in varied_values(plan).items() if len(values) > 1]
    besides = [name for name in varying if name not in _IN_TRIAL_ID]
    shown = plan.trials[:SHOWN_TRIALS]
    table = _columns("trial", *(["besides"] if besides else ["parameters", "steps"]), right=("parameters", "steps"))
    table.columns[0].min_width = max(len(trial.id) for trial in shown)
    for trial in shown:
        parameters = f"{count_parameters(trial.recipe.model).no_input_embedding:,}"
        varied = [f"{name.split('.')[-1]} {short(trial.varied[name])}" for name in besides if name in trial.varied]
        table.add_row(
            Text(trial.id, no_wrap=True), *([", ".join(varied)] if besides else [parameters, f"{trial.recipe.steps:,}"])
        )
    if (more := len(plan.trials) - SHOWN_TRIALS) > 0:
        table.add_row(Text(f"and {more:,} more (--json has all)", style="dim", no_wrap=True))
    return table


def varied_values(plan: Plan) -> dict[str, list[Any]]:
    """Each field that the grids vary, with its values in the order of the file."""
    values: dict[str, dict[Any, None]] = {}
    for trial in plan.trials:
        for name, value in trial.varied.items():
            values.setdefault(name, {})[value] = None
    return {name: list(found) for name, found in values.items()}


# --- faults and changes ---------------------------------------------------------------------------------------------


def _design(findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text("no fault found: axes, cells, seeds and side changes were looked at", style="green")
    table = _columns("", "", header=False)
    for finding in findings:
        style = "yellow" if finding.severity == "warning" else "dim"
        text = Text.assemble(finding.text, (f"\n{finding.remedy}", "dim"))
        table.add_row(Text(finding.code, style=style, no_wrap=True), text)
    return table


def _changed(changes: Changes | None) -> RenderableType | None:
    if changes is None or changes.nothing:
        return None
    lines = [Text(f"against the stored revision {changes.revision}:")]
    for change in changes.fields:
        again = len(change.trained_again)
        lines.append(
            Text(
                f"{change.field}: {short(change.before)} -> {short(change.after)} in {len(change.cells)} cells, "
                f"{again} of them to be trained" + (f" ({_some(change.trained_again)})" if again else "")
            )
        )
    for word, cells in (("new", changes.added), ("no longer asked for", changes.removed)):
        if cells:
            lines.append(Text(f"{len(cells)} cells are {word}: {_some(cells)}"))
    return Group(*lines)


def _some(names: Sequence[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


# --- the bill -------------------------------------------------------------------------------------------------------


def _bill(seen: Preview) -> Table:
    plan, bill = seen.plan, seen.bill
    table = _columns("", "", header=False)
    table.add_row("tokens", _tokens_line(seen))
    table.add_row("FLOPs", f"{bill.flops:.3g}{_left(bill.flops, bill.flops_left, '.3g')}: {FLOPS_CONVENTION}")
    left = _left(len(plan.segments), len(seen.standing.left))
    table.add_row(
        "segments",
        f"{len(plan.segments):,}{left}; {_shared_segments(plan):,} serve several trials, "
        f"{len(plan.forks):,} end in a fork",
    )
    for cost in bill.evaluations:
        table.add_row(cost.evaluator, _evaluations_line(cost, bill))
    stays = kept(plan, seen.spec.keep)
    table.add_row(
        "checkpoints",
        f"{size(bill.bytes_kept)} kept: {len(stays.weights):,} weights, {len(stays.state):,} optimizer states; "
        f"at most {size(bill.bytes_peak)} on the disk at one time",
    )
    return table


def _tokens_line(seen: Preview) -> Text:
    plan, bill = seen.plan, seen.bill
    saved = f"{bill.saved:.1%}" if bill.saved >= 0.001 or not bill.saved else f"{bill.saved:.2g}"
    how = f"sharing saves {saved}" if plan.shared else "nothing is shared, as --no-share says"
    left = _left(bill.tokens_trained, bill.tokens_left)
    trained = (f"{amount(bill.tokens_trained)} to train", "bold")
    return Text.assemble(f"{amount(bill.tokens_asked)} asked, ", trained, f"{left}: {how}")


def _left(whole: float, left: float, form: str | None = None) -> str:
    """What is left of a sum, where it is not all of it."""
    if left == whole:
        return ""
    return f" ({format(left, form) if form else amount(left)} left)"


def _evaluations_line(cost: EvaluationCost, bill: Bill) -> str:
    if cost.flops is None:
        share = "no estimate of their cost"
    else:
        part = cost.flops / bill.flops
        share = f"{part:.2%} of the training FLOPs" if part >= 1e-4 else "under 0.01% of the training FLOPs"
    return f"{cost.asked:,} evaluations{_left(cost.asked, cost.owed)}: {share}"


def _hours(bill: Bill) -> Group:
    begun = bill.flops_left != bill.flops
    names = ["one", "hours", *(["left"] if begun else []), "basis"]
    table = _columns(*names, right=("hours", "left"))
    for hours in bill.hours:
        left = [duration(hours.hours_left)] if begun else []
        basis = Text(hours.source, style="" if hours.measured else "dim")
        table.add_row(Text(hours.device, no_wrap=True), duration(hours.hours), *left, basis)
    return Group(table, Text("training alone, on one device; measure yours: geosweep bench", style="dim"))


def _last_lines(seen: Preview, start: str) -> Iterator[Text]:
    plan = seen.plan
    for name in plan.provisional:
        yield Text(
            f"corpus '{name}' is not prepared: a vocabulary of 50,280 is assumed and ids will change; "
            f"prepare it: geosweep data prepare {name}",
            style="yellow",
        )
    for line in seen.over:
        yield Text(f"above its limits: {line}", style="bold red")
    warnings = sum(finding.severity == "warning" for finding in seen.findings)
    if warnings:
        many = f"{warnings} warning{'s' if warnings > 1 else ''}"
        yield Text(f"{many} about the design; --strict refuses such a sweep", style="yellow")
    if seen.over:
        yield Text("nothing of this sweep will start")
    elif seen.standing.left or any(cost.owed for cost in seen.bill.evaluations):
        yield Text.assemble("start it: ", (start, "bold"))
    else:
        yield Text("complete: the store holds all of it", style="green")


# --- words for numbers ----------------------------------------------------------------------------------------------


def short(value: Any) -> str:
    """A value of a recipe, as short as it stays exact."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def amount(count: float) -> str:
    """Four digits and a unit: 31_998_345_216 -> '32.00B'."""
    for factor, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if count >= factor:
            return f"{count / factor:.2f}{letter}"
    return f"{count:,.0f}"


def size(count: float) -> str:
    for factor, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} bytes"


def duration(hours: float) -> str:
    if hours >= 100:
        return f"{hours:,.0f} h"
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{hours * 60:.1f} min" if hours * 60 >= 1 else f"{hours * 3600:.1f} s"


def _shared_segments(plan: Plan) -> int:
    return sum(len(segment.trials) > 1 for segment in plan.segments)


def _columns(*names: str, right: Iterable[str] = (), header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=header, header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in right else "left", vertical="top")
    return table
