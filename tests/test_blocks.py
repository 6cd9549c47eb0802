"""Our blocks against transformers' classes: the same states, losses and gradients, bit for bit on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from trainers.config import Model
from trainers.hugging_face import empty_hugging_face_model
from trainers.model import body, build_model
from trainers.scales import model_of

LAYOUTS = [("olmo", "sequential"), ("pythia", "sequential"), ("pythia", "parallel")]


def model(family: Any, attention: Any, tied: bool = False) -> Model:
    return model_of(
        family, "tiny-64", context=48, vocab_size=500, attention=attention, tied=tied, init_std=0.3
    )  # so large that attention is far from uniform


def pair(described: Model) -> tuple[Any, Any]:
    """Our network with fresh weights, and transformers' class with the same."""
    ours, theirs = build_model(described, seed=1), empty_hugging_face_model(described)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def ids(length: int) -> torch.Tensor:
    return torch.randint(0, 500, (3, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("family", "attention"), LAYOUTS)
@pytest.mark.parametrize("length", [48, 17, 1])
def test_states_have_the_bits_of_the_class_of_transformers(family: str, attention: str, length: int) -> None:
    ours, theirs = pair(model(family, attention))
    mine, expected = (body(network)(input_ids=ids(length)).last_hidden_state for network in (ours, theirs))
    assert torch.equal(mine, expected)


@pytest.mark.parametrize(("family", "attention"), LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_every_parameter_are_those_of_the_class_of_transformers(
    family: str, attention: str, tied: bool
) -> None:
    gradients = []
    for network in pair(model(family, attention, tied)):
        logits = network.get_output_embeddings()(body(network)(input_ids=ids(48)).last_hidden_state)
        torch.autograd.backward(cross_entropy(logits[:, :-1].flatten(0, 1), ids(48)[:, 1:].flatten()))
        gradients.append({name: parameter.grad for name, parameter in network.named_parameters()})
    ours, theirs = gradients
    assert list(ours) == list(theirs)  # the order too: the norm of the gradient is summed in it
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(("family", "attention"), LAYOUTS)
def test_bfloat16_states_are_those_of_the_class_of_transformers(family: str, attention: str) -> None:
    ours, theirs = pair(model(family, attention))
    with torch.autocast("cpu", torch.bfloat16):
        mine, expected = (body(network)(input_ids=ids(48)).last_hidden_state for network in (ours, theirs))
    torch.testing.assert_close(mine, expected)
