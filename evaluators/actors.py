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
from trainers.errors import EnvironmentFault, InputError

NICENESS = 10  # training goes first where cores are shared


class EvaluationActor:
    """Evaluates one checkpoint at a time, with `threads` CPU threads; the caller makes it an actor."""

    def __init__(self, threads: int) -> None:
        os.nice(NICENESS)  # before the import, which takes as long as a tiny trial

        import torch

        torch.set_num_threads(threads)

    def evaluate(self, checkpoint: str, settings: dict[str, Any], corpora: str) -> dict[str, Any]:
        """Values of one evaluation.

        checkpoint, corpora   folders;  settings  as filled by evaluators.config
        returns   {"values": MetricValue records as mappings, "failure": None or why it cannot be done,
                  "fault": None or what the machine broke: the caller tries again, "wall_s"}
        """
        from evaluators.evaluate import evaluate

        began = time.monotonic()
        answer: dict[str, Any] = {"values": [], "failure": None, "fault": None}
        try:
            values = evaluate(Path(checkpoint), settings_from(settings), corpora=Path(corpora))
            answer["values"] = [asdict(value) for value in values]
        except InputError as error:
            answer["failure"] = str(error)
        except EnvironmentFault as fault:
            answer["fault"] = str(fault)
        return {**answer, "wall_s": time.monotonic() - began}
