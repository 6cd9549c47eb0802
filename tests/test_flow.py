"""The whole flow on a real local Ray: a session, a second that finds nothing to do, and sessions killed at random."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from s3_server import SECRET
from test_store_full_disk import fill, small_disk

from orchestrator.query import Store
from orchestrator.store.copies import put_corpus
from orchestrator.store.files import folder_of
from orchestrator.store.inbox import list_units
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.live import read_live
from orchestrator.store.verify import verify

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

EXECUTION = {"rescue_seconds": 0.3, "evaluators": 1}
SWEEP = {
    "name": "flow",
    "question": "does everything come out the same whatever is killed?",
    "base": {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "token_budget": 24_576},
    "grids": [
        {"name": "decay-seed", "axes": {"weight_decay": [0.01, 0.1], "seed": [0, 1]}},
        {"name": "absurd", "axes": {"learning_rate, clip": [[1e9, 1e9]]}},
    ],
    "checkpoints": {"at_fractions": [0, 0.25, 1]},
    "evaluations": [
        {"evaluator": "geometry", "at": "every"},
        {"evaluator": "loss", "suite": "builtin", "tokens_per_domain": 512, "at": "every"},
    ],
    "execution": EXECUTION,
}
DEADLINE_S = 120


def start(store: Path | str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "orchestrator", *arguments, "--store", str(store)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ, start_new_session=True
    )


def finish(process: subprocess.Popen[str], expected: int = 0) -> str:
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == expected, printed
    return printed


def kill_tree(process: subprocess.Popen[str]) -> None:
    """SIGKILL the driver and every process that it started, Ray's among them, in no particular order."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    process.communicate(timeout=DEADLINE_S)
    psutil.wait_procs(family, timeout=DEADLINE_S)


def files_in(store: Path) -> int:
    """How many published files and checkpoint folders the store has: a clock of its progress."""
    return sum(1 for _ in store.glob("inbox/*/*.parquet")) + sum(1 for _ in store.glob("checkpoints/*/*"))


