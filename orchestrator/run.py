"""One session of a sweep: what is left is read from the store, then trained and evaluated side by side.

sweep file + store -> [run] -> tune and evals -> store
The main thread keeps the terminal and the signals and polls the evaluations; Ray Tune works in a thread of its own.
Killed and started again, a session continues: nothing is remembered outside the store.
"""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from orchestrator.activity import Activity, trials_of_segments
from orchestrator.corpora import require_corpora
from orchestrator.driving import Driver, only_driver
from orchestrator.legs import Leg, LegQueue, LegSegment, with_descendants
from orchestrator.placement import Node, places, unplaceable
from orchestrator.plan import Evaluation, Plan
from orchestrator.preview import preview, refuse_above_limits
from orchestrator.progress import Counts, Screen
from orchestrator.reach import require_visible_store
from orchestrator.retention import removable
from orchestrator.spec import SweepSpec
from orchestrator.standing import read_standing
from orchestrator.store import registry
from orchestrator.store.committer import committing
from orchestrator.store.durable import is_full
from orchestrator.store.layout import StoreLayout, create_or_open, stop_file
from orchestrator.store.live import telling
from orchestrator.store.sweeps import asked_evaluations, segments_of_other_sweeps, submit
from orchestrator.trackers import require_trackers
from trainers.errors import EnvironmentFault

if TYPE_CHECKING:  # Ray is for sessions that have something to do
    from orchestrator.evals import EvaluationPool

POLL_S = 0.2
POLL_S_REMOTE = 1.0  # a look at S3 is a request that is paid for
NODES_MAY_COME_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnd:
    """How a session ended.

    trained, evaluated  segments and evaluations that this session added to the store
    complete            every segment is committed or diverged, every evaluation that can be done is done
    stopped             a person or the system asked it to stop
    problems            what failed, one line each
    """

    sweep: str
    trained: int
    evaluated: int
    complete: bool
    stopped: bool
    problems: tuple[str, ...]


def run_sweep(
    text: str, source: str, root: Path, screen: Screen, *, share: bool = True, address: str | None = None
) -> SessionEnd:
    """Do what is left of a sweep.

    text, source  the sweep file and its name for messages;  root  the store's folder, made where there is none
    share         False: each trial trains alone
    address       of the Ray cluster that does it; None: this machine alone
    raises        InputError before anything started, also if the plan is above the sweep's limits; EnvironmentFault
                  where the machine or the store is at fault
    """
    seen = preview(text, source, root, share=share)
    refuse_above_limits(seen, source)
    spec, plan = seen.spec, seen.plan
    require_trackers(spec, source)
    require_corpora(root, plan)
    layout = create_or_open(root)
    with only_driver(layout, f"run {plan.sweep}", screen.say) as driver:
        submit(layout, text, plan)
        session = _Session(layout, spec, plan, screen, driver)
        return session.end() if session.nothing_left() else session.run(address)


def _asked(layout: StoreLayout, plan: Plan) -> list[Evaluation]:
    """What the sweep's file asks for, and what `geosweep eval` added to this revision later."""
    planned = {(e.segment, e.evaluator, e.settings_digest) for e in plan.evaluations}
    stored = asked_evaluations(layout, plan.sweep, plan.revision)
    added = [e for e in stored if (e.segment, e.evaluator, e.settings_digest) not in planned]
    return [*plan.evaluations, *added]


