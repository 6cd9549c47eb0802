from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_plan import CORPUS
from test_spec import sweep_file

from orchestrator.lint import Finding, aliased, lint
from orchestrator.plan import load_plan
from orchestrator.spec import AXES

BASE = {"preset": "tiny", "scale": "tiny-32", "context": 32, "token_budget": 8192, "batch_size": 8}
SEEDS = {"seed": [0, 1]}


def findings_of(*axes: dict[str, Any], **changes: Any) -> list[Finding]:
    """The lint of a sweep with one grid per mapping of axes."""
    grids = [{"name": f"grid-{n}", "axes": given} for n, given in enumerate(axes)]
    return list(lint(*load_plan(sweep_file(**{"base": BASE, "grids": grids, **changes}), "small.yaml", CORPUS)))


def test_a_full_product_with_seeds_has_no_fault() -> None:
    assert findings_of({"weight_decay": [0.01, 0.1], "batch_size": [8, 16], **SEEDS}) == []


def test_tied_fields_move_together_and_a_grid_that_varies_one_alone_is_named() -> None:
    tied = {"token_budget, batch_size": [[4096, 8], [8192, 16]], **SEEDS}
    base = {**BASE, "schedule": {"warmup_tokens": 512}}
    (finding,) = [f for f in findings_of(tied, base=base) if f.severity == "warning"]
    assert finding.code == "confounded"
    assert "grid 'grid-0': batch_size and token_budget move together" in finding.text
    assert "another grid" not in finding.text
    (finding,) = [f for f in findings_of(tied, {"batch_size": [8, 16], **SEEDS}, base=base) if f.severity == "warning"]
    assert finding.text.endswith("another grid varies batch_size alone")


def test_fields_that_are_fixed_in_each_grid_and_move_together_between_grids_are_found() -> None:
    findings = findings_of(
        {"tied": [True], "attention": ["parallel"], "seed": [0, 1]},
        {"tied": [False], "attention": ["sequential"], "weight_decay": [0.1, 0.2], "seed": [0, 1]},
        base={**BASE, "family": "pythia"},
    )
    (finding,) = [f for f in findings if f.code == "confounded"]
    assert finding.text.startswith("over all grids: attention and tied move together")


def test_a_tuple_axis_that_is_almost_a_product_lists_what_it_lacks() -> None:
    tuples = [[4096, 8], [4096, 16], [8192, 8]]
    (finding,) = [f for f in findings_of({"token_budget, batch_size": tuples, **SEEDS}) if f.code == "missing-cells"]
    assert "1 of the 4 cells of the product are missing: token_budget 8192, batch_size 16" in finding.text


def test_grids_over_the_same_axes_that_leave_a_corner_out_list_it() -> None:
    axes = [{"weight_decay": [0.1], "batch_size": [8, 16]}, {"weight_decay": [0.2], "batch_size": [8]}]
    (finding,) = [f for f in findings_of(*axes) if f.code == "missing-cells"]
    assert finding.text.startswith("grids 'grid-0' and 'grid-1': 1 of the 4 cells")
    assert "batch_size 16, weight_decay 0.2" in finding.text


def test_one_seed_is_a_warning_and_two_are_none() -> None:
    assert [f.code for f in findings_of({"weight_decay": [0.1, 0.2]})] == ["one-seed"]
    assert findings_of({"weight_decay": [0.1, 0.2], **SEEDS}) == []


def test_a_rule_that_changes_the_learning_rate_with_the_scale_is_named_with_its_range_and_source() -> None:
    ladder = {"preset": "ladder", "corpus": "pile", "context": 32, "batch_size": 8, "token_budget": 1_024_000}
    base = {**ladder, "schedule": {"warmup_tokens": 512}}
    (finding,) = findings_of({"scale": ["4M", "60M"], **SEEDS}, base=base)
    assert finding.code == "hidden-change"
    assert "learning_rate follows scale, from 0.005813 at 60M to 0.01441 at 4M" in finding.text
    assert "0.0047 (N / 108e6)^(-1/3)" in finding.text
    assert findings_of({"scale": ["4M", "60M"], **SEEDS}, base={**base, "learning_rate": 1e-3}) == []


