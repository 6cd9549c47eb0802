from __future__ import annotations

from dataclasses import replace
from typing import Any

from test_plan import plan_of

from orchestrator.identity import histories
from orchestrator.legs import Leg, LegQueue, work_left
from orchestrator.plan import Plan
from orchestrator.sharing import HeldState, Segment


def take_all(queue: LegQueue) -> list[Leg]:
    legs = []
    while (leg := queue.take()) is not None:
        legs.append(leg)
    return legs


def two_scales() -> Plan:
    return plan_of(grids=[{"name": "g", "axes": {"scale": ["tiny-32", "tiny-64"], "weight_decay": [0.01, 0.1]}}])


def wsd_budgets(*budgets: int, **changes: Any) -> Plan:
    """Checkpoints at the end of each trial only; decays of 2,048 tokens."""
    schedule = {"shape": "wsd", "warmup_tokens": 1024, "decay_tokens": 2048}
    return plan_of(
        base={"preset": "tiny", "context": 32, "batch_size": 8, "schedule": schedule},
        grids=[{"name": "budgets", "axes": {"token_budget": list(budgets)}}],
        checkpoints={"at_fractions": [1]},
        **changes,
    )


def state_after(segment: Segment) -> HeldState:
    return HeldState(segment=segment.id, tokens=segment.to_tokens, history=segment.history)


def spans(segments: tuple[Segment, ...]) -> list[tuple[int, int]]:
    return sorted((segment.from_tokens, segment.to_tokens) for segment in segments)


# --- what is left ---------------------------------------------------------------------------------------------------


def test_all_is_left_of_a_plan_that_was_never_begun() -> None:
    plan = two_scales()
    assert work_left(plan, committed=(), lost=(), held=()) == plan.segments


def test_a_fork_is_not_left_once_all_that_starts_from_it_is_done() -> None:
    plan = wsd_budgets(4096, 8192)
    ends = {trial.chain[-1] for trial in plan.trials}
    assert len(plan.segments) > len(ends)
    assert work_left(plan, committed=ends, lost=(), held=()) == ()


def test_a_new_branch_starts_from_the_fork_that_is_held_and_trains_the_trunk_again_where_it_is_not() -> None:
    plan = wsd_budgets(4096, 8192)
    (trunk,) = (s for s in plan.segments if s.parent is None)
    longer = {s.id for s in plan.segments if s.to_tokens == 8192}
    done = {trunk.id, *longer}
    assert spans(work_left(plan, done, (), [state_after(trunk)])) == [(2048, 4096)]
    assert spans(work_left(plan, done, (), [])) == [(0, 2048), (2048, 4096)]


def test_training_starts_from_the_latest_equal_state_that_another_sweep_left() -> None:
    (old,) = wsd_budgets(8192).trials
    states = [
        HeldState(segment=f"other-{tokens}", tokens=tokens, history=histories(old.recipe, [tokens])[tokens])
        for tokens in (1024, 4096, 7168)  # the last one lies inside the decay of the other sweep's trial
    ]
    plan = wsd_budgets(16_384)
    (left,) = work_left(plan, (), (), states)
    assert (left.parent, left.from_tokens, left.to_tokens) == ("other-4096", 4096, 16_384)


def test_nothing_is_left_behind_a_segment_that_diverged() -> None:
    plan = wsd_budgets(4096, 8192)
    (trunk,) = (s for s in plan.segments if s.parent is None)
    assert work_left(plan, committed=(), lost={trunk.id}, held=()) == ()


# --- legs -----------------------------------------------------------------------------------------------------------


def test_a_leg_ends_where_trials_part() -> None:
    queue = LegQueue(plan_of().segments)
    (fresh,) = take_all(queue)
    assert [segment.to_tokens for segment in fresh.segments] == [0]
    queue.committed(fresh)
    branches = take_all(queue)
    assert [[s.to_tokens for s in leg.segments] for leg in branches] == [[4096, 8192], [4096, 8192]]
    assert {leg.segments[0].parent for leg in branches} == {fresh.id}


def test_the_longest_remaining_path_comes_first() -> None:
    legs = take_all(LegQueue(two_scales().segments))
    assert [leg.recipe.model.scale for leg in legs] == ["tiny-64", "tiny-32"]


def test_of_two_branches_the_longer_path_comes_first() -> None:
    queue = LegQueue(wsd_budgets(4096, 8192, 16_384).segments)
    (trunk,) = take_all(queue)
    queue.committed(trunk)
    assert [leg.to_tokens for leg in take_all(queue)] == [6144, 4096]  # on to the fork of the longer two


def test_only_what_is_left_is_handed_out() -> None:
    plan = plan_of()
    first, second = (trial.chain for trial in plan.trials)
    held = [state_after(segment) for segment in plan.segments]
    queue = LegQueue(work_left(plan, {first[0], first[1], *second}, (), held))
    (leg,) = take_all(queue)
    assert [segment.id for segment in leg.segments] == [first[2]]
    queue.committed(leg)
    assert queue.exhausted


def test_a_segment_of_a_leg_says_whether_its_state_must_stay() -> None:
    queue = LegQueue(plan_of().segments)
    (fresh,) = take_all(queue)
    queue.committed(fresh)
    assert [segment.continued for segment in fresh.segments] == [True]
    assert [segment.continued for segment in take_all(queue)[0].segments] == [True, False]


def test_what_follows_a_lost_leg_is_not_handed_out_and_the_rest_goes_on() -> None:
    queue = LegQueue(two_scales().segments)
    large, small = take_all(queue)
    queue.lost(large)
    queue.committed(small)
    rest = take_all(queue)
    assert [leg.recipe.model.scale for leg in rest] == ["tiny-32", "tiny-32"]
    assert not queue.exhausted
    for leg in rest:
        queue.committed(leg)
    assert queue.exhausted


def test_a_chain_of_thousands_of_segments_is_one_leg_and_can_be_lost() -> None:
    (segment,) = (s for s in wsd_budgets(8192).segments if s.parent is None)
    chain = [
        replace(segment, id=str(n), parent=str(n - 1) if n else None, from_tokens=n, to_tokens=n + 1)
        for n in range(5000)
    ]
    queue = LegQueue(chain)
    leg = queue.take()
    assert leg is not None
    assert len(leg.segments) == 5000
    queue.lost(leg)
    assert queue.exhausted


def test_a_leg_travels_as_text() -> None:
    (leg,) = take_all(LegQueue(plan_of().segments))
    assert Leg.model_validate_json(leg.to_json()) == leg
