"""How well a model learns another domain, and how much it forgets of its own.

checkpoint -> model, target domain -> [finetune] -> metric values
in    a model, the training split of a domain, held-out sets of that domain and of the pre-training mix
out   the loss on the target before and after, at the learning rate that does best; the loss on the mix before and after
not   the checkpoint's own optimizer state: AdamW starts anew, as everybody's fine-tuning does; dropout

Each learning rate starts from the checkpoint's weights and sees the same sequences in the same order.

Letters: B sequences in a batch, T tokens in a sequence.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from evaluators.config import FinetuneSettings, LossSettings
from evaluators.loss import suite_losses
from evaluators.metrics import MetricValue, Plain, metric_value
from evaluators.suites import Suite, only, open_suite
from trainers.batches import TrainingSequences
from trainers.config import Data, Imported, Optimizer
from trainers.errors import InputError
from trainers.head import mean_loss
from trainers.model import body
from trainers.optim import AdamW

_TOKENS_PER_FORWARD = 16_384  # bounds the memory of a step; a constant, since the last bits depend on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What a fine-tuning reads: sequences to train on, held-out sets of the target and of the pre-training mix."""

    sequences: TrainingSequences
    target: Suite
    retained: Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The values, and the network with the weights of the best learning rate."""

    values: tuple[MetricValue, ...]
    network: PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tuned:
    """losses: on the target, then on the sets of the mix."""

    rate: float
    network: PreTrainedModel
    losses: Sequence[MetricValue]

    @property
    def on_target(self) -> float:
        value = self.losses[0].value
        assert value is not None
        return value


def open_texts(settings: FinetuneSettings, corpora: Path, trained_on: Data | Imported, context: int) -> Texts:
    """The texts of a fine-tuning.

    corpora   folder of the prepared corpora;  context   tokens of a sequence
    raises    InputError if a corpus or domain is missing, was made with another tokenizer, or has too little text
    """
    target = open_suite(settings.suite, corpora, trained_on)
    name = settings.retained or (trained_on.corpus if isinstance(trained_on, Data) else None)
    if name is None:
        raise InputError("retained: missing; an imported model's training text is not known")
    retained = open_suite(name, corpora, trained_on)
    sequences = TrainingSequences(
        target.folder,
        target.manifest,
        context=context,
        seed=settings.seed,
        repeat=False,
        domains=[target.manifest.split(settings.domain, "train").domain],
    )
    per_step = settings.batch_size * context
    problems = []
    if settings.tokens % per_step:
        near = [
            tokens for tokens in (settings.tokens // per_step * per_step, -(-settings.tokens // per_step) * per_step)
        ]
        problems.append(f"tokens: {settings.tokens:,} is not a whole number of steps of {per_step:,}; near: {near}")
    if settings.tokens > sequences.count * context:
        there = sequences.count * context // per_step * per_step
        problems.append(f"tokens: {settings.tokens:,}, whole steps of one pass over '{settings.domain}' have {there:,}")
    if problems:
        raise InputError(f"finetune on '{settings.domain}': does not fit, nothing was evaluated", problems)
    return Texts(
        sequences=sequences,
        target=only(target, [settings.domain]),
        retained=only(retained, retained.manifest.mix),
    )


def fine_tune(
    network: PreTrainedModel,
    unembedding: str,
    texts: Texts,
    settings: FinetuneSettings,
    context: int,
    device: str,
) -> Outcome:
    """Fine-tune at every learning rate; the best is the one with the lowest loss on the target's held-out set.

    network       float32; not changed
    unembedding   name of W among its parameters
    raises        InputError if no learning rate gives a finite loss, or as suite_losses
    """
    network = network.to(device).eval()
    before = _losses(network, texts, settings, context, device)
    best: _Tuned | None = None
    by_rate: dict[str, float | str] = {}
    for rate in settings.learning_rates:
        changed = _tuned(network, unembedding, texts.sequences, settings, context, rate)
        if changed is None:
            by_rate[f"{rate:g}"] = "diverged"
            continue
        one = _Tuned(rate=rate, network=changed, losses=_losses(changed, texts, settings, context, device))
        by_rate[f"{rate:g}"] = one.on_target
        best = one if best is None or one.on_target < best.on_target else best
    if best is None:
        raise InputError(f"finetune on '{settings.domain}': no learning rate of {settings.learning_rates} stays finite")
    convention: dict[str, Plain] = {
        "target": settings.domain,
        "target_digest": texts.target.manifest.digest,
        "tokens": settings.tokens,
        "learning_rate": best.rate,
        "target_loss_by_learning_rate": json.dumps(by_rate),
        "chosen": "the learning rate with the lowest loss on the target's held-out set",
    }
    return Outcome(values=tuple(_values(before, best, settings, convention)), network=best.network)


def _tuned(
    network: PreTrainedModel,
    unembedding: str,
    sequences: TrainingSequences,
    settings: FinetuneSettings,
    context: int,
    rate: float,
) -> PreTrainedModel | None:
    """A fine-tuned copy; None if a loss or a gradient stopped being finite."""
    network = copy.deepcopy(network)
    optimizer = AdamW(network, _optimizer(settings), unembedding)
    steps = settings.tokens // (settings.batch_size * context)
    for step in range(1, steps + 1):
        ids_BT = torch.from_numpy(sequences.read((step - 1) * settings.batch_size, settings.batch_size))
        optimizer.zero_grad()
        loss = _accumulate_gradients(network, ids_BT.to(network.device), settings)
        norm = clip_grad_norm_(network.parameters(), settings.clip).item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return None
        optimizer.step(rate * _share_of_rate(settings, step / steps))
    return network


def _optimizer(settings: FinetuneSettings) -> Optimizer:
    return Optimizer(
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        decay_all=True,
        clip=settings.clip,
    )


def _share_of_rate(settings: FinetuneSettings, done: float) -> float:
    """Of the learning rate, when `done` (0 to 1) of the tokens are seen: a line down to final_fraction."""
    return 1.0 - (1.0 - settings.final_fraction) * done


def _accumulate_gradients(network: PreTrainedModel, ids_BT: Tensor, settings: FinetuneSettings) -> float:
    """As trainers.loop: each part counts by its tokens, so how the batch is cut does not matter."""
    total = torch.zeros((), device=ids_BT.device)
    for part_BT in torch.split(ids_BT, max(1, _TOKENS_PER_FORWARD // ids_BT.shape[1])):
        with torch.autocast(ids_BT.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
            hidden_BTD = body(network)(input_ids=part_BT[:, :-1]).last_hidden_state
            weight_VD = network.get_output_embeddings().weight
            loss = mean_loss(hidden_BTD.flatten(0, 1), weight_VD, part_BT[:, 1:].flatten())
        loss = loss * (len(part_BT) / len(ids_BT))
        torch.autograd.backward(loss)
        total += loss.detach()
    return total.item()


def _losses(
    network: PreTrainedModel, texts: Texts, settings: FinetuneSettings, context: int, device: str
) -> list[MetricValue]:
    """The loss on the target, then those on the pre-training mix."""
    found: list[MetricValue] = []
    for suite in (texts.target, texts.retained):
        asked = LossSettings(suite=suite.name, tokens_per_domain=settings.tokens_per_domain)
        found += [v for v in suite_losses(network, suite, asked, context, device) if v.metric == "loss"]
    if unknown := [str(v.convention["undefined"]) for v in found if v.value is None]:
        raise InputError(f"finetune on '{settings.domain}': no loss, nothing was evaluated", unknown)
    return found


def _values(
    before: Sequence[MetricValue], best: _Tuned, settings: FinetuneSettings, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    pairs = list(zip(before, best.losses, strict=True))
    return [
        *_change("finetune_loss", "finetune_gain", *pairs[0], convention),
        *(value for pair in pairs[1:] for value in _change("retained_loss", "forgetting", *pair, convention)),
        metric_value("finetune_learning_rate", best.rate, dataset=settings.domain, convention=convention),
    ]


def _change(
    name: str, change: str, old: MetricValue, new: MetricValue, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    """The loss before and after, and what it gained or what was forgotten."""
    assert old.value is not None
    assert new.value is not None
    difference = old.value - new.value if change == "finetune_gain" else new.value - old.value
    named: dict[str, Any] = {"dataset": new.dataset, "split": new.split, "n": new.n}
    noted = {**new.convention, **convention}
    return [
        metric_value(f"{name}_before", old.value, **named, convention=noted),
        metric_value(name, new.value, **named, convention=noted),
        metric_value(change, difference, **named, convention=noted),
    ]
