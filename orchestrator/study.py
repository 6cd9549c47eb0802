"""Gather what statistics and report need to know of one sweep.

store -> query -> [study: Study] -> statistics -> report, bundle
in    an opened store; the name of a sweep in it
out   Study: one row per cell, what each metric column is, which axes the sweep varies
not   any number that is not stored, except the learning rate relative to its size
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

import pandas as pd

from evaluators.metrics import METRICS
from orchestrator.query import Store
from orchestrator.schema import TRIALS
from orchestrator.statistics import Findings, analyse
from orchestrator.store.layout import open_existing
from trainers.errors import InputError, nearest

Kind = Literal["geometry", "hidden_geometry", "loss", "finetune", "forgetting", "quantize", "other"]

RELATIVE_LR = "relative_lr"
_COLUMN_OF_AXIS: Mapping[str, str] = {
    "learning_rate": RELATIVE_LR,
    "learning_rate_multiplier": RELATIVE_LR,
    "schedule.shape": "schedule",
    "schedule.warmup_tokens": "warmup_tokens",
    "schedule.decay_tokens": "decay_tokens",
    "schedule.final_fraction": "final_lr_fraction",
}
# Counts and lengths of the matrix, not its shape: stored for checks, no predictors.
_BOOKKEEPING = ("zero_rows", "numerical_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One metric column of the cells: where it comes from, and whether its text is the one that was trained on."""

    name: str
    kind: Kind
    evaluator: str
    metric: str
    dataset: str | None
    unit: str
    in_distribution: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One sweep as statistics see it.

    cells      one row per cell of the current revision, as statistics.analyse wants it; also `reason` and the counts of
               the view `cells`
    axes       columns of `cells` that the sweep varies
    measures   the metric columns that are predictors or outcomes, by name
    """

    sweep: str
    revision: str
    question: str
    cells: pd.DataFrame
    axes: tuple[str, ...]
    measures: Mapping[str, Measure]

    def of_kind(self, *kinds: Kind) -> tuple[str, ...]:
        return tuple(name for name, measure in self.measures.items() if measure.kind in kinds)

    @property
    def predictors(self) -> tuple[str, ...]:
        return self.of_kind("geometry", "hidden_geometry")

    @property
    def outcomes(self) -> tuple[str, ...]:
        return self.of_kind("loss", "finetune", "forgetting", "quantize", "other")

    @property
    def token_losses(self) -> tuple[str, ...]:
        """Losses in nats per token, in distribution first."""
        losses = [name for name in self.of_kind("loss") if self.measures[name].unit == "nats/token"]
        return tuple(sorted(losses, key=lambda name: (not self.measures[name].in_distribution, name)))

    @property
    def main_loss(self) -> str | None:
        """The loss that pre-training lowers: held-out text of the training corpus."""
        return next(iter(self.token_losses), None)

    @property
    def main_rank(self) -> str | None:
        """The effective rank of the unembedding; else the first predictor that there is."""
        named = [name for name in self.predictors if self.measures[name].metric == "effective_rank"]
        return next(iter([*named, *self.predictors]), None)


def read_study(store: Store, root: Path, sweep: str) -> Study:
    """The current revision of a sweep.

    raises  InputError with the nearest name if the store has no such sweep
    """
    revisions = {row["sweep"]: row["revision"] for row in store.sql("select sweep, revision from latest").rows()}
    if sweep not in revisions:
        next_step = "start one: geosweep run SWEEP"
        raise InputError(f"the store {root} has no sweep '{sweep}'{nearest(sweep, revisions)}", (), next_step)
    cells = store.sql(cells_sql(sweep)).pandas()
    recipes = [_flat(json.loads(text)) for text in cells["recipe"]]
    names = _axis_columns(json.loads(text) for text in cells["varied"])
    for name in names:
        if name not in cells:
            cells[name] = [recipe.get(name) for recipe in recipes]
    cells[RELATIVE_LR] = relative_learning_rates(cells)
    measures = _measures(store, sweep)
    for name in measures:
        cells[name] = pd.to_numeric(cells[name]).astype(float)
    return Study(
        sweep=sweep,
        revision=revisions[sweep],
        question=_question(root, sweep, revisions[sweep]),
        cells=cells,
        axes=tuple(name for name in names if cells[name].nunique() > 1),
        measures=measures,
    )


def cells_sql(sweep: str) -> str:
    """The query that gives one row per cell: its recipe, state, and every metric of its last checkpoint."""
    return f"""select t.*, c.state, c.reason, c.checkpoints_done, c.checkpoints_asked, c.evaluations_done,
       c.evaluations_asked, f.* exclude ({", ".join(TRIALS.names)})
