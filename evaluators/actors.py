"""Evaluate checkpoints beside the training; orchestrator/evals.py makes it a Ray actor, nothing here imports Ray.

orchestrator/evals.py -> [actors] -> evaluate -> metric values -> store
It holds a device and nothing else: killed at any instant, nothing is lost, since the caller stores what it returns.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evaluators.config import settings_from
from trainers.errors import InputError

NICENESS = 10  # training goes first where cores are shared


class EvaluationActor:
    """Evaluates one checkpoint at a time, with `threads` CPU threads; the caller makes it an actor."""

    def __init__(self, threads: int) -> None:
        import torch

        os.nice(NICENESS)
        torch.set_num_threads(threads)

    def evaluate(self, checkpoint: str, settings: dict[str, Any], corpora: str) -> dict[str, Any]:
        """Values of one evaluation.

        checkpoint, corpora   folders;  settings  as filled by evaluators.config
        returns   {"values": MetricValue records as mappings, "failure": None or why it cannot be done, "wall_s"}
        raises    what the machine broke: the caller tries again
        """
        from evaluators.evaluate import evaluate

        began = time.monotonic()
        values: list[dict[str, Any]] = []
        failure = None
        try:
            values = [
                asdict(value) for value in evaluate(Path(checkpoint), settings_from(settings), corpora=Path(corpora))
            ]
        except InputError as error:
            failure = str(error)
        return {"values": values, "failure": failure, "wall_s": time.monotonic() - began}
