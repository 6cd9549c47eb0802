"""Prove that a resumed training is the one that was saved.

checkpoint folder, Training -> [certificate] -> digests of both sides, losses of a replay
in    a folder that a Training was saved to, the Training that was made of it
out   Digests: weights, optimizer, random state, position in the data; the largest difference of replayed losses
not   a store: the caller keeps what is found
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainers.checkpoint import CurveRecord, content_sha256, read_manifest, read_state
from trainers.loop import RANDOM_STATE, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Of one complete state. sha256 in hex; sequence: index of the next training sequence"""

    weights: str
    optimizer: str
    random: str
    sequence: int


def saved_digests(folder: Path) -> Digests:
    """Of what a checkpoint was when it was saved.

    The manifest has the digests of the saved memory; the state file is compared with its own before it is split.
    raises  EnvironmentFault (corrupt_file) if the file is not what was saved
    """
    manifest = read_manifest(folder)
    assert manifest.recipe is not None, "an imported model is never trained on"
    state = read_state(folder)
    random = state.pop(RANDOM_STATE)
    return Digests(
        weights=manifest.weights_sha256,
        optimizer=content_sha256(state),
        random=content_sha256({RANDOM_STATE: random}),
        sequence=manifest.steps * manifest.recipe.batch_size,
    )


def loaded_digests(training: Training) -> Digests:
    """Of what is in memory, whatever it was loaded from."""
    memory = training.snapshot()
    moments = {name: tensor for name, tensor in memory.state.items() if name != RANDOM_STATE}
    return Digests(
        weights=content_sha256(memory.weights),
        optimizer=content_sha256(moments),
        random=content_sha256({RANDOM_STATE: memory.state[RANDOM_STATE]}),
        sequence=memory.steps * memory.recipe.batch_size,
    )


def replay(start: Training, recorded: Sequence[CurveRecord]) -> float | None:
    """Train the recorded steps again. Largest difference of a loss, nats a token; None if there is nothing to repeat.

    start     the state before the first of them; it has moved on when this returns
    recorded  consecutive steps
    """
    if not recorded:
        return None
    assert recorded[0].step == start.steps + 1, f"at step {start.steps}, the record begins with {recorded[0].step}"
    again: list[CurveRecord] = []
    start.train_to(recorded[-1].tokens, lambda: False, again.append)
    return max(abs(a.loss - b.loss) for a, b in zip(again, recorded, strict=True))
