"""Where the sweeps of a store stand, cell by cell.

store -> query -> [status] -> terminal
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.failures import KINDS
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
_UNFINISHED = {"failed", "training", "waiting", "evaluating"}
SHOWN_CELLS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """One sweep: its cells as the view `cells` has them, how many are in each state, and what went wrong."""

    sweep: str
    revision: str
    states: dict[str, int]
    cells: list[dict[str, Any]]
    owed: int
    attempts_died: dict[str, int]


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
    deaths = store.sql("select kind from events where sweep = ? and list_contains(?, kind)", [sweep, list(KINDS)])
    died = dict(Counter(row["kind"] for row in deaths.rows()))
    states = dict(Counter(cell["state"] for cell in cells))
    return SweepStatus(sweep=sweep, revision=revision, states=states, cells=cells, owed=owed, attempts_died=died)


def show(sweeps: Sequence[SweepStatus], out: Console) -> None:
    """Print a line per sweep, and where there is one sweep only, its cells."""
    out.print(page(sweeps))


def watch(store: Store, name: str | None, out: Console, seconds: float = 2.0) -> None:
    """Draw the page again every few seconds until nothing is left to do; Ctrl-C leaves. Plain once off a terminal."""
    sweeps = read_status(store, name)
    if not out.is_terminal:
        show(sweeps, out)
        return
    with Live(page(sweeps), console=out, auto_refresh=False) as live:
        while any(_UNFINISHED & sweep.states.keys() for sweep in sweeps):
            time.sleep(seconds)
            store.refresh()
            sweeps = read_status(store, name)
            live.update(page(sweeps), refresh=True)


def page(sweeps: Sequence[SweepStatus]) -> Group:
    """The whole page: a line per sweep, a grid of its cells; for one sweep a table of them."""
    if not sweeps:
        return Group(Text("no sweep was submitted to this store yet; start one: geosweep run SWEEP"))
    parts: list[RenderableType] = []
    for sweep in sweeps:
        parts += [_headline(sweep), _grid(sweep)]
        if len(sweeps) == 1:
            parts.append(_table(sweep))
        if _UNFINISHED & sweep.states.keys():
            parts.append(Text(f"continue: geosweep resume {sweep.sweep}"))
    return Group(*parts)


def _headline(sweep: SweepStatus) -> Text:
    line = Text(f"{sweep.sweep} ({sweep.revision}): {len(sweep.cells)} cells: ")
    for place, (state, count) in enumerate(sorted(sweep.states.items())):
        line.append(", " * bool(place)).append(f"{count} {state}", style=_COLOURS.get(state, ""))
    line.append(f"; {sweep.owed} evaluations owed")
    if sweep.attempts_died:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(sweep.attempts_died.items()))
        line.append(f"; attempts that died: {kinds}")
    return line


def _grid(sweep: SweepStatus) -> Text:
    """A mark per cell in the order of the table: its colour and its letter say the state."""
    return Text("").join(
        Text(cell["state"][0], style=f"{_COLOURS.get(cell['state'], '')} reverse") for cell in sweep.cells
    )


def _table(sweep: SweepStatus) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("trial", no_wrap=True, overflow="ellipsis")
    table.add_column("state", no_wrap=True, min_width=8)
    for name, width in (("tokens", 11), ("checkpoints", 11), ("evaluations", 11)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    if any(cell["reason"] for cell in sweep.cells):
        table.add_column("reason", overflow="fold")
    for cell in sweep.cells[:SHOWN_CELLS]:
        table.add_row(*_cells_of_row(cell)[: len(table.columns)])
    if len(sweep.cells) > SHOWN_CELLS:
        table.caption = f"... {len(sweep.cells) - SHOWN_CELLS} more cells (--json has all)"
    return table


def _cells_of_row(cell: dict[str, Any]) -> list[Text]:
    return [
        Text(cell["trial"]),
        Text(cell["state"], style=_COLOURS.get(cell["state"], "")),
        Text(f"{cell['tokens'] or 0:,}"),
        Text(f"{cell['checkpoints_done']}/{cell['checkpoints_asked']}"),
        Text(f"{cell['evaluations_done']}/{cell['evaluations_asked']}"),
        Text(cell["reason"] or ""),
    ]
