"""Owed evaluations: what the plan asks for, minus what the store holds, computed by Ray actors beside the training.

plan + store -> [evals] -> evaluators.actors -> metrics (store)
Nothing is remembered: an evaluation is done when its rows are in the store. Training never waits for one.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orchestrator.plan import Evaluation, Plan
from orchestrator.schema import METRICS
from orchestrator.store.durable import is_full
from orchestrator.store.inbox import key_of, publish
from orchestrator.store.layout import StoreLayout
from orchestrator.store.tables import StoredTable
from trainers.checkpoint import read_manifest
from trainers.errors import EnvironmentFault

TRIES = 3  # of one evaluation in one session, when the machine breaks it


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedEvaluation:
    """An evaluation of a committed checkpoint whose values are not in the store."""

    evaluation: Evaluation
    checkpoint: str
    folder: str


class Ledger:
    """Which evaluations are done and which are owed. A checkpoint never changes, so its digest is read once."""

    def __init__(self, layout: StoreLayout, plan: Plan) -> None:
        self._layout = layout
        self._metrics = StoredTable(layout, "metrics")
        self._left = list(plan.evaluations)
        self._checkpoints: dict[str, str] = {}
        self.asked = len(plan.evaluations)

    def owed(self, committed: Collection[str]) -> list[OwedEvaluation]:
        """What can be evaluated now: its segment is among `committed` and its rows are not there yet."""
        here = [self._item(evaluation) for evaluation in self._left if evaluation.segment in committed]
        stored = self._metrics.have([_unit_key(item) for item in here])
        owed = [item for item in here if _unit_key(item) not in stored]
        still = {id(item.evaluation) for item in owed}
        self._left = [e for e in self._left if e.segment not in committed or id(e) in still]
        return owed

    @property
    def left(self) -> tuple[Evaluation, ...]:
        """What was not done when `owed` looked last, ready or not."""
        return tuple(self._left)

    @property
    def done(self) -> int:
        return self.asked - len(self._left)

    def _item(self, evaluation: Evaluation) -> OwedEvaluation:
        folder = self._layout.checkpoint(evaluation.segment, evaluation.tokens)
        if evaluation.segment not in self._checkpoints:
            self._checkpoints[evaluation.segment] = read_manifest(folder).checkpoint
        return OwedEvaluation(
            evaluation=evaluation, checkpoint=self._checkpoints[evaluation.segment], folder=str(folder)
        )


class EvaluationPool:
    """Ray actors that take owed evaluations; `poll` again and again, it never waits."""

    def __init__(self, layout: StoreLayout, ledger: Ledger, actors: int) -> None:
        self._layout, self._ledger = layout, ledger
        self._idle: list[Any] = [_new_actor() for _ in range(actors)]
        self._running: dict[Any, tuple[Any, OwedEvaluation]] = {}
        self._unsaved: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._tries: dict[str, int] = {}
        self.failures: dict[str, str] = {}

    def poll(self, committed: Collection[str]) -> int:
        """Store what is finished, hand out what is owed; returns how many are owed or running."""
        self._collect()
        in_work = {_name(owed) for _, owed in self._running.values()} | self._unsaved.keys()
        owed = [o for o in self._ledger.owed(committed) if _name(o) not in self.failures]
        for item in owed:
            if self._idle and _name(item) not in in_work:
                actor = self._idle.pop()
                settings = item.evaluation.settings.model_dump(mode="json")
                corpora = str(self._layout.root / "corpora")
                self._running[actor.evaluate.remote(item.folder, settings, corpora)] = (actor, item)
        return len(owed)

    def _collect(self) -> None:
        import ray

        finished, _ = (
            ray.wait(list(self._running), num_returns=len(self._running), timeout=0) if self._running else ([], [])
        )
        for reference in finished:
            actor, owed = self._running.pop(reference)
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayError as error:
                self._count_failure(owed, error)
                actor = _new_actor() if isinstance(error, ray.exceptions.RayActorError) else actor
            else:
                self._unsaved[_name(owed)] = metric_rows(owed, answer)
            self._idle.append(actor)
        self._save()

    def _save(self) -> None:
        """Store what was computed; while the disk is full it stays here, and the session goes on."""
        for name, rows in list(self._unsaved.items()):
            try:
                publish(self._layout, "metrics", rows)
            except EnvironmentFault as fault:
                if not is_full(fault):
                    raise
                return
            del self._unsaved[name]

    def _count_failure(self, owed: OwedEvaluation, error: Exception) -> None:
        name = _name(owed)
        self._tries[name] = self._tries.get(name, 0) + 1
        if self._tries[name] >= TRIES:
            self.failures[name] = str(error.__cause__ or error).strip().splitlines()[-1]


def _unit_key(owed: OwedEvaluation) -> str:
    asked = owed.evaluation
    return key_of(METRICS, [owed.checkpoint, asked.evaluator, asked.settings_digest, asked.version])


def _name(owed: OwedEvaluation) -> str:
    return f"{owed.evaluation.evaluator} ({owed.evaluation.settings_digest}) of {owed.folder}"


def _new_actor() -> Any:
    import ray

    from evaluators.actors import EvaluationActor

    return ray.remote(num_cpus=0, max_restarts=0)(EvaluationActor).remote(threads=1)


def metric_rows(owed: OwedEvaluation, answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The rows of one finished evaluation; one row without a value when it could not be done."""
    common = {
        "checkpoint": owed.checkpoint,
        "segment": owed.evaluation.segment,
        "tokens": owed.evaluation.tokens,
        "evaluator": owed.evaluation.evaluator,
        "settings_digest": owed.evaluation.settings_digest,
        "evaluator_version": owed.evaluation.version,
        "wall_s": answer["wall_s"],
        "host": socket.gethostname(),
        "time": datetime.now(UTC),
    }
    if answer["failure"] is not None:
        nothing = {"metric": "evaluation_failed", "metric_version": 1, "value": None, "unit": "", "convention": "{}"}
        return [
            {
                **common,
                **nothing,
                "dataset": None,
                "split": None,
                "layer": None,
                "n": None,
                "failure": answer["failure"],
            }
        ]
    return [
        {
            **common,
            "metric": value["metric"],
            "metric_version": value["version"],
            "dataset": value["dataset"],
            "split": value["split"],
            "layer": value["layer"],
            "value": value["value"],
            "unit": value["unit"],
            "n": value["n"],
            "convention": json.dumps(dict(value["convention"]), sort_keys=True),
            "failure": None,
        }
        for value in answer["values"]
    ]
