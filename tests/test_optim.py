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
from trainers.optim import build_optimizer, optimizer_tensors, restore_optimizer, set_learning_rate
from trainers.scales import model_of


def settings(**changes: Any) -> Optimizer:
    values: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay_all": True}
    return Optimizer(**{**values, "clip": 1.0, **changes})


def network(family: Any = "olmo", *, tied: bool = False) -> tuple[nn.Module, str]:
    model = model_of(family, "tiny-32", context=16, vocab_size=100, attention="sequential", tied=tied, init_std=0.02)
    return build_model(model, seed=0), unembedding_name(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    set_learning_rate(optimizer, 1e-3)
    optimizer.step()


def test_three_steps_are_those_of_the_published_formula() -> None:
    model = nn.Linear(3, 2, bias=False)
    w = model.weight.detach().double().numpy().copy()
    optimizer = build_optimizer(model, settings(), "weight")
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, rate in enumerate([1e-2, 2e-2, 5e-3], start=1):
        g = np.full(w.shape, 0.5 * t) * np.array([[1, -1, 2], [-2, 1, -1]])
        model.weight.grad = torch.tensor(g, dtype=torch.float32)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        # Loshchilov & Hutter 2019, algorithm 2, with the decay scaled by the learning rate
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        w = w * (1 - rate * 0.1) - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
    np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=2e-6)


def test_decay_of_everything_is_one_group_with_every_parameter() -> None:
    model, unembedding = network()
    groups = build_optimizer(model, settings(), unembedding).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1]
    assert len(groups[0]["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("family", ["olmo", "pythia"])
@pytest.mark.parametrize("tied", [False, True])
def test_else_matrices_of_the_blocks_and_the_unembedding_decay_and_nothing_more(family: str, tied: bool) -> None:
    model, unembedding = network(family, tied=tied)
    decayed, others = build_optimizer(model, settings(decay_all=False), unembedding).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    left = {names[id(parameter)] for parameter in others["params"]}
    assert {name for name in left if "norm" not in name and not name.endswith("bias")} == (
        set() if tied else {"model.embed_tokens.weight" if family == "olmo" else "gpt_neox.embed_in.weight"}
    )
    assert unembedding in {names[id(parameter)] for parameter in decayed["params"]}


def test_a_restored_state_goes_on_with_the_same_bits() -> None:
    straight, unembedding = network()
    optimizer = build_optimizer(straight, settings(), unembedding)
    step(straight, optimizer, 1)
    step(straight, optimizer, 2)
    copy, _ = network()
    copy.load_state_dict(straight.state_dict())
    state = {name: tensor.clone() for name, tensor in optimizer_tensors(straight, optimizer).items()}
    restored = build_optimizer(copy, settings(), unembedding)
    restore_optimizer(copy, restored, state, steps=2)
    step(straight, optimizer, 3)
    step(copy, restored, 3)
    for name, parameter in straight.named_parameters():
        assert torch.equal(parameter, copy.get_parameter(name)), name


def test_before_the_first_step_there_is_no_state() -> None:
    model, unembedding = network()
    optimizer = build_optimizer(model, settings(), unembedding)
    assert optimizer_tensors(model, optimizer) == {}
    restore_optimizer(model, optimizer, {}, steps=0)
    assert not optimizer.state


def test_the_state_of_another_model_is_refused_by_name() -> None:
    model, unembedding = network()
    optimizer = build_optimizer(model, settings(), unembedding)
    step(model, optimizer, 1)
    state = optimizer_tensors(model, optimizer)
    del state["lm_head.weight/exp_avg"]
    with pytest.raises(InputError, match=r"lm_head\.weight/exp_avg"):
        restore_optimizer(model, build_optimizer(model, settings(), unembedding), state, steps=1)
