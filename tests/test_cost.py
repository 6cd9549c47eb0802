from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from test_plan import CORPUS
from test_spec import sweep_file

from orchestrator.cost import Bill, make_bill, over_limits
from orchestrator.machines import SHIPPED, Device, devices
from orchestrator.plan import Plan, load_plan
from orchestrator.retention import kept, removable
from orchestrator.spec import Keep, Limits
from trainers.scales import flops_per_token

# tiny-32 with a vocabulary of 512 rows: 2 blocks of 16 x 32^2 + 2 x 32, a norm of 32, two embeddings of 512 x 32
PARAMETERS = 2 * (16 * 32**2 + 64) + 32 + 2 * 512 * 32
DEVICE = Device(name="one", kind="cuda", peak_flops=None, measured=((1.0, 1e9),), source="by hand")


def wsd(**changes: Any) -> Plan:
    """Budgets of 4,096 and 8,192 tokens whose decays are 1,024 and 2,048: a trunk of 3,072, and 3,072 more."""
    schedule = {"shape": "wsd", "warmup_tokens": 512, "decay_fraction": 0.25}
    content = {
        "base": {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "schedule": schedule},
        "grids": [{"name": "budgets", "axes": {"token_budget": [4096, 8192]}}],
        "checkpoints": {"at_fractions": [0.5, 1]},
        "evaluations": [{"evaluator": "geometry"}, {"evaluator": "loss", "suite": "builtin", "tokens_per_domain": 64}],
    }
    return load_plan(sweep_file(**{**content, **changes}), "small.yaml", CORPUS)[1]


def bill_of(plan: Plan, keep: Keep | None = None, **changes: Any) -> Bill:
    given: dict[str, Any] = {"left": plan.segments, "owed": plan.evaluations, "devices": [DEVICE], "domains": {}}
    return make_bill(plan, keep or Keep(), **{**given, **changes})


def test_tokens_and_flops_are_those_of_the_segments_by_hand() -> None:
    plan = wsd()
    bill = bill_of(plan, left=plan.segments[-1:])
    assert (bill.tokens_asked, bill.tokens_trained) == (12_288, 3072 + 1024 + 5120)
    assert bill.saved == 0.25
    # 6 FLOPs a matrix parameter: 2 x 16 x 32^2 of the blocks, 512 x 32 of the head; 12 L D T of attention
    per_token = 6 * (2 * 16 * 32**2 + 512 * 32) + 12 * 2 * 32 * 32
    assert bill.flops == 9216 * per_token
    assert bill.flops_left == plan.segments[-1].tokens * per_token


def test_hours_are_flops_by_the_speed_of_the_device() -> None:
    bill = bill_of(wsd())
    assert bill.hours[0].hours == pytest.approx(bill.flops / 1e9 / 3600)
    assert bill.hours[0].hours_left == bill.hours[0].hours


def test_kept_bytes_are_weights_of_every_asked_checkpoint_and_states_of_the_last() -> None:
    plan = wsd()
    # asked: 2,048 and 4,096 of the shorter; 4,096 and 8,192 of the longer. The fork at 3,072 is nobody's.
    assert len(plan.segments) == 5
    assert bill_of(plan).bytes_kept == (4 * 4 + 2 * 8) * PARAMETERS
    assert bill_of(plan, Keep(weights="last", state="none")).bytes_kept == 2 * 4 * PARAMETERS
    assert bill_of(plan, Keep(state="all")).bytes_kept == 4 * 12 * PARAMETERS


def test_the_peak_adds_a_whole_state_for_each_trial_under_way_and_each_fork() -> None:
    bill = bill_of(wsd())
    assert bill.bytes_peak - bill.bytes_kept == (2 + 1) * 12 * PARAMETERS


def test_evaluations_are_counted_by_kind_with_what_is_owed_and_their_flops() -> None:
    plan = wsd()
    owed = [evaluation for evaluation in plan.evaluations if evaluation.evaluator == "loss"][:1]
    geometry, loss = bill_of(plan, owed=owed, domains={"builtin": 6}).evaluations
    assert (geometry.evaluator, geometry.asked, geometry.owed) == ("geometry", 4, 0)
    assert geometry.flops == 4 * (4 * 512 * 32**2 + 9 * 32**3)
    assert (loss.asked, loss.owed) == (4, 1)
    assert loss.flops == pytest.approx(4 * flops_per_token(plan.trials[0].recipe.model) / 3 * 64 * 6)


