"""The loss head against torch's plain cross-entropy over all logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from trainers.head import mean_loss, token_losses


def case(tokens: int, rows: int, hidden_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens + rows)
    hidden = torch.randn(tokens, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(rows, hidden_size, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, rows, (tokens,), generator=generator)


def gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden_grad, weight_grad = torch.autograd.grad(loss, (hidden, weight))
    return hidden_grad, weight_grad


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(2, 200), st.sampled_from([1, 7, 128, 256, 1000]))
def test_value_and_gradients_are_those_of_plain_cross_entropy(tokens: int, rows: int, chunk: int) -> None:
    hidden, weight, targets = case(tokens, rows)
    plain = cross_entropy(hidden.double() @ weight.double().T, targets)
    loss = mean_loss(hidden, weight, targets, chunk)
    assert loss.item() == pytest.approx(plain.item(), rel=2e-6, abs=2e-6)
    for ours, theirs in zip(gradients(loss, hidden, weight), gradients(plain, hidden, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_loss_scales_the_gradient_by_what_comes_from_above() -> None:
    hidden, weight, targets = case(40, 30)
    once = gradients(mean_loss(hidden, weight, targets), hidden, weight)
    thrice = gradients(3 * mean_loss(hidden, weight, targets), hidden, weight)
    torch.testing.assert_close(thrice[1], 3 * once[1])


def test_under_bfloat16_the_loss_keeps_float32_digits_and_the_gradient_is_as_good_as_the_plain_heads() -> None:
    hidden, weight, targets = case(600, 500)
    exact = cross_entropy(hidden @ weight.T, targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss = mean_loss(hidden, weight, targets)
        plain = cross_entropy(torch.nn.functional.linear(hidden, weight), targets)
    assert loss.dtype == torch.float32
    # bfloat16 itself is 0.4 % coarse; the mean over 600 tokens is far closer than one rounding of it
    assert loss.item() == pytest.approx(exact.item(), rel=3e-4)
    expected = gradients(exact, hidden, weight)
    ours, theirs = gradients(loss, hidden, weight), gradients(plain, hidden, weight)
    for true, mine, other in zip(expected, ours, theirs, strict=True):
        assert (mine - true).norm() < 1.5 * (other - true).norm()


@pytest.mark.parametrize("chunk", [1, 13, 64, 500])
def test_token_losses_are_those_of_each_token(chunk: int) -> None:
    hidden, weight, targets = case(100, 70)
    losses = token_losses(hidden, weight, targets, chunk)
    expected = cross_entropy(hidden @ weight.T, targets, reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    assert not losses.requires_grad


def test_a_loss_beyond_the_range_of_exp_is_still_a_number() -> None:
    hidden, weight = torch.tensor([[1000.0]]), torch.tensor([[1.0], [-1.0]])
    assert mean_loss(hidden, weight, torch.tensor([1])).item() == 2000
    assert token_losses(hidden, weight, torch.tensor([1])).item() == 2000
