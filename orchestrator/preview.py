"""All that can be said of a sweep before it starts: its plan, its bill, its lint, and where it stands in the store.

sweep file + store -> [preview] -> plan page, run
in    the text of a sweep file; the folder of a store, which need not exist
out   Preview, plain data
not   changing anything; Ray, torch. What reads the store's tables is loaded only where there is a store: a plan before
      the first session answers at once
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.changes import Changes, changes_since
from orchestrator.corpora import corpus_facts
from orchestrator.cost import Bill, make_bill, over_limits
from orchestrator.legs import Standing, nothing_stored
from orchestrator.lint import Finding, lint
from orchestrator.machines import devices
from orchestrator.plan import Evaluation, Plan, load_plan
from orchestrator.presets import CorpusFacts
from orchestrator.spec import SweepSpec, refuse
from orchestrator.store.files import files_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """A sweep as it would go on from here.

    changes   against the revision that the store was given last; None where it has none
    over      what of the bill is above the sweep's limits
    """

    spec: SweepSpec
    plan: Plan
    standing: Standing
    bill: Bill
    findings: tuple[Finding, ...]
    changes: Changes | None
    over: tuple[str, ...]


def preview(text: str, source: str, root: Path, *, share: bool = True) -> Preview:
    """Look at a sweep file and at the store in `root`, if there is one.

    raises   InputError with every problem of the file at once
    """
    corpora = corpus_facts(root)
    spec, plan = load_plan(text, source, corpora, share=share)
    stored = _read_stored(root, plan) if files_of(root).exists(root / "geosweep.json") else _nothing(plan)
    standing = stored.standing
    bill = make_bill(plan, spec.keep, standing.left, stored.owed, devices(stored.speeds), _domains(corpora))
    return Preview(
        spec=spec,
        plan=plan,
        standing=standing,
        bill=bill,
        findings=lint(spec, plan),
        changes=changes_since(stored.last_plan, plan, standing.left) if stored.last_plan else None,
        over=tuple(over_limits(bill, spec.limits)),
    )


def refuse_above_limits(seen: Preview, source: str) -> None:
    """raises InputError if the plan costs more than its sweep file allows: nothing may start then"""
    if seen.over:
        raise refuse(source, list(seen.over), "the plan is above its limits, nothing was started")


def refuse_warnings(findings: Collection[Finding], source: str) -> None:
    """raises InputError with each warning of the lint and its remedy"""
    warnings = [finding for finding in findings if finding.severity == "warning"]
    if warnings:
        lines = [f"{finding.code}: {finding.text}\n    remedy: {finding.remedy}" for finding in warnings]
        raise refuse(source, lines, "refused because of --strict")


def _domains(corpora: Mapping[str, CorpusFacts]) -> dict[str, int]:
    return {name: facts.heldout_domains for name, facts in corpora.items() if facts.heldout_domains}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What the store says of a plan. last_plan: of the revision that was submitted last, as the store keeps it."""

    standing: Standing
    owed: tuple[Evaluation, ...]
    speeds: tuple[Mapping[str, Any], ...]
    last_plan: Mapping[str, Any] | None


def _nothing(plan: Plan) -> _Stored:
    return _Stored(standing=nothing_stored(plan), owed=plan.evaluations, speeds=(), last_plan=None)


def _read_stored(root: Path, plan: Plan) -> _Stored:
    from orchestrator.evals import Ledger
    from orchestrator.schema import SPEEDS
    from orchestrator.standing import read_standing
    from orchestrator.store.layout import open_existing
    from orchestrator.store.sweeps import current_revision
    from orchestrator.store.tables import read_rows

    layout = open_existing(root)
    standing = read_standing(layout, plan)
    ledger = Ledger(layout, plan.evaluations)
    ledger.owed(standing.committed)
    revision = current_revision(layout, plan.sweep)
    last = json.loads(layout.files.read(layout.plan(plan.sweep, revision))) if revision else None
    speeds = tuple(read_rows(layout, "speeds", SPEEDS.names))
    return _Stored(standing=standing, owed=tuple(ledger.left), speeds=speeds, last_plan=last)
