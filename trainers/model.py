"""A Hugging Face causal language model with fresh weights, from the recipe's model and a seed.

recipe -> [model] -> loop -> checkpoint
in    Model (config.py) and the trial's seed
out   a float32 model on the CPU whose bits depend on nothing else: no global random state is read or changed
not   published weights, devices, precision: they are added where they are used
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from trainers.config import Imported, Model
from trainers.errors import InputError

CUTOFF = 3.0  # fresh weights lie within this many standard deviations (OLMo's ladder)


def build_model(model: Model, seed: int) -> PreTrainedModel:
    """The model with fresh weights: matrices and embeddings normal(0, init_std) cut off at 3 std, gains 1, biases 0.

    seed     of the fresh weights; parameters are filled in the order of their names, from one private generator
    returns  float32, on the CPU, in training mode (there is no dropout)
    source   OLMo model ladder; pythia takes the same rule, so that families differ in their blocks only
    """
    network = empty_model(model)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(network.named_parameters()):
        _fill(name, parameter, model.init_std, generator)
    return network


def empty_model(model: Model) -> PreTrainedModel:
    """The model with its parameters unset, for weights that come from elsewhere."""
    with no_init_weights():
        network = _olmo(model) if model.family == "olmo" else _pythia(model)
    network.tie_weights()
    return network


def empty_imported_model(imported: Imported) -> PreTrainedModel:
    """The float32 model of an imported configuration with its parameters unset."""
    config = AutoConfig.for_model(**json.loads(imported.config))
    with no_init_weights():
        network: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    network.tie_weights()
    return network


def unembedding_name(model: Model) -> str:
    """Name of W, the (V, D) matrix of the head, among `named_parameters()`: the input embedding when tied."""
    if not model.tied:
        return "lm_head.weight"
    return "model.embed_tokens.weight" if model.family == "olmo" else "gpt_neox.embed_in.weight"


def body(network: PreTrainedModel) -> nn.Module:
    """The part from ids (B, T) to `.last_hidden_state` (B, T, D), the final norm included, without the head."""
    base: nn.Module = network.base_model
    return base


def _fill(name: str, parameter: nn.Parameter, std: float, generator: torch.Generator) -> None:
    if parameter.ndim >= 2:
        nn.init.trunc_normal_(parameter, std=std, a=-CUTOFF * std, b=CUTOFF * std, generator=generator)
    elif name.endswith(".bias"):
        nn.init.zeros_(parameter)
    else:
        nn.init.ones_(parameter)


def _shared_settings(model: Model) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_rows,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "max_position_embeddings": model.context,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied,
        "use_cache": False,
        "bos_token_id": None,  # the tokenizer belongs to the corpus, not to the model
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }


def _olmo(model: Model) -> LlamaForCausalLM:
    if model.rotary_fraction != 1:
        raise InputError(f"model.rotary_fraction is {model.rotary_fraction:g}; family 'olmo' rotates whole heads, so 1")
    rotary = {"rope_type": "default", "rope_theta": model.rotary_theta}
    config = LlamaConfig(**_shared_settings(model), rms_norm_eps=model.norm_eps, rope_parameters=rotary)
    return LlamaForCausalLM(config)


def _pythia(model: Model) -> GPTNeoXForCausalLM:
    rotary = {
        "rope_type": "default",
        "rope_theta": model.rotary_theta,
        "partial_rotary_factor": model.rotary_fraction,
    }
    config = GPTNeoXConfig(
        **_shared_settings(model),
        layer_norm_eps=model.norm_eps,
        use_parallel_residual=model.attention == "parallel",
        rope_parameters=rotary,
        hidden_act="gelu",
    )
    return GPTNeoXForCausalLM(config)
