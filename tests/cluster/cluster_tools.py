"""Real hosts for the tests of this folder: network namespaces with a Ray node each. They need root's rights."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.testbed import DASHBOARD_PORT, Host, Testbed, wait_for_port
from orchestrator.query import Store

SWEEP = {
    "name": "lost",
    "question": "does everything come out the same whatever machine is lost?",
    "base": {
        "preset": "tiny",
        "scale": "tiny-32",
        "context": 32,
        "batch_size": 8,
        "token_budget": 262_144,
        "repeat": True,
    },
    "grids": [{"name": "decay-seed", "axes": {"weight_decay": [0.01, 0.1], "seed": [0, 1, 2]}}],
    "checkpoints": {"at_fractions": [0, 0.25, 0.5, 1]},
    "evaluations": [{"evaluator": "geometry", "at": "every"}],
    "execution": {"rescue_seconds": 1, "evaluators": 1},
}
DEADLINE_S = 240.0


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    with tempfile.TemporaryDirectory(prefix="gs", dir="/tmp") as folder, Testbed(Path(folder)) as made:
        yield made


@pytest.fixture(scope="session")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "lost.yaml"
    path.write_text(yaml.safe_dump(SWEEP, sort_keys=False))
    return path


@pytest.fixture
def shared_store(tmp_path: Path, corpus: Path) -> Path:
    """The folder of a store that every host sees; no store yet, but its corpus."""
    store = tmp_path / "store"
    shutil.copytree(corpus, store / "corpora" / "builtin")
    return store


def start_head(testbed: Testbed, name: str, cpus: int = 0) -> Host:
    head = testbed.new_host(name)
    head.start_ray(cpus=cpus)
    wait_for_port(head.address, DASHBOARD_PORT)
    return head


def url(head: Host) -> str:
    return f"http://{head.address}:{DASHBOARD_PORT}"


def geosweep(testbed: Testbed, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A command on the machine that the hosts are on, which is no node of any cluster."""
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **testbed.environment, **environment},
    )


def finish(process: subprocess.Popen[str], expected: int = 0) -> str:
    printed, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == expected, printed
    return printed


def wait_until(what: str, happened: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
    """Poll until it is true; a test fails here, with its name, when it never is."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if found := happened():
            return found
        time.sleep(0.1)
    pytest.fail(f"{what}: not within {timeout_s:g} s")


def rows(store: Path, sql: str) -> list[dict[str, Any]]:
    with Store(store) as opened:
        return opened.sql(sql).rows()
