"""The shape of what a model makes of text: geometry of its last hidden states H.

checkpoint -> model, held-out sequences -> [hidden] -> metric values
in    a model and a corpus that its tokenizer made
out   every geometry metric of H: one row a sequence, its state at one position; after the final norm (layer null, what
      the unembedding reads) and before it (layer: number of the last block)
not   W: evaluate.py reads that without a model

H depends on the text, on how much of it and on the position: all of it is in the settings, nothing is drawn by chance.

Letters: S sequences, T tokens of a sequence, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from evaluators.config import HiddenSettings
from evaluators.geometry import geometry
from evaluators.metrics import MetricValue, Plain, metric_value
from evaluators.suites import Suite
from trainers.errors import InputError
from trainers.model import body
from trainers.tokens import open_split

_TOKENS_PER_FORWARD = 2048  # bounds the memory of a forward pass; a constant, since the last bits depend on it
_FINAL_NORMS = (
    "norm",
    "final_layer_norm",
    "ln_f",
    "final_layernorm",
)  # names that transformers gives it


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Last hidden states, (S, D) float32 on the CPU: what the final norm is given, and what it makes of it."""

    before_norm: Tensor
    after_norm: Tensor


def hidden_geometry(
    network: PreTrainedModel, suite: Suite, settings: HiddenSettings, context: int, device: str
) -> list[MetricValue]:
    """Geometry of H after the final norm, then before it.

    context    longest sequence of the model, in tokens
    raises     InputError if the settings do not fit the model or the corpus, or a state is nan or inf
    """
    domain = settings.domain or next(iter(suite.manifest.mix), None)
    if domain is None:
        raise InputError(f"suite '{suite.name}': domain: missing; it has no pre-training mix to take one from")
    tokens = settings.sequence_tokens or context
    ids_ST = _sequences(suite, domain, settings, tokens, context)
    network = network.to(device).eval()
    states = last_states(network, ids_ST, settings.position)
    layers: int = network.config.num_hidden_layers
    convention: dict[str, Plain] = {
        "suite": suite.name,
        "corpus_digest": suite.manifest.digest,
        "sequences": len(ids_ST),
        "sequence_tokens": tokens,
        "position": settings.position,
        "text": "from the start of the split; documents packed",
    }
    return [
        *_values(states.after_norm, settings, domain, None, {**convention, "matrix": "states after the final norm"}),
        *_values(
            states.before_norm, settings, domain, layers - 1, {**convention, "matrix": "states before the final norm"}
        ),
    ]


def _sequences(suite: Suite, domain: str, settings: HiddenSettings, tokens: int, context: int) -> NDArray[np.int64]:
    record = suite.manifest.split(domain, settings.split)
    needed = settings.sequences * tokens
    problems = []
    if tokens > context:
        problems.append(f"sequence_tokens: {tokens:,}, the model reads {context:,} at most")
    if not -tokens <= settings.position < tokens:
        problems.append(f"position: {settings.position}, a sequence has {tokens:,} tokens")
    if record.documents < 2:
        problems.append(f"domain '{domain}': its {settings.split} split is one document")
    if needed > record.tokens:
        problems.append(
            f"sequences: {settings.sequences:,} of {tokens:,} tokens, there are {record.tokens // tokens:,}"
        )
    if problems:
        raise InputError(f"suite '{suite.name}': no such sample of '{domain}', nothing was evaluated", problems)
    return open_split(suite.folder, domain, settings.split).read(0, needed).reshape(-1, tokens)


@torch.inference_mode()
def last_states(network: PreTrainedModel, ids_ST: NDArray[np.int64], position: int) -> States:
    """The states at one position of every sequence; the tokens after it are not read, since no state sees them."""
    inner = body(network)
    read_ST = ids_ST[:, : position % ids_ST.shape[1] + 1]
    at_once = max(1, _TOKENS_PER_FORWARD // read_ST.shape[1])
    before: list[Tensor] = []
    after: list[Tensor] = []

    def keep(_: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        before.append(given[0][:, -1].float().cpu())
        after.append(made[:, -1].float().cpu())

    hook = _final_norm(inner).register_forward_hook(keep)
    try:
        for start in range(0, len(read_ST), at_once):
            inner(input_ids=torch.from_numpy(read_ST[start : start + at_once]).to(network.device))
    finally:
        hook.remove()
    return States(before_norm=torch.cat(before), after_norm=torch.cat(after))


def _final_norm(inner: nn.Module) -> nn.Module:
    for name in _FINAL_NORMS:
        if isinstance(module := getattr(inner, name, None), nn.Module):
            return module
    raise InputError(f"a {type(inner).__name__} has no final norm that is known here ({', '.join(_FINAL_NORMS)})")


def _values(
    states_SD: Tensor, settings: HiddenSettings, domain: str, layer: int | None, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    return [
        metric_value(
            f"hidden_{value.metric}",
            value.value,
            dataset=domain,
            split=settings.split,
            layer=layer,
            n=value.n,
            convention=value.convention,
        )
        for value in geometry(states_SD, settings, convention)
    ]
