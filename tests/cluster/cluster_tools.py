"""What the tests of this folder share: a sweep, commands beside a cluster, and waiting for what happens."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.testbed import DASHBOARD_PORT, Bed, Host, wait_for_port
from orchestrator.query import Store

SWEEP = {
    "name": "lost",
    "question": "does everything come out the same whatever machine is lost?",
    "base": {
        "preset": "tiny",
        "scale": "tiny-32",
        "context": 32,
        "batch_size": 8,
        "token_budget": 327_680,
        "repeat": True,
    },
    "grids": [{"name": "decay-seed", "axes": {"weight_decay": [0.01, 0.1], "seed": [0, 1, 2]}}],
    "checkpoints": {"at_fractions": [0, 0.1, 0.25, 0.5, 0.75, 1]},
    "evaluations": [{"evaluator": "geometry", "at": "every"}],
    "execution": {"rescue_seconds": 1, "evaluators": 1},
}
DEADLINE_S = 240.0


def start_head(testbed: Bed, name: str, cpus: int = 0, **environment: str) -> Host:
    head = testbed.new_host(name)
    head.start_ray(cpus=cpus, **environment)
    wait_for_port(head.address, DASHBOARD_PORT)
    return head


def url(head: Host) -> str:
    return f"http://{head.address}:{DASHBOARD_PORT}"


def geosweep(testbed: Bed, *arguments: str, **environment: str) -> subprocess.Popen[str]:
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