class _Session:
    """The state of one session, all of it derived from the plan and the store."""

    def __init__(self, layout: StoreLayout, spec: SweepSpec, plan: Plan, screen: Screen, driver: Driver) -> None:
        from cluster.connect import machine_use
        from orchestrator.evals import Ledger

        self._driver = driver
        self._layout, self._spec, self._plan, self._screen = layout, spec, plan, screen
        standing = read_standing(layout, plan)
        self._committed, self._diverged = set(standing.committed), set(standing.diverged)
        self._left = {segment.id: segment for segment in standing.left}
        self._segments = len(self._committed.union(self._left))
        self._elsewhere = segments_of_other_sweeps(layout, plan.sweep)
        self._released_at = (-1, -1)
        self._failed: dict[str, str] = {}
        self._committed_before = len(self._committed)
        self._ledger = Ledger(layout, _asked(layout, plan))
        self._ledger.owed(self._committed)
        self._evaluated_before = self._ledger.done
        self._stopping = threading.Event()
        self._faults: list[str] = []
        self._hopeless = ""
        self._seen_at: dict[str, int] = {}
        self._to_store: deque[Callable[[], None]] = deque()
        self._is_full = False
        self._activity = Activity(plan.sweep, plan.trials, machine_use)

    def nothing_left(self) -> bool:
        return self._trained_out() and not self._ledger.owed(self._committed)

    def run(self, address: str | None) -> SessionEnd:
        with (
            self._screen,
            session_ray(address),
            telling(self._layout, self._plan.sweep, self._activity.look, self._screen.say),
            tempfile.TemporaryDirectory(prefix="geosweep-tune-") as scratch,
            committing(self._layout, self._screen.say),
        ):
            if address is not None:
                require_visible_store(self._layout)
            nodes = self._room(NODES_MAY_COME_S if address is not None else 0.0)
            self._work(Path(scratch), places(self._spec.execution, self._scales(), nodes))
        return self.end()

    def _keep_up(self, pool: EvaluationPool) -> bool:
        """Store what is to be stored, hand out what is owed; whether something is left to do. Waits on a full disk."""
        try:
            while self._to_store:
                self._to_store[0]()
                self._to_store.popleft()
            owed = pool.poll(self._committed)
            self._release()
        except EnvironmentFault as fault:
            if not is_full(fault):
                raise
            if not self._is_full:
                self._screen.say(f"the session waits for space: {fault}")
            self._is_full = True
            return True
        self._is_full = False
        return owed > 0 or bool(self._to_store)

    def _attend(self, pool: EvaluationPool, seconds: float) -> None:
        """Wait for the next look at everything; meanwhile no evaluator waits."""
        try:
            pool.attend(self._committed, seconds)
        except EnvironmentFault as fault:
            if not is_full(fault):
                raise
            time.sleep(seconds)  # the next look says so

    def _record(self, kind: str, segment: str, detail: str) -> None:
        """Have the main thread store an event of now: Tune's thread must not wait for a disk."""
        record = partial(registry.record_event, self._layout, kind, self._plan.sweep, segment)
        self._to_store.append(partial(record, detail=detail, time=datetime.now(UTC)))

    def _work(self, scratch: Path, places: int) -> None:
        from orchestrator.evals import EvaluationPool
        from orchestrator.tracking import Tracking, makers_of
        from orchestrator.tune import TuneSession

        queue = LegQueue(tuple(self._left.values()))
        pool = EvaluationPool(self._layout, self._ledger, self._spec.execution.evaluators, self._committed)
        sweep, execution = self._plan.sweep, self._spec.execution
        makers = makers_of(execution.track, self._layout, sweep)
        trials = trials_of_segments(self._plan.trials)
        tracking = Tracking(makers, self._layout, sweep, trials, self._screen.say)
        tune = TuneSession(queue, self._layout, sweep, execution, scratch, places, self._on_progress, tracking)
        with stop_signals(self._stopping, self._screen):
            if not queue.exhausted:
                tune.start()
            told, working = False, True
            while working:
                alive = tune.alive  # before the look at the store: so what a leg did last is seen
                owed = self._keep_up(pool)
                self._screen.counts(self._counts())
                self._require_to_be_current()
                self._look_for_a_stop()
                self._activity.evaluations(pool.at_work)
                if self._stopping.is_set() and not told:
                    tune.stop()
                    told = True
                working = alive or (owed and not told)
                self._attend(pool, poll_seconds(self._layout))
        if self._hopeless:
            raise EnvironmentFault("unknown", self._hopeless, "mend the cause, then give the same command again")
        self._faults += [f"{name}: {reason}" for name, reason in pool.failures.items()]
        if tune.crash:
            raise RuntimeError(f"Ray Tune ended with an exception of its own:\n{tune.crash}")

    def _require_to_be_current(self) -> None:
        """raises EnvironmentFault (store_busy): what our attempts do counts no more; they end with this process"""
        if self._driver.superseded.is_set():
            what = "another driver has taken over this store; this one has stopped"
            raise EnvironmentFault("store_busy", what, "see who it is: geosweep status")

    def _look_for_a_stop(self) -> None:
        """A stop that was asked from elsewhere, another driver, or a fault that every leg has, ends the session."""
        if self._stopping.is_set():
            return
        if self._layout.files.exists(stop_file(self._layout, self._plan.sweep)):
            self._screen.say("stopping, as `geosweep stop` asked: running trials save their state")
            self._stopping.set()
        if self._hopeless:
            self._stopping.set()

    def _scales(self) -> set[str]:
        return {segment.recipe.model.scale for segment in self._left.values()}

    def _room(self, patience_s: float) -> list[Node]:
        """The living nodes. raises EnvironmentFault (no_room) if after so long none could ever hold a trial"""
        from cluster.connect import living_nodes

        until = time.monotonic() + patience_s
        while True:
            nodes = [Node(name=name, has=has) for name, has in sorted(living_nodes(), key=itemgetter(0))]
            lines = unplaceable(self._spec.execution, self._scales(), nodes)
            if not lines:
                return nodes
            if time.monotonic() > until:
                has = "; ".join(map(str, nodes)) or "no node at all"
                what = "\n  ".join(["no node can hold these trials, nothing was trained", *lines, f"there is {has}"])
                raise EnvironmentFault("no_room", what, "change execution.resources, or add such a node")
            time.sleep(POLL_S)

    def _on_progress(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        """A leg moved or ended; called from Tune's thread."""
        ids = [segment.id for segment in leg.segments]
        match progress["state"]:
            case "committed":
                self._commit(ids)
            case "training" | "stopped" if "segment" in progress:  # else it was stopped before it had begun
                self._commit(ids[: ids.index(progress["segment"])])
            case "diverged":
                self._commit(ids[: ids.index(progress["segment"])])
                self._lose(progress["segment"])
                self._screen.say(self._divergence(leg, progress))
            case "died":
                self._record_death(leg, progress)
            case "paused":
                self._screen.say(f"{leg.id} waits: {progress['detail']}")
            case "failed":
                self._fail(leg, progress)
            case "hopeless":
                self._hopeless = progress["detail"]
        if progress["state"] == "training":
            self._seen_at[leg.id] = progress["tokens"]
        self._screen.leg(leg, progress)
        self._activity.leg(leg, progress)

    def _record_death(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        segment = self._open_segment(leg)
        seen = self._seen_at.get(leg.id)
        where = f"; last seen at {seen:,} tokens" if seen is not None else ""
        detail = f"{progress['detail']}{where}"
        self._record(progress["kind"], segment.id, detail)
        self._screen.say(f"an attempt at {segment.id} died ({progress['kind']}): {detail}")

    def _open_segment(self, leg: Leg) -> LegSegment:
        """The first segment of a leg whose checkpoint is not there."""
        return next((s for s in leg.segments if not registry.is_committed(self._layout, s)), leg.segments[-1])

    def _commit(self, ids: Sequence[str]) -> None:
        """Bound anew, never changed in place: the main thread may be reading the old ones."""
        self._committed = self._committed | set(ids)
        self._left = {id: segment for id, segment in self._left.items() if id not in self._committed}

    def _lose(self, diverged: str) -> None:
        """A segment diverged: it and what would start from it are no longer left."""
        self._diverged = self._diverged | {diverged}
        gone = with_descendants(self._plan.segments, [diverged])
        self._left = {id: segment for id, segment in self._left.items() if id not in gone}

    def _release(self) -> None:
        """Remove what the sweep does not keep, once nothing that is left starts from it and no evaluation owes it.

        What another sweep in the store trains or trained through is left alone: its own session decides.
        """
        owing = self._ledger.owing
        standing = (len(self._committed), len(owing))
        if standing == self._released_at:
            return
        mine = self._committed - self._elsewhere
        parts = removable(self._plan, self._spec.keep, mine, tuple(self._left.values()), owing)
        for id in parts.weights:
            registry.release(self._layout, self._plan.segment_by_id[id], self._plan.sweep)
        for id in parts.state:
            registry.release_state(self._layout, self._plan.segment_by_id[id], self._plan.sweep)
        self._released_at = standing

    def _divergence(self, leg: Leg, progress: Mapping[str, Any]) -> str:
        return (
            f"segment {progress['segment']}: {progress['detail']}, after {progress['tokens']:,} of "
            f"{leg.recipe.token_budget:,} tokens, peak lr {leg.recipe.schedule.peak_lr:g}\n"
            f"  stored as 'diverged'; what would start from its end is not trained, the rest goes on"
        )

    def _fail(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        reason = progress["detail"]
        segment = self._open_segment(leg)
        self._commit([s.id for s in leg.segments if s.to_tokens < segment.to_tokens])
        self._failed[segment.id] = reason
        self._to_store.append(partial(registry.commit_failure, self._layout, segment, reason, attempt=0))
        if progress["kind"] == "input_error":
            self._record("input_error", segment.id, reason)
        self._record("failed", segment.id, reason)
        self._screen.say(f"segment {segment.id} failed: {reason}\n  the rest goes on")

    def _trained_out(self) -> bool:
        """Each checkpoint that the sweep wants is committed, or diverged, or behind a diverged one."""
        lost = with_descendants(self._plan.segments, self._diverged)
        wanted = self._plan.segment_by_id.keys() - self._plan.forks
        return wanted <= self._committed | lost

    def _counts(self) -> Counts:
        return Counts(
            segments=self._segments,
            segments_done=len(self._committed),
            evaluations=self._ledger.asked,
            evaluations_done=self._ledger.done,
            diverged=len(self._diverged),
            failed=len(self._failed),
        )

    def end(self) -> SessionEnd:
        owed = self._ledger.owed(self._committed)
        gone = self._ledger.out_of_reach
        not_kept = [f"{gone} evaluations are asked of checkpoints that were not kept: they cannot be made"] * bool(gone)
        return SessionEnd(
            sweep=self._plan.sweep,
            trained=len(self._committed) - self._committed_before,
            evaluated=self._ledger.done - self._evaluated_before,
            complete=self._trained_out() and not owed and not gone,
            stopped=self._stopping.is_set(),
            problems=(*not_kept, *self._faults, *(f"{segment}: {reason}" for segment, reason in self._failed.items())),
        )


def poll_seconds(layout: StoreLayout) -> float:
    """How long a driver waits between two looks at a store."""
    return POLL_S_REMOTE if layout.files.remote else POLL_S


@contextmanager
def session_ray(address: str | None) -> Iterator[None]:
    """The Ray of a session. The workers of a cluster get our code; those of a job have it already."""
    from cluster.code import own_code
    from cluster.connect import ray_session

    if address is None or address == "auto":
        with ray_session(address):
            yield
    else:
        with own_code() as code, ray_session(address, code):
            yield


@contextmanager
def stop_signals(stopping: threading.Event, screen: Screen) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop; a second SIGINT leaves at once."""

    def ask(number: int, _frame: FrameType | None) -> None:
        if stopping.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        stopping.set()
        screen.say("stopping: running trials save their state (Ctrl-C again leaves at once)")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
