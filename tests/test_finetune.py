"""Fine-tuning: it learns the target and forgets the mix, each step is the trainer's, the best rate is the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from recipes import tiny_recipe
from test_evaluate import recipe_for, save
from transformers import AutoModelForCausalLM

from evaluators.__main__ import main
from evaluators.config import FinetuneSettings, LossSettings
from evaluators.evaluate import evaluate, fine_tune_checkpoint
from evaluators.metrics import MetricValue
from trainers.batches import TrainingSequences
from trainers.checkpoint import load_model, read_manifest
from trainers.errors import InputError
from trainers.loop import Execution, Training
from trainers.tokens import read_manifest as read_corpus

CONTEXT = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The olmo model after 400 steps on the pre-training mix."""
    recipe = tiny_recipe(token_budget=400 * 256, repeat=True)
    recipe = recipe.model_copy(update={"data": recipe_for(corpus).data.model_copy(update={"repeat": True})})
    training = Training.fresh(recipe, corpus, Execution())
    training.train_to(recipe.token_budget, lambda: False, lambda _: None)
    folder = tmp_path_factory.mktemp("trained") / "last"
    training.save(folder, segment="s", history="h", curve=())
    return folder


def settings(**changes: Any) -> FinetuneSettings:
    small = {"tokens": 100 * 256, "batch_size": 8, "learning_rates": (1e-4, 3e-3), "tokens_per_domain": 4096}
    return FinetuneSettings(suite="builtin", **{"domain": "python", **small, **changes})


def by_name(values: Any) -> dict[str, MetricValue]:
    return {value.metric: value for value in values}


def test_a_model_learns_the_target_and_forgets_its_mix(checkpoint: Path, corpus: Path) -> None:
    values = by_name(evaluate(checkpoint, settings(), corpora=corpus.parent))
    loss = {name: value.value for name, value in values.items()}
    assert loss["finetune_loss"] < loss["finetune_loss_before"] - 0.1
    assert loss["retained_loss"] > loss["retained_loss_before"]
    assert loss["finetune_gain"] == loss["finetune_loss_before"] - loss["finetune_loss"]
    assert loss["forgetting"] == loss["retained_loss"] - loss["retained_loss_before"]
    assert (values["finetune_loss"].dataset, values["retained_loss"].dataset) == ("python", "docs")
    by_rate = json.loads(str(values["finetune_loss"].convention["target_loss_by_learning_rate"]))
    assert loss["finetune_loss"] == min(by_rate.values())
    assert by_rate[f"{loss['finetune_learning_rate']:g}"] == loss["finetune_loss"]
    measured = evaluate(checkpoint, LossSettings(suite="builtin", tokens_per_domain=4096), corpora=corpus.parent)
    before = {v.dataset: v.value for v in measured if v.metric == "loss"}
    assert (loss["finetune_loss_before"], loss["retained_loss_before"]) == (before["python"], before["docs"])


def test_each_step_is_that_of_torchs_adamw_on_the_mean_loss(checkpoint: Path, corpus: Path) -> None:
    asked = settings(tokens=3 * 256, learning_rates=(2e-3,), weight_decay=0.1)
    found = fine_tune_checkpoint(checkpoint, asked, corpus.parent, "cpu").network
    network = load_model(checkpoint)
    order = TrainingSequences(corpus, read_corpus(corpus), context=CONTEXT, seed=0, repeat=False, domains=["python"])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step, rate in enumerate((2e-3 * 2 / 3, 2e-3 / 3, 0.0)):
        ids = torch.from_numpy(order.read(8 * step, 8))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        network(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    for (name, mine), (_, theirs) in zip(found.named_parameters(), network.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_rate_that_diverges_is_named_and_another_is_taken(checkpoint: Path, corpus: Path) -> None:
    asked = settings(tokens=20 * 256, learning_rates=(1e-3, 1e30), clip=1e30)
    values = by_name(evaluate(checkpoint, asked, corpora=corpus.parent))
    assert values["finetune_learning_rate"].value == 1e-3
    by_rate = json.loads(str(values["finetune_loss"].convention["target_loss_by_learning_rate"]))
    assert by_rate["1e+30"] == "diverged"
    with pytest.raises(InputError, match="no learning rate"):
        evaluate(checkpoint, asked.model_copy(update={"learning_rates": (1e30,)}), corpora=corpus.parent)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": 1000}, "tokens: 1,000 is not a whole number of steps of 256; near: [768, 1024]"),
        ({"tokens": 256 * 10**6}, "whole steps of one pass over 'python' have"),
        ({"domain": "pyton"}, "no train split of domain 'pyton'"),
        ({"retained": "pile"}, "no corpus 'pile'"),
    ],
    ids=["step", "pass", "domain", "retained"],
)
def test_text_that_does_not_fit_is_refused(checkpoint: Path, corpus: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        evaluate(checkpoint, settings(**changes), corpora=corpus.parent)
    assert says in str(caught.value)


def test_weights_are_kept_only_when_asked(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = "{evaluator: finetune, suite: builtin, domain: python, tokens: 2560, batch_size: 8, learning_rates: [1e-3]}"
    command = [str(checkpoint), "--corpora", str(corpus.parent), "--settings", entry, "--json"]
    assert main([*command, "--keep", str(tmp_path / "kept")]) == 0
    loss = next(v for v in json.loads(capsys.readouterr().out) if v["metric"] == "finetune_loss")
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
    recipe = read_manifest(checkpoint).recipe
    assert recipe is not None
    again = save(tmp_path / "again", recipe, {name: p.detach() for name, p in kept.named_parameters()})
    (value,) = [
        v
        for v in evaluate(again, LossSettings(suite="builtin"), corpora=corpus.parent)
        if (v.metric, v.dataset) == ("loss", "python")
    ]
    assert value.value == loss["value"]
    assert main([*command, "--keep", str(tmp_path / "kept")]) == 2
    assert "already exists" in capsys.readouterr().err
