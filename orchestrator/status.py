"""Where the sweeps of a store stand, cell by cell.

store -> query -> [status] -> terminal
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.query import Store
from trainers.errors import InputError, nearest

_COLOURS = {
    "complete": "green",
    "evaluating": "cyan",
    "training": "blue",
    "waiting": "dim",
    "diverged": "magenta",
    "failed": "red",
}
SHOWN_CELLS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """One sweep: its cells as the view `cells` has them, how many are in each state, and what went wrong."""

    sweep: str
    revision: str
    states: dict[str, int]
    cells: list[dict[str, Any]]
    owed: int
    attempts_died: int


def read_status(store: Store, name: str | None) -> list[SweepStatus]:
    """The status of one sweep, or of all in the store; InputError with the nearest name if there is none such."""
    revisions = {
        row["sweep"]: row["revision"] for row in store.sql("select sweep, revision from latest order by 1").rows()
    }
    if name is not None and name not in revisions:
        raise InputError(f"the store has no sweep '{name}'{nearest(name, revisions)}")
    return [_status(store, sweep, revisions[sweep]) for sweep in ([name] if name is not None else revisions)]


def _status(store: Store, sweep: str, revision: str) -> SweepStatus:
    cells = store.sql("select * exclude (sweep, revision) from cells where sweep = ? order by trial", [sweep]).rows()
    owed = store.sql("select count(*) as n from owed where sweep = ?", [sweep]).rows()[0]["n"]
    died = store.sql("select count(*) as n from events where sweep = ? and kind = 'attempt_died'", [sweep]).rows()[0][
        "n"
    ]
    states = dict(Counter(cell["state"] for cell in cells))
    return SweepStatus(sweep=sweep, revision=revision, states=states, cells=cells, owed=owed, attempts_died=died)


def show(sweeps: Sequence[SweepStatus], out: Console) -> None:
    """Print a line per sweep, and where there is one sweep only, a line per cell."""
    if not sweeps:
        out.print("no sweep was submitted to this store yet; start one: geosweep run SWEEP", markup=False)
    for sweep in sweeps:
        states = ", ".join(f"{count} {state}" for state, count in sorted(sweep.states.items()))
        out.print(
            f"{sweep.sweep} ({sweep.revision}): {len(sweep.cells)} cells: {states}; {sweep.owed} evaluations owed"
            + f"; {sweep.attempts_died} attempts died and were repeated" * bool(sweep.attempts_died),
            markup=False,
        )
        if len(sweeps) == 1:
            _show_cells(sweep, out)


def _show_cells(sweep: SweepStatus, out: Console) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("trial", "state", "tokens", "checkpoints", "evaluations", "reason"):
        table.add_column(
            name, justify="left" if name in ("trial", "state", "reason") else "right", no_wrap=name != "reason"
        )
    for cell in sweep.cells[:SHOWN_CELLS]:
        state = cell["state"]
        table.add_row(
            cell["trial"],
            f"[{_COLOURS.get(state, 'default')}]{state}[/]",
            f"{cell['tokens'] or 0:,}",
            f"{cell['checkpoints_done']}/{cell['checkpoints_asked']}",
            f"{cell['evaluations_done']}/{cell['evaluations_asked']}",
            cell["reason"] or "",
        )
    if len(sweep.cells) > SHOWN_CELLS:
        table.caption = f"... {len(sweep.cells) - SHOWN_CELLS} more cells (--json has all)"
    out.print(table)
    if {"failed", "training", "waiting", "evaluating"} & sweep.states.keys():
        out.print(f"continue: geosweep resume {sweep.sweep}", markup=False)
