"""Writers, committers, a compactor and a reader on one store, while SIGKILL takes one after the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.query import Store
from orchestrator.store.committer import only_committer
from orchestrator.store.files import folder_of
from orchestrator.store.inbox import list_units
from orchestrator.store.layout import create_or_open

# Starts 4 writers, 2 committers and a compactor, kills one of them after a random number of acknowledgements, starts it
# again, and prints after each kill what the writers were told. All are forks of a process that has imported everything
# and started no thread.
KILLER = """
import os, random, select, signal, sys, traceback
from pathlib import Path
from store_rows import metric_row
import boto3, obstore.auth.boto3  # a fork is ready at once
from orchestrator.store import committer as committers
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout

layout, kills, draw = StoreLayout(Path(sys.argv[1])), int(sys.argv[2]), random.Random(5)
committers.UNNAMED_S = 0.0  # replaced files go at once: readers have to look again

def write(seed, pipe):
    order = random.Random(seed)
    while True:
        unit = order.randrange(10 * kills)
        publish(layout, "metrics", [metric_row(f"c{unit}", f"m{i}", unit + i / 100) for i in range(30)])
        os.write(pipe, f"{unit} ".encode())

def fold(seed, pipe):
    committer = committers.Committer(layout)
    while True:
        committer.fold("metrics")

def compact(seed, pipe):
    committer = committers.Committer(layout)
    while True:
        committer.compact("metrics")

def start(body, seed):
    read, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            body(seed, write_end)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    os.close(write_end)
    return pid, read, body

alive = [start(body, seed) for seed, body in enumerate([write] * 4 + [fold] * 2 + [compact])]
def end_all():
    died = []
    for pid, _, body in alive:
        try:
            os.kill(pid, signal.SIGKILL)
            if os.waitpid(pid, 0)[1] != signal.SIGKILL:
                died.append(body.__name__)
        except (ProcessLookupError, ChildProcessError):  # it was seen to die by itself
            continue
    return died

def kill_one():
    wanted, told = draw.randint(1, 12), []
    victim = draw.randrange(len(alive))
    while len(told) < wanted:
        for pipe in select.select([read for _, read, body in alive if body is write], [], [])[0]:
            received = os.read(pipe, 4096)
            if not received:
                sys.exit("a writer died by itself")
            while not received.endswith(b" "):
                received += os.read(pipe, 1)
            told += received.decode().split()
    pid, pipe, body = alive[victim]
    os.kill(pid, signal.SIGKILL)
    if os.waitpid(pid, 0)[1] != signal.SIGKILL:
        sys.exit(f"{body.__name__} died by itself")
    os.close(pipe)
    alive[victim] = start(body, 100 + kill)
    print(*told, flush=True)

try:
    for kill in range(kills):
        kill_one()
finally:
    died = end_all()
if died:
    sys.exit(f"died by themselves: {died}")
"""


SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    ("where", "kills"),
    [("disk", 20), ("s3", 4), pytest.param("disk", 120, marks=SOAK), pytest.param("s3", 120, marks=SOAK)],
)
def test_kills_at_any_moment_lose_double_or_halve_no_row_and_the_reader_never_errs(
    tmp_path: Path, where: str, kills: int, request: pytest.FixtureRequest
) -> None:
    root = tmp_path / "store" if where == "disk" else folder_of(request.getfixturevalue("s3_store"))
    layout = create_or_open(root)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", KILLER, str(layout.root), str(kills)]
    acknowledged: set[str] = set()
    deaths = 0
    with Store(layout.root) as reader, subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as killer:
        assert killer.stdout is not None
        for line in killer.stdout:  # everybody goes on while we read
            acknowledged |= {f"c{unit}" for unit in line.decode().split()}
            deaths += 1
            reader.refresh()
            assert acknowledged <= whole_units(reader)
    assert (killer.returncode, deaths) == (0, kills)
    with only_committer(layout) as committer:
        committer.fold("metrics")
        committer.compact("metrics")
        assert committer.problems == {}
    assert list_units(layout, "metrics") == []
    with Store(layout.root) as reader:
        assert acknowledged <= whole_units(reader)
    assert layout.files.below(layout.root / "conflicts") == []


def whole_units(reader: Store) -> set[str]:
    """Every unit that can be read; each is there once, with all its rows."""
    stored = reader.sql("select checkpoint, count(*) n, sum(value) total from metrics group by 1").rows()
    for unit in stored:
        number = int(unit["checkpoint"][1:])
        assert (unit["n"], unit["total"]) == (30, pytest.approx(30 * number + 4.35))
    return {unit["checkpoint"] for unit in stored}
