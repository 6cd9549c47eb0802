"""Joining a cluster, sending it a sweep, stopping it; what can be wrong with address, token, version and store."""

from __future__ import annotations

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_tools import BASE, finish, geosweep, rows, start_head, tokens_of_seconds, url, wait_until

from cluster.testbed import HEAD_PORT, Bed, Host

SECRET = "a-secret-that-no-file-may-hold"
SMALL = {
    "name": "small",
    "question": "does it work on a cluster?",
    "base": {**BASE, "token_budget": 16_384},
    "grids": [{"name": "decay", "axes": {"weight_decay": [0.01, 0.1]}}],
    "checkpoints": {"at_fractions": [0, 1]},
    "evaluations": [{"evaluator": "geometry", "at": "every"}],
    "execution": {"rescue_seconds": 1, "evaluators": 1},
}
METADATA = """
import sys, json
from ray._raylet import GcsClient
from ray._common.usage.usage_constants import CLUSTER_METADATA_KEY
gcs = GcsClient(address=sys.argv[1])
metadata = json.loads(gcs.internal_kv_get(CLUSTER_METADATA_KEY, b"cluster"))
gcs.internal_kv_put(CLUSTER_METADATA_KEY, json.dumps({**metadata, sys.argv[2]: sys.argv[3]}).encode(), True, b"cluster")
print(metadata[sys.argv[2]])
"""


@pytest.fixture(scope="module")
def head(testbed: Bed) -> Host:
    head = start_head(testbed, "head", cpus=1, AWS_SECRET_ACCESS_KEY=SECRET, AWS_ACCESS_KEY_ID="key")
    node = testbed.new_host("node")
    node.start_ray(head.address, AWS_SECRET_ACCESS_KEY=SECRET, AWS_ACCESS_KEY_ID="key")
    return head


def written(folder: Path, **changes: Any) -> str:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return str(path)


def gcs(head: Host) -> str:
    return f"{head.address}:{HEAD_PORT}"


def complete(store: Path) -> bool:
    states = [row["state"] for row in rows(store, "select state from cells where sweep = 'small'")]
    return states == ["complete"] * 2


@pytest.mark.parametrize("by", ["submit", "run"])
def test_a_wrong_token_is_refused_and_the_message_says_where_the_right_one_belongs(
    testbed: Bed, head: Host, tmp_path: Path, shared_store: Path, by: str
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    address = url(head) if by == "submit" else gcs(head)
    arguments = (by, written(tmp_path), "--address", address, "--store", str(shared_store))
    printed = finish(geosweep(testbed, *arguments, RAY_AUTH_TOKEN_PATH=str(wrong)), expected=3)
    assert "the token that was found is not the cluster's" in printed
    assert "RAY_AUTH_TOKEN_PATH" in printed
    assert wrong.stat().st_mode & 0o777 == 0o600, "a token that others can read is closed to them"


def test_a_job_without_the_token_is_refused_by_the_cluster(testbed: Bed, head: Host) -> None:
    body = b'{"entrypoint": "touch /tmp/reached"}'
    for token, refusal in ((None, 401), ("0" * 64, 403)):
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(f"{url(head)}/api/jobs/", body, headers), timeout=20)
        assert caught.value.code == refusal
        caught.value.close()
    assert testbed.token.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("by", "address"), [("submit", "http://127.0.0.1:6398"), ("run", "127.0.0.1:6399")])
def test_an_address_where_nothing_answers_is_named(
    testbed: Bed, tmp_path: Path, shared_store: Path, by: str, address: str
) -> None:
    arguments = (by, written(tmp_path), "--address", address, "--store", str(shared_store))
    printed = finish(geosweep(testbed, *arguments), expected=3)
    assert address.removeprefix("http://") in printed
    assert "nothing answers there" in printed
    assert "nothing was started" in printed


@pytest.mark.parametrize(("field", "value"), [("ray_version", "2.0.1"), ("python_version", "3.8.2")])
def test_another_version_of_ray_or_python_on_the_cluster_is_named_beside_ours(
    testbed: Bed, head: Host, tmp_path: Path, shared_store: Path, field: str, value: str
) -> None:
    before = head.run(sys.executable, "-c", METADATA, gcs(head), field, value).splitlines()[-1]
    try:
        arguments = ("run", written(tmp_path), "--address", gcs(head), "--store", str(shared_store))
        printed = finish(geosweep(testbed, *arguments), expected=3)
    finally:
        head.run(sys.executable, "-c", METADATA, gcs(head), field, before)
    assert value in printed
    assert before in printed
    assert "geosweep submit" in printed


