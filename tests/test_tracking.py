"""Trackers: real TensorBoard and MLflow files, read back with their readers; loggers that raise, stall, are absent."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from ray.tune.logger import LoggerCallback
from test_attempt import begin, never, only_leg, planned
from test_spec import sweep_file

from orchestrator import trackers
from orchestrator.query import Store
from orchestrator.spec import parse
from orchestrator.store.layout import StoreLayout
from orchestrator.trackers import require_trackers
from orchestrator.tracking import Maker, Tracking, makers_of
from trainers.errors import InputError

SMALL_SWEEP = {
    "base": {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "token_budget": 65_536},
    "grids": [{"name": "one", "axes": {"seed": [0]}}],
    "evaluations": [],
    "execution": {"track": ["tensorboard", "wandb", "mlflow"]},
}
WANDB_BLOCK = 32_768
POINTS = ("loss", "lr", "grad_norm", "tokens_per_s")


def track(root: Path, makers: dict[str, Maker], said: list[str]) -> dict[int, dict[str, float]]:
    """Train a small leg in short slices and feed the trackers as Tune would; what they were told, by tokens."""
    plan = planned(root)
    leg = only_leg(root, plan)
    trials = {id: [trial.id] for trial in plan.trials for id in trial.chain}
    tracking = Tracking(makers, StoreLayout(root), "small", trials, said.append)
    tracking.begin("t1", leg)
    attempt, told = begin(root, leg), {}
    while True:
        progress = attempt.advance(0.01, never)  # a few steps
        tracking.point("t1", asdict(progress))
        if progress.loss is not None:
            told[progress.tokens] = {name: getattr(progress, name) for name in POINTS}
        if progress.state == "committed":
            break
    tracking.end("t1", failed=False)
    tracking.close()
    return told


def stored_curve(root: Path) -> dict[int, dict[str, float]]:
    with Store(root) as store:
        rows = store.sql(f"select tokens, {', '.join(POINTS)} from curves").rows()
    return {row.pop("tokens"): row for row in rows}


def test_tensorboard_reads_back_the_curve_of_the_store(store_root: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    told = track(store_root, makers_of(["tensorboard"], StoreLayout(store_root), "small"), said)
    (folder,) = (store_root / "track" / "tensorboard" / "small").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    curve = stored_curve(store_root)
    assert max(told) == max(curve)
    for name in POINTS:
        read = {event.step: event.value for event in events.Scalars(f"ray/tune/{name}")}
        assert read == {tokens: pytest.approx(curve[tokens][name], rel=1e-6) for tokens in told}
    assert said == []


def test_mlflow_reads_back_the_curve_of_the_store_and_the_recipe(
    store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    said: list[str] = []
    told = track(store_root, makers_of(["mlflow"], StoreLayout(store_root), "small"), said)
    assert said == []
    client = MlflowClient(tracking_uri=(store_root / "track" / "mlflow").as_uri())
    (entry,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert (entry.info.status, entry.data.params["model/scale"]) == ("FINISHED", "tiny-32")
    for name in POINTS:
        read = {metric.step: metric.value for metric in client.get_metric_history(entry.info.run_id, name)}
        assert read == {tokens: row[name] for tokens, row in told.items()}


class _Raises(LoggerCallback):
    """A tracker whose server answers with an error to all but its setup."""

    def log_trial_start(self, *_: Any, **__: Any) -> None:
        raise ConnectionError("503: the tracker is down\nsecond line")

    log_trial_result = log_trial_end = on_experiment_end = log_trial_start


class _CannotStart(LoggerCallback):
    def setup(self, *_: Any, **__: Any) -> None:
        raise ValueError("no API key")


def test_a_tracker_that_raises_is_named_once_and_the_others_and_the_training_go_on(store_root: Path) -> None:
    said: list[str] = []
    good = makers_of(["tensorboard"], StoreLayout(store_root), "small")
    told = track(store_root, {"raises": _Raises, "cannot": _CannotStart, **good}, said)
    assert sorted(said) == [
        "tracker cannot did not start and is left out, the training goes on: no API key",
        "tracker raises has a fault, the training goes on: 503: the tracker is down",
    ]
    assert told
    assert list((store_root / "track" / "tensorboard" / "small").rglob("events.out.tfevents*"))


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """A tracker whose server takes the connection and never answers, until the test is over."""
    over = threading.Event()
    monkeypatch.setattr("orchestrator.tracking.START_S", 0.01)

    class Stalls(LoggerCallback):
        def setup(self, *_: Any, **__: Any) -> None:
            over.wait()

    yield Stalls
    over.set()


def test_a_tracker_that_never_answers_is_left_behind(store_root: Path, stalled: Maker) -> None:
    said: list[str] = []
    track(store_root, {"stalls": stalled}, said)
    assert said == ["tracker stalls does not answer and is left behind; the store has all that it was to be told"]
    assert len(stored_curve(store_root)) == 32


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "MODULES", {**trackers.MODULES, "mlflow": "no_such_package"})
    spec, _ = parse(sweep_file(execution={"track": ["tensorboard", "mlflow"]}), "small.yaml")
    assert spec is not None
    with pytest.raises(InputError, match=r"execution.track\[1\]: mlflow .* pip install 'geosweep\[mlflow\]'"):
        require_trackers(spec, "small.yaml")


@pytest.mark.parametrize(("given", "words"), [(["wandb", "wandb"], "twice"), (["tensorbord"], "allowed: tensorboard")])
def test_a_tracker_that_is_unknown_or_named_twice_is_refused(given: list[str], words: str) -> None:
    _, (problem,) = parse(sweep_file(execution={"track": given}), "small.yaml")
    assert words in problem


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_session_feeds_wandb_offline_and_trains_though_the_mlflow_server_is_down(
    tmp_path: Path, corpus: Path
) -> None:
    wandb_internal = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    sweep, store = tmp_path / "small.yaml", tmp_path / "store"
    sweep.write_text(sweep_file(**SMALL_SWEEP))
    shutil.copytree(corpus, store / "corpora" / "builtin")
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "run", str(sweep), "--store", str(store)],
        capture_output=True,
        text=True,
        env={**os.environ, "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "http://127.0.0.1:1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tracker mlflow does not answer and is left behind" in done.stdout
    assert list((store / "track" / "tensorboard").rglob("events.out.tfevents*"))
    (file,) = (store / "track" / "wandb").glob("wandb/offline-run-*/*.wandb")
    curve, read = stored_curve(store), list(wandb_points(file, wandb_internal))
    assert read
    for point in read:
        assert {name: point[name] for name in POINTS} == curve[point["tokens"]]


def wandb_points(file: Path, wandb_internal: Any) -> Iterator[dict[str, float]]:
    """The points of a W&B log: LevelDB's record format in blocks, after a head of seven bytes."""
    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = WANDB_BLOCK - place % WANDB_BLOCK
        if left < 7:
            place += left
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal.Record()
            record.ParseFromString(parts)
            parts = b""
            if record.WhichOneof("record_type") == "history":
                yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
