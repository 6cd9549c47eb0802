"""Define the views that people query, as SQL over the stored rows.

store/tables.py -> [views] -> query.py
in    tables stored_<table>: every row that was ever acknowledged, kept apart from the names that people use
out   one view per table of schema.TABLES (one row per key) and those of schema.VIEWS
not   reading files, running SQL
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType

from orchestrator.schema import TABLES, TRIALS

TABLE_VIEWS: Mapping[str, str] = MappingProxyType(
    {
        name: f"select * from stored_{name}"
        for name in TABLES
        # A unit is one file and its rows have different keys, so only segments and curves can hold a key twice: where
        # they do, segments_view and curves_view take the place of these.
    }
)

REPEATED_QUERIES: Mapping[str, str] = MappingProxyType(
    {
        "segments": "select segment from stored_segments group by segment having count(*) > 1",
        "curves": "select segment from stored_curves group by segment having min(attempt) < max(attempt)",
    }
)
"""Which segments have several rows of a key in one of these tables."""

STATE_VIEWS: Mapping[str, str] = MappingProxyType(
    {
        "latest": """
            select sweep, detail as revision, time from events where kind = 'sweep_submitted'
            qualify row_number() over (partition by sweep order by time desc, event desc) = 1""",
        "trial_checkpoints": """
            select c.sweep, c.revision, c.trial, c.position, c.segment, k.tokens, k.checkpoint
            from chains c
            join latest using (sweep, revision)
            join checkpoints k on k.segment = c.segment and k.tokens = c.to_tokens
            where c.asked""",
        # Of two versions of one evaluator, a sweep is asked about the newer only.
        "evaluations": """
            with several as (
                select sweep, evaluator from asked join latest using (sweep, revision)
                group by all having min(evaluator_version) < max(evaluator_version)
            ), newest as (
                select sweep, segment, evaluator, settings_digest, max(evaluator_version) as newest
                from asked join latest using (sweep, revision) semi join several using (sweep, evaluator) group by all
            ), current_asked as (
                select a.* from asked a join latest using (sweep, revision)
                left join newest n using (sweep, segment, evaluator, settings_digest)
                where n.newest is null or n.newest = a.evaluator_version
            ), fell as (
                select c.sweep, c.revision, c.trial, min(c.position) as position
                from chains c join segments s on s.segment = c.segment where s.state = 'diverged' group by all
            ), lost as (
                select distinct c.sweep, c.revision, c.segment from chains c
                join fell f on (f.sweep, f.revision, f.trial) = (c.sweep, c.revision, c.trial)
                where c.position >= f.position
            ), measured as (
                select distinct checkpoint, evaluator, settings_digest, evaluator_version from metrics
            ), failed as (
                select checkpoint, evaluator, settings_digest, evaluator_version, arg_max(reason, time) as reason
                from failures group by all
            )
            select a.sweep, a.revision, a.segment, a.tokens, a.evaluator, a.settings_digest, a.evaluator_version,
                a.settings, k.checkpoint, k.checkpoint is not null as ready,
                case when m.checkpoint is not null then 'done' when f.checkpoint is not null then 'failed'
                    when k.checkpoint is not null then 'ready' when lost.segment is not null then 'unreachable'
                    else 'waiting' end as state,
                case when m.checkpoint is null then f.reason end as reason
            from current_asked a
            left join checkpoints k on k.segment = a.segment and k.tokens = a.tokens
            left join lost on (lost.sweep, lost.revision, lost.segment) = (a.sweep, a.revision, a.segment)
            left join measured m on m.checkpoint = k.checkpoint and m.evaluator = a.evaluator
                and m.settings_digest = a.settings_digest and m.evaluator_version = a.evaluator_version
            left join failed f on f.checkpoint = k.checkpoint and f.evaluator = a.evaluator
                and f.settings_digest = a.settings_digest and f.evaluator_version = a.evaluator_version""",
        "owed": "select * from evaluations where state in ('ready', 'waiting')",
        "cells": """
            with chain as (
                select c.sweep, c.revision, c.trial, c.position, c.segment, c.asked, k.tokens, s.state, s.reason
                from chains c
                left join checkpoints k on k.segment = c.segment and k.tokens = c.to_tokens
                left join segments s on s.segment = c.segment
            ), trained as (
                select sweep, revision, trial, coalesce(max(tokens), 0) as tokens,
                    count(*) filter (where asked) as checkpoints_asked,
                    count(tokens) filter (where asked) as checkpoints_done, count(tokens) > 0 as begun,
                    bool_or(coalesce(state, '') = 'diverged') as diverged,
                    bool_or(coalesce(state, '') = 'failed' and tokens is null) as failed,
                    arg_min(reason, position) filter (where tokens is null) as reason
                from chain group by all
            ), evaluated as (
                select c.sweep, c.revision, c.trial,
                    count(*) filter (where e.state = 'done') as evaluations_done,
                    count(*) filter (where e.state = 'failed') as evaluations_failed,
                    count(*) filter (where e.state <> 'unreachable') as evaluations_asked
                from chain c join evaluations e using (sweep, revision, segment) group by all
            ), counted as (
                select t.sweep, t.revision, t.trial, t.token_budget, trained.* exclude (sweep, revision, trial),
                    coalesce(evaluations_done, 0) as evaluations_done,
                    coalesce(evaluations_failed, 0) as evaluations_failed,
                    coalesce(evaluations_asked, 0) as evaluations_asked
                from trials t
                join latest using (sweep, revision)
                join trained using (sweep, revision, trial)
                left join evaluated using (sweep, revision, trial)
            )
            select sweep, revision, trial,
                case when diverged then 'diverged' when failed then 'failed'
                    when not begun then 'waiting' when checkpoints_done < checkpoints_asked then 'training'
                    when evaluations_done + evaluations_failed < evaluations_asked then 'evaluating'
                    else 'complete' end as state,
                tokens, token_budget, checkpoints_done, checkpoints_asked,
                evaluations_done, evaluations_failed, evaluations_asked, reason
            from counted""",
        # One version of an evaluator per sweep, so that a column never mixes two: the one asked for, else the newest.
        "current_metrics": """
            with reached as (
                select p.sweep, m.*
                from (select distinct sweep, checkpoint from trial_checkpoints) p join metrics m using (checkpoint)
            ), chosen as (
                select r.sweep, r.evaluator, coalesce(max(e.evaluator_version), max(r.evaluator_version)) as version
                from (select distinct sweep, evaluator, evaluator_version from reached) r
                left join (select distinct sweep, evaluator, evaluator_version from evaluations) e
                    on e.sweep = r.sweep and e.evaluator = r.evaluator
                group by all
            )
            select r.* from reached r join chosen c on c.sweep = r.sweep and c.evaluator = r.evaluator
                and c.version = r.evaluator_version""",
        # The rank of a checkpoint is the same whatever the settings of geometry: they do not enter it.
        "saturation": """
            with measured as (
                select p.sweep, p.trial, p.tokens, m.evaluator, m.metric, m.settings_digest, m.dataset, m.value,
                    m.convention
                from trial_checkpoints p join current_metrics m on m.sweep = p.sweep and m.checkpoint = p.checkpoint
                where m.value is not null
            ), rank as (
                select sweep, trial, tokens, any_value(value) as effective_rank from measured
                where evaluator = 'geometry' and metric = 'effective_rank' group by all
            ), curve as (
                select m.sweep, m.trial, m.settings_digest, m.dataset, m.tokens, m.value as loss, r.effective_rank,
                    m.convention->>'in_distribution' = 'true' as in_distribution
                from measured m left join rank r using (sweep, trial, tokens)
                where m.evaluator = 'loss' and m.metric = 'loss'
            ), turned as (
                select sweep, trial, dataset, settings_digest, bool_or(in_distribution) as in_distribution,
                    count(*) as checkpoints, arg_min(tokens, (loss, tokens)) as turned_at_tokens,
                    max(tokens) as last_tokens, min(loss) as lowest_loss, arg_max(loss, tokens) as last_loss,
                    arg_min(effective_rank, (loss, tokens)) as rank_at_turn,
                    arg_max(effective_rank, tokens) as last_rank
                from curve group by all
            )
            select *, last_loss - lowest_loss as rise, last_rank - rank_at_turn as rank_change,
                last_loss > lowest_loss and last_rank < rank_at_turn as saturated
            from turned""",
    }
)


def segments_view(repeated: Sequence[str]) -> str:
    """SQL of segments, where an end counts before a failure, and of two ends the newer.

    repeated  answers of REPEATED_QUERIES; without any the table is what it is, and costs no sorting
    """
    if not repeated:
        return TABLE_VIEWS["segments"]
    return """
        select * from stored_segments
        qualify row_number() over (
            partition by segment
            order by case state when 'committed' then 0 when 'diverged' then 1 else 2 end, time desc, reason
        ) = 1"""


def curves_view(repeated: Sequence[str]) -> str:
    """SQL of curves, where the newest attempt counts.

    repeated  answers of REPEATED_QUERIES. They are named, since a filter on other segments would not get past a
              window: one curve would cost a look at all of them
    """
    if not repeated:
        return TABLE_VIEWS["curves"]
    listed = ", ".join(_literal(segment) for segment in repeated)
    return f"""
        select * from stored_curves where segment not in ({listed})
        union all
        select * from stored_curves where segment in ({listed})
        qualify row_number() over (partition by segment, step order by attempt desc) = 1"""


RESULT_COLUMNS_QUERY = """
    select evaluator, settings_digest, metric, dataset, split, layer, min(unit) as unit
    from current_metrics group by all
    order by count(*) desc, evaluator, settings_digest, metric, dataset, split, layer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultColumn:
    """One metric column of results; a row of view result_columns."""

    name: str
    evaluator: str
    settings_digest: str
    metric: str
    dataset: str | None
    split: str | None
    layer: int | None
    unit: str