def wait_for_files(process: subprocess.Popen[str], store: Path, count: int) -> bool:
    """Until the store has `count` files or the process has ended; whether it still lives."""
    deadline = time.monotonic() + DEADLINE_S
    while process.poll() is None and files_in(store) < count and time.monotonic() < deadline:
        os.sched_yield()
        time.sleep(0.005)
    return process.poll() is None


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "flow.yaml"
    path.write_text(yaml.safe_dump(SWEEP, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path, sweep_file: Path) -> Path:
    store = tmp_path_factory.mktemp("undisturbed") / "store"
    shutil.copytree(corpus, store / "corpora" / "builtin")
    finish(start(store, "run", str(sweep_file)))
    return store


def rows(store: Path | str, sql: str) -> list[dict[str, Any]]:
    with Store(store) as opened:
        return opened.sql(sql).rows()


def test_a_session_leaves_every_cell_complete_with_geometry_and_six_losses(undisturbed: Path) -> None:
    cells = rows(undisturbed, "select state, evaluations_done, evaluations_asked from cells order by state")
    assert [cell["state"] for cell in cells] == ["complete"] * 4 + ["diverged"]
    assert all(cell["evaluations_done"] == cell["evaluations_asked"] for cell in cells)
    final = rows(undisturbed, "select * from final")
    assert len(final) == 4
    losses = {name for name in final[0] if name.startswith("loss_")}
    assert losses == {"loss_docs", "loss_python", "loss_maths", "loss_cpp", "loss_language", "loss_licences"}
    assert all(row["effective_rank"] > 1 and row["loss_docs"] > 0 for row in final)


def test_the_models_learn(undisturbed: Path) -> None:
    (row,) = rows(
        undisturbed,
        "select max(loss_docs) filter (tokens = 0) as fresh, min(loss_docs) as trained from results",
    )
    assert row["trained"] < row["fresh"] - 0.5


def test_a_loss_that_is_not_finite_is_a_result_with_its_tokens(undisturbed: Path) -> None:
    (ended,) = rows(undisturbed, "select * from segments where state = 'diverged'")
    assert ended["diverged_at_tokens"] == ended["tokens_trained"] > 0
    assert "step" in ended["reason"]
    assert rows(undisturbed, "select count(*) as n from events where kind in ('worker_killed', 'failed')") == [{"n": 0}]


def test_only_the_last_optimizer_state_of_each_trial_is_kept(undisturbed: Path) -> None:
    kept = {path.parent.name for path in undisturbed.glob("checkpoints/*/*/state.parquet")}
    assert kept == {str(SWEEP["base"]["token_budget"])}
    weights = list(undisturbed.glob("checkpoints/*/*/weights.parquet"))
    assert len(weights) == len(rows(undisturbed, "select * from checkpoints"))


def test_a_second_session_trains_nothing_and_starts_no_ray(undisturbed: Path, sweep_file: Path) -> None:
    before = files_in(undisturbed)
    printed = finish(start(undisturbed, "run", str(sweep_file)))
    assert "complete already: nothing was trained or evaluated" in printed
    assert files_in(undisturbed) == before


def test_sessions_killed_at_random_moments_give_the_same_bits(
    tmp_path: Path, corpus: Path, sweep_file: Path, undisturbed: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(corpus, store / "corpora" / "builtin")
    seed = int(os.environ.get("GEOSWEEP_KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"GEOSWEEP_KILL_SEED={seed}")
    moments = random.Random(seed)
    killed = 0
    goal = moments.randrange(6, 14)  # the first files are those of the submitted sweep
    for _ in range(int(os.environ.get("GEOSWEEP_KILLS", "3"))):
        process = start(store, "run", str(sweep_file))
        alive = wait_for_files(process, store, goal)
        if not alive:
            finish(process)
            break
        kill_tree(process)
        killed += 1
        goal = files_in(store) + moments.randrange(1, 16)
    finish(start(store, "run", str(sweep_file)))
    assert killed
    same_results(store, undisturbed)
    nothing_is_trained_after_its_checkpoint(store)


def same_results(store: Path | str, undisturbed: Path) -> None:
    for sql in (
        "select segment, tokens, checkpoint, weights_sha256 from checkpoints order by all",  # digests of all the bits
        "select segment, step, tokens, loss, lr, weight_decay, grad_norm from curves order by all",
        "select checkpoint, evaluator, settings_digest, metric, dataset, split, value, n from metrics order by all",
        "select segment, parent, from_tokens, to_tokens, state, tokens_trained from segments order by all",
        "select * from chains order by all",
        "select trial, state, tokens, evaluations_done from cells order by all",
    ):
        found, expected = rows(store, sql), rows(undisturbed, sql)
        assert expected
        assert found == expected, sql


def nothing_is_trained_after_its_checkpoint(store: Path | str) -> None:
    events = rows(
        store, "select kind, segment from events where kind in ('started', 'resumed', 'committed') order by time"
    )
    committed: Counter[str] = Counter()
    for event in events:
        assert event["kind"] == "committed" or not committed[event["segment"]], event
        committed[event["segment"]] += event["kind"] == "committed"
    assert set(committed.values()) <= {0, 1}
    ended = rows(store, "select segment, tokens_trained from segments where state = 'committed'")
    assert len({row["segment"] for row in ended}) == len(ended)
    assert sum(row["tokens_trained"] for row in ended) == 4 * 24_576


def workers_of(process: subprocess.Popen[str], title: str) -> list[psutil.Process]:
    """Ray's worker processes of a kind, by the title that Ray gives them."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            found += [child] * any(title in part for part in child.cmdline())
    return found


def wait_until(process: subprocess.Popen[str], what: Callable[[], Any]) -> Any:
    """What `what` returns, as soon as that is not empty and while the process lives."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_stops_a_killed_trial_and_evaluators_that_stand_still_leave_the_results_of_an_undisturbed_session(
    tmp_path: Path, corpus: Path, undisturbed: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(corpus, store / "corpora" / "builtin")
    alone = tmp_path / "alone.yaml"  # one trial at a time, so one process less imports in each session
    alone.write_text(yaml.safe_dump({**SWEEP, "execution": {**EXECUTION, "max_trials": 1}}, sort_keys=False))
    every = rows(undisturbed, "select count(*) as n from segments")
    process = start(store, "run", str(alone))
    for signal_number, more in ((signal.SIGINT, 14), (signal.SIGTERM, 4)):
        assert wait_for_files(process, store, files_in(store) + more)
        live = read_live(StoreLayout(store), "flow")
        assert live is not None
        assert (live[0].pid, live[0].machine.cpus) == (process.pid, len(os.sched_getaffinity(0)))
        process.send_signal(signal_number)
        printed = finish(process, expected=130)
        assert f"continue: geosweep resume flow --store {store}" in printed
        assert read_live(StoreLayout(store), "flow") is None
        process = start(store, "resume", "flow")
    try:
        evaluators = wait_until(process, lambda: workers_of(process, "Evaluations"))
        for evaluator in evaluators:
            evaluator.suspend()
        wait_until(process, lambda: workers_of(process, "Trainable"))[0].kill()
        wait_until(process, lambda: rows(store, "select count(*) as n from segments") == every)
        (owed,) = rows(store, "select count(*) as n from owed where ready")
        for evaluator in evaluators:
            evaluator.resume()
        finish(process)
    except BaseException:
        kill_tree(process)
        raise
    assert owed["n"] > 0, "training has ended while evaluations were waiting"
    same_results(store, undisturbed)
    died = rows(store, "select detail from events where kind = 'worker_killed'")
    assert len(died) == 1
    assert died[0]["detail"]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_session_on_s3_that_is_killed_is_resumed_on_another_machine_with_the_bits_of_a_local_one(
    s3_store: str, corpus: Path, sweep_file: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = create_or_open(folder_of(s3_store))
    shutil.copytree(corpus, layout.corpus("builtin"))
    put_corpus(layout.root, "builtin")
    process = start(s3_store, "run", str(sweep_file))
    while process.poll() is None and len(list_units(layout, "metrics")) < 6:
        time.sleep(0.2)
    kill_tree(process)
    monkeypatch.setenv("GEOSWEEP_CACHE", str(layout.root.parent / "another"))
    printed = finish(start(s3_store, "resume", "flow"))
    same_results(s3_store, undisturbed)
    nothing_is_trained_after_its_checkpoint(s3_store)
    assert verify(layout).damaged == []
    written = [path for path in layout.root.parent.rglob("*") if path.is_file()]
    stored = [layout.files.read(path) for path in layout.files.below(layout.root)]
    assert not any(
        SECRET.encode() in content for content in [printed.encode(), *map(Path.read_bytes, written), *stored]
    )


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_session_on_a_full_disk_waits_and_goes_on_with_the_same_results(
    tmp_path: Path, corpus: Path, sweep_file: Path, undisturbed: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "100m"):
        store = disk / "store"
        shutil.copytree(corpus, store / "corpora" / "builtin")
        process = start(store, "run", str(sweep_file))
        assert wait_for_files(process, store, 16)
        filler = fill(create_or_open(store), 0)
        assert process.stdout is not None
        assert any("waits" in line for line in process.stdout)
        filler.unlink()
        finish(process)
        same_results(store, undisturbed)
