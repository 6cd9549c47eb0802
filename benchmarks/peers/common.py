"""What the loops that are compared share: the same start, the same tokens, the same way to measure."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.batches import TrainingSequences
from trainers.config import Recipe
from trainers.tokens import read_manifest

WARM_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a loop is to train: RECIPE CORPUS STEPS THREADS DEVICE on its command line."""

    recipe: Recipe
    corpus: Path
    steps: int
    threads: int
    device: str


def arguments() -> Given:
    recipe, corpus, steps, threads, device = sys.argv[1:]
    return Given(
        recipe=Recipe.model_validate_json(Path(recipe).read_text()),
        corpus=Path(corpus),
        steps=WARM_STEPS + int(steps),
        threads=int(threads),
        device=device,
    )


def sequences_of(recipe: Recipe, corpus: Path) -> TrainingSequences:
    return TrainingSequences(
        corpus, read_manifest(corpus), context=recipe.model.context, seed=recipe.seed, repeat=recipe.data.repeat
    )


def hugging_face_model(recipe: Recipe) -> Any:
    """The class of transformers with the trial's fresh weights."""
    from trainers.hugging_face import empty_hugging_face_model
    from trainers.model import build_model

    network = empty_hugging_face_model(recipe.model)
    network.load_state_dict(build_model(recipe.model, recipe.seed).state_dict())
    return network.train()


def adamw(model: Any, recipe: Recipe, lr: float) -> Any:
    """torch's AdamW in its fused form, as the recipe sets it: every parameter decays."""
    import torch

    settings = recipe.optimizer
    assert settings.decay_all
    betas, decay = (settings.beta1, settings.beta2), settings.weight_decay
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, eps=settings.eps, weight_decay=decay, fused=True)


def peak_mib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Clock:
    """When each step ended, by the wall clock and by the CPU time of this process, and its loss."""

    def __init__(self) -> None:
        self._ends = [(time.perf_counter(), time.process_time())]
        self.losses: list[float] = []

    def tick(self) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    def seconds(self, kind: int) -> float:
        """The median step, without the first ones, which warm up; kind 0: wall, 1: CPU."""
        steps = [after[kind] - before[kind] for before, after in zip(self._ends, self._ends[1:], strict=False)]
        return statistics.median(steps[WARM_STEPS:])


def report(given: Given, clock: Clock, mib_before: float) -> None:
    """Print the measurement as one line of JSON."""
    tokens = given.recipe.tokens_per_step
    answer = {
        "tokens_per_s": tokens / clock.seconds(0),
        "tokens_per_cpu_s": tokens / clock.seconds(1),
        "mib": _gpu_mib() if given.device != "cpu" else peak_mib() - mib_before,
        "losses": clock.losses,
    }
    print(json.dumps(answer))


def _gpu_mib() -> float:
    """Largest memory that torch took on the device."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**20