_FIELDS = tuple(field.name for field in fields(ResultColumn))


def name_result_columns(found: Sequence[Mapping[str, object]]) -> list[ResultColumn]:
    """Give each stored (evaluator, settings, metric, dataset, split, layer) a column name of its own.

    found    answers of RESULT_COLUMNS_QUERY, the most common first: it gets the plain name, the others a part of their
             settings digest behind it
    returns  sorted by name
    """
    used = {name.casefold() for name in (*TRIALS.names, "tokens", "checkpoint")}  # SQL names ignore case
    columns = []
    for row in found:
        name = next(name for name in _names(row) if name.casefold() not in used)
        used.add(name.casefold())
        columns.append(ResultColumn(name=name, **row))  # type: ignore[arg-type]  # the query gives these types
    return sorted(columns, key=lambda column: column.name)


def results_views(columns: Sequence[ResultColumn]) -> dict[str, str]:
    """SQL of result_columns, results and final for these metric columns."""
    values = [f"max(value) filter (where name = '{c.name}') as \"{c.name}\"" for c in columns]
    results = f"""
        with named as (
            select m.sweep, m.checkpoint, c.name, m.value from current_metrics m join result_columns c
            on m.evaluator = c.evaluator and m.settings_digest = c.settings_digest and m.metric = c.metric
            and m.dataset is not distinct from c.dataset and m.split is not distinct from c.split
            and m.layer is not distinct from c.layer
        ), wide as (select {", ".join(["sweep", "checkpoint", *values])} from named group by sweep, checkpoint)
        select t.*, p.tokens, p.checkpoint, wide.* exclude (sweep, checkpoint)
        from trials t
        join trial_checkpoints p using (sweep, revision, trial)
        left join wide on wide.sweep = p.sweep and wide.checkpoint = p.checkpoint"""
    return {
        "result_columns": _listed(columns),
        "results": results,
        "final": "select * from results where tokens = token_budget",
    }


