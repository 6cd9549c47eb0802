"""Fresh models: their bits, their distribution, and that they are the Hugging Face models they claim to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from recipes import hugging_face_model
from scipy.stats import truncnorm
from transformers import GPTNeoXForCausalLM, LlamaForCausalLM

from trainers.config import Model
from trainers.errors import InputError
from trainers.hugging_face import empty_hugging_face_model
from trainers.model import body, build_model, unembedding, unembedding_name
from trainers.scales import model_of


def model(family: Any = "olmo", **changes: Any) -> Model:
    shape: dict[str, Any] = {"context": 32, "vocab_size": 1000, "attention": "sequential", "tied": False}
    return model_of(family, "tiny-64", **{**shape, "init_std": 0.02, **changes})


def test_fresh_weights_depend_on_model_and_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_model(model(), seed=3).state_dict()
    torch.manual_seed(2)
    again, other = build_model(model(), seed=3).state_dict(), build_model(model(), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    build_model(model("pythia"), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("family", ["olmo", "pythia"])
def test_fresh_matrices_are_normal_cut_off_at_three_deviations(family: str) -> None:
    network = build_model(model(family, init_std=0.05), seed=0)
    matrices = [p.detach().flatten() for p in network.parameters() if p.ndim == 2]
    values = torch.cat(matrices).double().numpy()
    expected = truncnorm(-3, 3, scale=0.05)
    assert np.abs(values).max() <= 0.15
    assert values.std() == pytest.approx(expected.std(), rel=0.01)
    quantiles = np.array([0.01, 0.1, 0.5, 0.9, 0.99])
    np.testing.assert_allclose(np.quantile(values, quantiles), expected.ppf(quantiles), atol=1e-3)


@pytest.mark.parametrize("family", ["olmo", "pythia"])
def test_fresh_gains_are_one_and_biases_zero(family: str) -> None:
    vectors = {n: p for n, p in build_model(model(family), seed=0).named_parameters() if p.ndim == 1}
    assert all((p == (0 if name.endswith("bias") else 1)).all() for name, p in vectors.items())
    assert any(name.endswith("bias") for name in vectors) == (family == "pythia")


@pytest.mark.parametrize("family", ["olmo", "pythia"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_unembedding_is_found_under_its_name(family: str, tied: bool) -> None:
    described = model(family, tied=tied)
    network = build_model(described, seed=0)
    weight = dict(network.named_parameters())[unembedding_name(described)]
    assert weight is network.get_output_embeddings().weight
    assert (weight is network.base_model.input_embedding.weight) == tied


def test_olmo_is_the_llama_class_without_biases_and_with_the_published_block() -> None:
    network = empty_hugging_face_model(model())
    assert isinstance(network, LlamaForCausalLM)
    assert network.config.intermediate_size == 4 * 64
    assert network.config.rms_norm_eps == 1e-6
    assert network.config.rope_parameters["rope_theta"] == 10_000


@pytest.mark.parametrize(("attention", "parallel"), [("parallel", True), ("sequential", False)])
def test_pythia_is_gpt_neox_with_the_residual_of_its_attention_layout(attention: str, parallel: bool) -> None:
    network = empty_hugging_face_model(model("pythia", attention=attention))
    assert isinstance(network, GPTNeoXForCausalLM)
    assert network.config.use_parallel_residual is parallel
    assert network.gpt_neox.layers[0].attention.rotary_ndims == 4  # a quarter of a head of 16
    assert network.config.hidden_act == "gelu"


@pytest.mark.parametrize("family", ["olmo", "pythia"])
def test_the_head_on_the_body_gives_the_logits_of_the_whole_model(family: str) -> None:
    network, whole = build_model(model(family), seed=0), hugging_face_model(model(family), seed=0)
    ids = torch.randint(0, 1000, (2, 32), generator=torch.Generator().manual_seed(0))
    hidden = body(network)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(hidden @ unembedding(network).T, whole(input_ids=ids).logits)


def test_a_part_rotary_olmo_is_refused_since_llama_would_ignore_it() -> None:
    with pytest.raises(InputError, match=r"rotary_fraction is 0\.5"):
        build_model(model().model_copy(update={"rotary_fraction": 0.5}), seed=0)
