"""Evaluate what a sweep has in the store, without training: what it owes, and evaluations that are asked for only now.

sweep in the store, Request -> [backfill] -> evals -> metrics, failures (store)
What is asked for is stored first, under the sweep's current revision: killed and started again, it continues, and
`geosweep resume` does what is left of it too.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml
from pydantic import ValidationError

from evaluators.config import EVALUATOR_SETTINGS, EVALUATOR_VERSIONS, EvaluatorSettings, settings_from
from orchestrator.activity import Activity
from orchestrator.corpora import read_by, require
from orchestrator.driving import only_driver
from orchestrator.evals import EvaluationPool, Ledger
from orchestrator.identity import settings_digest
from orchestrator.plan import Evaluation
from orchestrator.progress import Counts, Screen
from orchestrator.query import Store
from orchestrator.reach import require_visible_store
from orchestrator.run import SessionEnd, poll_seconds, session_ray, stop_signals
from orchestrator.spec import read_text
from orchestrator.store import registry
from orchestrator.store.checkpoints import has_checkpoint
from orchestrator.store.layout import StoreLayout, create_or_open, open_existing, stop_file
from orchestrator.store.live import telling
from orchestrator.store.sweeps import ask, asked_evaluations, require_revision
from trainers.errors import InputError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `geosweep eval` is asked for.

    evaluators   names; those the sweep does not ask for yet get their default settings; empty: all that it asks for
    file         YAML list of {evaluator, settings ...}, as `evaluations:` of a sweep file without `at`
    suite        of evaluators with default settings; None: the corpus that the trials were trained on
    at           checkpoints that get what is asked for only now
    """

    evaluators: tuple[str, ...] = ()
    file: Path | None = None
    suite: str | None = None
    at: Literal["every", "last"] = "every"
    retry_failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The end of one segment of a trial."""

    trial: str
    segment: str
    tokens: int


def evaluate_sweep(
    root: Path, sweep: str, request: Request, screen: Screen, *, actors: int = 2, address: str | None = None
) -> SessionEnd:
    """Make the evaluations that are asked for and can be made, on the checkpoints that are there.

    actors   evaluations at a time;  address   of the Ray cluster that makes them; None: this machine alone
    raises   InputError before anything started; EnvironmentFault where the machine or the store is at fault
    """
    open_existing(root)
    layout = create_or_open(root)
    revision = require_revision(layout, sweep)
    with only_driver(layout, f"eval {sweep}", screen.say):
        known = asked_evaluations(layout, sweep, revision)
        settings = _settings(root, sweep, request, known)
        committed = {id for id, state in registry.segment_states(layout).items() if state == "committed"}
        places = [p for p in _places(root, sweep, request.at) if not _is_gone(layout, p, committed)]
        new = _not_yet_asked(settings, places, known)
        chosen = [e for e in [*known, *new] if not settings or e.settings in settings]
        require(root, sweep, read_by(chosen))
        ask(layout, sweep, revision, new)
        ledger = Ledger(layout, chosen, retry_failed=request.retry_failed)
        return _session(layout, sweep, ledger, committed, screen, actors, address)


def _is_gone(layout: StoreLayout, place: _Place, committed: Collection[str]) -> bool:
    """Whether the checkpoint was there and was not kept: nothing new can be asked of it."""
    return place.segment in committed and not has_checkpoint(layout, layout.checkpoint(place.segment, place.tokens))


def _session(
    layout: StoreLayout,
    sweep: str,
    ledger: Ledger,
    committed: Collection[str],
    screen: Screen,
    actors: int,
    address: str | None,
) -> SessionEnd:
    from cluster.connect import machine_use

    failures: dict[str, str] = {}
    stopping = threading.Event()
    owed = len(ledger.owed(committed))
    before = ledger.done
    if owed:
        activity = Activity(sweep, (), machine_use)
        with (
            screen,
            session_ray(address),
            telling(layout, sweep, activity.look, screen.say),
            stop_signals(stopping, screen),
        ):
            if address is not None:
                require_visible_store(layout)
            layout.files.remove(stop_file(layout, sweep))
            pool = EvaluationPool(layout, ledger, min(actors, owed), committed)
            while pool.poll(committed) and not stopping.is_set() and not layout.files.exists(stop_file(layout, sweep)):
                screen.counts(_counts(ledger, failures))
                activity.evaluations(pool.at_work)
                pool.attend(committed, poll_seconds(layout))
            failures = pool.failures
    return SessionEnd(
        sweep=sweep,
        trained=0,
        evaluated=ledger.done - before - len(failures),
        complete=not ledger.owed(committed),
        stopped=stopping.is_set() or layout.files.exists(stop_file(layout, sweep)),
        problems=tuple(f"{name}: {reason}" for name, reason in failures.items()),
    )


def _counts(ledger: Ledger, failures: dict[str, str]) -> Counts:
    return Counts(
        segments=0,
        segments_done=0,
        evaluations=ledger.asked,
        evaluations_done=ledger.done,
        diverged=0,
        failed=len(failures),
    )


# --- what is asked for ------------------------------------------------------------------------------------------------


def _settings(root: Path, sweep: str, request: Request, known: Sequence[Evaluation]) -> list[EvaluatorSettings]:
    """Settings of the request, filled; none when it names none and all that the sweep asks for is meant."""
    if unknown := [name for name in request.evaluators if name not in EVALUATOR_SETTINGS]:
        problems = [f"no evaluator '{name}'{nearest(name, EVALUATOR_SETTINGS)}" for name in unknown]
        raise InputError(f"--evaluators: {len(unknown)} unknown, nothing was evaluated", problems)
    found: list[EvaluatorSettings] = []
    for name in request.evaluators:
        asked = [e.settings for e in known if e.evaluator == name]
        found += asked or [_defaults(root, sweep, name, request.suite)]
    found += _entries(request.file) if request.file else []
    return [settings for position, settings in enumerate(found) if settings not in found[:position]]


def _defaults(root: Path, sweep: str, evaluator: str, suite: str | None) -> EvaluatorSettings:
    if "suite" not in EVALUATOR_SETTINGS[evaluator].model_fields:
        return settings_from({"evaluator": evaluator})
    return settings_from({"evaluator": evaluator, "suite": suite or _trained_on(root, sweep)})


def _trained_on(root: Path, sweep: str) -> str:
    """The corpus of all trials of a sweep. raises InputError if there is not one"""
    with Store(root) as store:
        sql = "select distinct corpus from trials join latest using (sweep, revision) where sweep = ?"
        corpora = [row["corpus"] for row in store.sql(sql, [sweep]).rows()]
    if len(corpora) != 1 or corpora[0] is None:
        trained = "on no corpus that is known" if corpora == [None] else f"on {', '.join(map(str, corpora))}"
        raise InputError(f"{sweep}: its trials were trained {trained}", next_step="name a suite with --suite")
    return str(corpora[0])


def _entries(path: Path) -> list[EvaluatorSettings]:
    try:
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise InputError(f"{path}: not a list of evaluations such as - {{evaluator: geometry}}")
    found: list[EvaluatorSettings] = []
    problems: list[str] = []
    for position, entry in enumerate(content):
        try:
            found.append(settings_from(entry))
        except (InputError, ValidationError) as error:
            problems.append(f"[{position}]: {error}")
    if problems:
        raise InputError(f"{path}: {len(problems)} faulty evaluations, nothing was evaluated", problems)
    return found


def _places(root: Path, sweep: str, at: Literal["every", "last"]) -> list[_Place]:
    """Where the checkpoints of a sweep are or will be: each once, or the last of each trial."""
    with Store(root) as store:
        sql = """
            select trial, segment, to_tokens as tokens from chains join latest using (sweep, revision)
            where sweep = ? and asked order by trial, position"""
        every = [_Place(**row) for row in store.sql(sql, [sweep]).rows()]
    chosen = every if at == "every" else list({place.trial: place for place in every}.values())
    return list({place.segment: place for place in chosen}.values())


def _not_yet_asked(
    settings: Iterable[EvaluatorSettings], places: Sequence[_Place], known: Sequence[Evaluation]
) -> list[Evaluation]:
    there = {(e.segment, e.evaluator, e.settings_digest) for e in known}
    candidates = [
        Evaluation(
            segment=place.segment,
            tokens=place.tokens,
            evaluator=one.evaluator,
            version=EVALUATOR_VERSIONS[one.evaluator],
            settings=one,
            settings_digest=settings_digest(one.model_dump(mode="json")),
        )
        for one in settings
        for place in places
    ]
    return [e for e in candidates if (e.segment, e.evaluator, e.settings_digest) not in there]
