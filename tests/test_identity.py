from __future__ import annotations

import pytest
from recipes import tiny_recipe

from orchestrator.identity import canonical_json, histories, segment_id, short_count, trial_id


def test_canonical_json_is_one_text_per_value_and_refuses_nan() -> None:
    assert canonical_json({"b": 1, "a": [1.0, True]}) == '{"a":[1.0,true],"b":1}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_history_at_zero_tokens_depends_on_fresh_weights_only() -> None:
    recipe = tiny_recipe()
    other = tiny_recipe(batch_size=8, weight_decay=0.5, peak_lr=1.0)
    assert histories(recipe, [0]) == histories(other, [0])
    assert histories(recipe, [0]) != histories(tiny_recipe(seed=1), [0])


def test_history_does_not_depend_on_where_else_checkpoints_lie() -> None:
    recipe = tiny_recipe()
    every = histories(recipe, [0, 512, 1024, 2048, 4096])
    few = histories(recipe, [1024, 4096])
    assert every[1024] == few[1024]
    assert every[4096] == few[4096]


@pytest.mark.parametrize(
    "change", [{"batch_size": 4}, {"weight_decay": 0.2}, {"seed": 3}, {"peak_lr": 2e-2}, {"clip": 0.5}]
)
def test_history_changes_with_everything_that_the_first_step_realises(change: dict[str, float]) -> None:
    assert histories(tiny_recipe(), [2048]) != histories(tiny_recipe(**change), [2048])


def test_wsd_trials_with_two_budgets_share_their_history_up_to_the_shorter_decay() -> None:
    short = tiny_recipe(shape="wsd", warmup_tokens=512, decay_tokens=1024, token_budget=4096)
    long = tiny_recipe(shape="wsd", warmup_tokens=512, decay_tokens=1024, token_budget=8192)
    assert histories(short, [3072]) == histories(long, [3072])
    assert histories(short, [3584]) != histories(long, [3584])


def test_cosine_trials_with_two_budgets_share_only_their_warm_up() -> None:
    short = tiny_recipe(shape="cosine", warmup_tokens=1024, token_budget=4096)
    long = tiny_recipe(shape="cosine", warmup_tokens=1024, token_budget=8192)
    assert histories(short, [1024]) == histories(long, [1024])
    assert histories(short, [1536]) != histories(long, [1536])


def test_the_allowance_to_repeat_data_is_in_no_history_but_in_the_trial() -> None:
    assert histories(tiny_recipe(), [4096]) == histories(tiny_recipe(repeat=True), [4096])
    assert trial_id(tiny_recipe()) != trial_id(tiny_recipe(repeat=True))


def test_ids_begin_with_what_a_person_reads() -> None:
    recipe = tiny_recipe(batch_size=16, weight_decay=0.1, token_budget=8192)
    assert trial_id(recipe).startswith("tiny-32-b16-wd0.1-8192-s0-")
    assert segment_id(recipe, 250_000, "ab" * 32) == "olmo-tiny-32-250k-abababababababab"


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (131072, "131072"), (250_000, "250k"), (8 * 10**9, "8B")])
def test_short_count_is_exact(count: int, text: str) -> None:
    assert short_count(count) == text
