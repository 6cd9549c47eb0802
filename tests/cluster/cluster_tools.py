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
import yaml

from cluster.testbed import DASHBOARD_PORT, Bed, Host, wait_for_port
from orchestrator.corpora import corpus_facts
from orchestrator.plan import load_plan
from orchestrator.query import Store
from trainers.loop import Execution, Training

FRACTIONS = (0, 0.25, 0.5, 0.75, 1)
STEP = 256  # tokens
BASE = {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "repeat": True}


def sweep_text(budget: int) -> str:
    """A sweep of six trials of so many tokens each."""
    content = {
        "name": "lost",
        "question": "does everything come out the same whatever machine is lost?",
        "base": {**BASE, "token_budget": budget},
        "grids": [{"name": "decay-seed", "axes": {"weight_decay": [0.01, 0.1], "seed": [0, 1, 2]}}],
        "checkpoints": {"at_fractions": list(FRACTIONS)},
        "evaluations": [{"evaluator": "geometry", "at": "every"}],
        "execution": {"rescue_seconds": 1, "evaluators": 1},
    }
    return yaml.safe_dump(content, sort_keys=False)


def tokens_of_seconds(store: Path, seconds: float) -> int:
    """How many tokens this machine trains in so many seconds on a core, as busy as it is; a multiple of 4 steps."""
    recipe = load_plan(sweep_text(STEP * 40_000), "lost.yaml", corpus_facts(store))[1].trials[0].recipe
    training = Training.fresh(recipe, store / "corpora" / "builtin", Execution(threads=1))
    training.train_to(STEP * 20, lambda: False, lambda _: None)  # warm
    until, before = time.monotonic() + 2.0, training.tokens
    training.train_to(recipe.token_budget, lambda: time.monotonic() > until, lambda _: None)
    return max(8, round((training.tokens - before) / 2.0 * seconds / STEP / 4)) * STEP * 4


DEADLINE_S = 600.0


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
