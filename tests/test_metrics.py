"""The metric table, the record of one value, and the settings of an evaluator as a sweep file writes them."""

from __future__ import annotations

import math

import pytest

from evaluators.config import (
    EVALUATOR_SETTINGS,
    EVALUATOR_VERSIONS,
    FinetuneSettings,
    GeometrySettings,
    HiddenSettings,
    LossSettings,
    QuantizeSettings,
    settings_from,
)
from evaluators.metrics import METRICS, metric_value
from trainers.errors import InputError


def test_value_carries_the_version_and_unit_of_its_metric() -> None:
    value = metric_value("loss", 3.5, dataset="docs", split="heldout", n=8128, convention={"context": 128})
    assert (value.metric, value.version, value.unit, value.value) == ("loss", 1, "nats/token", 3.5)
    assert (value.dataset, value.split, value.layer, value.n) == ("docs", "heldout", None, 8128)


def test_value_of_an_unknown_metric_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="'efective_rank'; nearest is 'effective_rank'"):
        metric_value("efective_rank", 1.0, convention={})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(InputError, match=f"'isotropy' is {value}"):
        metric_value("isotropy", value, convention={})


def test_undefined_value_without_a_reason_is_refused() -> None:
    with pytest.raises(InputError, match="without a reason"):
        metric_value("condition_number", None, convention={})
    assert metric_value("condition_number", None, convention={"undefined": "rank 1 of 2"}).value is None


def test_every_metric_says_what_it_is() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert metric.version >= 1
        assert metric.unit
        assert metric.source
        assert metric.meaning


def test_settings_are_filled_from_what_a_sweep_file_says() -> None:
    assert settings_from({"evaluator": "geometry"}) == GeometrySettings()
    assert settings_from({"evaluator": "loss", "suite": "builtin"}) == LossSettings(suite="builtin")


def test_settings_survive_json() -> None:
    for settings in (
        GeometrySettings(top_k=3),
        LossSettings(suite="builtin", tokens_per_domain=256),
        QuantizeSettings(suite="builtin", bits=(2, 8), group_size=None),
        HiddenSettings(suite="builtin", domain="docs", position=3),
        FinetuneSettings(suite="builtin", domain="python", learning_rates=(1e-4, 1e-3)),
    ):
        assert settings_from(settings.model_dump(mode="json")) == settings
    assert EVALUATOR_VERSIONS.keys() == EVALUATOR_SETTINGS.keys()


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"evaluator": "geometri"}, "there is no 'geometri'; nearest is 'geometry'"),
        ({"suite": "builtin"}, "evaluator: missing"),
        ({"evaluator": "loss"}, "suite: missing"),
        (
            {"evaluator": "loss", "suite": "builtin", "token_per_domain": 5},
            "token_per_domain: no such field; nearest is 'tokens_per_domain'",
        ),
        ({"evaluator": "loss", "suite": "builtin", "tokens_per_domain": 0}, "greater than 0, given 0"),
        ({"evaluator": "geometry", "power_law_ranks": [0.5, 0.1]}, "must rise"),
        ({"evaluator": "quantize", "suite": "builtin", "bits": [5]}, "bits.0: Input should be 2, 3, 4 or 8, given 5"),
        ({"evaluator": "quantize", "suite": "builtin", "bits": [4, 3]}, "bits [4, 3] must rise"),
        ({"evaluator": "quantize", "suite": "builtin", "bits": []}, "bits: Tuple should have at least 1 item"),
        ({"evaluator": "quantize", "suite": "builtin", "dampp": 0.1}, "dampp: no such field; nearest is 'damp'"),
    ],
    ids=[
        "unknown",
        "missing",
        "no-suite",
        "extra",
        "zero",
        "falling",
        "bits-unknown",
        "bits-falling",
        "bits-none",
        "quantize-extra",
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_field(entry: dict[str, object], says: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_from(entry)
    assert says in str(caught.value)
