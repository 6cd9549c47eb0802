"""Owed evaluations: what the plan asks for, minus what the store holds, computed by Ray actors beside the training.

plan + store -> [evals] -> evaluators.actors -> metrics, failures (store)
Nothing is remembered: an evaluation is done when its values are in the store, and failed when a reason is. Training
never waits for one.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias

from evaluators.actors import EvaluationActor
from evaluators.config import settings_from
from orchestrator.failures import classify
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

Identity: TypeAlias = tuple[str, str, str, int]
"""Checkpoint, evaluator, settings and version: the unit of `metrics` that the values of an evaluation are."""

TRIES = 3  # of one evaluation in one session, when the machine breaks it


@dataclass(frozen=True, slots=True, kw_only=True)
class OwedEvaluation:
    """An evaluation of a committed checkpoint whose values are not in the store."""

    evaluation: Evaluation
    checkpoint: str
    folder: str

    @property
    def identity(self) -> Identity:
        asked = self.evaluation
        return (self.checkpoint, asked.evaluator, asked.settings_digest, asked.version)

    def __str__(self) -> str:
        return f"{self.evaluation.evaluator} ({self.evaluation.settings_digest}) of {self.folder}"


class Ledger:
    """Which evaluations are done, failed or owed, of all that are asked for.

    The store is asked about an evaluation when its checkpoint is new here, and by `owed` about all of them. In between
    the ledger is told (`settle`, `give_up`): one session at a time works on a store. A checkpoint never changes, so its
    digest is read once.

    asked         how many evaluations are asked for
    done          those that have their values in the store, or could not be done
    out_of_reach  those that are asked of checkpoints whose weights were not kept
    """

    def __init__(self, layout: StoreLayout, evaluations: Iterable[Evaluation], *, retry_failed: bool = False) -> None:
        """evaluations: all that are asked for. retry_failed: those that could not be done are owed again"""
        self._layout = layout
        self._metrics = StoredTable(layout, "metrics")
        self._there: set[str] = set()
        self._failed = set() if retry_failed else failed_identities(layout)
        self._checkpoints = checkpoint_digests(layout)
        self._waiting: dict[str, list[Evaluation]] = {}
        for evaluation in evaluations:
            self._waiting.setdefault(evaluation.segment, []).append(evaluation)
        self._open: dict[Identity, list[OwedEvaluation]] = {}
        self._open_segments: Counter[str] = Counter()
        self.asked = sum(map(len, self._waiting.values()))
        self.done = 0
        self.out_of_reach = 0

    def owed(self, committed: Collection[str]) -> list[OwedEvaluation]:
        """What can be evaluated now: its segment is among `committed`, its values are not there, it has not failed."""
        seen = [item for items in self._open.values() for item in items]
        self._open, self._open_segments, self.out_of_reach = {}, Counter(), 0
        return [*self._look(seen), *self.news(committed)]

    def news(self, committed: Collection[str]) -> list[OwedEvaluation]:
        """What of it was not there when this or `owed` looked last; costs nothing for what was."""
        arrived = self._waiting.keys() & committed
        ordered = [segment for segment in self._waiting if segment in arrived] if arrived else []
        found = self._look([self._item(evaluation) for segment in ordered for evaluation in self._waiting[segment]])
        for segment in ordered:
            del self._waiting[segment]
        return found

    def settle(self, item: OwedEvaluation) -> None:
        """Note that it is done: its values are in the store, or the reason why there are none."""
        for one in self._open.pop(item.identity):
            self.done += 1
            self._open_segments[one.evaluation.segment] -= 1
            if not self._open_segments[one.evaluation.segment]:
                del self._open_segments[one.evaluation.segment]

    def give_up(self, item: OwedEvaluation, reason: str, tries: int) -> None:
        """Store that an evaluation could not be done; the others go on."""
        publish(self._layout, "failures", [_failure_row(item, reason, tries)])
        self._failed.add(item.identity)
        self.settle(item)

    @property
    def left(self) -> Iterator[Evaluation]:
        """What was not done when the store was last asked, ready or not."""
        yield from (item.evaluation for items in self._open.values() for item in items)
        yield from (evaluation for waiting in self._waiting.values() for evaluation in waiting)

    @property
    def owing(self) -> Set[str]:
        """The segments whose checkpoints owe something of it."""
        return self._open_segments.keys() | self._waiting.keys()

    def _look(self, items: Sequence[OwedEvaluation]) -> list[OwedEvaluation]:
        """Sort evaluations of committed checkpoints into done and open; returns those of the open that can be made.

        Of equal checkpoints of two segments, one is evaluated.
        """
        candidates = [(key_of(METRICS, item.identity), item) for item in items if item.identity not in self._failed]
        stored = self._metrics.have([key for key, _ in candidates])
        owed = [item for key, item in candidates if key not in stored]
        there = [item for item in owed if self._is_there(item)]
        found: dict[Identity, OwedEvaluation] = {}
        for item in there:
            if item.identity not in self._open:
                found.setdefault(item.identity, item)
        for item in owed:
            self._open.setdefault(item.identity, []).append(item)
            self._open_segments[item.evaluation.segment] += 1
        self.done += len(items) - len(owed)
        self.out_of_reach += len(owed) - len(there)
        return list(found.values())

    def _is_there(self, item: OwedEvaluation) -> bool:
        """Whether the checkpoint is in the store; one that owes an evaluation is not removed, so it is asked once."""
        if item.folder not in self._there and has_checkpoint(self._layout, Path(item.folder)):
            self._there.add(item.folder)
        return item.folder in self._there

    def _item(self, evaluation: Evaluation) -> OwedEvaluation:
        folder = self._layout.checkpoint(evaluation.segment, evaluation.tokens)
        if evaluation.segment not in self._checkpoints:
            manifest = read_manifest(fetch_checkpoint(self._layout, folder, ()))
            self._checkpoints[evaluation.segment] = manifest.checkpoint
        return OwedEvaluation(
            evaluation=evaluation, checkpoint=self._checkpoints[evaluation.segment], folder=str(folder)
        )


def failed_identities(layout: StoreLayout) -> set[Identity]:
    """Every evaluation that could not be done."""
    rows = read_rows(layout, "failures", ["checkpoint", "evaluator", "settings_digest", "evaluator_version"])
    return {(r["checkpoint"], r["evaluator"], r["settings_digest"], r["evaluator_version"]) for r in rows}


class EvaluationPool:
    """Ray actors that take owed evaluations; `poll` again and again, it never waits.

    failures   what could not be done in this session, with the reason
    """

    def __init__(self, layout: StoreLayout, ledger: Ledger, actors: int, committed: Collection[str]) -> None:
        """committed: segments whose checkpoints are there already"""
        self._layout, self._ledger = layout, ledger
        places = cycle(_cpu_nodes())
        self._idle: list[Any] = [_new_actor(next(places)) for _ in range(actors)]
        self._queue = deque(ledger.owed(committed))
        self._running: dict[Any, tuple[Any, OwedEvaluation]] = {}
        self._unsaved: deque[tuple[OwedEvaluation, Sequence[Mapping[str, Any]]]] = deque()
        self._tries: Counter[Identity] = Counter()
        self.failures: dict[str, str] = {}

    def poll(self, committed: Collection[str]) -> int:
        """Store what is finished, hand out what is owed; returns how many are owed, running or not yet stored."""
        self._collect()
        self._queue.extend(self._ledger.news(committed))
        while self._idle and self._queue:
            actor, item = self._idle.pop(), self._queue.popleft()
            settings = item.evaluation.settings.model_dump(mode="json")
            path = str(Path(item.folder).relative_to(self._layout.root))
            self._running[actor.evaluate_stored.remote(self._layout.url, path, settings)] = (actor, item)
        return len(self._queue) + len(self._running) + len(self._unsaved)

    def attend(self, committed: Collection[str], seconds: float) -> None:
        """Poll as often as an actor gets free, for so long: an evaluation may take less than a turn of the caller."""
        import ray

        until = time.monotonic() + seconds
        while self._running and (left := until - time.monotonic()) > 0:
            if ray.wait(list(self._running), timeout=left)[0]:
                self.poll(committed)
        time.sleep(max(0.0, until - time.monotonic()))

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
            except ray.exceptions.RayActorError as error:
                failure = classify(error)
                lost = failure.kind == "node_lost" or failure.silent  # no fault of the evaluation: it is not counted
                answer = None if lost else {"fault": failure.detail}
                actor = _new_actor(random.choice(_cpu_nodes()))
            except ray.exceptions.RayTaskError as error:  # an exception that evaluate does not expect
                answer = {"fault": str(error).strip().splitlines()[-1]}
            self._idle.append(actor)
            if answer is None:
                self._queue.append(owed)
                continue
            try:
                self._settle(owed, answer)
            except EnvironmentFault:  # no space for the reason of a failure: it is made again
                self._queue.append(owed)
                raise
        self._save()

    def _save(self) -> None:
        """Store what was computed; while the disk is full it stays here, and the session goes on."""
        while self._unsaved:
            item, rows = self._unsaved[0]
            try:
                publish(self._layout, "metrics", rows)
            except EnvironmentFault as fault:
                if not is_full(fault):
                    raise
                return
            self._unsaved.popleft()
            self._ledger.settle(item)

    def _settle(self, owed: OwedEvaluation, answer: Mapping[str, Any]) -> None:
        if answer["fault"] is not None:
            self._count_fault(owed, answer["fault"])
        elif answer["failure"] is not None:
            self._give_up(owed, answer["failure"])
        else:
            self._unsaved.append((owed, metric_rows(owed, answer)))

    def _count_fault(self, owed: OwedEvaluation, reason: str) -> None:
        if self._tries[owed.identity] + 1 >= TRIES:
            self._give_up(owed, reason)
        else:
            self._tries[owed.identity] += 1
            self._queue.append(owed)

    def _give_up(self, owed: OwedEvaluation, reason: str) -> None:
        self._ledger.give_up(owed, reason, tries=self._tries[owed.identity] + 1)
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


def _cpu_nodes() -> list[str]:
    """Ids of the living nodes without a GPU, or of all where each has one: trials that wait for a GPU go first."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    without = [node for node in alive if not node["Resources"].get("GPU")]
    return [node["NodeID"] for node in without or alive]


def _new_actor(node: str) -> Any:
    """An actor on this node, or on another where it is gone meanwhile."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node_id=node, soft=True)
    return ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy=place)(StoreEvaluations).remote(threads=1)


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
