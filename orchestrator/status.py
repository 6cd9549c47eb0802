"""Where the sweeps of a store stand, cell by cell, and what a session does now.

store -> query, store/live.py -> [status] -> terminal
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orchestrator.failures import KINDS
from orchestrator.query import Store
from orchestrator.store.live import SILENT_S, LiveSession, MachineUse, RunningLeg, read_live
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
SHOWN_FAILURES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What went wrong, equal cases as one.

    kind    training, evaluation, attempt (died, and was repeated), diverged (a result)
    count   of segments, evaluations, attempts or trials
    retry   the command that tries it again; empty where nothing is to be tried again
    """

    kind: str
    what: str
    reason: str
    count: int
    retry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What the newest session said last, and how many seconds ago; silent: long enough to count as gone."""

    said: LiveSession
    age_s: float

    @property
    def silent(self) -> bool:
        return self.age_s > SILENT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepStatus:
    """One sweep: its cells as the view `cells` has them, how many are in each state, and what went wrong.

    states     a cell whose first segment a session trains right now counts as training
    session    None where no session is at work
    resume     the command that continues the sweep
    """

    sweep: str
    revision: str
    states: dict[str, int]
    cells: list[dict[str, Any]]
    owed: int
    failures: tuple[Failure, ...]
    session: Session | None
    resume: str


def read_status(store: Store, name: str | None, where: str = "") -> list[SweepStatus]:
    """The status of one sweep, or of all in the store; InputError with the nearest name if there is none such.

    where   what the commands that are shown need to find the store: " --store FOLDER", or nothing
    """
    revisions = {
        row["sweep"]: row["revision"] for row in store.sql("select sweep, revision from latest order by 1").rows()
    }
    if name is not None and name not in revisions:
        raise InputError(f"the store has no sweep '{name}'{nearest(name, revisions)}")
    store.keep("evaluations", ("sweep", "revision", "segment", "evaluator", "state", "reason"))
    return [_status(store, sweep, revisions[sweep], where) for sweep in ([name] if name is not None else revisions)]


def as_json(sweeps: Sequence[SweepStatus]) -> list[dict[str, Any]]:
    """The same for programs."""
    return [{**asdict(sweep), "session": _session_as_json(sweep.session)} for sweep in sweeps]


def _session_as_json(session: Session | None) -> dict[str, Any] | None:
    if session is None:
        return None
    return {**session.said.model_dump(mode="json"), "age_s": session.age_s, "silent": session.silent}


def _status(store: Store, sweep: str, revision: str, where: str) -> SweepStatus:
    cells = store.sql("select * exclude (sweep, revision) from cells where sweep = ? order by trial", [sweep]).rows()
    owed = store.sql("select count(*) as n from owed where sweep = ?", [sweep]).rows()[0]["n"]
    live = read_live(store.layout, sweep)
    session = Session(said=live[0], age_s=live[1]) if live else None
    if session and not session.silent:
        begun = {trial for leg in session.said.training for trial in leg.trials}
        cells = [c | {"state": "training"} if c["state"] == "waiting" and c["trial"] in begun else c for c in cells]
    return SweepStatus(
        sweep=sweep,
        revision=revision,
        states=dict(Counter(cell["state"] for cell in cells)),
        cells=cells,
        owed=owed,
        failures=tuple(_failures(store, sweep, where)),
        session=session,
        resume=f"geosweep resume {sweep}{where}",
    )


_FAILED_SEGMENTS = """
    select s.state, s.reason, count(distinct s.segment) as count from segments s
    where s.state in ('failed', 'diverged')
        and s.segment in (select segment from chains join latest using (sweep, revision) where sweep = ?)
    group by all order by count desc, reason"""
_FAILED_EVALUATIONS = """
    select evaluator, reason, count(*) as count from evaluations where sweep = ? and state = 'failed'
    group by all order by count desc, evaluator, reason"""
_DEAD_ATTEMPTS = """
    select kind || ': ' || detail as reason, count(*) as count from events where sweep = ? and list_contains(?, kind)
    group by all order by count desc, reason"""


def _failures(store: Store, sweep: str, where: str) -> Iterator[Failure]:
    ended: dict[str, list[dict[str, Any]]] = {"failed": [], "diverged": []}
    for row in store.sql(_FAILED_SEGMENTS, [sweep]).rows():
        ended[row.pop("state")].append(row)
    for row in ended["failed"]:
        yield Failure(kind="training", what="segments failed", **row, retry=f"geosweep resume {sweep}{where}")
    for row in store.sql(_FAILED_EVALUATIONS, [sweep]).rows():
        evaluator = row.pop("evaluator")
        retry = f"geosweep eval {sweep} --evaluators {evaluator} --retry-failed{where}"
        yield Failure(kind="evaluation", what=f"{evaluator} evaluations failed", **row, retry=retry)
    for row in store.sql(_DEAD_ATTEMPTS, [sweep, list(KINDS)]).rows():
        yield Failure(kind="attempt", what="attempts died and were repeated", **row, retry="")
    for row in ended["diverged"]:
        yield Failure(kind="diverged", what="segments diverged, which is a result", **row, retry="")


def show(sweeps: Sequence[SweepStatus], out: Console) -> None:
    """Print a line per sweep, and where there is one sweep only, its cells."""
    out.print(page(sweeps))


def watch(store: Store, name: str | None, out: Console, where: str = "", seconds: float = 2.0) -> None:
    """Draw the page again every few seconds until nothing is left to do; Ctrl-C leaves. Plain once off a terminal."""
    sweeps = read_status(store, name, where)
    if not out.is_terminal:
        show(sweeps, out)
        return
    with Live(page(sweeps), console=out, auto_refresh=False) as live:
        while any(_UNFINISHED & sweep.states.keys() for sweep in sweeps):
            time.sleep(seconds)
            store.refresh()
            sweeps = read_status(store, name, where)
            live.update(page(sweeps), refresh=True)


def page(sweeps: Sequence[SweepStatus]) -> Group:
    """For each sweep a line, a grid of its cells, what trains and what failed; for one alone a table of its cells."""
    if not sweeps:
        return Group(Text("no sweep was submitted to this store yet; start one: geosweep run SWEEP"))
    parts: list[RenderableType] = []
    for sweep in sweeps:
        parts += [_headline(sweep), _grid(sweep), *_session(sweep)]
        if len(sweeps) == 1:
            parts.append(_table(sweep))
        parts += _failed(sweep)
        if _UNFINISHED & sweep.states.keys() and (sweep.session is None or sweep.session.silent):
            parts.append(Text(f"continue: {sweep.resume}"))
    return Group(*parts)


def _headline(sweep: SweepStatus) -> Text:
    line = Text(f"{sweep.sweep} ({sweep.revision}): {len(sweep.cells)} cells: ")
    for place, (state, count) in enumerate(sorted(sweep.states.items())):
        line.append(", " * bool(place)).append(f"{count} {state}", style=_COLOURS.get(state, ""))
    return line.append(f"; {sweep.owed} evaluations owed")


# --- what a session does now ----------------------------------------------------------------------------------------


def _session(sweep: SweepStatus) -> list[RenderableType]:
    if sweep.session is None:
        return []
    said, age = sweep.session.said, duration(sweep.session.age_s)
    who = f"session on {said.host} (process {said.pid})"
    if sweep.session.silent:
        gone = "it was killed, or it cannot write to the store; what is stored is whole"
        return [Text(f"the {who} has said nothing for {age}: {gone}", style="yellow")]
    since = duration((datetime.now(UTC) - said.started).total_seconds())
    names = ", ".join(sorted({evaluation.evaluator for evaluation in said.evaluating}))
    work = f"{len(said.training)} in training, {len(said.evaluating)} in evaluation" + f" ({names})" * bool(names)
    parts: list[RenderableType] = [Text(f"{who} for {since}: {work}; {_machine(said.machine)}")]
    return [*parts, _training(said.training)] if said.training else parts


def _machine(use: MachineUse) -> str:
    gpus = f"GPUs {use.gpus_held:g} of {use.gpus:g}, " * bool(use.gpus)
    memory = f"memory {use.memory_used_bytes / 1e9:.1f} of {use.memory_bytes / 1e9:.1f} GB"
    return f"CPUs {use.cpus_held:g} of {use.cpus:g} ({use.cpu_percent:.0f} % busy), {gpus}{memory}"


def _training(legs: Sequence[RunningLeg]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("in training", no_wrap=True, overflow="ellipsis", min_width=14)
    for name, width in (("tokens", 7), ("of", 7), ("tokens/s", 8), ("loss", 6), ("time left", 9)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    rows = [_row_of_leg(leg) for leg in legs]
    if any(row[-1] for row in rows):
        table.add_column("", no_wrap=True, min_width=8)
    for row in rows:
        table.add_row(*row[: len(table.columns)])
    return table


def _row_of_leg(leg: RunningLeg) -> list[str]:
    first, *others = leg.trials or (leg.segment,)
    return [
        f"+{len(others)} {first}" if others else first,
        f"{leg.tokens:,}",
        f"{leg.to_tokens:,}",
        "" if leg.tokens_per_s is None else f"{leg.tokens_per_s:,.0f}",
        "" if leg.loss is None else f"{leg.loss:.3f}",
        "" if leg.seconds_left is None else duration(leg.seconds_left),
        ", ".join(_notes(leg)),
    ]


def _notes(leg: RunningLeg) -> Iterator[str]:
    if leg.state != "training":
        yield leg.state
    if leg.attempt and leg.attempt > 1:
        yield f"attempt {leg.attempt}"


def duration(seconds: float) -> str:
    """A span of time in one or two units: 41 s, 12 min, 3 h 20 min, 2 d 5 h."""
    hours = int(seconds // 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if hours < 48:
        return f"{hours} h {int(seconds % 3600 // 60)} min"
    return f"{hours // 24} d {hours % 24} h"


# --- cells and failures ---------------------------------------------------------------------------------------------


def _failed(sweep: SweepStatus) -> Iterator[Text]:
    for failure in sweep.failures[:SHOWN_FAILURES]:
        colour = {"diverged": "magenta", "attempt": "yellow"}.get(failure.kind, "red")
        line = Text(f"{failure.count} {failure.what}: ", style=colour)
        again = f"\n  again: {failure.retry}" if failure.retry else ""
        yield line.append(f"{failure.reason}{again}", style="default")
    if len(sweep.failures) > SHOWN_FAILURES:
        yield Text(f"... {len(sweep.failures) - SHOWN_FAILURES} more reasons (--json has all)")


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
