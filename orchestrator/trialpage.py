"""One cell of a sweep, whole: recipe, segments, curve, checkpoints, metrics, events.

store -> query -> [trialpage] -> terminal
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.query import Store
from trainers.errors import InputError, nearest

SPARK = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 60
SHOWN_EVENTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialStatus:
    """One trial of a sweep's current revision. curve: tokens and training loss (nats) of every step in the store."""

    sweep: str
    trial: str
    state: str
    reason: str | None
    recipe: dict[str, Any]
    varied: dict[str, Any]
    segments: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    curve: list[tuple[int, float]]
    events: list[dict[str, Any]]


def read_trial(store: Store, trial: str, sweep: str | None = None) -> TrialStatus:
    """The trial whose id begins with `trial`; InputError if none does, or more than one.

    sweep   which sweep's, where several have the trial; None: the first
    """
    known = store.sql("select sweep, trial from cells order by all").rows()
    found = [row for row in known if row["trial"].startswith(trial) and sweep in (None, row["sweep"])]
    ids = sorted({row["trial"] for row in found})
    if len(ids) != 1:
        problem = f"{len(ids)} trials begin with '{trial}'" if ids else f"no trial '{trial}'"
        hint = "" if ids else nearest(trial, {row["trial"] for row in known})
        raise InputError(f"{problem}{hint}", ids[:10], "all trials: geosweep status NAME")
    key = [found[0]["sweep"], ids[0]]
    (cell,) = store.sql("select state, reason from cells where sweep = ? and trial = ?", key).rows()
    (row,) = store.sql(
        "select recipe, varied from trials join latest using (sweep, revision) where sweep = ? and trial = ?", key
    ).rows()
    return TrialStatus(
        sweep=key[0],
        trial=key[1],
        state=cell["state"],
        reason=cell["reason"],
        recipe=json.loads(row["recipe"]),
        varied=json.loads(row["varied"]),
        segments=store.sql(_SEGMENTS, key).rows(),
        metrics=store.sql(_METRICS, key).rows(),
        curve=[(point["tokens"], point["loss"]) for point in store.sql(_CURVE, key).rows()],
        events=store.sql(_EVENTS, key).rows(),
    )


_CHAIN = "(select c.* from chains c join latest using (sweep, revision) where c.sweep = ? and c.trial = ?)"
_SEGMENTS = f"""
    select c.segment, c.from_tokens, c.to_tokens, coalesce(s.state, 'waiting') as state, s.attempt, s.host, k.checkpoint
    from {_CHAIN} c left join segments s using (segment)
    left join checkpoints k on k.segment = c.segment and k.tokens = c.to_tokens
    order by c.position"""
_METRICS = f"""
    with measured as (
        select checkpoint, tokens, metric, dataset, value, unit from metrics
        union all select checkpoint, tokens, evaluator || ' failed: ' || reason, null, null, '' from failures)
    select m.* exclude checkpoint
    from {_CHAIN} c join checkpoints k on k.segment = c.segment and k.tokens = c.to_tokens
    join measured m on m.checkpoint = k.checkpoint
    order by m.metric, m.dataset, m.tokens"""
_CURVE = f"select v.tokens, v.loss from {_CHAIN} c join curves v using (segment) order by v.tokens"
_EVENTS = f"""
    select e.time, e.kind, e.attempt, e.host, e.detail, e.segment
    from {_CHAIN} c join events e using (segment) order by e.time"""


def show(trial: TrialStatus, out: Console) -> None:
    """Print the trial from its recipe to its events."""
    out.print(
        f"{trial.trial} of {trial.sweep}: {trial.state}" + f" ({trial.reason})" * bool(trial.reason), markup=False
    )
    for part, fields in trial.recipe.items():
        values = fields if isinstance(fields, Mapping) else {part: fields}
        name = part if isinstance(fields, Mapping) else ""
        out.print(f"  {name:<10} " + ", ".join(f"{key} {value}" for key, value in values.items()), markup=False)
    if trial.curve:
        losses = [loss for _, loss in trial.curve]
        out.print(f"\ntraining loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f} nats a token", markup=False)
    out.print(_table(trial.segments, ("segment", "from_tokens", "to_tokens", "state", "attempt", "host", "checkpoint")))
    if trial.metrics:
        out.print(_metric_table(trial.metrics))
    for event in trial.events[-SHOWN_EVENTS:]:
        when = event["time"].strftime("%Y-%m-%d %H:%M:%S")
        out.print(f"  {when} {event['kind']:<12} {event['segment']} {event['detail']}", markup=False)


def sparkline(values: Sequence[float], width: int = SPARK_WIDTH) -> str:
    """Values as bars of eight heights, at most `width` of them: each the mean of its share of the values."""
    bins = min(width, len(values))
    edges = [round(place * len(values) / bins) for place in range(bins + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARK[round((mean - low) / span * (len(SPARK) - 1))] for mean in means)


def _metric_table(metrics: Sequence[Mapping[str, Any]]) -> Table:
    """One row a metric and dataset, one column a checkpoint."""
    tokens = sorted({row["tokens"] for row in metrics})
    values: dict[tuple[str, str], dict[int, Any]] = {}
    for row in metrics:
        name = (row["metric"] + (f" {row['dataset']}" if row["dataset"] else ""), row["unit"])
        values.setdefault(name, {})[row["tokens"]] = row["value"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("metric", *(f"{count:,}" for count in tokens), "unit"):
        table.add_column(heading, justify="left" if heading in ("metric", "unit") else "right")
    for (metric, unit), by_tokens in values.items():
        table.add_row(metric, *(_text(by_tokens.get(count)) for count in tokens), unit)
    return table


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="right" if name.endswith("tokens") or name == "attempt" else "left")
    for row in rows:
        table.add_row(*(_text(row[name])[:48] for name in names))
    return table


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
