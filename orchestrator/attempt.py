"""One go at a leg on one machine: from the last state in the store to the leg's end, a checkpoint at a time.

leg -> [attempt] -> checkpoints, curves, events (store)
in    a Leg, the store, how to execute
out   committed checkpoints; Progress after each slice of time
not   Ray: tune.py calls `advance` again and again; any of it may be killed at any instant

A slice ends at a step boundary. A checkpoint is written from a copy of the state by a thread, while training goes on;
the next one waits for it, and so does the end. Between two checkpoints of the plan the state is saved as a *rescue*: a
checkpoint folder inside the segment, read by nobody but the next attempt, gone when the segment is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

from orchestrator.identity import histories
from orchestrator.legs import Leg, LegSegment
from orchestrator.store import registry
from orchestrator.store.checkpoints import fetch_checkpoint, put_checkpoint
from orchestrator.store.copies import fetch_corpus
from orchestrator.store.layout import StoreLayout
from trainers.checkpoint import CURVE, STATE, WEIGHTS, read_curve
from trainers.loop import CurveRecord, Execution, Snapshot, Training

WHOLE = (WEIGHTS, STATE, CURVE)
Curve = Sequence[CurveRecord]
State = Literal["training", "committed", "diverged", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where an attempt stands after a slice.

    state     training: call again; committed: the whole leg is in the store; diverged, stopped: the leg ends here
    attempt   which attempt at the leg this is
    tokens    position of the trial
    loss, lr, grad_norm, tokens_per_s   of the newest step, as in a curve; None before the first
    detail    why, for diverged
    """

    state: State
    segment: str
    attempt: int
    tokens: int
    loss: float | None
    lr: float | None
    grad_norm: float | None
    tokens_per_s: float | None
    detail: str = ""


