"""The same networks as classes of transformers, for what only they can do: save, export, quantise, other families.

recipe, or the configuration of an imported model -> [hugging_face] -> checkpoint (load_model) -> evaluators
in    Model or Imported (config.py)
out   a float32 PreTrainedModel on the CPU with its parameters unset; weights are the caller's
not   training: importing transformers takes several seconds, and nothing that trains needs it
"""

from __future__ import annotations

import json
from typing import Any

import torch
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


def empty_hugging_face_model(origin: Model | Imported) -> PreTrainedModel:
    """The network of a recipe as Llama or GPT-NeoX, or that of an imported configuration, without weights."""
    with no_init_weights():
        network = _imported(origin) if isinstance(origin, Imported) else _of_recipe(origin)
    network.tie_weights()
    return network


def _of_recipe(model: Model) -> PreTrainedModel:
    return _olmo(model) if model.family == "olmo" else _pythia(model)


def _imported(imported: Imported) -> PreTrainedModel:
    config = AutoConfig.for_model(**json.loads(imported.config))
    network: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return network


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
