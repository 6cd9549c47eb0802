from __future__ import annotations

from typing import Any

import pytest
import yaml

from orchestrator.plan import load_plan
from orchestrator.spec import SHIPPED, find_sweep, parse
from trainers.errors import InputError


def sweep_file(**changes: Any) -> str:
    content: dict[str, Any] = {
        "name": "small",
        "question": "does it work?",
        "base": {"preset": "tiny", "context": 32, "token_budget": 8192, "batch_size": 8},
        "grids": [{"name": "decay", "axes": {"weight_decay": [0.01, 0.1]}}],
        "checkpoints": {"at_fractions": [0, 0.5, 1]},
        "evaluations": [{"evaluator": "geometry", "at": "every"}],
    }
    return yaml.safe_dump({**content, **changes}, sort_keys=False)


def problems_of(text: str) -> tuple[str, ...]:
    with pytest.raises(InputError) as caught:
        load_plan(text, "small.yaml", {})
    assert caught.value.headline.startswith(f"small.yaml: {len(caught.value.problems)} problem")
    assert caught.value.next_step == "every field and its unit: sweeps/README.md"
    return caught.value.problems


def test_mistakes_of_every_kind_are_reported_at_once() -> None:
    text = sweep_file(
        base={"preset": "tiny", "contxt": 32, "token_budget": 8192, "weight_decay": "3e-x"},
        grids=[{"name": "g", "axes": {"scale": ["tiny-64", "tiny-65"], "lr": [1]}}],
        evaluations=[{"evaluator": "geometri"}],
    )
    assert problems_of(text) == (
        "base.weight_decay: '3e-x' is text, a number is needed",
        "base.contxt: no such field; nearest is 'context'",
        "evaluations[0].evaluator: no evaluator 'geometri'; nearest is 'geometry'",
        *[p for p in problems_of(text) if p.startswith("grids[0].axes.lr: no such field 'lr'")],
        "grids[0] at scale tiny-65: family 'olmo' has no scale 'tiny-65'; nearest is 'tiny-96'",
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "../up"}, "name: '../up' is no name"),
        ({"checkpoints": {}}, "checkpoints: needs exactly one of at_fractions, at_tokens, every_tokens"),
        ({"checkpoints": {"at_tokens": [100]}}, "100 tokens lie inside a step of 256"),
        ({"checkpoints": {"at_tokens": [81920]}}, "81,920 is beyond token_budget 8,192"),
        ({"grids": []}, "grids: is empty, at least one is needed"),
        ({"grids": [{"name": "g", "axes": {"seed": [1, 1]}}]}, "grids[0].axes.seed: 1 stands twice"),
        ({"grids": [{"name": "g", "axes": {"seed, tied": [[1]]}}]}, "[1] is no tuple of 2 values for seed, tied"),
        ({"grids": [{"name": "g", "axes": {"token_budget": [8000]}}]}, "nearest are 7,936 and 8,192"),
        ({"grids": [{"name": "g", "axes": {"schedule.final_fraction": [1.5]}}]}, "less than or equal to 1"),
        ({"grids": [{"name": "g", "axes": {"token_budget": [0]}}]}, "greater than 0"),
        ({"grids": [{"name": "g", "axes": {"weight_decay": [float("nan")]}}]}, "finite number"),
        ({"grids": [{"name": "g", "axes": {"schedule.shape": ["wsd"]}}]}, "decay_tokens belongs to shape 'wsd'"),
        ({"grids": [{"name": "g", "axes": {"learning_rate, learning_rate_multiplier": [[1, 1]]}}]}, "both set"),
        ({"grids": [{"name": "g", "axes": {"scale": ["12M"]}}]}, "heads of 21 dimensions"),
        ({"execution": {"resources": {"default": {"cpu": 1}}}}, "default.cpu: no such field; nearest is 'cpus'"),
        ({"keep": {"weights": "first"}}, "keep.weights: 'first' is not allowed; allowed: all, last"),
        ({"keep": {"wieghts": "all"}}, "keep.wieghts: no such field; nearest is 'weights'"),
        ({"limits": {"max_bytes": "10XB"}}, "limits.max_bytes: '10XB' is not a whole number"),
        ({"limits": {"max_gpu_hours": 0}}, "limits.max_gpu_hours: 0: input should be greater than 0"),
        ({"sources": {"weigth_decay": "a paper"}}, "sources.weigth_decay: no such field; nearest is 'weight_decay'"),
        ({"grids": [{"name": "g", "axes": {"schedule.decay_fraction": [0]}}]}, "greater than 0"),
        (
            {"grids": [{"name": "g", "axes": {"schedule.decay_fraction, schedule.decay_tokens": [[0.1, 256]]}}]},
            "schedule.decay_tokens and schedule.decay_fraction are both set",
        ),
        (
            {"evaluations": [{"evaluator": "loss", "suit": "builtin"}]},
            "evaluations[0].suit: no such field; nearest is 'suite'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(changes: dict[str, Any], problem: str) -> None:
    assert any(problem in line for line in problems_of(sweep_file(**changes)))


def test_six_wrong_axes_get_one_message_each_at_once() -> None:
    axes: list[dict[str, Any]] = [
        {"wieght_decay": [0.1]},
        {"seed, tied": [[1, False, 2]]},
        {"scale": ["4M", "13M"]},
        {"schedule.final_fraction": [0.1, 1.1]},
        {"token_budget": [0]},
        {"weight_decay": [float("nan")]},
    ]
    problems = problems_of(sweep_file(grids=[{"name": f"g{n}", "axes": given} for n, given in enumerate(axes)]))
    assert len(problems) == 6
    for n, part in enumerate(
        [
            "no such field 'wieght_decay'; nearest is 'weight_decay'",
            "[1, False, 2] is no tuple of 2 values for seed, tied",
            "family 'olmo' has no scale '13M'; nearest is",
            "1.1: input should be less than or equal to 1",
            "0: input should be greater than 0",
            "nan: input should be a finite number",
        ]
    ):
        assert any(line.startswith(f"grids[{n}]") and part in line for line in problems), (part, problems)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("8192", 8192),
        ("8_192", 8192),
        ("8.192e3", 8192),
        ("'8e9'", 8 * 10**9),
        ("8B", 8 * 10**9),
        ("128M", 128_000_000),
    ],
)
def test_token_counts_are_read_as_the_number_they_plainly_are(given: str, value: int) -> None:
    spec, problems = parse(sweep_file().replace("token_budget: 8192", f"token_budget: {given}"), "small.yaml")
    assert problems == []
    assert spec is not None
    assert spec.base.token_budget == value


