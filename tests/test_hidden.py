"""Geometry of H against transformers' own hidden states, and samples that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import tiny_recipe
from test_evaluate import fresh_weights, recipe_for, save
from test_hub import FAMILIES

from evaluators.config import HiddenSettings, MatrixSettings
from evaluators.evaluate import evaluate
from evaluators.geometry import geometry
from evaluators.hidden import last_states
from trainers.checkpoint import load_model
from trainers.errors import InputError
from trainers.tokens import open_split


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    recipe = recipe_for(corpus)
    return save(tmp_path_factory.mktemp("trial") / "0", recipe, fresh_weights(recipe))


def settings(**changes: Any) -> HiddenSettings:
    return HiddenSettings(suite="builtin", **{"sequences": 100, **changes})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("position", [-1, 0, 7])
def test_states_are_those_that_transformers_returns(family: str, position: int) -> None:
    kind, config = FAMILIES[family]
    torch.manual_seed(2)
    network = kind(config).eval()
    ids = np.random.default_rng(0).integers(0, 512, (70, 32))  # more than one forward pass
    states = last_states(network, ids, position)
    with torch.no_grad():
        whole = network(torch.from_numpy(ids), output_hidden_states=True)
        logits = states.after_norm @ network.get_output_embeddings().weight.T
    torch.testing.assert_close(states.after_norm, whole.hidden_states[-1][:, position], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, whole.logits[:, position], rtol=1e-4, atol=1e-4)
    normed = next(m for n, m in network.base_model.named_children() if n in ("norm", "final_layer_norm", "ln_f"))
    with torch.no_grad():
        torch.testing.assert_close(normed(states.before_norm), states.after_norm, rtol=1e-4, atol=1e-5)


def test_values_are_the_geometry_of_the_states_after_and_before_the_final_norm(checkpoint: Path, corpus: Path) -> None:
    values = evaluate(checkpoint, settings(domain="python", position=5), corpora=corpus.parent)
    ids = open_split(corpus, "python", "heldout").read(0, 3200).reshape(100, 32)
    states = last_states(load_model(checkpoint).eval(), ids, 5)
    for layer, matrix in ((None, states.after_norm), (1, states.before_norm)):
        found = {v.metric: v.value for v in values if v.layer == layer}
        expected = {f"hidden_{v.metric}": v.value for v in geometry(matrix, MatrixSettings(), {})}
        assert found == pytest.approx(expected, rel=1e-9)
    assert {(v.dataset, v.split) for v in values} == {("python", "heldout")}
    rank = next(v for v in values if v.metric == "hidden_effective_rank")
    assert rank.n == 100
    assert {"sequences": 100, "sequence_tokens": 32, "position": 5}.items() <= rank.convention.items()
    assert evaluate(checkpoint, settings(domain="python", position=5), corpora=corpus.parent) == values


def test_without_a_domain_the_pre_training_mix_is_read_and_another_sample_is_another_number(
    checkpoint: Path, corpus: Path
) -> None:
    def rank(**changes: Any) -> tuple[str | None, float]:
        values = evaluate(checkpoint, settings(**changes), corpora=corpus.parent)
        (found,) = [v for v in values if v.metric == "hidden_effective_rank" and v.layer is None]
        assert found.value is not None
        return found.dataset, found.value

    domain, one = rank()
    assert domain == "docs"
    assert len({one, rank(sequences=99)[1], rank(position=3)[1], rank(split="train")[1], rank(domain="cpp")[1]}) == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sequence_tokens": 64}, "sequence_tokens: 64, the model reads 32 at most"),
        ({"position": 32}, "position: 32, a sequence has 32 tokens"),
        ({"sequences": 10_000_000}, "sequences: 10,000,000 of 32 tokens, there are"),
        ({"domain": "pyton"}, "no heldout split of domain 'pyton'"),
    ],
    ids=["context", "position", "sequences", "domain"],
)
def test_sample_that_the_model_or_the_corpus_does_not_have_is_refused(
    checkpoint: Path, corpus: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError) as caught:
        evaluate(checkpoint, settings(**changes), corpora=corpus.parent)
    assert says in str(caught.value)


def test_states_of_a_model_with_nan_weights_are_refused(tmp_path: Path, corpus: Path) -> None:
    recipe = tiny_recipe().model_copy(update={"data": recipe_for(corpus).data})
    weights = fresh_weights(recipe)
    weights["model.norm.weight"][0] = float("nan")
    with pytest.raises(InputError, match=r"bad: non_finite: 1 tensors"):
        evaluate(save(tmp_path / "bad", recipe, weights), settings(), corpora=corpus.parent)
