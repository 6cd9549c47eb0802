"""Tell every machine that sees the store what a session does now: one small file, replaced every few seconds.

run, backfill -> [live] -> live/<sweep>.json -> status
in    LiveSession: what trains, what is evaluated, what of the machine is in use
out   the file, whole or absent; gone when the session ends; old when the session was killed
not   results or memory: nothing but people reads it. It never ends a session: what the storage refuses is said once
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

from pydantic import ValidationError

from orchestrator.store.layout import StoreLayout
from trainers.config import Frozen
from trainers.errors import EnvironmentFault

BEAT_S = 2.0
BEAT_S_REMOTE = 10.0  # a put to S3 is a request that is paid for
SILENT_S = 30.0  # a file that is older than this was left by a session that is gone, or its storage is


class RunningLeg(Frozen):
    """An attempt that trains.

    trials         that the segment belongs to
    segment        in training now;  leg: the last segment that this attempt will train
    tokens         position;  to_tokens: end of the leg
    tokens_per_s   and loss (nats a token) of the newest step; None before the first
    seconds_left   to the end of the leg at that speed
    """

    trials: tuple[str, ...]
    segment: str
    leg: str
    attempt: int | None
    state: str
    tokens: int
    to_tokens: int
    tokens_per_s: float | None
    loss: float | None
    seconds_left: float | None


class RunningEvaluation(Frozen):
    """An evaluation at work: evaluator, and the checkpoint that `segment` left at `tokens`."""

    evaluator: str
    segment: str
    tokens: int


class MachineUse(Frozen):
    """What the session's machines have and hold: CPU and GPU slots as Ray counts them, memory of the driver's machine.

    cpu_percent   of the driver's machine, all processes
    """

    cpus: float
    cpus_held: float
    gpus: float
    gpus_held: float
    cpu_percent: float
    memory_bytes: int
    memory_used_bytes: int


class LiveSession(Frozen):
    """One moment of a session. started: UTC. beat: counts up while the session lives."""

    sweep: str
    host: str
    pid: int
    started: datetime
    beat: int
    training: tuple[RunningLeg, ...]
    evaluating: tuple[RunningEvaluation, ...]
    machine: MachineUse


@contextmanager
def telling(
    layout: StoreLayout, sweep: str, look: Callable[[int], LiveSession], say: Callable[[str], None]
) -> Iterator[None]:
    """Keep the file of a session up to date beside the body, in a thread; it goes with the body.

    look  makes the content for a beat; called from the thread
    say   told once why the file is not up to date; the session goes on
    """
    ending = threading.Event()
    thread = threading.Thread(target=_tell, args=(layout, look, say, ending), name="live", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        with contextlib.suppress(EnvironmentFault, OSError):
            layout.files.remove(layout.live(sweep))


def read_live(layout: StoreLayout, sweep: str) -> tuple[LiveSession, float] | None:
    """What the newest session of a sweep last said, and how many seconds ago by the storage's time of the file.

    returns  None where no session is at work, or the file says nothing that this version understands
    """
    files, path = layout.files, layout.live(sweep)
    try:
        written = files.facts(path).modified
        return LiveSession.model_validate_json(files.read(path)), max(0.0, time.time() - written)
    except (FileNotFoundError, ValidationError):
        return None


def _tell(
    layout: StoreLayout, look: Callable[[int], LiveSession], say: Callable[[str], None], ending: threading.Event
) -> None:
    beat, said = 0, False
    while not ending.is_set():
        try:
            _write(layout, look(beat))
        except Exception as error:  # noqa: BLE001  what is told to people must never end a session
            if not said:
                say(f"`geosweep status` is not told what this session does, the session goes on: {error}")
            said = True
        beat += 1
        ending.wait(BEAT_S_REMOTE if layout.files.remote else BEAT_S)


def _write(layout: StoreLayout, session: LiveSession) -> None:
    layout.files.replace(layout.live(session.sweep), session.model_dump_json().encode())
