from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from recipes import tiny_recipe

from orchestrator.identity import trial_id
from orchestrator.sharing import Course, Cuts, Segment, cut
from trainers.config import Recipe
from trainers.schedule import learning_rates

STEP = 256  # tokens of a step of tiny_recipe at batch size 8


def course(checkpoints: Sequence[int] = (), **changes: Any) -> Course:
    recipe = tiny_recipe(**changes)
    return Course(trial=trial_id(recipe), recipe=recipe, checkpoints=tuple(sorted({*checkpoints, recipe.token_budget})))


def wsd(budget_steps: int, **changes: Any) -> Course:
    """Warm-up of 2 steps; the last 4 steps decay."""
    schedule = {"shape": "wsd", "warmup_tokens": 2 * STEP, "decay_tokens": 4 * STEP}
    return course(**{"token_budget": budget_steps * STEP, **schedule, **changes})


def spans(cuts: Cuts) -> list[tuple[int, int, int]]:
    """(first step, last step, number of trials) of each segment, steps counted as tokens / STEP."""
    return sorted((s.from_tokens // STEP, s.to_tokens // STEP, len(s.trials)) for s in cuts.segments)


# --- by hand --------------------------------------------------------------------------------------------------------


def test_wsd_budgets_are_one_trunk_with_a_fork_where_each_decay_begins() -> None:
    cuts = cut([wsd(8), wsd(16), wsd(32)])
    assert spans(cuts) == [(0, 4, 3), (4, 8, 1), (4, 12, 2), (12, 16, 1), (12, 32, 1)]
    # trained: 32 for the longest, 4 for each other decay; asked: 56
    assert sum(segment.tokens for segment in cuts.segments) == (32 + 4 + 4) * STEP


def test_checkpoints_of_one_trial_cut_the_trunk_for_all_and_nothing_is_trained_twice() -> None:
    early, late = wsd(8, checkpoints=[STEP, 3 * STEP]), wsd(16, checkpoints=[2 * STEP])
    cuts = cut([early, late])
    assert spans(cuts) == [(0, 1, 2), (1, 2, 2), (2, 3, 2), (3, 4, 2), (4, 8, 1), (4, 16, 1)]


def test_cosine_trials_share_their_warm_up_and_the_rest_of_nothing() -> None:
    cuts = cut([course(token_budget=16 * STEP), course(token_budget=32 * STEP)])  # warm-up: 4 steps
    assert spans(cuts) == [(0, 4, 2), (4, 16, 1), (4, 32, 1)]


def test_a_trial_that_is_the_beginning_of_another_needs_no_fork() -> None:
    constant = {"shape": "constant", "final_fraction": 1.0}
    cuts = cut([course(token_budget=16 * STEP, **constant), course(token_budget=32 * STEP, **constant)])
    assert spans(cuts) == [(0, 16, 2), (16, 32, 1)]


def test_trials_of_other_conditions_share_fresh_weights_only() -> None:
    cuts = cut([course([0], weight_decay=0.1), course([0], weight_decay=0.2), course([0], seed=1)])
    assert Counter((s.from_tokens, s.to_tokens, len(s.trials)) for s in cuts.segments) == {
        (0, 0, 2): 1,
        (0, 0, 1): 1,
        (0, 32 * STEP, 1): 3,
    }


def test_unshared_each_trial_trains_alone_under_ids_of_its_own_with_the_same_histories() -> None:
    courses = [wsd(8, checkpoints=[0]), wsd(16, checkpoints=[0])]
    shared, alone = cut(courses), cut(courses, share=False)
    assert spans(alone) == [(0, 0, 1), (0, 0, 1), (0, 8, 1), (0, 16, 1)]
    assert not {s.id for s in shared.segments} & {s.id for s in alone.segments}
    assert {s.history for s in alone.segments} <= {s.history for s in shared.segments}


# --- of random sweeps, against the realised learning rates bit by bit ------------------------------------------------


@st.composite
def random_course(draw: st.DrawFn) -> Course:
    shape = draw(st.sampled_from(["wsd", "wsd", "cosine", "linear", "constant"]))
    steps = draw(st.integers(3, 14))
    warmup = draw(st.integers(0, (steps - 3) * STEP))
    changes: dict[str, Any] = {
        "shape": shape,
        "token_budget": steps * STEP,
        "warmup_tokens": draw(st.sampled_from([w for w in (0, 100, 512, 700) if w <= warmup] or [0])),
        "decay_tokens": draw(st.integers(3 * STEP, steps * STEP - warmup)) if shape == "wsd" else None,
        "final_fraction": 1.0 if shape == "constant" else draw(st.sampled_from([0.0, 0.1, 1.0])),
        "peak_lr": draw(st.sampled_from([1e-2, 1.3e-2])),
        "seed": draw(st.integers(0, 1)),
    }
    wanted = draw(st.lists(st.integers(0, steps), max_size=3))
    return course([count * STEP for count in wanted], **changes)


random_sweep = st.lists(random_course(), min_size=1, max_size=8, unique_by=lambda c: c.trial)


def realised(recipe: Recipe, steps: int) -> tuple[str, bytes]:
    """All that the first steps of a trial do: what is fixed, and the float64 bits of each learning rate."""
    fixed = recipe.model_dump(mode="json", exclude={"schedule": True, "token_budget": True})
    return json.dumps(fixed), learning_rates(recipe, 1, steps).tobytes()


def work(segment: Segment) -> set[tuple[str, bytes]]:
    first, last = segment.from_tokens // STEP + 1, segment.to_tokens // STEP
    return {realised(segment.recipe, step) for step in range(first, last + 1)}


@settings(max_examples=150)
@given(random_sweep)
def test_every_chain_adds_up_to_its_budget_and_holds_the_checkpoints_that_were_wanted(courses: list[Course]) -> None:
    cuts = cut(courses)
    segments = {segment.id: segment for segment in cuts.segments}
    for wanted in courses:
        chain = [segments[id] for id in cuts.chains[wanted.trial]]
        assert [s.parent for s in chain] == [None, *(s.id for s in chain[:-1])]
        assert [s.from_tokens for s in chain] == [0, *(s.to_tokens for s in chain[:-1])]
        assert set(wanted.checkpoints) <= {s.to_tokens for s in chain}
        assert chain[-1].to_tokens == wanted.recipe.token_budget
        for segment in chain:
            steps = segment.to_tokens // STEP
            assert realised(segment.recipe, steps) == realised(wanted.recipe, steps)


@settings(max_examples=150)
@given(random_sweep)
def test_no_step_is_trained_twice_and_every_cut_is_wanted_or_a_fork(courses: list[Course]) -> None:
    cuts = cut(courses)
    done = Counter(step for segment in cuts.segments for step in work(segment))
    asked = {realised(c.recipe, step) for c in courses for step in range(1, c.recipe.steps + 1)}
    assert set(done) == asked
    assert set(done.values()) == {1}
    children = Counter(segment.parent for segment in cuts.segments)
    wanted = {(c.trial, tokens) for c in courses for tokens in c.checkpoints}
    for segment in cuts.segments:
        assert children[segment.id] > 1 or any((trial, segment.to_tokens) in wanted for trial in segment.trials)


def plain(cuts: Cuts) -> set[tuple[Any, ...]]:
    return {(s.id, s.parent, s.from_tokens, s.to_tokens, s.history, frozenset(s.trials)) for s in cuts.segments}


@settings(max_examples=100)
@given(random_sweep, st.randoms(use_true_random=False))
def test_the_order_of_the_trials_changes_nothing(courses: list[Course], shuffle: random.Random) -> None:
    other = shuffle.sample(courses, len(courses))
    assert plain(cut(courses)) == plain(cut(other))
    assert dict(cut(courses).chains) == dict(cut(other).chains)


@settings(max_examples=100)
@given(random_sweep, st.integers(1, 8))
def test_the_segments_of_a_part_of_the_trials_end_where_those_of_all_do(courses: list[Course], count: int) -> None:
    whole, part = cut(courses), cut(courses[:count])
    assert {s.id for s in part.segments} <= {s.id for s in whole.segments}
    for trial, chain in part.chains.items():
        assert set(chain) <= set(whole.chains[trial])


@settings(max_examples=100)
@given(random_sweep)
def test_equal_histories_are_equal_training(courses: list[Course]) -> None:
    found: dict[str, Any] = {}
    for segment in (*cut(courses).segments, *cut(courses, share=False).segments):
        steps = segment.to_tokens // STEP
        bits = realised(segment.recipe, steps) if steps else (segment.recipe.model, segment.recipe.seed)
        assert found.setdefault(segment.history, bits) == bits
