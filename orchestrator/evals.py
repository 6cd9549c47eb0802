"""Owed evaluations: what the plan asks for, minus what the store holds, computed by Ray actors beside the training.

plan + store -> [evals] -> evaluators.actors -> metrics, failures (store)
Nothing is remembered: an evaluation is done when its values are in the store, and failed when a reason is. Training
never waits for one.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from evaluators.actors import EvaluationActor
from evaluators.config import settings_from
from orchestrator.plan import Evaluation
from orchestrator.schema import METRICS
from orchestrator.store.checkpoints import fetch_checkpoint, has_checkpoint
from orchestrator.store.copies import fetch_corpus
from orchestrator.store.durable import is_full
from orchestrator.store.files import folder_of
from orchestrator.store.inbox import key_of, publish
from orchestrator.store.layout import StoreLayout
from orchestrator.store.registry import checkpoint_digests
from orchestrator.store.tables import StoredTable, read_rows
from trainers.checkpoint import TOKENIZER, WEIGHTS, read_manifest
from trainers.errors import EnvironmentFault

TRIES = 3  # of one evaluation in one session, when the machine breaks it


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedEvaluation:
    """An evaluation of a committed checkpoint whose values are not in the store."""

    evaluation: Evaluation
    checkpoint: str
    folder: str

    @property
    def identity(self) -> tuple[str, str, str, int]:
        """The unit of `metrics` that its values will be."""
        asked = self.evaluation
        return (self.checkpoint, asked.evaluator, asked.settings_digest, asked.version)

    def __str__(self) -> str:
        return f"{self.evaluation.evaluator} ({self.evaluation.settings_digest}) of {self.folder}"


class Ledger:
    """Which evaluations are done, failed or owed. A checkpoint never changes, so its digest is read once."""

    def __init__(self, layout: StoreLayout, evaluations: Iterable[Evaluation], *, retry_failed: bool = False) -> None:
        """evaluations: all that are asked for. retry_failed: those that could not be done are owed again"""
        self._layout = layout
        self._metrics = StoredTable(layout, "metrics")
        self._left = list(evaluations)
        self._there: set[str] = set()
        self._failed = set() if retry_failed else failed_identities(layout)
        self._checkpoints = checkpoint_digests(layout)
        self.out_of_reach = 0
        """Evaluations that are asked of checkpoints whose weights were not kept; as of the last `owed`."""
        self.asked = len(self._left)

    def owed(self, committed: Collection[str]) -> list[OwedEvaluation]:
        """What can be evaluated now: its segment is among `committed`, its values are not there, it has not failed."""
        here = [self._item(evaluation) for evaluation in self._left if evaluation.segment in committed]
        open_ = [item for item in here if item.identity not in self._failed]
        stored = self._metrics.have([key_of(METRICS, item.identity) for item in open_])
        owed = [item for item in open_ if key_of(METRICS, item.identity) not in stored]
        still = {id(item.evaluation) for item in owed}
        self._left = [e for e in self._left if e.segment not in committed or id(e) in still]
        reachable = [item for item in owed if self._is_there(item)]
        self.out_of_reach = len(owed) - len(reachable)
        return reachable

    def _is_there(self, item: OwedEvaluation) -> bool:
        """Whether the checkpoint is in the store; one that owes an evaluation is not removed, so it is asked once."""
        if item.folder not in self._there and has_checkpoint(self._layout, Path(item.folder)):
            self._there.add(item.folder)
        return item.folder in self._there

    @property
    def left(self) -> tuple[Evaluation, ...]:
        """What was not done when `owed` looked last, ready or not."""
        return tuple(self._left)

    def give_up(self, item: OwedEvaluation, reason: str, tries: int) -> None:
        """Store that an evaluation could not be done; the others go on."""
        publish(self._layout, "failures", [_failure_row(item, reason, tries)])
        self._failed.add(item.identity)

    @property
    def done(self) -> int:
        return self.asked - len(self._left)

    def _item(self, evaluation: Evaluation) -> OwedEvaluation:
        folder = self._layout.checkpoint(evaluation.segment, evaluation.tokens)
        if evaluation.segment not in self._checkpoints:
            manifest = read_manifest(fetch_checkpoint(self._layout, folder, ()))
            self._checkpoints[evaluation.segment] = manifest.checkpoint
        return OwedEvaluation(
            evaluation=evaluation, checkpoint=self._checkpoints[evaluation.segment], folder=str(folder)
        )


def failed_identities(layout: StoreLayout) -> set[tuple[str, str, str, int]]:
    """Checkpoint, evaluator, settings and version of every evaluation that could not be done."""
    rows = read_rows(layout, "failures", ["checkpoint", "evaluator", "settings_digest", "evaluator_version"])
    return {(r["checkpoint"], r["evaluator"], r["settings_digest"], r["evaluator_version"]) for r in rows}


class EvaluationPool:
    """Ray actors that take owed evaluations; `poll` again and again, it never waits.

    failures   what could not be done in this session, with the reason
    """

    def __init__(self, layout: StoreLayout, ledger: Ledger, actors: int) -> None:
        self._layout, self._ledger = layout, ledger
        self._idle: list[Any] = [_new_actor() for _ in range(actors)]
        self._running: dict[Any, tuple[Any, OwedEvaluation]] = {}
        self._unsaved: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._tries: Counter[str] = Counter()
        self.failures: dict[str, str] = {}

    def poll(self, committed: Collection[str]) -> int:
        """Store what is finished, hand out what is owed; returns how many are owed or running."""
        self._collect()
        in_work = {str(owed) for _, owed in self._running.values()} | self._unsaved.keys()
        owed = self._ledger.owed(committed)
        for item in owed:
            if self._idle and str(item) not in in_work:
                actor = self._idle.pop()
                settings = item.evaluation.settings.model_dump(mode="json")
                path = str(Path(item.folder).relative_to(self._layout.root))
                self._running[actor.evaluate_stored.remote(self._layout.url, path, settings)] = (actor, item)
        return len(owed)

    @property
    def at_work(self) -> tuple[Evaluation, ...]:
        """What the actors compute now."""
        return tuple(owed.evaluation for _, owed in self._running.values())

    def _collect(self) -> None:
        import ray

        finished, _ = (
            ray.wait(list(self._running), num_returns=len(self._running), timeout=0) if self._running else ([], [])
        )
        for reference in finished:
            actor, owed = self._running.pop(reference)
            try:
                answer = ray.get(reference)
            except ray.exceptions.RayActorError as error:  # the actor died: its machine, its memory, a kill
                answer = {"fault": str(error).strip().splitlines()[0]}
                actor = _new_actor()
            except ray.exceptions.RayTaskError as error:  # an exception that evaluate does not expect
                answer = {"fault": str(error).strip().splitlines()[-1]}
            self._idle.append(actor)  # also when the answer cannot be stored for want of space: it is made again
            self._settle(owed, answer)
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

    def _settle(self, owed: OwedEvaluation, answer: Mapping[str, Any]) -> None:
        if answer["fault"] is not None:
            self._count_fault(owed, answer["fault"])
        elif answer["failure"] is not None:
            self._give_up(owed, answer["failure"])
        else:
            self._unsaved[str(owed)] = metric_rows(owed, answer)

    def _count_fault(self, owed: OwedEvaluation, reason: str) -> None:
        if self._tries[str(owed)] + 1 >= TRIES:
            self._give_up(owed, reason)
        else:
            self._tries[str(owed)] += 1

    def _give_up(self, owed: OwedEvaluation, reason: str) -> None:
        self._ledger.give_up(owed, reason, tries=self._tries[str(owed)] + 1)
        self.failures[str(owed)] = reason


class StoreEvaluations(EvaluationActor):
    """Evaluates checkpoints of a store on whichever machine it runs."""

    def evaluate_stored(self, store: str, path: str, settings: dict[str, Any]) -> dict[str, Any]:
        """As evaluate. store: its folder or URL; path: of the checkpoint in it, as table checkpoints has it"""
        layout = StoreLayout(folder_of(store))
        try:
            folder = fetch_checkpoint(layout, layout.root / path, (WEIGHTS, TOKENIZER))
            for name in settings_from(settings).corpora:
                fetch_corpus(layout.root, name)
        except EnvironmentFault as fault:
            return {"values": [], "failure": None, "fault": str(fault), "wall_s": 0.0}
        return self.evaluate(str(folder), settings, str(layout.root / "corpora"))


def _new_actor() -> Any:
    import ray

    return ray.remote(num_cpus=0, max_restarts=0)(StoreEvaluations).remote(threads=1)


def metric_rows(owed: OwedEvaluation, answer: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The rows of one finished evaluation."""
    return [
        {
            **_common(owed),
            "metric": value["metric"],
            "metric_version": value["version"],
            "dataset": value["dataset"],
            "split": value["split"],
            "layer": value["layer"],
            "value": value["value"],
            "unit": value["unit"],
            "n": value["n"],
            "convention": json.dumps(dict(value["convention"]), sort_keys=True),
            "wall_s": answer["wall_s"],
        }
        for value in answer["values"]
    ]


def _failure_row(owed: OwedEvaluation, reason: str, tries: int) -> Mapping[str, Any]:
    return {**_common(owed), "reason": reason, "tries": tries}


def _common(owed: OwedEvaluation) -> dict[str, Any]:
    return {
        "checkpoint": owed.checkpoint,
        "segment": owed.evaluation.segment,
        "tokens": owed.evaluation.tokens,
        "evaluator": owed.evaluation.evaluator,
        "settings_digest": owed.evaluation.settings_digest,
        "evaluator_version": owed.evaluation.version,
        "host": socket.gethostname(),
        "time": datetime.now(UTC),
    }
