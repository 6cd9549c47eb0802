from __future__ import annotations

from typing import Any

import pytest
from test_spec import sweep_file

from orchestrator.plan import Plan, load_plan
from orchestrator.presets import CorpusFacts
from trainers.errors import InputError
from trainers.scales import flops_per_token

CORPUS = {"builtin": CorpusFacts(name="builtin", digest="d" * 64, vocab_size=500, tokens=1_000_000)}


def plan_of(**changes: Any) -> Plan:
    return load_plan(sweep_file(**changes), "small.yaml", CORPUS)[1]


def test_the_same_file_gives_the_same_plan() -> None:
    assert plan_of() == plan_of()
    assert plan_of().revision == plan_of().revision


def test_execution_and_comments_do_not_change_the_revision_and_a_weight_decay_does() -> None:
    plain = plan_of()
    assert plan_of(execution={"retries": {"unknown": 2}, "micro_batch": 2}).revision == plain.revision
    assert load_plan("# note\n" + sweep_file(), "small.yaml", CORPUS)[1].revision == plain.revision
    assert plan_of(grids=[{"name": "decay", "axes": {"weight_decay": [0.01, 0.2]}}]).revision != plain.revision


def test_every_chain_leads_from_fresh_weights_to_the_budget_without_a_gap() -> None:
    plan = plan_of()
    for trial in plan.trials:
        chain = [plan.segment_by_id[id] for id in trial.chain]
        assert [s.from_tokens for s in chain] == [0, 0, 4096]
        assert [s.to_tokens for s in chain] == [0, 4096, 8192]
        assert [s.parent for s in chain] == [None, chain[0].id, chain[1].id]


def test_trials_that_differ_from_the_first_step_share_their_fresh_weights_only() -> None:
    plan = plan_of()
    assert len(plan.trials) == 2
    assert [len(segment.trials) for segment in plan.segments] == [2, 1, 1, 1, 1]
    assert plan.tokens_asked == plan.tokens_trained == 2 * 8192


def test_wsd_budgets_share_the_trunk_and_train_less_than_they_ask_for() -> None:
    base = {"preset": "tiny", "context": 32, "batch_size": 8}
    schedule = {"shape": "wsd", "warmup_tokens": 1024, "decay_tokens": 2048}
    plan = plan_of(
        base={**base, "schedule": schedule},
        grids=[{"name": "budgets", "axes": {"token_budget": [4096, 8192]}}],
        checkpoints={"every_tokens": 2048},
    )
    # trunk to 6,144 once; one decay of 2,048 from 2,048, one from 6,144
    assert plan.tokens_asked == 4096 + 8192
    assert plan.tokens_trained == 6144 + 2048 + 2048


def test_equal_cells_of_two_grids_are_one_trial_with_both_names() -> None:
    grids = [
        {"name": "decay", "axes": {"weight_decay": [0.01, 0.1]}},
        {"name": "seeds", "axes": {"seed": [0, 1]}},  # weight decay 0.1 and seed 0 are the preset's
    ]
    plan = plan_of(grids=grids)
    assert plan.cells == 4
    assert len(plan.trials) == 3
    assert [trial.grids for trial in plan.trials] == [("decay",), ("decay", "seeds"), ("seeds",)]


def test_evaluations_are_asked_once_per_segment_and_setting() -> None:
    evaluations = [{"evaluator": "geometry"}, {"evaluator": "loss", "suite": "builtin", "at": "last"}]
    plan = plan_of(evaluations=evaluations)
    kinds = [(e.evaluator, e.tokens) for e in plan.evaluations]
    assert kinds.count(("geometry", 0)) == 1  # both trials have the same fresh weights
    assert kinds.count(("geometry", 4096)) == 2
    assert [e for e in kinds if e[0] == "loss"] == [("loss", 8192)] * 2


def test_fractions_mean_the_nearest_step_boundary() -> None:
    plan = plan_of(checkpoints={"at_fractions": [0.1]})
    assert [plan.segment_by_id[id].to_tokens for id in plan.trials[0].chain] == [3 * 256, 8192]  # 0.1 of 32 steps: 3.2


def test_a_corpus_that_is_not_prepared_gives_a_provisional_plan() -> None:
    _, plan = load_plan(sweep_file(), "small.yaml", {})
    assert plan.provisional == ("builtin",)
    assert plan.trials[0].recipe.model.vocab_rows == 50_304


def test_a_budget_beyond_the_corpus_is_refused_unless_it_may_repeat() -> None:
    small = {"builtin": CorpusFacts(name="builtin", digest="d", vocab_size=500, tokens=5000)}
    text = sweep_file()
    with pytest.raises(InputError, match=r"more than the 5,000 training tokens of corpus 'builtin'; set repeat: true"):
        load_plan(text, "small.yaml", small)
    assert load_plan(text.replace("preset: tiny", "preset: tiny\n  repeat: true"), "small.yaml", small)


def test_flops_of_a_segment_are_its_tokens_times_those_of_the_model() -> None:
    plan = plan_of()
    segment = plan.segments[1]
    assert segment.flops == 4096 * flops_per_token(segment.recipe.model)
