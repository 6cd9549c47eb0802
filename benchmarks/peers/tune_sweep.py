"""A sweep as one writes it without us: Ray Tune over transformers' Trainer, with evaluation in the loop.

    python -m benchmarks.peers.tune_sweep CELLS.json CORPUS OUT

CELLS.json: the recipes of the grid and the token counts of their checkpoints (benchmarks/sweep.py writes it). Every
trial saves the model and the optimizer at each checkpoint and evaluates there: the geometry of W by its singular
values and vectors, and the loss on 8,192 held-out tokens of each domain. Two trials at a time on two cores, one thread
each. Prints the losses at the last checkpoint as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray import tune
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.peers.common import adamw, hugging_face_model, sequences_of
from benchmarks.peers.trainer import InOrder
from trainers.config import Recipe
from trainers.schedule import learning_rates
from trainers.tokens import open_split, read_manifest

TOKENS_PER_DOMAIN = 8_192


def geometry(weight: np.ndarray[Any, Any]) -> dict[str, float]:
    """The study's metrics as one writes them first, in float64."""
    matrix = weight.astype(np.float64)
    centred = matrix - matrix.mean(axis=0)
    found: dict[str, float] = {}
    for name, one in (("raw", matrix), ("centred", centred)):
        singular = np.linalg.svd(one, compute_uv=False)
        p = singular / singular.sum()
        found[f"{name}_effective_rank"] = float(np.exp(-(p * np.log(p)).sum()))
        vectors = np.linalg.eigh(one.T @ one)[1]
        z = np.concatenate([np.exp(one @ vectors).sum(axis=0), np.exp(-one @ vectors).sum(axis=0)])
        found[f"{name}_isotropy"] = float(z.min() / z.max())
        unit = one / np.linalg.norm(one, axis=1, keepdims=True)
        total = unit.sum(axis=0)
        found[f"{name}_cosine"] = float((total @ total - len(unit)) / (len(unit) * (len(unit) - 1)))
    return found


@torch.no_grad()
def losses(model: Any, corpus: Path, context: int) -> dict[str, float]:
    """Mean loss on the start of every domain's held-out split."""
    found = {}
    for domain in read_manifest(corpus).domains:
        ids = torch.from_numpy(open_split(corpus, domain, "heldout").read(0, TOKENS_PER_DOMAIN).reshape(-1, context))
        parts = [model(input_ids=part, labels=part).loss.item() for part in ids.split(16)]
        found[domain] = float(np.mean(parts))
    return found


class Checkpoints(TrainerCallback):  # type: ignore[misc]
    """Saves and evaluates at the steps asked for."""

    def __init__(self, steps: set[int], folder: Path, corpus: Path, context: int) -> None:
        self._steps, self._folder, self._corpus, self._context = steps, folder, corpus, context
        self.results: dict[str, Any] = {}

    def on_train_begin(self, _arguments: Any, state: Any, _control: Any, **more: Any) -> None:
        self._visit(state, more)

    def on_step_end(self, _arguments: Any, state: Any, _control: Any, **more: Any) -> None:
        self._visit(state, more)

    def _visit(self, state: Any, more: Mapping[str, Any]) -> None:
        if state.global_step not in self._steps:
            return
        model, folder = more["model"], self._folder / str(state.global_step)
        model.save_pretrained(folder)
        torch.save(more["optimizer"].state_dict(), folder / "optimizer.pt")
        model.eval()
        geometry_of_w = geometry(model.get_output_embeddings().weight.detach().numpy())
        self.results = {"geometry": geometry_of_w, "losses": losses(model, self._corpus, self._context)}
        (folder / "results.json").write_text(json.dumps(self.results))
        model.train()


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    cell = json.loads(config["cell"])
    recipe, corpus = Recipe.model_validate(cell["recipe"]), Path(config["corpus"])
    model, settings = hugging_face_model(recipe), recipe.optimizer
    optimizer = adamw(model, recipe, 1.0)
    rates = [*learning_rates(recipe, 1, recipe.steps).tolist(), 0.0]
    folder = Path(config["out"]) / str(config["number"])
    steps = {tokens // recipe.tokens_per_step for tokens in cell["checkpoints"]}
    checkpoints = Checkpoints(steps, folder, corpus, recipe.model.context)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            per_device_train_batch_size=recipe.batch_size,
            max_steps=recipe.steps,
            max_grad_norm=settings.clip,
            logging_steps=50,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=InOrder(sequences_of(recipe, corpus)),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])),
        callbacks=[checkpoints],
    )
    trainer.train()
    tune.report({"loss": checkpoints.results["losses"]["docs"]})


def main() -> None:
    cells, corpus, out = (Path(argument).resolve() for argument in sys.argv[1:])
    texts = [json.dumps(cell) for cell in json.loads(cells.read_text())]
    tuner = tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space={
            "number": tune.grid_search(list(range(len(texts)))),
            "cell": tune.sample_from(lambda config: texts[config["number"]]),
            "corpus": str(corpus),
            "out": str(out / "checkpoints"),
        },
        tune_config=tune.TuneConfig(reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(out / "tune"), verbose=0),
    )
    results = tuner.fit()
    losses = {result.config["number"]: result.metrics["loss"] for result in results}
    (out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
