"""Learning rate as a pure function of tokens; the trainer and the planner read the same pieces.

recipe -> [schedule] -> one value a step
A step's value is that of the tokens seen when the step ends: the first step already learns, and the last one has
exactly the final value. A schedule is a few pieces, each one formula with its numbers: `learning_rates` evaluates them
in float64, `laws` names them. Equal pieces are equal bits on every machine, so trials are compared by their pieces and
no machine's cosine enters an id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from trainers.config import Recipe, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Steps up to and including last_step, counted from 1, that follow one formula.

    formula   rise: numbers = (peak, tokens of warm-up); flat: (peak,); line and cosine: (peak, final fraction, tokens
              where the fall begins, tokens where it ends)
    """

    last_step: int
    formula: Literal["rise", "flat", "line", "cosine"]
    numbers: tuple[float, ...]

    @property
    def law(self) -> tuple[str | float, ...]:
        """The formula and its numbers: what two pieces must have in common to be the same bits."""
        return (self.formula, *self.numbers)


def pieces(recipe: Recipe) -> tuple[Piece, ...]:
    """The learning rate of a whole trial: at most a rise, a plateau and a fall, in this order.

    source   cosine and linear: Loshchilov & Hutter 2017; wsd: Hu et al. 2024 (MiniCPM), with a linear decay
    """
    schedule, budget = recipe.schedule, recipe.token_budget
    step, peak = recipe.tokens_per_step, schedule.peak_lr
    begins = _fall_begins(schedule, budget)
    risen = max(-(-schedule.warmup_tokens // step) - 1, 0)  # steps that end before the warm-up does
    found = [
        Piece(last_step=risen, formula="rise", numbers=(peak, float(schedule.warmup_tokens))),
        Piece(last_step=begins // step, formula="flat", numbers=(peak,)),
        Piece(
            last_step=recipe.steps,
            formula="cosine" if schedule.shape == "cosine" else "line",
            numbers=(peak, schedule.final_fraction, float(begins), float(budget)),
        ),
    ]
    starts = (0, *(piece.last_step for piece in found))
    return tuple(piece for piece, start in zip(found, starts, strict=False) if piece.last_step > start)


def _fall_begins(schedule: Schedule, budget: int) -> int:
    """Tokens where the rate leaves the peak; the budget for a schedule that never does."""
    if schedule.shape == "constant" or schedule.final_fraction == 1:
        return budget
    return budget - schedule.decay_tokens if schedule.decay_tokens else schedule.warmup_tokens


def learning_rates(recipe: Recipe, first_step: int, last_step: int) -> NDArray[np.float64]:
    """The learning rate of steps first_step to last_step, both counted from 1 and both included."""
    parts, first = [np.empty(0)], first_step
    for piece in pieces(recipe):
        last = min(piece.last_step, last_step)
        if last >= first:
            tokens = np.arange(first, last + 1, dtype=np.float64) * recipe.tokens_per_step
            parts.append(_evaluated(piece, tokens))
            first = last + 1
    return np.concatenate(parts)


def _evaluated(piece: Piece, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    if piece.formula == "flat":
        return np.full_like(tokens, piece.numbers[0])
    if piece.formula == "rise":
        peak, warmup = piece.numbers
        return peak * (tokens / warmup)
    peak, final, begins, ends = piece.numbers
    done = (tokens - begins) / (ends - begins)
    if piece.formula == "line":
        return peak * (1.0 - (1.0 - final) * done)
    return peak * (final + (1.0 - final) * 0.5 * (1.0 + np.cos(np.pi * done)))


def step_of(recipe: Recipe, tokens: int) -> int:
    """How many whole steps `tokens` are; refused if they are not a whole number."""
    steps, rest = divmod(tokens, recipe.tokens_per_step)
    assert rest == 0, f"{tokens:,} tokens lie inside a step of {recipe.tokens_per_step:,}"
    return steps
