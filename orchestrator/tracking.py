"""Feed the trackers that people have, through Ray Tune's own loggers, and let none of them get in the way.

tune (progress of legs) -> [tracking] -> TensorBoard, Weights & Biases, MLflow
in    the newest step of a leg, about once a second; the whole curve is in the store
out   an entry of the tracker for each leg; where the tracker has no settings of its own, under <store>/track/
not   anything that a result depends on: each tracker works in a thread of its own, and what it raises is said once

Servers, keys and offline modes are the trackers' own settings (MLFLOW_TRACKING_URI, WANDB_MODE, ...).
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ray.tune.logger import LoggerCallback, TBXLoggerCallback

from orchestrator.legs import Leg
from orchestrator.store.layout import StoreLayout

WAITING_POINTS = 1000  # a tracker that falls further behind loses points
END_S = 60.0  # what a tracker may take to finish when the session ends
START_S = 5.0  # what one that has not even started by then may take
_POINT = ("tokens", "loss", "lr", "grad_norm", "tokens_per_s")

Maker = Callable[[], LoggerCallback]


class TrackedLeg:
    """A leg with what Ray's loggers ask of one of Tune's trials.

    trial_id   new in each session
    name       the first trial that the leg belongs to, and where the leg ends
    """

    def __init__(self, tune_id: str, leg: Leg, sweep: str, trial: str, folder: Path) -> None:
        """folder: of the tracker"""
        self.trial_id = tune_id
        self.name = f"{trial}-to-{leg.to_tokens}"
        self.experiment_dir_name = sweep
        self.config = {"sweep": sweep, "trial": trial, "segment": leg.id, **leg.recipe.model_dump(mode="json")}
        self.evaluated_params = self.config
        self._folder = folder / sweep / self.name

    def __str__(self) -> str:
        return self.name

    @property
    def local_path(self) -> str:
        """A folder for the logger's files, made when it asks: MLflow does not, and takes every folder for its own."""
        self.init_local_path()
        return str(self._folder)

    def init_local_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)


def point_of(progress: Mapping[str, Any]) -> dict[str, float] | None:
    """What a tracker gets of a leg's progress; None before the first step. Its clock is the tokens of the trial."""
    if progress.get("loss") is None:
        return None
    return {"training_iteration": progress["tokens"], **{name: progress[name] for name in _POINT}}


class Tracker:
    """One tracker in its thread: what it is too slow for is dropped, what it raises is said once."""

    def __init__(self, name: str, make: Maker, say: Callable[[str], None]) -> None:
        """make, say: called from the thread"""
        self._name, self._make, self._say = name, make, say
        self._calls: queue.Queue[tuple[str, tuple[Any, ...]] | None] = queue.Queue()
        self._started = self._gone = False
        self._said = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def begin(self, leg: TrackedLeg) -> None:
        self._call("log_trial_start", leg)

    def point(self, leg: TrackedLeg, values: Mapping[str, float]) -> None:
        if self._calls.qsize() > WAITING_POINTS:
            self._dropped += 1
        else:
            self._call("log_trial_result", values["training_iteration"], leg, dict(values))

    def end(self, leg: TrackedLeg, failed: bool) -> None:
        self._call("log_trial_end", leg, failed)

    def close(self) -> None:
        """Let it finish what it has, for a while."""
        self._calls.put(None)
        self._thread.join(END_S if self._started else START_S)
        if self._thread.is_alive():
            state = "is still not finished" if self._started else "does not answer"
            self._say(f"tracker {self._name} {state} and is left behind; the store has all that it was to be told")
        elif self._dropped:
            self._say(f"tracker {self._name} was too slow for {self._dropped} points; the store has them")

    def _call(self, method: str, *arguments: Any) -> None:
        if not self._gone:
            self._calls.put((method, arguments))

    def _work(self) -> None:
        try:
            logger = self._make()
            logger.setup()
        except Exception as error:  # noqa: BLE001  a tracker that cannot start is no reason not to train
            self._gone = True
            self._complain("did not start and is left out", error)
            return
        self._started = True
        while call := self._calls.get():
            self._guarded(getattr(logger, call[0]), *call[1])
        self._guarded(logger.on_experiment_end, trials=[])

    def _guarded(self, method: Callable[..., Any], *arguments: Any, **more: Any) -> None:
        try:
            method(*arguments, **more)
        except Exception as error:  # noqa: BLE001  the next point may be taken again; the training goes on
            self._complain("has a fault", error)

    def _complain(self, what: str, error: Exception) -> None:
        if not self._said:
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            self._say(f"tracker {self._name} {what}, the training goes on: {reason}")
        self._said = True


class Tracking:
    """All trackers of a session; called from Tune's thread, which never waits for one."""

    def __init__(
        self,
        makers: Mapping[str, Maker],
        layout: StoreLayout,
        sweep: str,
        trials: Mapping[str, Sequence[str]],
        say: Callable[[str], None],
    ) -> None:
        """trials: segment -> ids of the trials that it belongs to. say: called from the trackers' threads"""
        self._trackers = {name: Tracker(name, make, say) for name, make in makers.items()}
        self._layout, self._sweep, self._trials = layout, sweep, trials
        self._legs: dict[str, dict[str, TrackedLeg]] = {}

    def begin(self, tune_id: str, leg: Leg) -> None:
        """An attempt at a leg begins; a repeated one goes on in the entry that is there."""
        if tune_id not in self._legs:
            trial = next(iter(self._trials.get(leg.id, ())), leg.id)
            self._legs[tune_id] = {
                name: TrackedLeg(tune_id, leg, self._sweep, trial, self._layout.tracker(name))
                for name in self._trackers
            }
        for name, tracked in self._legs[tune_id].items():
            self._trackers[name].begin(tracked)

    def point(self, tune_id: str, progress: Mapping[str, Any]) -> None:
        if values := point_of(progress):
            for name, tracked in self._legs.get(tune_id, {}).items():
                self._trackers[name].point(tracked, values)

    def end(self, tune_id: str, *, failed: bool) -> None:
        for name, tracked in self._legs.pop(tune_id, {}).items():
            self._trackers[name].end(tracked, failed)

    def close(self) -> None:
        for tracker in self._trackers.values():
            tracker.close()


# --- the trackers that Ray has loggers for --------------------------------------------------------------------------


def makers_of(names: Sequence[str], layout: StoreLayout, sweep: str) -> dict[str, Maker]:
    """What makes the logger of each tracker that a sweep file names."""
    return {name: partial(_MAKERS[name], layout.tracker(name), sweep) for name in names}


def _tensorboard(_folder: Path, _sweep: str) -> LoggerCallback:
    return TBXLoggerCallback()  # writes to the tracked leg's local_path


def _wandb(folder: Path, sweep: str) -> LoggerCallback:
    from ray.air.integrations.wandb import WandbLoggerCallback

    folder.mkdir(parents=True, exist_ok=True)
    project = os.environ.get("WANDB_PROJECT", "geosweep")
    place = os.environ.get("WANDB_DIR", str(folder))
    return WandbLoggerCallback(project=project, group=sweep, dir=place, upload_timeout=int(END_S / 2))


def _mlflow(folder: Path, sweep: str) -> LoggerCallback:
    from ray.air.integrations.mlflow import MLflowLoggerCallback

    server = os.environ.get("MLFLOW_TRACKING_URI")
    if server is None:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 asks whether files are meant
        server = folder.as_uri()
    return MLflowLoggerCallback(tracking_uri=server, registry_uri=server, experiment_name=sweep)


_MAKERS: Mapping[str, Callable[[Path, str], LoggerCallback]] = MappingProxyType(
    {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
)
