"""The network that is trained: a causal language model with fresh weights, from the recipe's model and a seed.

recipe -> blocks -> [model] -> loop -> checkpoint
in    Model (config.py) and the trial's seed
out   a float32 network on the CPU whose bits depend on nothing else: no global random state is read or changed
not   published weights, devices, precision: they are added where they are used; transformers: hugging_face.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from trainers.blocks import CausalLM, Olmo, Pythia
from trainers.config import Model
from trainers.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Network: TypeAlias = CausalLM | PreTrainedModel
    """What is trained here, or its like of transformers: `body` and `unembedding` take either."""

CUTOFF = 3.0  # fresh weights lie within this many standard deviations (OLMo's ladder)


def build_model(model: Model, seed: int) -> CausalLM:
    """The network with fresh weights: matrices and embeddings normal(0, init_std) cut off at 3 std, gains 1, biases 0.

    seed     of the fresh weights; parameters are filled in the order of their names, from one private generator
    returns  float32, on the CPU, in training mode (there is no dropout)
    source   OLMo model ladder; pythia takes the same rule, so that families differ in their blocks only
    """
    network = empty_model(model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(network.named_parameters()):
        _fill(name, parameter, model.init_std, generator)
    return network


def empty_model(model: Model) -> CausalLM:
    """The network with its parameters unset, for weights that come from elsewhere."""
    if model.family == "pythia":
        return Pythia(model)
    if model.rotary_fraction != 1:
        raise InputError(f"model.rotary_fraction is {model.rotary_fraction:g}; family 'olmo' rotates whole heads, so 1")
    return Olmo(model)


def unembedding_name(model: Model) -> str:
    """Name of W, the (V, D) matrix of the head, among `named_parameters()`: the input embedding when tied."""
    if not model.tied:
        return "lm_head.weight"
    return "model.embed_tokens.weight" if model.family == "olmo" else "gpt_neox.embed_in.weight"


def body(network: Network) -> nn.Module:
    """The part from ids (B, T) to `.last_hidden_state` (B, T, D), the final norm included, without the head."""
    base: nn.Module = network.base_model
    return base


def unembedding(network: Network) -> Tensor:
    """W, the (V, D) matrix of the head."""
    weight_VD: Tensor = network.get_output_embeddings().weight
    return weight_VD


def _fill(name: str, parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    if parameter.ndim >= 2:
        nn.init.trunc_normal_(parameter, std=std, a=-CUTOFF * std, b=CUTOFF * std, generator=generator)
    elif name.endswith(".bias"):
        nn.init.zeros_(parameter)
    else:
        nn.init.ones_(parameter)
