"""A sweep that loses a machine, a network, its driver and the whole cluster, beside the same one that loses nothing."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from cluster_tools import FRACTIONS, finish, geosweep, rows, start_head, url, wait_until

from cluster.testbed import Bed, Host

TRIALS = 6


def checkpoints(store: Path) -> int:
    return sum(1 for _ in store.glob("checkpoints/*/*/manifest.json"))


def lost_nodes(store: Path) -> int:
    return int(rows(store, "select count(*) as n from events where kind = 'node_lost'")[0]["n"])


def trains(host: Host) -> list[psutil.Process]:
    return host.find("Trainable")


def worker(testbed: Bed, name: str, head: Host) -> Host:
    host = testbed.new_host(name)
    host.start_ray(head.address)
    return host


def lose_a_host(testbed: Bed, store: Path, head: Host, victim: Host) -> Host:
    """Power off a machine that trains; a new one comes."""
    wait_until("the victim trains", lambda: checkpoints(store) >= 3 and trains(victim))
    victim.kill()
    wait_until("its loss is recorded", lambda: lost_nodes(store) >= 1)
    return worker(testbed, "third", head)


def cut_off(store: Path, victim: Host) -> None:
    """Unplug a machine that trains for longer than the health check, then plug it in again.

    The store stays within its reach, which is worse for us: what it still trains has to be refused.
    """
    known, lost = checkpoints(store), lost_nodes(store)
    wait_until("the victim trains", lambda: checkpoints(store) > known and trains(victim))
    victim.cut()
    wait_until("its loss is recorded", lambda: lost_nodes(store) > lost)
    victim.reconnect()
    wait_until("its Ray has ended itself", lambda: not victim.find("raylet/raylet"))


def kill_the_driver(store: Path, head: Host) -> None:
    known = checkpoints(store)
    wait_until("more is trained", lambda: checkpoints(store) > known)
    drivers = head.find("-m orchestrator run")
    assert drivers
    for process in drivers:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(testbed: Bed, undisturbed_store: Path, sweep_file: Path) -> Path:
    finish(geosweep(testbed, "run", str(sweep_file), "--store", str(undisturbed_store)))
    return undisturbed_store


@pytest.fixture(scope="module")
def story(testbed: Bed, lost_store: Path, sweep_file: Path) -> str:
    """The whole story; what the last command printed."""
    store, here = lost_store, ("--store", str(lost_store))
    head = start_head(testbed, "head")
    first, second = worker(testbed, "first", head), worker(testbed, "second", head)
    submitted = finish(geosweep(testbed, "submit", str(sweep_file), "--address", url(head), *here))
    joined = finish(geosweep(testbed, "submit", str(sweep_file), "--address", url(head), *here))
    assert submitted.splitlines()[0].removeprefix("submitted: ") == joined.splitlines()[0].removeprefix("joined: ")

    lose_a_host(testbed, store, head, first)
    cut_off(store, second)
    kill_the_driver(store, head)
    for host in (head, second, testbed.hosts["third"]):
        host.kill()

    anew = start_head(testbed, "anew", cpus=2)
    return finish(geosweep(testbed, "resume", "lost", "--address", url(anew), *here))


def test_every_cell_is_complete_after_a_host_a_network_the_driver_and_the_head_were_lost(
    story: str, lost_store: Path
) -> None:
    cells = rows(lost_store, "select state, evaluations_done, evaluations_asked from cells")
    assert [cell["state"] for cell in cells] == ["complete"] * TRIALS
    assert all(cell["evaluations_done"] == cell["evaluations_asked"] > 0 for cell in cells)
    assert "segments trained" in story


@pytest.mark.parametrize(
    "sql",
    [
        "select segment, tokens, checkpoint, weights_sha256 from checkpoints order by all",
        "select segment, step, tokens, loss, lr, weight_decay, grad_norm from curves order by all",
        "select checkpoint, evaluator, settings_digest, metric, dataset, split, layer, value from metrics order by all",
        "select segment, parent, from_tokens, to_tokens, state, tokens_trained from segments order by all",
    ],
    ids=["checkpoints", "curves", "metrics", "segments"],
)
def test_the_numbers_are_those_of_an_undisturbed_sweep_on_one_host_bit_for_bit(
    story: str, lost_store: Path, undisturbed: Path, sql: str
) -> None:
    expected = rows(undisturbed, sql)
    assert expected
    assert rows(lost_store, sql) == expected


def test_no_segment_is_committed_twice(story: str, lost_store: Path) -> None:
    committed = Counter(
        row["segment"] for row in rows(lost_store, "select segment from events where kind = 'committed'")
    )
    assert committed
    assert set(committed.values()) == {1}


def test_the_events_tell_what_kind_of_failure_each_was(story: str, lost_store: Path) -> None:
    kinds = Counter(row["kind"] for row in rows(lost_store, "select kind from events"))
    assert kinds["node_lost"] >= 2
    assert kinds["failed"] == kinds["unknown"] == kinds["storage_error"] == kinds["out_of_memory"] == 0


def test_what_is_trained_twice_is_at_most_one_interval_a_failure(story: str, lost_store: Path) -> None:
    budget = rows(lost_store, "select max(token_budget) as tokens from trials")[0]["tokens"]
    interval = budget * max(b - a for a, b in pairwise(FRACTIONS))
    sql = (
        "select segment, kind, detail from events where kind in ('node_lost', 'worker_killed', 'resumed') order by time"
    )
    seen: dict[str, int] = {}
    repeated = []
    for event in rows(lost_store, sql):
        if event["kind"] != "resumed":
            if found := re.search(r"last seen at ([\d,]+) tokens", event["detail"]):
                seen[event["segment"]] = int(found[1].replace(",", ""))
        elif event["segment"] in seen:
            resumed = re.search(r"at ([\d,]+) tokens", event["detail"])
            assert resumed
            repeated.append(seen.pop(event["segment"]) - int(resumed[1].replace(",", "")))
    print("tokens trained again after a failure:", repeated)
    assert repeated
    assert max(repeated) <= interval


def test_the_resume_certificate_holds(testbed: Bed, story: str, lost_store: Path) -> None:
    printed = finish(geosweep(testbed, "status", "lost", "--verify", "--json", "--store", str(lost_store)))
    certificates = json.loads(printed)
    assert certificates
    assert all(row["digests_agree"] for row in certificates)
    replayed = [row["replay_difference"] for row in certificates if row["replayed_steps"]]
    assert set(replayed) <= {0.0}
