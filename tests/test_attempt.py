from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_spec import sweep_file

from orchestrator.attempt import Attempt, Progress
from orchestrator.certificates import read_certificates
from orchestrator.corpora import corpus_facts
from orchestrator.legs import Leg, LegQueue
from orchestrator.plan import Plan, load_plan
from orchestrator.query import Store
from orchestrator.standing import read_standing
from orchestrator.store import registry
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.sweeps import submit
from trainers import checkpoint
from trainers.checkpoint import CurveRecord
from trainers.errors import EnvironmentFault
from trainers.loop import Execution

ONE_THREAD = Execution(device="cpu", threads=1, micro_batch=None, compile=False)
BASE = {"preset": "tiny", "scale": "tiny-32", "context": 32, "token_budget": 8192, "batch_size": 8}


def never() -> bool:
    return False


def planned(root: Path, **changes: Any) -> Plan:
    """The plan of a small sweep, submitted to the store at `root`."""
    text = sweep_file(**{"base": BASE, "grids": [{"name": "one", "axes": {"seed": [0]}}], **changes})
    _, plan = load_plan(text, "small.yaml", corpus_facts(root))
    submit(StoreLayout(root), text, plan)
    return plan


def only_leg(root: Path, plan: Plan) -> Leg:
    """The leg of a plan that is one chain, as far as it is left."""
    leg = LegQueue(read_standing(StoreLayout(root), plan).left).take()
    assert leg is not None
    return leg


def begin(root: Path, leg: Leg, rescue_s: float = 600.0) -> Attempt:
    return Attempt(StoreLayout(root), "small", leg, ONE_THREAD, rescue_s=rescue_s)


def train(root: Path, leg: Leg) -> Progress:
    return begin(root, leg).advance(60.0, never)


def stored(root: Path) -> list[Any]:
    with Store(root) as store:
        return [
            store.sql("select segment, tokens, checkpoint from checkpoints order by all").rows(),
            store.sql("select segment, step, loss, grad_norm from curves order by all").rows(),
            store.sql("select segment, state, tokens_trained from segments order by all").rows(),
        ]


@pytest.fixture
def other_root(tmp_path: Path, store_root: Path) -> Path:
    """A second store with the same corpus."""
    return Path(shutil.copytree(store_root, tmp_path / "other"))


def test_an_attempt_commits_every_checkpoint_of_its_leg_with_the_curve(store_root: Path) -> None:
    plan = planned(store_root)
    progress = train(store_root, only_leg(store_root, plan))
    assert (progress.state, progress.tokens) == ("committed", 8192)
    checkpoints, curve, segments = stored(store_root)
    assert [row["tokens"] for row in checkpoints] == [0, 4096, 8192]
    assert [row["step"] for row in curve] == list(range(1, 33))
    assert [row["tokens_trained"] for row in segments] == [0, 4096, 4096]


def test_an_attempt_killed_after_any_slice_is_continued_with_the_same_bits(store_root: Path, other_root: Path) -> None:
    train(store_root, only_leg(store_root, planned(store_root)))
    leg = only_leg(other_root, planned(other_root))
    for _ in range(200):  # each attempt is dropped after one short slice, as a kill would
        attempt = begin(other_root, leg, rescue_s=0.0)
        if attempt.advance(0.02, never).state == "committed":
            break
        attempt.wait()
    assert stored(other_root) == stored(store_root)


def test_a_stop_leaves_a_rescue_that_the_commit_removes(store_root: Path, other_root: Path) -> None:
    train(store_root, only_leg(store_root, planned(store_root)))
    leg = only_leg(other_root, planned(other_root))
    steps = iter(range(20))
    progress = begin(other_root, leg).advance(60.0, lambda: next(steps, None) is None)
    assert progress.state == "stopped"
    folders = {path.parent.name: path.name for path in (other_root / "checkpoints").glob("*/*")}
    assert folders[progress.segment] == str(progress.tokens)
    assert progress.tokens not in (0, 4096, 8192)
    assert train(other_root, leg).state == "committed"
    assert stored(other_root) == stored(store_root)
    assert sorted(int(path.name) for path in (other_root / "checkpoints").glob("*/*")) == [0, 4096, 8192]


