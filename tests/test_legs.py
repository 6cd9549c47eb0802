from __future__ import annotations

from test_plan import plan_of

from orchestrator.legs import Leg, LegQueue
from orchestrator.plan import Plan


def take_all(queue: LegQueue) -> list[Leg]:
    legs = []
    while (leg := queue.take()) is not None:
        legs.append(leg)
    return legs


def two_scales() -> Plan:
    return plan_of(grids=[{"name": "g", "axes": {"scale": ["tiny-32", "tiny-64"], "weight_decay": [0.01, 0.1]}}])


def test_a_leg_ends_where_trials_part() -> None:
    plan = plan_of()
    queue = LegQueue(plan, committed=(), lost=())
    (fresh,) = take_all(queue)
    assert [segment.to_tokens for segment in fresh.segments] == [0]
    queue.committed(fresh)
    branches = take_all(queue)
    assert [[s.to_tokens for s in leg.segments] for leg in branches] == [[4096, 8192], [4096, 8192]]
    assert {leg.segments[0].parent for leg in branches} == {fresh.id}


def test_the_longest_remaining_path_comes_first() -> None:
    legs = take_all(LegQueue(two_scales(), committed=(), lost=()))
    assert [leg.recipe.model.scale for leg in legs] == ["tiny-64", "tiny-32"]


def test_only_what_is_left_is_handed_out() -> None:
    plan = plan_of()
    first, second = (trial.chain for trial in plan.trials)
    queue = LegQueue(plan, committed={first[0], first[1], *second}, lost=())
    (leg,) = take_all(queue)
    assert [segment.id for segment in leg.segments] == [first[2]]
    queue.committed(leg)
    assert queue.exhausted


def test_what_follows_a_lost_leg_is_not_handed_out_and_the_rest_goes_on() -> None:
    queue = LegQueue(two_scales(), committed=(), lost=())
    large, small = take_all(queue)
    queue.lost(large)
    queue.committed(small)
    rest = take_all(queue)
    assert [leg.recipe.model.scale for leg in rest] == ["tiny-32", "tiny-32"]
    assert not queue.exhausted
    for leg in rest:
        queue.committed(leg)
    assert queue.exhausted


def test_a_leg_travels_as_text() -> None:
    (leg,) = take_all(LegQueue(plan_of(), committed=(), lost=()))
    assert Leg.model_validate_json(leg.to_json()) == leg
