"""Learning rates at every corner, worked by hand: 256 tokens a step, peak 0.01."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.recipes import tiny_recipe
from trainers.schedule import learning_rates, pieces, step_of

STEP = 256
SHAPES = ("cosine", "linear", "constant", "wsd")


def rates(**changes: Any) -> NDArray[np.float64]:
    """All steps; 32 of them, 4 of warm-up, unless changed. wsd decays over the last 8, constant ends at its peak."""
    shape = changes.get("shape", "cosine")
    filled = {
        "final_fraction": 1.0 if shape == "constant" else 0.1,
        "decay_tokens": 8 * STEP if shape == "wsd" else None,
        "warmup_tokens": 4 * STEP,
        "token_budget": 32 * STEP,
        **changes,
    }
    recipe = tiny_recipe(peak_lr=1e-2, **filled)
    return learning_rates(recipe, 1, recipe.steps)


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_rises_by_equal_parts_and_ends_at_the_peak(shape: str) -> None:
    np.testing.assert_allclose(rates(shape=shape)[:4], [0.0025, 0.005, 0.0075, 0.01], rtol=1e-15)


def test_a_warm_up_that_ends_inside_the_first_step_is_over_at_its_end() -> None:
    assert rates(shape="constant", warmup_tokens=STEP // 2)[0] == 0.01
    assert rates(shape="linear", warmup_tokens=STEP // 2)[0] == pytest.approx(0.01 * (1 - 0.9 * 0.5 / 31.5), rel=1e-15)


def test_without_warm_up_the_first_step_is_the_first_of_the_decay() -> None:
    assert rates(shape="linear", warmup_tokens=0)[0] == pytest.approx(0.01 * (1 - 0.9 / 32), rel=1e-15)
    assert rates(shape="constant", warmup_tokens=0)[0] == 0.01
    assert rates(shape="wsd", warmup_tokens=0)[0] == 0.01
    cosine = 0.1 + 0.9 * (1 + np.cos(np.pi / 32)) / 2
    assert rates(shape="cosine", warmup_tokens=0)[0] == pytest.approx(0.01 * cosine, rel=1e-15)


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_when_warm_up_is_the_whole_budget_the_last_step_is_the_peak(shape: str) -> None:
    found = rates(shape=shape, warmup_tokens=32 * STEP)
    np.testing.assert_allclose(found, 0.01 * np.arange(1, 33) / 32, rtol=1e-15)


@pytest.mark.parametrize("final", [0.0, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_the_last_step_has_exactly_the_final_fraction_of_the_peak(shape: str, final: float) -> None:
    assert rates(shape=shape, final_fraction=final)[-1] == pytest.approx(0.01 * final, rel=1e-13, abs=1e-18)


def test_half_of_the_decay_lies_half_way() -> None:
    half = 4 + 14 - 1  # steps 5 to 32 decay; step 18 is half way
    assert rates(shape="cosine")[half] == pytest.approx(0.01 * (0.1 + 0.9 * 0.5), rel=1e-14)
    assert rates(shape="linear")[half] == pytest.approx(0.01 * 0.55, rel=1e-14)
    assert rates(shape="wsd")[24 + 4 - 1] == pytest.approx(0.01 * 0.55, rel=1e-14)


def test_wsd_stays_at_its_peak_until_the_decay_begins() -> None:
    assert set(rates(shape="wsd")[3:24]) == {0.01}


def test_the_trunk_of_wsd_is_the_same_bits_for_every_budget() -> None:
    short, long = rates(shape="wsd"), rates(shape="wsd", token_budget=64 * STEP)
    assert short[:24].tobytes() == long[:24].tobytes()
    assert short[24] < long[24]


def test_warm_up_is_the_same_bits_for_every_shape_and_budget() -> None:
    found = {rates(shape=shape, token_budget=steps * STEP)[:4].tobytes() for shape in SHAPES for steps in (16, 32)}
    assert len(found) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_rates_rise_through_warm_up_and_never_after(shape: str) -> None:
    found = rates(shape=shape)
    assert (np.diff(found[:4]) > 0).all()
    assert (np.diff(found[3:]) <= 0).all()


@given(st.sampled_from(SHAPES), st.integers(1, 32), st.integers(0, 31))
def test_a_step_has_the_same_bits_in_whatever_range_it_is_asked(shape: Any, first: int, more: int) -> None:
    last = min(32, first + more)
    whole = rates(shape=shape)
    recipe = tiny_recipe(
        shape=shape,
        warmup_tokens=4 * STEP,
        final_fraction=1.0 if shape == "constant" else 0.1,
        decay_tokens=8 * STEP if shape == "wsd" else None,
    )
    assert learning_rates(recipe, first, last).tobytes() == whole[first - 1 : last].tobytes()


def test_tokens_inside_a_step_are_no_step() -> None:
    recipe = tiny_recipe()
    assert step_of(recipe, 3 * STEP) == 3
    with pytest.raises(AssertionError, match="inside a step"):
        step_of(recipe, 3 * STEP + 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_pieces_of_a_schedule_cover_every_step_once_in_order(shape: str) -> None:
    decay = 8 * STEP if shape == "wsd" else None
    final = 1.0 if shape == "constant" else 0.1
    recipe = tiny_recipe(shape=shape, warmup_tokens=4 * STEP, decay_tokens=decay, final_fraction=final)
    found = [(piece.formula, piece.last_step) for piece in pieces(recipe)]
    assert (
        found
        == {
            "cosine": [("rise", 3), ("flat", 4), ("cosine", 32)],
            "linear": [("rise", 3), ("flat", 4), ("line", 32)],
            "constant": [("rise", 3), ("flat", 32)],
            "wsd": [("rise", 3), ("flat", 24), ("line", 32)],
        }[shape]
    )


@given(st.integers(1, 32), st.integers(1, 32), st.sampled_from(SHAPES))
def test_any_range_of_steps_has_the_bits_of_the_whole(first: int, last: int, shape: str) -> None:
    decay = 8 * STEP if shape == "wsd" else None
    final = 1.0 if shape == "constant" else 0.1
    recipe = tiny_recipe(shape=shape, warmup_tokens=1000, decay_tokens=decay, final_fraction=final)
    whole = learning_rates(recipe, 1, 32)
    assert learning_rates(recipe, first, last).tobytes() == whole[first - 1 : last].tobytes()