class Attempt:
    """Trains one leg. Holds the model and the optimizer between slices."""

    def __init__(
        self, layout: StoreLayout, sweep: str, leg: Leg, execution: Execution, *, rescue_s: float, attempt: int
    ) -> None:
        self._layout, self._sweep, self._leg, self._execution = layout, sweep, leg, execution
        self._rescue_s, self._attempt = rescue_s, attempt
        self._left = [s for s in leg.segments if not self._is_done(s)]
        self._training: Training | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._writing_of: LegSegment | None = None
        self._curve: list[CurveRecord] = []
        self._newest: CurveRecord | None = None
        self._saved_at = time.monotonic()

    def advance(self, seconds: float, stop_asked: Callable[[], bool]) -> Progress:
        """Train for about `seconds`, or to the end of the leg.

        stop_asked  looked at every step; when true, the state is saved as a rescue and the attempt ends
        raises      InputError (never retried) and EnvironmentFault (retried), both with the store unharmed
        """
        if self._left:
            self._opened(self._left[0])
        until = time.monotonic() + seconds
        while self._left:
            segment = self._left[0]
            training = self._opened(segment)
            ending = training.train_to(
                segment.to_tokens,
                lambda: time.monotonic() > until or stop_asked() or self._write_failed(),
                self._record,
            )
            if self._write_failed() or ending.kind == "diverged":
                self.wait()
            if ending.kind == "diverged":
                return self._diverged(segment, ending.tokens, ending.reason)
            if ending.kind == "reached":
                self._commit(segment, training)
                continue
            if stop_asked():
                self._save_rescue(segment, training)
                self.wait()
                registry.record_event(self._layout, "stopped", self._sweep, segment.id, self._attempt, self._where())
                return self._progress("stopped", segment)
            if time.monotonic() - self._saved_at > self._rescue_s:
                self._save_rescue(segment, training)
            return self._progress("training", segment)
        self.wait()
        return self._progress("committed", self._leg.segments[-1])

    def _record(self, step: CurveRecord) -> None:
        self._curve.append(step)
        self._newest = step

    def _opened(self, segment: LegSegment) -> Training:
        """The training at the segment's start, or where an earlier attempt left a rescue."""
        if self._training is not None:
            return self._training
        corpus = fetch_corpus(self._layout.root, self._leg.recipe.data.corpus)
        rescue = registry.newest_rescue(self._layout, segment)
        if rescue is not None:
            fetch_checkpoint(self._layout, rescue, WHOLE)
            self._training = Training.resume(rescue, self._leg.recipe, corpus, self._execution)
            self._curve = list(read_curve(rescue))
        elif segment.parent is not None:
            start = fetch_checkpoint(self._layout, self._layout.checkpoint(segment.parent, segment.from_tokens), WHOLE)
            self._training = Training.resume(start, self._leg.recipe, corpus, self._execution)
        else:
            self._training = Training.fresh(self._leg.recipe, corpus, self._execution)
        kind = "started" if rescue is None and self._attempt == 1 else "resumed"
        registry.record_event(self._layout, kind, self._sweep, segment.id, self._attempt, self._where())
        self._saved_at = time.monotonic()
        return self._training

    def _is_done(self, segment: LegSegment) -> bool:
        """Whether its checkpoint is there, with its state if something starts from it; its rows are then there too."""
        if segment.continued and not registry.has_state(self._layout, segment):
            return False
        return registry.recommit(self._layout, segment, self._attempt)

    def wait(self) -> None:
        """Until the checkpoint that is being written is in the store. raises what its writing raised"""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_failed(self) -> bool:
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def _start_writing(
        self, segment: LegSegment, training: Training, commit: Callable[[Snapshot, Curve], None]
    ) -> None:
        """Write a copy of the state beside the training: one at a time."""
        self.wait()
        self._writing_of = segment
        self._writing = self._writer.submit(commit, training.snapshot(), tuple(self._curve))
        self._saved_at = time.monotonic()

    def _commit(self, segment: LegSegment, training: Training) -> None:
        def commit(snapshot: Snapshot, curve: Curve) -> None:
            registry.drop_stateless(self._layout, segment)
            self._put(snapshot, segment, segment.history, curve)
            registry.commit(self._layout, segment, self._attempt)
            where = self._where(snapshot.tokens)
            registry.record_event(self._layout, "committed", self._sweep, segment.id, self._attempt, where)

        self._start_writing(segment, training, commit)
        self._left.pop(0)
        self._curve = []

    def _save_rescue(self, segment: LegSegment, training: Training) -> None:
        """Leave the newest state inside the segment, then drop the older ones; at a segment's start there is none."""

        def commit(snapshot: Snapshot, curve: Curve) -> None:
            history = histories(self._leg.recipe, [snapshot.tokens])[snapshot.tokens]
            self._put(snapshot, segment, history, curve)
            registry.drop_rescues(self._layout, segment, keep=snapshot.tokens)

        if training.tokens > segment.from_tokens:
            self._start_writing(segment, training, commit)
        self._saved_at = time.monotonic()

    def _put(self, snapshot: Snapshot, segment: LegSegment, history: str, curve: Curve) -> None:
        temporary = self._layout.temporary()
        write = partial(snapshot.write, segment=segment.id, history=history, curve=curve, temporary=temporary)
        put_checkpoint(self._layout, self._layout.checkpoint(segment.id, snapshot.tokens), write)

    def _diverged(self, segment: LegSegment, tokens: int, reason: str) -> Progress:
        """A diverged loss is a result: stored with its token count and the curve up to there, and never repeated."""
        registry.commit_divergence(self._layout, segment, self._curve, tokens, reason, self._attempt)
        registry.record_event(self._layout, "diverged", self._sweep, segment.id, self._attempt, reason)
        return self._progress("diverged", segment, reason)

    def _where(self, tokens: int | None = None) -> str:
        if tokens is None:
            tokens = self._training.tokens if self._training else 0
        return f"at {tokens:,} tokens, attempt {self._attempt}"

    def _progress(self, state: State, segment: LegSegment, detail: str = "") -> Progress:
        """segment: where the attempt trains; while the end of the one before is being written, that one is not done."""
        last = self._newest
        unwritten = self._writing_of if self._writing is not None and not self._writing.done() else None
        return Progress(
            state=state,
            segment=(unwritten or segment).id,
            attempt=self._attempt,
            tokens=self._training.tokens if self._training else segment.to_tokens,
            loss=last.loss if last else None,
            lr=last.lr if last else None,
            grad_norm=last.grad_norm if last else None,
            tokens_per_s=last.tokens_per_s if last else None,
            detail=detail,
        )
