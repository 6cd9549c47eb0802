"""Look at a sweep as an experiment: can it answer what it asks?

spec, plan -> [lint] -> check, plan page
in    a SweepSpec and its Plan, both valid
out   Findings, each with its remedy; `--strict` refuses a sweep that has warnings
not   what makes a file invalid: that is refused by spec.py and trainers/config.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from orchestrator.plan import Plan, Trial
from orchestrator.spec import Grid, SweepSpec, axis_fields, field_value
from trainers.config import Recipe

LONG_WARMUP = 0.5  # of the budget


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of the design. warning: it can mislead the answer; note: good to know."""

    code: str
    severity: Literal["warning", "note"]
    text: str
    remedy: str


def lint(spec: SweepSpec, plan: Plan) -> tuple[Finding, ...]:
    """Everything that the design of a sweep cannot tell apart, leaves out, repeats or changes on the side."""
    of_grid = {grid.name: [trial for trial in plan.trials if grid.name in trial.grids] for grid in spec.grids}
    findings = [
        *_confounded(spec, plan, of_grid),
        *(finding for grid in spec.grids for finding in _missing_in_tuples(grid)),
        *_missing_between_grids(spec.grids),
        *_hidden_changes(spec, of_grid),
        *_long_warmup(plan),
        *_one_seed(plan),
        *_repeated_cells(plan),
        *_resources_differ(spec, plan),
    ]
    return tuple(sorted(findings, key=lambda finding: finding.severity, reverse=True))


# --- axes that move together ----------------------------------------------------------------------------------------


def _confounded(spec: SweepSpec, plan: Plan, of_grid: Mapping[str, Sequence[Trial]]) -> Iterator[Finding]:
    """Fields whose effects no additive model can part: of the cells of one grid, or of all grids together."""
    told: list[set[str]] = []
    for grid in spec.grids:
        for group in aliased({name: [t.varied[name] for t in of_grid[grid.name]] for name in _fields(grid)}):
            told.append(set(group))
            alone = [name for name in group if any(_alone(other, name, group) for other in spec.grids)]
            elsewhere = f"; another grid varies {_listed(alone)} alone" if alone else ""
            yield _moves_together(f"grid '{grid.name}'", group, elsewhere)
    names = dict.fromkeys(name for grid in spec.grids for name in _fields(grid))
    for group in aliased({name: [_level(trial, spec, name) for trial in plan.trials] for name in names}):
        if not any(set(group) <= fields for fields in told):
            yield _moves_together("over all grids", group, "")


def _moves_together(where: str, group: Sequence[str], elsewhere: str) -> Finding:
    return Finding(
        code="confounded",
        severity="warning",
        text=f"{where}: {_listed(group)} move together, their effects cannot be told apart{elsewhere}",
        remedy="give each field an axis of its own, or say in the question that only their joint effect is meant",
    )


def _fields(grid: Grid) -> list[str]:
    return [name for key in grid.axes for name in axis_fields(key)]


def _level(trial: Trial, spec: SweepSpec, name: str) -> Any:
    """The value of a field in a trial whose grid may not vary it: the base's then, or the preset's."""
    if name in trial.varied:
        return trial.varied[name]
    own = field_value(spec.base, name)
    return own if own is not None else _realised(trial.recipe, _IN_RECIPE.get(name, name.split(".")[-1]))


_IN_RECIPE = {"learning_rate": "peak_lr"}


