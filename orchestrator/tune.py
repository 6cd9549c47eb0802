"""Hand legs to Ray Tune and take their outcomes; the only module that knows Tune.

LegQueue -> [tune] -> attempt (in Tune's workers) -> store
Tune is a disposable scheduler: it starts actors, says which of them died, and remembers nothing for us. What follows a
death (failures.py) is decided here, and the leg goes back into the queue: Tune itself never retries.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import tune
from ray._private.state import actors
from ray.air._internal import usage
from ray.train._internal.session import _TrainingResult
from ray.tune.execution import class_cache
from ray.tune.search import Searcher

from orchestrator.failures import KINDS, Budget, Failure, Kind, classify
from orchestrator.legs import Leg, LegQueue
from orchestrator.placement import bundle_of
from orchestrator.spec import Execution as SweepExecution
from orchestrator.spec import Retries
from orchestrator.store.durable import is_full
from orchestrator.store.files import folder_of
from orchestrator.store.layout import StoreLayout, stop_file
from orchestrator.tracking import Tracking
from trainers.errors import EnvironmentFault, InputError

if TYPE_CHECKING:  # torch is for the workers: the driver does without it
    from orchestrator.attempt import Attempt

PAUSE_SECONDS = 5.0  # between two tries while the disk is full
SILENT_SECONDS = 90.0  # Ray's own default for noticing a machine that is gone is about a minute
SLICE_SECONDS = 1.0  # a trial reports, and sees whether it is to stop, about this often

# Tune would give each trial an environment of its own, with the driver's keys, which the dashboard then shows; workers
# have theirs, and a process that Ray keeps ready can be had only without.
class_cache.ENV_VARS_TO_PROPAGATE.clear()
class_cache.DEFAULT_ENV_VARS.clear()
os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # read in the workers, on whatever machine: they stay where they began

# Tune would import every tracker that is installed, to count ours for usage statistics, which are off
usage.tag_callbacks = lambda _callbacks: False

Listener = Callable[[Leg, Mapping[str, Any]], None]
"""Called with a leg and its newest progress (attempt.Progress as a mapping), from Tune's thread."""


class LegTrainable(tune.Trainable):  # type: ignore[misc]  # Ray is untyped
    """Tune's side of an attempt; one actor trains many legs, one after the other."""

    def setup(self, config: dict[str, Any]) -> None:
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._config = config
        self._layout = StoreLayout(folder_of(config["store"]))
        self._attempt: Attempt | None = None
        self._next_look = 0.0
        self._stop = False

    def step(self) -> dict[str, Any]:
        if self._attempt is None and self._stop_asked():
            return {"state": "stopped", "done": True}
        try:
            if self._attempt is None:
                self._attempt = _new_attempt(self._layout, self._config)
            progress = asdict(self._attempt.advance(SLICE_SECONDS, self._stop_asked))
        except InputError as error:
            progress = {"state": "failed", "kind": "input_error", "detail": str(error)}
        except EnvironmentFault as fault:
            if not is_full(fault):
                raise
            progress = self._pause(fault)
        return {**progress, "done": progress["state"] not in ("training", "paused")}

    def _pause(self, fault: EnvironmentFault) -> dict[str, Any]:
        """Wait a little for space; the next step goes on from what is in the store."""
        self._attempt = None
        until = time.monotonic() + PAUSE_SECONDS
        while time.monotonic() < until and not self._stop_asked():
            time.sleep(0.25)
        return {"state": "stopped" if self._stop else "paused", "detail": str(fault)}

    def _stop_asked(self) -> bool:
        """Whether the session is asked to stop; looks at the disk a few times a second only."""
        if not self._stop and (now := time.monotonic()) > self._next_look:
            self._next_look = now + (1.0 if self._layout.files.remote else 0.25)
            self._stop = self._layout.files.exists(stop_file(self._layout, self._config["sweep"]))
        return self._stop

    def save(self, checkpoint_dir: str | None = None) -> Any:  # noqa: ARG002
        """Tune asks when a trial ends; our checkpoints are in the store, and Tune's folder is on the driver only."""
        return _TrainingResult(checkpoint=None, metrics={})

    def load_checkpoint(self, checkpoint: Any) -> None:
        """A retry finds its state in the store."""


def _new_attempt(layout: StoreLayout, config: Mapping[str, Any]) -> Attempt:
    from orchestrator.attempt import Attempt
    from trainers.loop import Execution

    if not layout.files.exists(layout.marker):  # a node that came after the start, where reach.py looked at all
        what = f"{socket.gethostname()} does not see the store {config['store']}"
        raise EnvironmentFault("storage_error", what, "mount it there, or take the node out of the cluster")
    leg = Leg.model_validate_json(config["leg"])
    execution = Execution(
        device="cuda" if config["gpus"] else "cpu",
        threads=config["cpus"],
        micro_batch=config["micro_batch"],
        compress_checkpoints=config["compress_checkpoints"],
    )
    return Attempt(
        layout,
        config["sweep"],
        leg,
        execution,
        rescue_s=config["rescue_seconds"],
    )


