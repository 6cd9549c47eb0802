"""Ids: a readable part and twelve hex digits of a digest over what can change a number.

spec -> [identity] -> plan
The heart is `histories`: two trials with the same history digest at a token have had the same training up to there,
bit for bit, whatever sweep asked for them. Segments and checkpoints are named by it, so sharing needs no bookkeeping.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from trainers.config import Recipe
from trainers.schedule import Piece, pieces, step_of

HISTORY_VERSION = 1  # moves when the trainer's arithmetic does: old checkpoints are then no longer the same training


def canonical_json(value: object) -> str:
    """One text per value: sorted keys, no spaces, shortest exact floats; ValueError for nan and inf."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def digest(value: object) -> str:
    """sha256 hex digits of the canonical JSON of a plain value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def recipe_digest(recipe: Recipe) -> str:
    return digest(recipe.model_dump(mode="json"))


def trial_id(recipe: Recipe) -> str:
    """Readable, and the same in every sweep that asks for this recipe."""
    readable = (
        f"{recipe.model.scale}-b{recipe.batch_size}-wd{recipe.optimizer.weight_decay:g}-"
        f"{short_count(recipe.token_budget)}-s{recipe.seed}"
    )
    return f"{readable}-{recipe_digest(recipe)[:12]}"


def segment_id(recipe: Recipe, to_tokens: int, history: str) -> str:
    return f"{recipe.model.family}-{recipe.model.scale}-{short_count(to_tokens)}-{history[:16]}"


def lone_segment_id(recipe: Recipe, to_tokens: int, history: str, trial: str) -> str:
    """Name of a segment that one trial keeps for itself, although others have the same history."""
    return segment_id(recipe, to_tokens, digest([history, trial]))


def fresh_digest(recipe: Recipe) -> str:
    """Of the fresh weights: the model and the seed alone."""
    return digest({"version": HISTORY_VERSION, **_fresh(recipe)})


def conditions_digest(recipe: Recipe) -> str:
    """Of everything that every step realises, but the learning rate: fresh weights, data, batch, optimizer, precision.

    The budget never counts: it acts through the learning rates. Nor does `repeat`: it only says whether a second pass
    is refused.
    """
    return digest(
        {
            "version": HISTORY_VERSION,
            **_fresh(recipe),
            "data": recipe.data.digest,
            "optimizer": recipe.optimizer.model_dump(mode="json"),
            "batch_size": recipe.batch_size,
            "precision": recipe.precision,
        }
    )


def _fresh(recipe: Recipe) -> dict[str, object]:
    return {"model": recipe.model.model_dump(mode="json"), "seed": recipe.seed}


def history_at(conditions: str, schedule: Sequence[Piece], step: int) -> str:
    """Digest of everything realised in steps 1 to `step`.

    conditions  conditions_digest of the recipe
    schedule    its pieces; they stand for the float64 value of each step (trainers.schedule), and unlike a digest of
                the values theirs is the same on every machine
    """
    laws: list[list[object]] = []
    for piece in schedule:
        laws.append([min(piece.last_step, step), *piece.law])
        if piece.last_step >= step:
            break
    return digest([conditions, laws])


def histories(recipe: Recipe, at_tokens: Sequence[int]) -> dict[int, str]:
    """Digest of everything realised from fresh weights up to each token count of `at_tokens`.

    at_tokens  step boundaries
    returns    tokens -> sha256 hex; at 0 tokens only the fresh weights count
    """
    conditions, schedule = conditions_digest(recipe), pieces(recipe)
    return {
        tokens: history_at(conditions, schedule, step_of(recipe, tokens)) if tokens else fresh_digest(recipe)
        for tokens in at_tokens
    }


def evaluation_id(checkpoint: str, evaluator: str, settings_digest: str, version: int) -> str:
    """Name of one evaluation: the same question to the same bits has the same name in every sweep."""
    return f"{evaluator}-v{version}-{digest([checkpoint, evaluator, settings_digest, version])[:24]}"


def settings_digest(settings: Mapping[str, object]) -> str:
    return digest(dict(settings))[:16]


def short_count(count: int) -> str:
    """Tokens for names: 131072 -> '131072', 250000 -> '250k', 8e9 -> '8B'; exact always."""
    for factor, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count and count % factor == 0:
            return f"{count // factor}{letter}"
    return str(count)