@contextmanager
def hidden(host: Host, folder: Path) -> Iterator[None]:
    """On this host, something else is mounted where the store is."""
    host.run("mount", "-t", "tmpfs", "tmpfs", str(folder))
    try:
        yield
    finally:
        host.run("umount", str(folder))


def test_a_store_that_a_node_does_not_see_is_found_out_before_anything_is_trained(
    testbed: Bed, head: Host, tmp_path: Path, shared_store: Path
) -> None:
    arguments = ("submit", written(tmp_path), "--address", url(head), "--store", str(shared_store), "--follow")
    with hidden(testbed.hosts["node"], shared_store):
        printed = finish(geosweep(testbed, *arguments), expected=3)
    assert "1 of 2 nodes cannot work on this store, nothing was started" in printed
    assert f"node: there is no store at {shared_store}" in printed
    assert rows(shared_store, "select * from segments") == []


def test_trials_that_no_node_can_hold_are_refused_with_what_each_node_has(
    testbed: Bed, head: Host, tmp_path: Path, shared_store: Path
) -> None:
    sweep = written(tmp_path, execution={"resources": {"default": {"cpus": 64}}})
    arguments = ("submit", sweep, "--address", url(head), "--store", str(shared_store), "--follow")
    printed = finish(geosweep(testbed, *arguments), expected=3)
    assert "64 CPU" in printed
    assert "the most that a node has is 1 CPU" in printed
    assert "head: 1 CPU, 0 GPU; node: 1 CPU, 0 GPU" in printed


def test_a_disk_that_gets_full_on_one_node_loses_nothing_and_no_credential_is_left_anywhere(
    testbed: Bed, head: Host, tmp_path: Path, shared_store: Path
) -> None:
    node = testbed.hosts["node"]
    sweep = written(tmp_path, base={**BASE, "token_budget": tokens_of_seconds(shared_store, 10.0)})
    arguments = ("submit", sweep, "--address", url(head), "--store", str(shared_store), "--follow")
    follower = geosweep(testbed, *arguments, AWS_SECRET_ACCESS_KEY=SECRET, AWS_ACCESS_KEY_ID="key")
    wait_until("a checkpoint", lambda: follower.poll() is not None or any(shared_store.glob("checkpoints/*/*/m*")))
    filler = node.scratch / "filler"
    node.run("sh", "-c", f"dd if=/dev/zero of={filler} bs=1M; true")
    try:
        finish(follower)
    finally:
        node.run("rm", str(filler))
    assert complete(shared_store)
    places = [str(shared_store), *(f"/proc/{host.init}/root{host.scratch}" for host in (head, node))]
    found = subprocess.run(["grep", "-rlFI", "--", SECRET, *places], capture_output=True, text=True)
    assert found.stdout == ""
    jobs = urllib.request.Request(
        f"{url(head)}/api/jobs/", headers={"Authorization": f"Bearer {testbed.token.read_text()}"}
    )
    with urllib.request.urlopen(jobs, timeout=20) as answer:
        listed = answer.read().decode()
    assert "geosweep-small" in listed
    assert SECRET not in listed
    assert testbed.token.read_text() not in listed


def test_a_machine_that_is_no_node_drives_the_cluster_and_a_stop_from_elsewhere_saves_its_trials(
    testbed: Bed, head: Host, tmp_path: Path, shared_store: Path
) -> None:
    sweep = written(tmp_path, base={**BASE, "token_budget": tokens_of_seconds(shared_store, 30.0)})
    driver = geosweep(testbed, "run", sweep, "--address", gcs(head), "--store", str(shared_store))
    wait_until("a checkpoint", lambda: driver.poll() is not None or any(shared_store.glob("checkpoints/*/*/m*")))
    assert driver.poll() is None, driver.communicate()[0]
    stopped = finish(geosweep(testbed, "stop", "small", "--store", str(shared_store)))
    assert "small: stopped" in stopped
    printed = finish(driver, expected=130)
    assert "geosweep resume small" in printed
    hosts = {row["host"] for row in rows(shared_store, "select host from events where kind = 'started'")}
    assert hosts <= {"head", "node"}