def _names(row: Mapping[str, object]) -> Iterator[str]:
    """Candidates, best first: effective_rank, loss_docs, loss_docs_train, ..._layer3; then with the settings' digest.

    Letters, digits and _ only, so that a name needs no escape in SQL.
    """
    parts = [row["metric"], row["dataset"], row["split"] if row["split"] != "heldout" else None]
    if row["layer"] is not None:
        parts.append(f"layer{row['layer']}")
    plain = re.sub(r"\W+", "_", "_".join(str(part) for part in parts if part is not None))
    yield plain
    with_settings = f"{plain}_{str(row['settings_digest'])[:6]}"
    yield with_settings
    yield from (f"{with_settings}_{n}" for n in itertools.count(2))


def _listed(columns: Sequence[ResultColumn]) -> str:
    """SQL of a table that holds `columns`, of the same types when there are none."""
    typed = ", ".join(f"cast({name} as {'bigint' if name == 'layer' else 'varchar'}) as {name}" for name in _FIELDS)
    rows = [[_literal(getattr(column, name)) for name in _FIELDS] for column in columns]
    values = ", ".join(f"({', '.join(row)})" for row in rows or [["null"] * len(_FIELDS)])
    return f"select {typed} from (values {values}) as listed ({', '.join(_FIELDS)}) where name is not null"


def _literal(value: str | int | None) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "null" if value is None else str(value)
