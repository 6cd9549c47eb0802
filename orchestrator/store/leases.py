"""Agree on who does what only one should do: fold a store, drive it.

committer, driving -> [leases] -> leases/<what>.json
in    a store, the name of what is leased: the fold, the driving
out   whether this process may go on
not   a lock: two holders for a moment are possible, and harmless where each step has a fence of its own

A holder counts up a beat. Others watch the count against their own monotonic clock, so no wall clock is compared: one
that is set back an hour changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from orchestrator.store.layout import StoreLayout

SILENCE_S = 30.0  # after this long without a beat, the holder counts as dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease. machine: where its process id means something (machine_id); doing: for people."""

    owner: str
    host: str
    machine: str
    pid: int
    beat: int
    doing: str


class Lease:
    """One contender for one lease."""

    def __init__(
        self, layout: StoreLayout, what: str, clock: Callable[[], float] = time.monotonic, doing: str = ""
    ) -> None:
        self._files, self._path, self._clock, self._doing = layout.files, layout.lease(what), clock, doing
        self._owner = uuid.uuid4().hex
        self._beat = 0
        self._watched: Holder | None = None
        self._since = 0.0

    def hold(self) -> bool:
        """Beat as the holder, or become it if nobody is; whether this contender holds the lease now."""
        if self.is_free():
            self.seize()
            return True
        return False

    def is_free(self) -> bool:
        """Whether nobody else holds it and lives; a dead holder is known by its silence since the first look."""
        holder = self.holder()
        return holder is None or holder.owner == self._owner or self._is_dead(holder)

    def seize(self) -> None:
        """Become the holder, whoever was: who finds itself replaced stops by itself."""
        self._beat += 1
        content = asdict(
            Holder(
                owner=self._owner,
                host=socket.gethostname(),
                machine=machine_id(),
                pid=os.getpid(),
                beat=self._beat,
                doing=self._doing,
            )
        )
        self._files.replace(self._path, json.dumps(content).encode())

    def release(self) -> None:
        """Let the next contender in at once."""
        holder = self.holder()
        if holder is not None and holder.owner == self._owner:
            self._files.remove(self._path)

    def _is_dead(self, holder: Holder) -> bool:
        if holder.machine == machine_id() and not Path(f"/proc/{holder.pid}").exists():
            return True
        if holder != self._watched:
            self._watched, self._since = holder, self._clock()
        return self._clock() - self._since > SILENCE_S

    def holder(self) -> Holder | None:
        """Who holds the lease; None where nobody does, or the file says nothing readable."""
        try:
            return Holder(**json.loads(self._files.read(self._path)))
        except (FileNotFoundError, ValueError, TypeError):
            return None


@cache
def machine_id() -> str:
    """Where a process id of ours means this process: this start of the machine, this namespace of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