def test_a_decay_that_is_declared_as_a_fraction_of_the_budget_is_no_hidden_change() -> None:
    schedule = {"shape": "wsd", "warmup_tokens": 512, "decay_fraction": 0.25}
    assert findings_of({"token_budget": [4096, 8192], **SEEDS}, base={**BASE, "schedule": schedule}) == []


def test_a_warm_up_of_most_of_the_budget_is_named() -> None:
    base = {**BASE, "schedule": {"warmup_tokens": 4096}}
    (finding,) = findings_of({"token_budget": [4096, 16384], **SEEDS}, base=base)
    assert finding.code == "long-warmup"
    assert finding.text.startswith("2 trials")


def test_repeated_cells_and_other_resources_are_notes() -> None:
    grids = [{"scale": ["tiny-32", "tiny-64"], **SEEDS}, {"weight_decay": [0.1, 0.2], **SEEDS}]
    resources = {"resources": {"default": {"cpus": 1}, "tiny-64": {"cpus": 2}}}
    findings = findings_of(*grids, execution=resources)
    assert [(f.code, f.severity) for f in findings] == [("repeated-cells", "note"), ("resources-differ", "note")]
    assert "8 cells are 6 unique trials: 2 stand in several grids" in findings[0].text
    assert "tiny-32: 1 CPUs, 0 GPUs; tiny-64: 2 CPUs, 0 GPUs" in findings[1].text


# --- the rank of the design -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "groups"),
    [
        ({}, []),
        ({"a": [1, 1, 1]}, []),
        ({"a": [1, 2], "b": [1, 2]}, [("a", "b")]),
        ({"a": [1, 2, 1, 2], "b": [1, 1, 2, 2]}, []),
        ({"a": [1, 2, 3], "b": [1, 2, 2]}, [("a", "b")]),  # b follows from a, a does not from b
        ({"a": [1, 2, 1, 2], "b": [1, 2, 1, 2], "c": [1, 1, 2, 2], "d": [5, 5, 6, 6]}, [("a", "b"), ("c", "d")]),
        ({"a": [1, 2, 1], "b": [1, 1, 2]}, []),  # three cells of four: an additive model still parts them
        ({"a": [0, 0, 1, 1], "b": [0, 1, 0, 1], "c": [0, 1, 1, 0]}, []),  # half of a 2 x 2 x 2: main effects only
    ],
)
def test_fields_are_aliased_where_their_columns_depend(fields: dict[str, list[int]], groups: Any) -> None:
    assert aliased(fields) == groups


def test_fields_that_depend_only_jointly_are_one_group() -> None:
    cells = [(0, 0, 0), (1, 1, 0), (1, 0, 1)]  # a = b + c; any two of them can be told apart
    a, b, c = zip(*cells, strict=True)
    assert aliased({"a": a, "b": b, "c": c}) == [("a", "b", "c")]


@settings(max_examples=60)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_a_full_product_is_never_aliased_and_a_copied_field_always_is(levels: list[int], shuffle: Any) -> None:
    cells = list(itertools.product(*(range(count) for count in levels)))
    shuffle.shuffle(cells)
    fields = {f"axis-{n}": [cell[n] for cell in cells] for n in range(len(levels))}
    assert aliased(fields) == []
    renamed = {"copy": [f"level {value}" for value in fields["axis-0"]]}
    assert aliased({**fields, **renamed}) == [("axis-0", "copy")]
    assert np.unique(list(zip(*fields.values(), strict=True)), axis=0).shape[0] == len(cells)


@pytest.mark.parametrize("field", [name for name in AXES if name not in ("seed", "schedule.shape")])
def test_a_field_that_one_grid_varies_and_neither_base_nor_recipe_may_name_is_no_stumbling_block(field: str) -> None:
    values: dict[str, Any] = {
        "attention": ["sequential"],
        "corpus": ["builtin"],
        "family": ["olmo"],
        "precision": ["float32"],
        "scale": ["tiny-32"],
        "schedule.decay_tokens": [None],
        "schedule.decay_fraction": [None],
        "schedule.warmup_tokens": [0],
        "token_budget": [8192],
        "tied": [False],
        "repeat": [False],
        "decay_all": [True],
        "context": [32],
        "batch_size": [8],
    }
    assert findings_of(SEEDS, {field: values.get(field, [0.5])}) is not None