@pytest.mark.parametrize(("given", "value"), [("10GB", 10**10), ("1.5TB", 15 * 10**11), ("500kB", 500_000), ("8", 8)])
def test_sizes_are_read_with_their_unit(given: str, value: int) -> None:
    spec, problems = parse(sweep_file(limits={"max_bytes": given}), "small.yaml")
    assert problems == []
    assert spec is not None
    assert spec.limits.max_bytes == value


def test_a_source_in_the_file_stands_beside_those_of_the_preset() -> None:
    _, plan = load_plan(sweep_file(sources={"weight_decay": "a paper"}), "small.yaml", {})
    assert plan.trials[0].sources["weight_decay"] == "a paper"
    assert plan.trials[0].sources["beta1"] == "OLMo and Pythia alike"


def test_a_rate_written_without_a_dot_is_a_number() -> None:
    spec, problems = parse(sweep_file().replace("preset: tiny", "preset: tiny\n  learning_rate: 3e-4"), "small.yaml")
    assert problems == []
    assert spec is not None
    assert spec.base.learning_rate == 3e-4


def test_a_key_that_stands_twice_is_refused() -> None:
    with pytest.raises(InputError, match="'name' stands twice"):
        parse(sweep_file() + "name: again\n", "small.yaml")


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "just text"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"small.yaml: is (no YAML|a )"):
        parse(text, "small.yaml")


def test_an_unknown_sweep_is_answered_with_the_nearest_shipped_name() -> None:
    with pytest.raises(InputError, match="nearest is 'demo'"):
        find_sweep("dem")


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_sweeps_are_valid(path: Any) -> None:
    spec, plan = load_plan(path.read_text(), path.name, {})
    assert spec.name == path.stem
    assert plan.trials