class _NotInSnapshots:
    """Tune pickles itself now and then; nothing of ours is in those snapshots, since no one restores them."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _LegSearch(_NotInSnapshots, Searcher):  # type: ignore[misc]
    """Tune's source of trials: a leg each, None while the ready ones wait for parents, for room or out a delay."""

    def __init__(
        self, queue: LegQueue, layout: StoreLayout, sweep: str, execution: SweepExecution, listener: Listener
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._queue, self._layout, self._sweep, self._execution = queue, layout, sweep, execution
        self._listener = listener
        self._budget = Budget(budgets(execution.retries), execution.retries.equal_faults)
        self._delayed: list[tuple[float, Leg]] = []
        self._silent: list[tuple[float, Leg, Failure, str | None]] = []
        self.legs: dict[str, Leg] = {}
        self.stopping = threading.Event()

    def set_search_properties(self, *_args: Any, **_keywords: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        self._judge_silent()
        if self.stopping.is_set() or self._queue.exhausted:
            return Searcher.FINISHED
        self._end_delays()
        if self._execution.max_trials is not None and len(self.legs) >= self._execution.max_trials:
            return None
        leg = self._queue.take()
        if leg is None:
            return None
        self.legs[trial_id] = leg
        resources = self._execution.resources_of(leg.recipe.model.scale)
        return {
            "leg": leg.to_json(),
            "store": self._layout.url,
            "sweep": self._sweep,
            "cpus": resources.cpus,
            "gpus": resources.gpus,
            "bundle": json.dumps(bundle_of(resources)),
            "micro_batch": self._execution.micro_batch,
            "rescue_seconds": self._execution.rescue_seconds,
            "compress_checkpoints": self._execution.compress_checkpoints,
        }

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        if error:
            return  # `died` follows, with the exception
        leg = self.legs.pop(trial_id)
        outcome = dict(result or {"state": "failed", "kind": "unknown", "detail": "no result"})
        if outcome["state"] == "committed":
            self._queue.committed(leg)
        elif outcome["state"] == "outdated":
            self._queue.again(leg)
        else:
            self._queue.lost(leg)
        self._listener(leg, outcome)

    def died(self, trial_id: str, error: BaseException | str | None) -> None:
        """An attempt ended with an exception: its leg goes back into the queue, or is lost."""
        leg = self.legs.pop(trial_id)
        failure = classify(error)
        if failure.silent and not self.stopping.is_set():
            self._silent.append((time.monotonic() + SILENT_SECONDS, leg, failure, _node_of(error)))
        else:
            self._judge(leg, failure)

    def _judge_silent(self) -> None:
        """Tell a machine that went away from a process that did, once Ray has noticed it or has had its time."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if self._silent else set()
        waiting = []
        for until, leg, failure, node in self._silent:
            if node is not None and node not in alive:
                self._judge(leg, replace(failure, kind="node_lost"))
            elif time.monotonic() > until or self.stopping.is_set():
                self._judge(leg, failure)
            else:
                waiting.append((until, leg, failure, node))
        self._silent = waiting

    def _judge(self, leg: Leg, failure: Failure) -> None:
        verdict = self._budget.judge(leg.id, failure)
        self._listener(leg, {"state": "died", "kind": failure.kind, "detail": failure.detail})
        if verdict.action == "again":
            self._delayed.append((time.monotonic() + verdict.delay_s, leg))
            self._listener(leg, {"state": "retrying", "detail": failure.detail})
            return
        self._queue.lost(leg)
        self._listener(leg, {"state": "failed", "kind": failure.kind, "detail": verdict.reason})
        if verdict.action == "stop":
            self._listener(leg, {"state": "hopeless", "kind": failure.kind, "detail": verdict.reason})

    def _end_delays(self) -> None:
        now = time.monotonic()
        for due, leg in self._delayed:
            if due <= now:
                self._queue.again(leg)
        self._delayed = [(due, leg) for due, leg in self._delayed if due > now]

    def save(self, _path: str) -> None: ...

    def restore(self, _path: str) -> None: ...


def _node_of(error: object) -> str | None:
    """Id of the node that the actor of this error was on; None where Ray does not know any more."""
    with contextlib.suppress(Exception):
        return str(actors(error.actor_id)["Address"]["NodeID"])  # type: ignore[attr-defined]
    return None


def budgets(retries: Retries) -> dict[Kind, int]:
    """How often a leg is begun again after each kind of failure."""
    return {kind: getattr(retries, kind) for kind in KINDS}


class _Relay(_NotInSnapshots, tune.Callback):  # type: ignore[misc]
    """Passes progress on; an exception here would abort the whole sweep, so none leaves it."""

    def __init__(self, search: _LegSearch, listener: Listener) -> None:
        self._search, self._listener = search, listener

    def on_trial_start(self, *, trial: Any, **_rest: Any) -> None:
        with contextlib.suppress(Exception):
            if leg := self._search.legs.get(trial.trial_id):
                self._listener(leg, {"state": "starting"})

    def on_trial_result(self, *, trial: Any, result: Mapping[str, Any], **_rest: Any) -> None:
        with contextlib.suppress(Exception):
            if (leg := self._search.legs.get(trial.trial_id)) and not result.get("done"):
                self._listener(leg, result)

    def on_trial_error(self, *, trial: Any, **_rest: Any) -> None:
        with contextlib.suppress(Exception):
            self._search.died(trial.trial_id, _error_of(trial))


def _error_of(trial: Any) -> BaseException | str | None:
    """What Tune wrote down of a trial's end on this machine: the exception, or its text where that cannot be read."""
    with contextlib.suppress(Exception):
        return pickle.loads(Path(trial.pickled_error_file).read_bytes())  # type: ignore[no-any-return]
    return Path(trial.error_file).read_text() if trial.error_file else None


class _TrackingRelay(_NotInSnapshots, tune.Callback):  # type: ignore[misc]
    """Passes what Tune says on to the trackers."""

    def __init__(self, search: _LegSearch, tracking: Tracking) -> None:
        self._search, self._tracking = search, tracking

    def on_trial_start(self, *, trial: Any, **_rest: Any) -> None:
        if leg := self._search.legs.get(trial.trial_id):
            self._tracking.begin(trial.trial_id, leg)

    def on_trial_result(self, *, trial: Any, result: Mapping[str, Any], **_rest: Any) -> None:
        self._tracking.point(trial.trial_id, result)

    def on_trial_complete(self, *, trial: Any, **_rest: Any) -> None:
        self._tracking.end(trial.trial_id, failed=trial.last_result.get("state") not in ("committed", "stopped"))

    def on_trial_error(self, *, trial: Any, **_rest: Any) -> None:
        self._tracking.end(trial.trial_id, failed=True)

    def on_experiment_end(self, **_rest: Any) -> None:
        self._tracking.close()


class TuneSession:
    """One use of Tune: starts in a thread of its own, so that the main thread keeps the signals and the terminal."""

    def __init__(
        self,
        queue: LegQueue,
        layout: StoreLayout,
        sweep: str,
        execution: SweepExecution,
        scratch: Path,
        places: int,
        listener: Listener,
        tracking: Tracking,
    ) -> None:
        """scratch: a local folder for Tune's own files; nothing in it is ever read again. places: trials at a time"""
        # With a search algorithm Tune starts one process after the other, and whenever no leg waits for a place it ends
        # one that the next leg could have had: each costs seconds of imports.
        os.environ["TUNE_MAX_PENDING_TRIALS_PG"] = str(places)
        self._search = _LegSearch(queue, layout, sweep, execution, listener)
        self._layout, self._sweep = layout, sweep
        callbacks = [_Relay(self._search, listener), _TrackingRelay(self._search, tracking)]
        self._tuner = _tuner(self._search, scratch, callbacks)
        self._thread = threading.Thread(target=self._fit, name="tune", daemon=True)
        self.crash: str | None = None
        layout.files.remove(stop_file(layout, sweep))

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        """No new legs; the running ones save their state and end within a second or two."""
        self._search.stopping.set()
        self._layout.files.replace(stop_file(self._layout, self._sweep), b"")

    def _fit(self) -> None:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        try:
            self._tuner.fit()
        except BaseException:  # noqa: BLE001  a thread's exception would be lost: the session reports it
            self.crash = traceback.format_exc()
        finally:
            self._layout.files.remove(stop_file(self._layout, self._sweep))


def _tuner(search: _LegSearch, scratch: Path, callbacks: Sequence[tune.Callback]) -> tune.Tuner:
    def resources(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([json.loads(config["bundle"])])

    return tune.Tuner(
        tune.with_resources(LegTrainable, resources),
        tune_config=tune.TuneConfig(search_alg=search, num_samples=-1, reuse_actors=True),
        run_config=tune.RunConfig(
            name="legs",
            storage_path=str(scratch),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=0),
            callbacks=list(callbacks),
        ),
    )