# --- limits ---------------------------------------------------------------------------------------------------------


def test_a_bill_within_its_limits_is_not_refused() -> None:
    bill = bill_of(wsd())
    assert over_limits(bill, Limits()) == []
    assert over_limits(bill, Limits(max_gpu_hours=bill.hours[0].hours, max_bytes=bill.bytes_peak)) == []


def test_each_limit_that_is_exceeded_is_one_line_with_both_numbers() -> None:
    bill = bill_of(wsd())
    hours, size = over_limits(bill, Limits(max_gpu_hours=1e-9, max_bytes=1000))[::-1]
    assert size.startswith(f"limits.max_bytes: {bill.bytes_peak:,} bytes of checkpoints at the peak, 1,000 are allowed")
    assert "hours of one (by hand), 1e-09 are allowed" in hours


def test_without_a_named_gpu_the_slowest_of_the_table_counts_and_a_cpu_never() -> None:
    cpu = Device(name="cpu", kind="cpu", peak_flops=None, measured=((1.0, 1.0),), source="measured")
    slow = Device(name="slow", kind="cuda", peak_flops=None, measured=((1.0, 1e8),), source="by hand")
    bill = bill_of(wsd(), devices=[cpu, DEVICE, slow])
    limit = bill.hours[1].hours * 2
    (line,) = over_limits(bill, Limits(max_gpu_hours=limit))
    assert "hours of slow" in line
    assert over_limits(bill, Limits(max_gpu_hours=limit, gpu="one")) == []
    assert over_limits(bill, Limits(max_gpu_hours=limit, gpu="on")) == [
        "limits.gpu: no GPU type 'on'; nearest is 'one'"
    ]


# --- devices --------------------------------------------------------------------------------------------------------


def speed(device: str, cost: float, tokens_per_s: float, minute: int = 0) -> dict[str, Any]:
    time = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=minute)
    return {"device": device, "kind": "cuda", "flops_per_token": cost, "tokens_per_s": tokens_per_s, "time": time}


def test_a_shipped_device_says_that_its_speed_is_assumed_and_of_what() -> None:
    a100 = next(device for device in SHIPPED if device.name == "A100")
    assert a100.flops_per_s(1e8) == 0.15 * 312e12
    assert a100.source == "assumed: 15% of its data sheet's 312 TFLOP/s"


def test_a_measured_device_takes_the_place_of_the_assumed_one_and_the_newest_measurement_counts() -> None:
    found = devices([speed("H200", 1e8, 10.0, minute=5), speed("H200", 1e8, 7.0, minute=1), speed("H200", 1e9, 2.0)])
    assert [device.name for device in found].count("H200") == 1
    assert found[0].flops_per_s(1.5e8) == 1e9  # of the measured model of the nearest cost
    assert found[0].flops_per_s(9e8) == 2e9
    assert found[0].source == "measured by `geosweep bench` at 2 models"


# --- retention ------------------------------------------------------------------------------------------------------


def test_what_is_kept_is_never_removable_and_a_fork_is_once_its_branches_are_done() -> None:
    plan, keep = wsd(), Keep()
    (fork,) = plan.forks
    ids = set(plan.segment_by_id)
    ends = {trial.chain[-1] for trial in plan.trials}
    done = removable(plan, keep, committed=ids, left=(), owing=())
    assert done.weights == {fork}
    assert done.state == ids - ends - {fork}
    assert not done.weights & kept(plan, keep).weights
    branch = [segment for segment in plan.segments if segment.parent == fork][:1]
    assert fork not in removable(plan, keep, committed=ids, left=branch, owing=()).weights


def test_an_owed_evaluation_holds_the_weights_that_would_go_but_not_the_state() -> None:
    plan, keep = wsd(), Keep(weights="last")
    middle = plan.trials[0].checkpoints[0]
    free = removable(plan, keep, committed={middle}, left=(), owing=())
    owing = removable(plan, keep, committed={middle}, left=(), owing={middle})
    assert (free.weights, free.state) == ({middle}, frozenset())
    assert (owing.weights, owing.state) == (frozenset(), {middle})