from trials t
join cells c using (sweep, revision, trial)
left join final f on f.sweep = t.sweep and f.trial = t.trial
where t.sweep = '{sweep}'
order by t.trial"""


def relative_learning_rates(cells: pd.DataFrame) -> pd.Series[float]:
    """Peak learning rate over the commonest one of the same family and size (the lowest of several): no unit.

    Rules give each size its own rate, so cells of one recipe agree in this number and not in the rate itself.
    """
    usual = cells.groupby(["family", "scale"])["peak_lr"].transform(lambda rates: rates.mode().min())
    return (cells["peak_lr"] / usual).map(lambda ratio: float(f"{ratio:.6g}"))


def findings(study: Study, mixed: Sequence[str] | None = None) -> Findings:
    """The statistics of a study.

    mixed   outcomes that get a mixed-effects model; default: all that come from fine-tuning
    """
    return analyse(study.cells, **questions(study, mixed))


class Questions(TypedDict):
    """What statistics.analyse is asked about the cells."""

    axes: Sequence[str]
    predictors: Sequence[str]
    outcomes: Sequence[str]
    mixed: Sequence[str]


def questions(study: Study, mixed: Sequence[str] | None = None) -> Questions:
    """As findings asks them; the loss in distribution is a predictor too, since geometry has to beat it."""
    loss = [] if study.main_loss is None else [study.main_loss]
    return {
        "axes": study.axes,
        "predictors": [*study.predictors, *loss],
        "outcomes": study.outcomes,
        "mixed": study.of_kind("finetune", "forgetting") if mixed is None else mixed,
    }


def as_json(study: Study, found: Findings) -> dict[str, Any]:
    """Study and findings for programs."""
    about = {"sweep": study.sweep, "revision": study.revision, "question": study.question}
    return {**about, "measures": [asdict(measure) for measure in study.measures.values()], **asdict(found)}


# --- parts ----------------------------------------------------------------------------------------------------------


def _axis_columns(varied: Any) -> list[str]:
    """The column of each axis that some cell is varied in, in the order of the sweep file."""
    keys = dict.fromkeys(key for fields in varied for key in fields)
    return list(dict.fromkeys(_COLUMN_OF_AXIS.get(key, key.rpartition(".")[2]) for key in keys))


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Every leaf of a recipe by its own name."""
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {name: value})
    return flat


def _measures(store: Store, sweep: str) -> dict[str, Measure]:
    rows = store.sql(
        """select c.name, c.evaluator, c.metric, c.dataset, c.unit, min(m.convention) as convention
        from result_columns c join current_metrics m on m.metric = c.metric and m.evaluator = c.evaluator
            and m.settings_digest = c.settings_digest and m.dataset is not distinct from c.dataset
            and m.split is not distinct from c.split and m.layer is not distinct from c.layer
        where m.sweep = ? group by all order by c.name""",
        [sweep],
    ).rows()
    found = {}
    for row in rows:
        kind = _kind(row["evaluator"], row["metric"], row["unit"])
        if kind is not None:
            in_distribution = json.loads(row.pop("convention") or "{}").get("in_distribution")
            found[row["name"]] = Measure(kind=kind, in_distribution=in_distribution, **row)
    known = {metric: place for place, metric in enumerate(METRICS)}
    return dict(sorted(found.items(), key=lambda item: known.get(item[1].metric, len(known))))


def _kind(evaluator: str, metric: str, unit: str) -> Kind | None:
    """What part a metric has in the study; None for one that is neither predictor nor outcome."""
    if "geometry" in evaluator:
        if metric in _BOOKKEEPING:
            return None
        return "geometry" if evaluator == "geometry" else "hidden_geometry"
    known = METRICS.get(metric)
    if unit not in ("nats/token", "bits/byte") and (known is None or known.direction == "descriptive"):
        return None
    if "forget" in metric:
        return "forgetting"
    kinds: tuple[Kind, ...] = ("loss", "finetune", "quantize")
    return next((kind for kind in kinds if evaluator.startswith(kind)), "other")


def _question(root: Path, sweep: str, revision: str) -> str:
    try:
        question = json.loads(open_existing(root).plan(sweep, revision).read_text())["question"]
    except FileNotFoundError:
        return ""
    return str(question)
