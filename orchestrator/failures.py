"""What broke an attempt, and whether it is tried again.

tune (an exception) -> [failures] -> events, a new attempt, a failed segment, or the end of the sweep
in    exceptions, by their class names, so that Ray is not imported here
out   Failure: kind, one line for people, traceback; Budget: what is done about it
not   a diverged loss, which is a result, and an input error, which is the caller's: neither is ever tried again
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainers.errors import EnvironmentFault

Kind = Literal["node_lost", "worker_killed", "out_of_memory", "storage_error", "unknown"]
KINDS: tuple[Kind, ...] = ("node_lost", "worker_killed", "out_of_memory", "storage_error", "unknown")
"""Kinds of the events that say how an attempt died."""
_OF_STORAGE = ("storage_error", "corrupt_file")
_ADDRESS = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{16,}\b|\bpid=\d+|\bip=[\d.]+")
NO_SPACE = "No space left on device"
LONGEST_DELAY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one attempt died.

    detail     one line
    traceback  of an exception in our code; empty when the process or its machine went away
    silent     the process answers no more, and Ray does not know yet whether its machine went with it
    """

    kind: Kind
    detail: str
    traceback: str = ""
    silent: bool = False

    @property
    def place(self) -> str:
        """The traceback without what differs from process to process: equal faults have equal places."""
        return _ADDRESS.sub("", self.traceback)


def classify(error: BaseException | str | None) -> Failure:
    """The failure behind what Tune says of a trial: an exception of Ray, or its text where it could not be kept."""
    if error is None:
        return Failure(kind="unknown", detail="the attempt ended without an error or a result")
    text = str(error)
    if isinstance(error, str) or not _is_death(error):
        return Failure(kind=_kind_of_exception(error, text), detail=_last_line(text), traceback=text)
    if getattr(error, "actor_init_failed", False):
        return Failure(kind=_kind_of_text(text), detail=_last_line(text), traceback=text)
    return Failure(
        kind=_kind_of_death(text, preempted=getattr(error, "preempted", False)),
        detail=_reason(text),
        silent=type(error).__name__ == "ActorUnavailableError",
    )


def _is_death(error: BaseException) -> bool:
    """Whether Ray says that a process or a machine went away; torch has an OutOfMemoryError too."""
    deaths = ("RayActorError", "NodeDiedError", "OutOfMemoryError")
    return any(kind.__module__ == "ray.exceptions" and kind.__name__ in deaths for kind in type(error).__mro__)


def _kind_of_death(text: str, *, preempted: bool) -> Kind:
    """Of a process or a machine that went away. Ray names memory as a usual cause of any kill: that is no finding."""
    if NO_SPACE in text:
        return "storage_error"
    if preempted or "node has died" in text or "node was terminated" in text or "Owner's node has crashed" in text:
        return "node_lost"
    if "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
        return "out_of_memory"
    return "worker_killed"


def _kind_of_text(text: str) -> Kind:
    """Where the exception could not be kept: with its disk full, a node cannot even keep that."""
    return "storage_error" if NO_SPACE in text else "unknown"


def _kind_of_exception(error: BaseException | str, text: str) -> Kind:
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, EnvironmentFault):
        return "storage_error" if cause.kind in _OF_STORAGE else "unknown"
    names = {kind.__name__ for kind in type(cause).__mro__}
    if isinstance(cause, MemoryError) or "OutOfMemoryError" in names or "can't allocate memory" in str(cause):
        return "out_of_memory"
    if isinstance(cause, OSError):  # Ray too writes on the node's disk
        return "storage_error"
    return _kind_of_text(text)


def _reason(text: str) -> str:
    """The line of a death notice that says why."""
    lines = list(_lines(text))
    said = [line for line in lines if "has died" in line or "killed" in line or "Worker exit" in line]
    return (said or lines or ["no reason given"])[0][:400]


def _last_line(text: str) -> str:
    return (list(_lines(text)) or ["no reason given"])[-1][:400]


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is done about a failure: again after `delay_s`, given up for the reason, or the whole sweep is stopped."""

    action: Literal["again", "give_up", "stop"]
    delay_s: float = 0.0
    reason: str = ""


class Budget:
    """Counts the failures of one session, a leg and a kind at a time."""

    def __init__(self, retries: dict[Kind, int], equal: int) -> None:
        """retries: further attempts a leg after each kind; equal: legs with one traceback that stop the sweep."""
        self._retries, self._equal = retries, equal
        self._counts: Counter[tuple[str, Kind]] = Counter()
        self._places: dict[str, set[str]] = {}

    def judge(self, leg: str, failure: Failure) -> Verdict:
        """Count a failure of a leg and say what follows."""
        self._counts[leg, failure.kind] += 1
        died = self._counts[leg, failure.kind]
        if failure.kind == "unknown" and self._is_everywhere(leg, failure):
            reason = f"{self._equal} attempts died of the same fault, so the sweep stops:\n{failure.traceback}"
            return Verdict(action="stop", reason=reason)
        if died > self._retries[failure.kind]:
            times = f" after {died} attempts" if died > 1 else ""
            return Verdict(action="give_up", reason=f"{failure.kind}{times}: {failure.detail}")
        return Verdict(action="again", delay_s=min(LONGEST_DELAY_S, 2.0 ** (died - 1) - 1))

    def _is_everywhere(self, leg: str, failure: Failure) -> bool:
        """Whether so many legs died in one place of the code that the rest would too."""
        if not failure.traceback:
            return False
        legs = self._places.setdefault(failure.place, set())
        legs.add(leg)
        return len(legs) >= self._equal
