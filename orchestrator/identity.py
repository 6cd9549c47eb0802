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
from trainers.schedule import learning_rates, step_of

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


def histories(recipe: Recipe, at_tokens: Sequence[int]) -> dict[int, str]:
    """Digest of everything realised from fresh weights up to each token count of `at_tokens`.

    at_tokens  step boundaries, ascending
    returns    tokens -> sha256 hex. At 0 tokens only the fresh weights count; later also data, batch, optimizer and the
               learning rate of every step so far, as float64 bits. The budget itself never counts: it acts through
               the learning rates. Nor does `repeat`: it only says whether a second pass is refused.
    """
    fresh = {"version": HISTORY_VERSION, "model": recipe.model.model_dump(mode="json"), "seed": recipe.seed}
    settings = {
        "data": recipe.data.digest,
        "optimizer": recipe.optimizer.model_dump(mode="json"),
        "batch_size": recipe.batch_size,
        "precision": recipe.precision,
    }
    running = hashlib.sha256(canonical_json({"fresh": fresh, **settings}).encode())
    rates = learning_rates(recipe, 1, step_of(recipe, at_tokens[-1])) if at_tokens else None
    found, done = {}, 0
    for tokens in at_tokens:
        if tokens == 0:
            found[0] = digest({"fresh": fresh})
            continue
        assert rates is not None
        step = step_of(recipe, tokens)
        running.update(rates[done:step].tobytes())
        found[tokens] = running.copy().hexdigest()
        done = step
    return found


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
