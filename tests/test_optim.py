"""AdamW against its formula, its groups, and its state under names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainers.config import Optimizer
from trainers.errors import InputError
from trainers.model import build_model, unembedding_name
from trainers.optim import AdamW
from trainers.scales import model_of


def settings(**changes: Any) -> Optimizer:
    values: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay_all": True}
    return Optimizer(**{**values, "clip": 1.0, **changes})


def network(family: Any = "olmo", *, tied: bool = False) -> tuple[nn.Module, str]:
    model = model_of(family, "tiny-32", context=16, vocab_size=100, attention="sequential", tied=tied, init_std=0.02)
    return build_model(model, seed=0), unembedding_name(model)


def fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def step(model: nn.Module, optimizer: AdamW, seed: int) -> None:
    fill_gradients(model, seed)
    optimizer.step(1e-3)


def test_three_steps_are_those_of_the_published_formula() -> None:
    model = nn.Linear(3, 2, bias=False)
    w = model.weight.detach().double().numpy().copy()
    optimizer = AdamW(model, settings(), "weight")
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, rate in enumerate([1e-2, 2e-2, 5e-3], start=1):
        g = np.full(w.shape, 0.5 * t) * np.array([[1, -1, 2], [-2, 1, -1]])
        model.weight.grad = torch.tensor(g, dtype=torch.float32)
        optimizer.step(rate)
        # Loshchilov & Hutter 2019, algorithm 2, with the decay scaled by the learning rate
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - rate * 0.1) - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=2e-6)


@pytest.mark.parametrize("decay_all", [True, False])
def test_the_bits_are_those_of_the_class_of_torch(decay_all: bool) -> None:
    ours, unembedding = network()
    theirs, _ = network()
    optimizer = AdamW(ours, settings(decay_all=decay_all), unembedding)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in theirs.named_parameters():
        groups[name in optimizer.decayed].append(parameter)
    peer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for seed in range(3):
        step(ours, optimizer, seed)
        fill_gradients(theirs, seed)
        peer.step()
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name
        assert torch.equal(peer.state[parameter]["exp_avg_sq"], optimizer.tensors()[f"{name}/exp_avg_sq"]), name


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    model, unembedding = network()
    optimizer = AdamW(model, settings(), unembedding)
    fill_gradients(model, 0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.get_parameter(unembedding).grad = None
    optimizer.step(1e-3)
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert same == {unembedding}


def test_decay_of_everything_is_one_group_with_every_parameter() -> None:
    model, unembedding = network()
    assert AdamW(model, settings(), unembedding).decayed.keys() == dict(model.named_parameters()).keys()


@pytest.mark.parametrize("family", ["olmo", "pythia"])
@pytest.mark.parametrize("tied", [False, True])
def test_else_matrices_of_the_blocks_and_the_unembedding_decay_and_nothing_more(family: str, tied: bool) -> None:
    model, unembedding = network(family, tied=tied)
    decayed = AdamW(model, settings(decay_all=False), unembedding).decayed
    left = dict(model.named_parameters()).keys() - decayed.keys()
    assert {name for name in left if "norm" not in name and not name.endswith("bias")} == (
        set() if tied else {"model.embed_tokens.weight" if family == "olmo" else "gpt_neox.embed_in.weight"}
    )
    assert unembedding in decayed


def test_a_restored_state_goes_on_with_the_same_bits() -> None:
    straight, unembedding = network()
    optimizer = AdamW(straight, settings(), unembedding)
    step(straight, optimizer, 1)
    step(straight, optimizer, 2)
    copy, _ = network()
    copy.load_state_dict(straight.state_dict())
    state = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    restored = AdamW(copy, settings(), unembedding)
    restored.restore(state, steps=2)
    step(straight, optimizer, 3)
    step(copy, restored, 3)
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name)), name


def test_before_the_first_step_there_is_no_state() -> None:
    model, unembedding = network()
    optimizer = AdamW(model, settings(), unembedding)
    assert optimizer.tensors() == {}
    optimizer.restore({}, steps=0)
    assert optimizer.tensors() == {}


def test_the_state_of_another_model_is_refused_by_name() -> None:
    model, unembedding = network()
    optimizer = AdamW(model, settings(), unembedding)
    step(model, optimizer, 1)
    state = optimizer.tensors()
    del state["lm_head.weight/exp_avg"]
    with pytest.raises(InputError, match=r"lm_head\.weight/exp_avg"):
        AdamW(model, settings(), unembedding).restore(state, steps=1)
