"""Collect what a session does now: which attempts train, what is evaluated, what of the machine is in use.

run, backfill -> [activity] -> store/live.py
in    progress of legs (from Tune's thread), evaluations at work (from the main thread)
out   LiveSession, from any thread
not   files; Ray: the caller passes in how the machine is asked
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from orchestrator.legs import Leg
from orchestrator.plan import Evaluation, Trial
from orchestrator.store.live import LiveSession, MachineUse, RunningEvaluation, RunningLeg

_RUNNING = ("starting", "training", "retrying", "paused")


class Activity:
    """What one session does; each change binds a new value, so that another thread always reads a whole one."""

    def __init__(self, sweep: str, trials: Iterable[Trial], machine: Callable[[], Mapping[str, float]]) -> None:
        self._sweep, self._machine = sweep, machine
        self._started = datetime.now(UTC)
        self._trials = trials_of_segments(trials)
        self._legs: dict[str, RunningLeg] = {}
        self._evaluations: tuple[RunningEvaluation, ...] = ()

    def leg(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        """A leg moved or ended. progress: attempt.Progress as a mapping"""
        rest = {id: running for id, running in self._legs.items() if id != leg.id}
        if progress["state"] in _RUNNING:
            rest[leg.id] = running_leg(leg, progress, self._trials, self._legs.get(leg.id))
        self._legs = rest

    def evaluations(self, at_work: Iterable[Evaluation]) -> None:
        self._evaluations = tuple(
            RunningEvaluation(evaluator=e.evaluator, segment=e.segment, tokens=e.tokens) for e in at_work
        )

    def look(self, beat: int) -> LiveSession:
        return LiveSession(
            sweep=self._sweep,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self._started,
            beat=beat,
            training=tuple(self._legs.values()),
            evaluating=self._evaluations,
            machine=MachineUse.model_validate(self._machine()),
        )


def trials_of_segments(trials: Iterable[Trial]) -> dict[str, tuple[str, ...]]:
    """Segment -> ids of the trials that train through it."""
    found: dict[str, list[str]] = {}
    for trial in trials:
        for segment in trial.chain:
            found.setdefault(segment, []).append(trial.id)
    return {segment: tuple(ids) for segment, ids in found.items()}


def running_leg(
    leg: Leg, progress: Mapping[str, Any], trials: Mapping[str, tuple[str, ...]], before: RunningLeg | None
) -> RunningLeg:
    """A leg as its newest progress has it; what this progress does not say is as it was before."""
    segment = progress.get("segment") or (before.segment if before else leg.segments[0].id)
    tokens = progress.get("tokens", before.tokens if before else leg.segments[0].from_tokens)
    speed = progress.get("tokens_per_s")
    return RunningLeg(
        trials=trials.get(segment, ()),
        segment=segment,
        leg=leg.id,
        attempt=progress.get("attempt", before.attempt if before else None),
        state=progress["state"],
        tokens=tokens,
        to_tokens=leg.to_tokens,
        tokens_per_s=speed,
        loss=progress.get("loss"),
        seconds_left=(leg.to_tokens - tokens) / speed if speed else None,
    )
