"""What broke an attempt is told apart by what Ray really says of it."""

from __future__ import annotations

import errno

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from orchestrator.failures import KINDS, Budget, Failure, classify
from orchestrator.spec import Retries
from orchestrator.tune import budgets
from trainers.errors import EnvironmentFault, InputError


def raised_on_a_worker(cause: Exception) -> BaseException:
    """An exception as the driver gets it from an actor's method."""
    traceback = f"Traceback ...\n  File 'x.py', line 1\n{type(cause).__name__}: {cause}"
    return RayTaskError("step", traceback, cause).as_instanceof_cause()


def died(message: str, *, preempted: bool = False) -> ActorDiedError:
    error = ActorDiedError()
    error.error_msg, error._preempted = message, preempted
    return error


NODE = "The actor died unexpectedly.\n\tip: 10.0.0.2\nThe actor died because its node has died. Node Id: ab12"
KILLED = (
    "The actor died unexpectedly.\nThe actor is dead because its worker process has died. Worker exit type: "
    "SYSTEM_ERROR Worker exit detail: There are some potential root causes. (1) The process is killed by SIGKILL by OOM"
)
MEMORY = "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (died(NODE), "node_lost"),
        (died("drained", preempted=True), "node_lost"),
        (died(KILLED), "worker_killed"),
        (died(MEMORY), "out_of_memory"),
        (OutOfMemoryError("Task was killed due to the node running low on memory."), "out_of_memory"),
        (raised_on_a_worker(MemoryError("no room")), "out_of_memory"),
        (raised_on_a_worker(RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes")), "out_of_memory"),
        (raised_on_a_worker(EnvironmentFault("storage_error", "a file", "look")), "storage_error"),
        (raised_on_a_worker(EnvironmentFault("corrupt_file", "a file", "look")), "storage_error"),
        (raised_on_a_worker(OSError(errno.EIO, "broken")), "storage_error"),
        ("Traceback ...\nOSError: [Errno 28] No space left on device", "storage_error"),
        (RuntimeError("Failed to set up runtime environment. [Errno 28] No space left on device"), "storage_error"),
        (raised_on_a_worker(KeyError("a bug")), "unknown"),
        ("text of an exception that could not be pickled", "unknown"),
        (None, "unknown"),
    ],
)
def test_what_ray_says_of_a_death_has_its_kind(error: BaseException | str | None, kind: str) -> None:
    failure = classify(error)
    assert failure.kind == kind
    assert failure.detail
    assert "\n" not in failure.detail


def test_the_gpus_own_out_of_memory_error_is_one() -> None:
    import torch

    assert classify(raised_on_a_worker(torch.OutOfMemoryError("CUDA out of memory"))).kind == "out_of_memory"


def test_each_kind_has_its_own_budget_and_waits_longer_from_time_to_time() -> None:
    budget = Budget(budgets(Retries(node_lost=3, worker_killed=1, unknown=0)), equal=3)
    lost, killed = Failure(kind="node_lost", detail="gone"), Failure(kind="worker_killed", detail="gone")
    verdicts = [budget.judge("leg", lost) for _ in range(3)]
    assert [verdict.action for verdict in verdicts] == ["again"] * 3
    assert [verdict.delay_s for verdict in verdicts] == sorted({verdict.delay_s for verdict in verdicts})
    assert budget.judge("leg", killed).action == "again"
    assert budget.judge("leg", killed).action == "give_up"
    assert budget.judge("another leg", killed).action == "again"
    assert budget.judge("leg", lost).action == "give_up"
    assert budget.judge("leg", Failure(kind="unknown", detail="a bug")).action == "give_up"


def test_the_third_leg_that_dies_of_one_fault_stops_the_sweep_with_its_traceback() -> None:
    budget = Budget(budgets(Retries(unknown=5)), equal=3)
    fault = [
        Failure(
            kind="unknown", detail="a bug", traceback=f"ray::Leg.train() (pid={pid}, ip=10.0.0.{pid})\nKeyError: 'x'"
        )
        for pid in range(1, 7)
    ]
    assert [budget.judge("first", fault[n]).action for n in range(3)] == ["again"] * 3, "one leg is not everywhere"
    assert budget.judge("second", fault[3]).action == "again"
    assert budget.judge("other", Failure(kind="unknown", detail="b", traceback="another")).action == "again"
    verdict = budget.judge("third", fault[4])
    assert verdict.action == "stop"
    assert "KeyError: 'x'" in verdict.reason


def test_every_kind_has_a_budget_in_the_sweep_file() -> None:
    assert set(budgets(Retries())) == set(KINDS)


def test_an_input_error_is_no_failure_of_a_machine() -> None:
    assert not issubclass(InputError, EnvironmentFault)
