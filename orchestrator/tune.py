"""Hand legs to Ray Tune and take their outcomes; the only module that knows Tune.

LegQueue -> [tune] -> attempt (in Tune's workers) -> store
Tune is a disposable scheduler: it starts actors, retries what the machine broke, and remembers nothing for us. What is
deterministic (a diverged loss, an input error) is returned as a normal result, since Tune would retry an exception.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.search import Searcher

from orchestrator.legs import Leg, LegQueue
from orchestrator.spec import Execution as SweepExecution
from orchestrator.store import registry
from orchestrator.store.durable import is_full
from orchestrator.store.files import folder_of
from orchestrator.store.layout import StoreLayout
from orchestrator.tracking import Tracking
from trainers.errors import EnvironmentFault, InputError

if TYPE_CHECKING:  # torch is for the workers: the driver does without it
    from orchestrator.attempt import Attempt

PAUSE_SECONDS = 5.0  # between two tries while the disk is full
SLICE_SECONDS = 1.0  # a trial reports, and sees whether it is to stop, about this often

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
        try:
            if self._attempt is None:
                self._attempt = _new_attempt(self._layout, self._config)
            progress = asdict(self._attempt.advance(SLICE_SECONDS, self._stop_asked))
        except InputError as error:
            progress = {"state": "failed", "detail": str(error)}
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
        return {"state": "failed" if self._stop else "paused", "detail": str(fault)}

    def _stop_asked(self) -> bool:
        """Whether the session is asked to stop; looks at the disk a few times a second only."""
        if not self._stop and (now := time.monotonic()) > self._next_look:
            self._next_look = now + (1.0 if self._layout.files.remote else 0.25)
            self._stop = self._layout.files.exists(stop_file(self._layout, self._config["sweep"]))
        return self._stop

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune asks when a trial ends; our checkpoints are in the store already."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """A retry finds its state in the store."""


def stop_file(layout: StoreLayout, sweep: str) -> Path:
    """While this file exists, the attempts of a sweep save their state and end."""
    return layout.lease(f"{sweep}.stop")


def _new_attempt(layout: StoreLayout, config: Mapping[str, Any]) -> Attempt:
    from orchestrator.attempt import Attempt
    from trainers.loop import Execution

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
        attempt=registry.next_attempt(layout, leg.segments[0].id),
    )


class _NotInSnapshots:
    """Tune pickles itself now and then; nothing of ours is in those snapshots, since no one restores them."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class _LegSearch(_NotInSnapshots, Searcher):  # type: ignore[misc]
    """Tune's source of trials: a leg each, None while the ready ones wait for their parents."""

    def __init__(
        self, queue: LegQueue, layout: StoreLayout, sweep: str, execution: SweepExecution, listener: Listener
    ) -> None:
        super().__init__(metric=None, mode=None)
        self._queue, self._layout, self._sweep, self._execution = queue, layout, sweep, execution
        self._listener = listener
        self.legs: dict[str, Leg] = {}
        self.stopping = threading.Event()

    def set_search_properties(self, *_args: Any, **_keywords: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        if self.stopping.is_set() or self._queue.exhausted:
            return Searcher.FINISHED
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
            "micro_batch": self._execution.micro_batch,
            "rescue_seconds": self._execution.rescue_seconds,
            "compress_checkpoints": self._execution.compress_checkpoints,
        }

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        leg = self.legs.pop(trial_id)
        outcome = dict(result or {"state": "failed", "detail": "no result"})
        if error:
            outcome = {"state": "failed", "detail": f"gave up after {self._execution.retries + 1} attempts"}
        if outcome["state"] == "committed":
            self._queue.committed(leg)
        else:
            self._queue.lost(leg)
        self._listener(leg, outcome)

    def save(self, _path: str) -> None: ...

    def restore(self, _path: str) -> None: ...


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

    def on_trial_recover(self, *, trial: Any, **_rest: Any) -> None:
        with contextlib.suppress(Exception):
            if leg := self._search.legs.get(trial.trial_id):
                self._listener(leg, {"state": "retrying", "detail": _last_line(trial)})


def _last_line(trial: Any) -> str:
    """What broke an attempt, in one line."""
    error = trial.get_error()
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


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
        listener: Listener,
        tracking: Tracking,
    ) -> None:
        """scratch: a local folder for Tune's own files; nothing in it is ever read again."""
        self._search = _LegSearch(queue, layout, sweep, execution, listener)
        self._layout, self._sweep = layout, sweep
        callbacks = [_Relay(self._search, listener), _TrackingRelay(self._search, tracking)]
        self._tuner = _tuner(self._search, execution, scratch, callbacks)
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


def _tuner(
    search: _LegSearch, execution: SweepExecution, scratch: Path, callbacks: Sequence[tune.Callback]
) -> tune.Tuner:
    def resources(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
        bundle = {"CPU": config["cpus"], **({"GPU": config["gpus"]} if config["gpus"] else {})}
        return tune.PlacementGroupFactory([bundle])

    return tune.Tuner(
        tune.with_resources(LegTrainable, resources),
        tune_config=tune.TuneConfig(search_alg=search, num_samples=-1, reuse_actors=True),
        run_config=tune.RunConfig(
            name="legs",
            storage_path=str(scratch),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=execution.retries),
            callbacks=list(callbacks),
        ),
    )