def test_each_state_that_is_trained_on_from_has_a_certificate_and_a_changed_one_does_not_hold(
    store_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leg = only_leg(store_root, planned(store_root))
    steps = iter(range(20))
    begin(store_root, leg).advance(60.0, lambda: next(steps, None) is None)
    begin(store_root, leg, rescue_s=0.0).advance(0.01, never)
    with Store(store_root) as store:
        (certificate,) = read_certificates(store, "small")
    assert certificate["holds"]
    assert (certificate["replayed_steps"], certificate["replay_difference"]) == (2, 0.0)
    assert certificate["sequence_loaded"] == certificate["tokens"] // 32

    recorded = checkpoint.read_curve

    def wrong(folder: Path) -> tuple[CurveRecord, ...]:
        return tuple(replace(record, loss=record.loss + 1e-12) for record in recorded(folder))

    monkeypatch.setattr("orchestrator.attempt.read_curve", wrong)
    begin(store_root, leg, rescue_s=0.0).advance(0.01, never)
    with Store(store_root) as store:
        _, certificate = read_certificates(store, "small")
    assert certificate["digests_agree"]
    assert 0 < certificate["replay_difference"] < 1e-11
    assert not certificate["holds"]


def test_an_attempt_that_was_replaced_while_it_was_away_commits_nothing(store_root: Path, other_root: Path) -> None:
    train(store_root, only_leg(store_root, planned(store_root)))
    leg = only_leg(other_root, planned(other_root))
    away = begin(other_root, leg, rescue_s=0.0)
    assert away.advance(0.0, never).state == "training"
    away.wait()
    newer = begin(other_root, leg)
    assert newer.advance(0.0, never).state == "training"
    newer.wait()
    before = sorted(other_root.glob("checkpoints/*/*"))
    assert away.advance(60.0, never).state == "outdated"
    assert sorted(other_root.glob("checkpoints/*/*")) == before
    assert newer.advance(60.0, never).state == "committed"
    assert stored(other_root) == stored(store_root)
    with Store(other_root) as store:
        (row,) = store.sql("select attempt from segments where to_tokens = 4096").rows()
    assert row["attempt"] == 2


@pytest.mark.parametrize("lost", [("segments",), ("segments", "checkpoints"), ("segments", "checkpoints", "curves")])
def test_a_kill_between_a_checkpoint_and_its_rows_loses_no_row(store_root: Path, lost: tuple[str, ...]) -> None:
    leg = only_leg(store_root, planned(store_root))
    train(store_root, leg)
    before = stored(store_root)
    for table in lost:
        for path in (store_root / "inbox" / table).iterdir():
            path.unlink()
    progress = train(store_root, leg)
    assert progress.state == "committed"
    assert stored(store_root) == before


def test_a_loss_that_is_not_finite_is_stored_as_diverged_with_its_tokens(store_root: Path) -> None:
    plan = planned(store_root, base={**BASE, "learning_rate": 1e9, "clip": 1e9, "schedule": {"warmup_tokens": 0}})
    progress = train(store_root, only_leg(store_root, plan))
    assert progress.state == "diverged"
    assert 0 < progress.tokens < 8192
    with Store(store_root) as store:
        (cell,) = store.sql("select state, reason from cells").rows()
        (segment,) = store.sql("select * from segments where state = 'diverged'").rows()
        newest = store.sql("select max(tokens) as tokens from curves").rows()[0]["tokens"]
    assert cell["state"] == "diverged"
    assert "not finite" in cell["reason"] or "nan" in cell["reason"] or "inf" in cell["reason"]
    assert segment["diverged_at_tokens"] == progress.tokens == newest
    assert registry.segment_states(StoreLayout(store_root))[segment["segment"]] == "diverged"


def test_a_corrupt_checkpoint_is_named_and_nothing_else_is_touched(store_root: Path) -> None:
    plan = planned(store_root)
    train(store_root, only_leg(store_root, plan))
    _, second, third = plan.trials[0].chain
    (damaged,) = (store_root / "checkpoints" / second).glob("4096/weights.parquet")
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for path in (store_root / "inbox" / "segments").glob(f"{third}*"):
        path.unlink()
    shutil.rmtree(store_root / "checkpoints" / third)
    with pytest.raises(EnvironmentFault) as caught:
        train(store_root, only_leg(store_root, plan))
    assert caught.value.kind == "corrupt_file"
    assert str(damaged) in str(caught.value)
    assert caught.value.next_step


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system of our own needs root")
def test_a_full_disk_is_named_and_with_space_the_same_bits_follow(store_root: Path, tmp_path: Path) -> None:
    train(store_root, only_leg(store_root, planned(store_root)))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", small], check=True)
    try:
        root = create_or_open(small / "store").root
        shutil.copytree(store_root / "corpora", root / "corpora", dirs_exist_ok=True)
        leg = only_leg(root, planned(root))
        with pytest.raises(EnvironmentFault) as caught:
            train(root, leg)
        assert caught.value.kind == "storage_error"
        assert "No space left" in str(caught.value)
        assert "free space" in caught.value.next_step
        subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
        assert train(root, leg).state == "committed"
        assert stored(root) == stored(store_root)
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)  # the corpus is still mapped