def aliased(fields: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """Groups of fields whose main effects are not all estimable: their columns of the design matrix depend.

    fields   name -> its value in each cell; values are levels, not numbers
    returns  groups of two fields or more; fields that depend only jointly are one group
    """
    columns = {name: _dummies(values) for name, values in fields.items() if len(set(values)) > 1}
    everything = [np.ones((len(next(iter(fields.values()), ())), 1)), *columns.values()]
    if not columns or _rank(everything) == sum(part.shape[1] for part in everything):
        return []
    involved = [
        name
        for name in columns
        if _rank(everything) - _rank([part for part in everything if part is not columns[name]])
        < columns[name].shape[1]
    ]
    pairs = [
        pair
        for pair in itertools.combinations(involved, 2)
        if _rank([everything[0], *(columns[name] for name in pair)]) < 1 + sum(columns[n].shape[1] for n in pair)
    ]
    return _connected(pairs) or [tuple(involved)]


def _dummies(values: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One column per level but the first, 1 where a cell has it."""
    levels = list(dict.fromkeys(values))
    return np.array([[float(value == level) for level in levels[1:]] for value in values]).reshape(len(values), -1)


def _rank(parts: Sequence[np.ndarray[Any, np.dtype[np.float64]]]) -> int:
    rows = np.unique(np.hstack(parts), axis=0)
    return int(np.linalg.matrix_rank(rows))


def _connected(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    groups: list[set[str]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    return [tuple(sorted(group)) for group in groups]


def _alone(grid: Grid, name: str, group: Sequence[str]) -> bool:
    """Whether another grid varies this field without the others of its group."""
    fields = set(_fields(grid))
    return name in fields and not fields & (set(group) - {name})


# --- cells that are not there, or there twice -----------------------------------------------------------------------


def _missing_in_tuples(grid: Grid) -> Iterator[Finding]:
    """Tied fields that are more than a pairing but less than a product."""
    for key, values in grid.axes.items():
        fields = axis_fields(key)
        given = {tuple(value) for value in values} if len(fields) > 1 else set()
        levels = [list(dict.fromkeys(value[i] for value in given)) for i in range(len(fields))]
        whole = set(itertools.product(*levels)) if given else set()
        if given and len(given) > max(len(level) for level in levels) and (missing := whole - given):
            yield _missing(f"grid '{grid.name}', axis '{key}'", fields, missing, len(whole))


def _missing_between_grids(grids: Sequence[Grid]) -> Iterator[Finding]:
    """Grids over the same fields, which together are less than the product of their values."""
    over: dict[tuple[str, ...], list[Grid]] = {}
    for grid in grids:
        over.setdefault(tuple(sorted(grid.axes)), []).append(grid)
    for keys, alike in over.items():
        if len(alike) > 1:
            levels = [list(dict.fromkeys(_hashable(v) for g in alike for v in g.axes[key])) for key in keys]
            whole = set(itertools.product(*levels))
            there = {
                cell
                for g in alike
                for cell in itertools.product(*([_hashable(v) for v in g.axes[key]] for key in keys))
            }
            if missing := whole - there:
                yield _missing("grids " + _listed(f"'{grid.name}'" for grid in alike), keys, missing, len(whole))


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _missing(where: str, fields: Sequence[str], missing: Iterable[tuple[Any, ...]], whole: int) -> Finding:
    cells = sorted(missing, key=str)
    shown = "; ".join(", ".join(f"{n} {v}" for n, v in zip(fields, cell, strict=True)) for cell in cells[:3])
    more = f"; and {len(cells) - 3} more" if len(cells) > 3 else ""
    return Finding(
        code="missing-cells",
        severity="warning",
        text=f"{where}: {len(cells)} of the {whole} cells of the product are missing: {shown}{more}",
        remedy="add them, or take the values out that occur in few cells: a comparison needs equal company",
    )


def _repeated_cells(plan: Plan) -> Iterator[Finding]:
    repeated = [trial for trial in plan.trials if len(trial.grids) > 1]
    if repeated:
        yield Finding(
            code="repeated-cells",
            severity="note",
            text=f"{plan.cells} cells are {len(plan.trials)} unique trials: {len(repeated)} stand in several grids",
            remedy="nothing is trained twice; count unique trials where observations must be independent",
        )


def _one_seed(plan: Plan) -> Iterator[Finding]:
    seeds = {trial.recipe.seed for trial in plan.trials}
    if len(seeds) == 1 and len(plan.trials) > 1:
        yield Finding(
            code="one-seed",
            severity="warning",
            text=f"every trial has seed {seeds.pop()}: a difference cannot be told from the noise between seeds",
            remedy="add an axis `seed: [0, 1, 2]`, at least to one grid, so that the noise is measured",
        )


# --- changes on the side --------------------------------------------------------------------------------------------

_REALISED = ("peak_lr", "batch_size", "weight_decay", "warmup_tokens", "decay_tokens", "final_fraction", "context")
_CHANGED_BY = {
    "peak_lr": ("learning_rate", "learning_rate_multiplier"),
    "decay_tokens": ("schedule.decay_tokens", "schedule.decay_fraction", "schedule.shape"),
    "final_fraction": ("schedule.final_fraction", "schedule.shape"),
    "warmup_tokens": ("schedule.warmup_tokens",),
}


def _hidden_changes(spec: SweepSpec, of_grid: Mapping[str, Sequence[Trial]]) -> Iterator[Finding]:
    """What a preset's rule changes along with an axis, although no axis names it."""
    found: dict[tuple[str, str], list[str]] = {}
    for grid in spec.grids:
        fields, trials = _fields(grid), of_grid[grid.name]
        for name in _REALISED:
            values = [_realised(trial.recipe, name) for trial in trials]
            if len(set(values)) > 1 and not set(fields) & {name, *_CHANGED_BY.get(name, ())}:
                mover = next((axis for axis in fields if _decides(axis, trials, values)), None)
                if mover is not None:
                    found.setdefault((name, mover), []).append(grid.name)
    for (name, mover), grids in found.items():
        if not (name == "decay_tokens" and spec.base.schedule.decay_fraction is not None):  # the file says so itself
            yield _hidden_change(name, mover, grids, of_grid[grids[0]])


def _hidden_change(name: str, mover: str, grids: Sequence[str], trials: Sequence[Trial]) -> Finding:
    """name: a field of the recipe; mover: the axis that it follows; trials: of one grid where it does"""
    field = {"peak_lr": "learning_rate"}.get(name, name)
    low = min(trials, key=lambda trial: _realised(trial.recipe, name))
    high = max(trials, key=lambda trial: _realised(trial.recipe, name))
    source = low.sources.get(field, low.sources.get(f"schedule.{field}"))
    where = f"grid {grids[0]}" if len(grids) == 1 else f"{len(grids)} grids"
    return Finding(
        code="hidden-change",
        severity="warning",
        text=f"{where}: {field} follows {mover}, from {_realised(low.recipe, name):.4g} at {low.varied[mover]} to "
        f"{_realised(high.recipe, name):.4g} at {high.varied[mover]}" + (f": {source}" if source else ""),
        remedy=f"fix {field} in `base`, vary it in a grid of its own, or say in the question that {mover} includes it",
    )


def _realised(recipe: Recipe, name: str) -> Any:
    """A field as the recipe has it; None for one that only helps to fill it, such as learning_rate_multiplier."""
    for holder in (recipe, recipe.data, recipe.schedule, recipe.optimizer, recipe.model):
        if hasattr(holder, name):
            return getattr(holder, name)
    return None


def _decides(axis: str, trials: Sequence[Trial], values: Sequence[Any]) -> bool:
    """Whether the axis alone tells the value in each trial, and is not constant itself."""
    told: dict[Any, Any] = {}
    for trial, value in zip(trials, values, strict=True):
        if told.setdefault(trial.varied[axis], value) != value:
            return False
    return len(told) > 1


def _resources_differ(spec: SweepSpec, plan: Plan) -> Iterator[Finding]:
    scales = dict.fromkeys(trial.recipe.model.scale for trial in plan.trials)
    resources = {scale: spec.execution.resources_of(scale) for scale in scales}
    if len({(r.cpus, r.gpus) for r in resources.values()}) > 1:
        alike: dict[str, list[str]] = {}
        for scale, r in resources.items():
            alike.setdefault(f"{r.cpus} CPUs, {r.gpus:g} GPUs", []).append(scale)
        each = "; ".join(f"{', '.join(scales)}: {what}" for what, scales in alike.items())
        yield Finding(
            code="resources-differ",
            severity="note",
            text=f"scales that are compared train on different resources ({each})",
            remedy="do not compare their wall-clock times; other thread counts also round sums differently",
        )


def _long_warmup(plan: Plan) -> Iterator[Finding]:
    long = [t for t in plan.trials if t.recipe.schedule.warmup_tokens > LONG_WARMUP * t.recipe.token_budget]
    if long:
        example = max(long, key=lambda t: t.recipe.schedule.warmup_tokens / t.recipe.token_budget).recipe
        yield Finding(
            code="long-warmup",
            severity="warning",
            text=f"{len(long)} trials spend more than half of their budget on warm-up, for example "
            f"{example.schedule.warmup_tokens:,} of {example.token_budget:,} tokens at {example.model.scale}",
            remedy="set schedule.warmup_tokens, or give these trials a larger budget",
        )


def _listed(names: Iterable[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
