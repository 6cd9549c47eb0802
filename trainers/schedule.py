"""Learning rate as a pure function of tokens; the trainer and the planner call the same function.

recipe -> [schedule] -> one value a step
A step's value is that of the tokens seen when the step ends: the first step already learns, and the last one has
exactly the final value. Vectorised float64, so that the planner compares whole trials bit for bit.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainers.config import Recipe


def learning_rates(recipe: Recipe, first_step: int, last_step: int) -> NDArray[np.float64]:
    """The learning rate of steps first_step to last_step, both counted from 1 and both included.

    source   cosine and linear: Loshchilov & Hutter 2017; wsd: Hu et al. 2024 (MiniCPM), with a linear decay
    """
    tokens = np.arange(first_step, last_step + 1, dtype=np.float64) * recipe.tokens_per_step
    schedule = recipe.schedule
    warmup, budget = float(schedule.warmup_tokens), float(recipe.token_budget)
    rising = np.minimum(tokens / warmup, 1.0) if warmup else np.ones_like(tokens)
    falling_from = budget - schedule.decay_tokens if schedule.decay_tokens else warmup
    if budget > falling_from:
        done = np.clip((tokens - falling_from) / (budget - falling_from), 0.0, 1.0)
    else:
        done = np.zeros_like(tokens)
    return schedule.peak_lr * np.where(tokens < warmup, rising, _decayed(recipe, done))


def _decayed(recipe: Recipe, done: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fraction of the peak when `done` (0 to 1) of the decay lies behind."""
    final = recipe.schedule.final_fraction
    match recipe.schedule.shape:
        case "cosine":
            return final + (1.0 - final) * 0.5 * (1.0 + np.cos(np.pi * done))
        case "linear" | "wsd":
            return 1.0 - (1.0 - final) * done
        case "constant":
            return np.ones_like(done)


def step_of(recipe: Recipe, tokens: int) -> int:
    """How many whole steps `tokens` are; refused if they are not a whole number."""
    steps, rest = divmod(tokens, recipe.tokens_per_step)
    assert rest == 0, f"{tokens:,} tokens lie inside a step of {recipe.tokens_per_step:,}"
    return steps
