"""What a report says in tables: cells and their states, evaluations, where the numbers come from.

store -> query -> study -> [tables] -> page
in    Study; for provenance also the store
out   plain rows of text
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.text import Text

from orchestrator.corpora import corpus_facts
from orchestrator.lint import lint
from orchestrator.plan import load_plan
from orchestrator.query import Store
from orchestrator.report import style
from orchestrator.statistics import Association, Estimate, Findings
from orchestrator.store.layout import open_existing
from orchestrator.store.sweeps import stored_sweep
from orchestrator.study import Kind, Study
from trainers.errors import InputError

SHOWN_EXAMPLES = 6  # of each sort
STATES = ("complete", "evaluating", "training", "waiting", "diverged", "failed")
KINDS: Mapping[Kind, str] = {
    "geometry": "geometry of W",
    "hidden_geometry": "geometry of H",
    "loss": "losses",
    "finetune": "fine-tuning",
    "forgetting": "forgetting",
    "quantize": "quantisation",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Column heads and rows of text; a head that begins with # is a column of numbers."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def unfinished_cells(study: Study) -> Table:
    """Every cell that is not complete, and why."""
    rows = [
        (
            cell["trial"],
            cell["state"],
            f"{cell['checkpoints_done']}/{cell['checkpoints_asked']}",
            f"{cell['evaluations_done']}/{cell['evaluations_asked']}",
            cell["reason"] or "",
        )
        for cell in study.cells.astype(object).where(study.cells.notna(), None).to_dict("records")
        if cell["state"] != "complete"
    ]
    return Table(heads=("trial", "state", "#checkpoints", "#evaluations", "reason"), rows=rows)


def evaluations(study: Study) -> Table:
    """Each kind of evaluation: how many metrics, how many cells have them all."""
    rows = []
    for kind, words in KINDS.items():
        names = list(study.of_kind(kind))
        if not names:
            rows.append((words, "not evaluated in this store", "", ""))
            continue
        evaluators = sorted({study.measures[name].evaluator for name in names})
        whole = int(study.cells[names].notna().all(axis=1).sum())
        rows.append((words, ", ".join(evaluators), str(len(names)), f"{whole} of {len(study.cells)}"))
    return Table(heads=("what", "evaluator", "#metrics", "#trials with all of them"), rows=rows)


def design(root: Path, study: Study) -> Table:
    """What the lint of the stored sweep file says; a file that this version cannot plan says why."""
    heads = ("severity", "what", "what to do")
    path = stored_sweep(open_existing(root), study.sweep)
    try:
        spec, plan = load_plan(path.read_text(encoding="utf-8"), path.name, corpus_facts(root))
    except InputError as error:
        return Table(heads=heads, rows=[("unknown", str(error), error.next_step)])
    return Table(heads=heads, rows=[(one.severity, one.text, one.remedy) for one in lint(spec, plan)])


def examples(study: Study, found: Any) -> Table:
    """The counter-examples by name; found: effects.counterexamples."""
    rank, loss = study.main_rank or "", study.main_loss or ""
    named = found[found["example"].notna()]
    named = named.assign(gap=(named["rank_place"] + named["loss_place"] - 1).abs()).sort_values("gap", ascending=False)
    rows = [
        (
            cell["trial"],
            cell["example"],
            f"{cell[rank]:.4g}",
            f"{cell['rank_place']:.2f}",
            f"{cell[loss]:.4g}",
            f"{cell['loss_place']:.2f}",
            str(cell["peers"]),
        )
        for example in named["example"].unique()
        for cell in named[named["example"] == example].head(SHOWN_EXAMPLES).to_dict("records")
    ]
    heads = ("trial", "what it is", f"#{style.label(study, rank)}", "#place", f"#{style.label(study, loss)}", "#place")
    return Table(heads=(*heads, "#peers"), rows=rows)


def all_associations(study: Study, found: Sequence[Association]) -> Table:
    """Every association with its intervals."""
    rows = [
        (
            style.label(study, one.predictor, unit=False),
            style.label(study, one.outcome, unit=False),
            str(one.n),
            str(one.recipes),
            *(estimate_text(getattr(one, form)) for form in ("raw", "partial", "increment", "beyond_recipe", "mixed")),
            "" if one.baseline_r2 is None else f"{one.baseline_r2:.3f}",
            "; ".join(one.notes),
        )
        for one in found
    ]
    heads = ("metric", "with", "#n", "#recipes", "#raw", "#partial", "#added R²", "#beyond recipe", "#mixed effect")
    return Table(heads=(*heads, "#R² of size, compute, tokens", "notes"), rows=rows)


def show(study: Study, found: Findings, out: Console) -> None:
    """Print the associations of the effective rank and of the loss in distribution in a terminal."""
    out.print(
        f"{study.sweep}: {found.counts.used} of {found.counts.asked} cells, {found.recipes} recipes", markup=False
    )
    for warning in found.warnings:
        out.print(f"  {warning}", style="yellow", markup=False)
    for predictor in (study.main_rank, study.main_loss):
        rows = [one for one in found.associations if one.predictor == predictor]
        if predictor is None or not rows:
            continue
        table = rich.table.Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column(f"{style.label(study, predictor, unit=False)} with")
        for head in ("n", "raw", "partial", "added R²", "beyond recipe"):
            table.add_column(head, justify="right")
        for one in rows:
            texts = [Text(estimate_text(part, 2)) for part in (one.raw, one.partial, one.increment, one.beyond_recipe)]
            table.add_row(Text(style.label(study, one.outcome, unit=False)), str(one.n), *texts)
        out.print(table)
    out.print(
        f"{len(found.associations)} associations in all, with notes: geosweep stats {study.sweep} --json", markup=False
    )


def estimate_text(estimate: Estimate, digits: int = 3) -> str:
    """-0.699 [-0.781, -0.602]; empty without a value."""
    if estimate.value is None:
        return ""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.{digits}f}"
    return f"{estimate.value:+.{digits}f} [{estimate.low:+.{digits}f}, {estimate.high:+.{digits}f}]"


def provenance(store: Store, study: Study) -> Table:
    """Code revisions, package versions, data digests, machines, evaluators: what made the numbers."""
    where = [study.sweep]
    checkpoints = store.sql(
        "select k.code_revision, k.versions, k.dtype, k.bytes, k.time from trial_checkpoints p "
        "join checkpoints k using (checkpoint) where p.sweep = ?",
        where,
    ).rows()
    machines = store.sql(
        "select distinct s.host, s.device, s.threads from chains c join latest using (sweep, revision) "
        "join segments s on s.segment = c.segment where c.sweep = ? order by all",
        where,
    ).rows()
    corpora = study.cells[["corpus", "corpus_digest"]].drop_duplicates().to_dict("records")
    evaluators = store.sql(
        "select evaluator, evaluator_version as version, settings_digest, count(distinct checkpoint) as checkpoints "
        "from current_metrics where sweep = ? group by all order by all",
        where,
    ).rows()
    versions = {text: json.loads(text) for text in {row["versions"] for row in checkpoints} if text}
    rows = [
        ("sweep", f"{study.sweep}, revision {study.revision}"),
        ("code", ", ".join(sorted({row["code_revision"] for row in checkpoints}))),
        *(("packages", ", ".join(f"{k} {v}" for k, v in sorted(found.items()))) for found in versions.values()),
        *(("corpus", f"{row['corpus']}, digest {row['corpus_digest']}") for row in corpora),
        *(("machine", _machine(row)) for row in machines),
        *(("evaluator", _evaluator(row)) for row in evaluators),
        ("checkpoints", f"{len(checkpoints)}, {sum(row['bytes'] for row in checkpoints):,} bytes"),
        ("newest checkpoint", max((f"{row['time']:%Y-%m-%d %H:%M} UTC" for row in checkpoints), default="none")),
    ]
    return Table(heads=("what", "which"), rows=[row for row in rows if row[1]])


def _machine(row: Mapping[str, Any]) -> str:
    threads = f", {row['threads']} threads" if row["threads"] else ""
    return f"{row['host'] or 'unknown host'}: {row['device'] or 'unknown device'}{threads}"


def _evaluator(row: Mapping[str, Any]) -> str:
    return (
        f"{row['evaluator']} version {row['version']}, settings {row['settings_digest']}, "
        f"{row['checkpoints']} checkpoints"
    )
