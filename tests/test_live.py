"""What a session tells others: a whole file while it is at work, none after it, and never a reason to end it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from test_attempt import begin, never, only_leg, planned

from orchestrator.activity import Activity, trials_of_segments
from orchestrator.store import live
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.live import LiveSession, read_live, telling

MACHINE = {"cpus": 4, "cpus_held": 3, "gpus": 1, "gpus_held": 0.5, "cpu_percent": 70.0} | {
    "memory_bytes": 8_000_000_000,
    "memory_used_bytes": 3_000_000_000,
}


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreLayout:
    monkeypatch.setattr(live, "BEAT_S", 0.01)
    return create_or_open(tmp_path / "store")


def looking(beats: int) -> tuple[Callable[[int], LiveSession], threading.Event]:
    """A session that does nothing, and an event that is set when that many beats are on the disk."""
    activity, reached = Activity("small", (), lambda: MACHINE), threading.Event()

    def look(beat: int) -> LiveSession:
        if beat == beats:
            reached.set()
        return activity.look(beat)

    return look, reached


def test_the_file_follows_the_beats_and_goes_with_the_session(layout: StoreLayout) -> None:
    look, reached = looking(3)
    with telling(layout, "small", look, pytest.fail):
        assert reached.wait(30)
        found = read_live(layout, "small")
        assert found is not None
        assert found[0].beat >= 2
        assert (found[0].pid, found[0].machine.memory_bytes) == (os.getpid(), 8_000_000_000)
    assert read_live(layout, "small") is None
    assert not list((layout.root / "temporary").iterdir())


def test_a_store_that_refuses_the_file_is_named_once_and_the_session_goes_on(layout: StoreLayout) -> None:
    (layout.root / "live").rmdir()
    (layout.root / "live").touch()  # no folder
    look, reached = looking(3)
    said: list[str] = []
    with telling(layout, "small", look, said.append):
        assert reached.wait(30)
    (line,) = said
    assert "the session goes on" in line
    assert "Not a directory" in line
    assert not list((layout.root / "temporary").iterdir())


def test_the_age_is_the_files_own_and_what_is_no_session_says_nothing(layout: StoreLayout) -> None:
    session = Activity("small", (), lambda: MACHINE).look(7)
    layout.live("small").write_text(session.model_dump_json())
    an_hour_ago = time.time() - 3600
    os.utime(layout.live("small"), (an_hour_ago, an_hour_ago))
    found = read_live(layout, "small")
    assert found is not None
    assert found[0] == session
    assert 3600 <= found[1] < 3700
    layout.live("small").write_text('{"sweep": "small", "beat')
    assert read_live(layout, "small") is None


def test_a_leg_is_shown_with_its_trials_its_newest_step_and_the_time_left(store_root: Path) -> None:
    plan = planned(store_root)
    leg = only_leg(store_root, plan)
    activity = Activity("small", plan.trials, lambda: MACHINE)
    activity.leg(leg, {"state": "starting"})
    (started,) = activity.look(0).training
    assert (started.state, started.tokens, started.seconds_left) == ("starting", 0, None)
    attempt = begin(store_root, leg)
    progress = attempt.advance(0.01, never)
    while progress.loss is None:  # the first steps wait for the checkpoint of the fresh weights
        progress = attempt.advance(0.01, never)
    activity.leg(leg, asdict(progress))
    (running,) = activity.look(1).training
    assert running.trials == (plan.trials[0].id,)
    assert (running.attempt, running.tokens, running.to_tokens) == (1, progress.tokens, 8192)
    assert running.loss == progress.loss
    assert progress.tokens_per_s is not None
    assert running.seconds_left == pytest.approx((8192 - progress.tokens) / progress.tokens_per_s)
    activity.leg(leg, {"state": "retrying", "detail": "worker died"})
    (again,) = activity.look(2).training
    assert (again.state, again.tokens, again.attempt) == ("retrying", progress.tokens, 1)
    activity.leg(leg, asdict(attempt.advance(60.0, never)))
    assert activity.look(3).training == ()


def test_a_segment_that_trials_share_names_them_all(store_root: Path) -> None:
    schedule = {"shape": "wsd", "warmup_tokens": 512, "decay_fraction": 0.25}
    base = {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "schedule": schedule}
    plan = planned(store_root, base=base, grids=[{"name": "g", "axes": {"token_budget": [4096, 8192]}}])
    found = trials_of_segments(plan.trials)
    shared = [id for id in plan.trials[0].chain if id in plan.trials[1].chain]
    assert shared
    assert all(found[id] == tuple(trial.id for trial in plan.trials) for id in shared)
