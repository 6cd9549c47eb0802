"""What the tests of the trainer share: recipes of the small corpus, and training them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recipes import tiny_recipe
from trainers.checkpoint import CheckpointManifest, CurveRecord
from trainers.config import Recipe
from trainers.loop import Execution, Training
from trainers.tokens import read_manifest

CPU = Execution(device="cpu", threads=1)


def recipe_of(corpus: Path, **changes: Any) -> Recipe:
    """tests.recipes.tiny_recipe on the small corpus."""
    return tiny_recipe(digest=read_manifest(corpus).digest, **changes)


def trained(training: Training, tokens: int) -> list[CurveRecord]:
    """Train to `tokens` without a stop; the steps."""
    curve: list[CurveRecord] = []
    ending = training.train_to(tokens, lambda: False, curve.append)
    assert (ending.kind, ending.tokens) == ("reached", tokens)
    return curve


def save(training: Training, target: Path, curve: list[CurveRecord] | None = None) -> CheckpointManifest:
    return training.save(target, segment="s", history="h", curve=curve or [])
