"""Agree on who does what only one should do: fold a store.

committer -> [leases] -> leases/<what>.json
in    a store, the name of what is leased
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
from dataclasses import dataclass
from pathlib import Path

from orchestrator.store.layout import StoreLayout

SILENCE_S = 30.0  # after this long without a beat, the holder counts as dead


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holder:
    owner: str
    host: str
    pid: int
    beat: int


class Lease:
    """One contender for one lease."""

    def __init__(self, layout: StoreLayout, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._files, self._path, self._clock = layout.files, layout.lease(what), clock
        self._owner = uuid.uuid4().hex
        self._beat = 0
        self._watched: _Holder | None = None
        self._since = 0.0

    def hold(self) -> bool:
        """Beat as the holder, or become it if nobody is; whether this contender holds the lease now."""
        holder = self._read()
        if holder is None or holder.owner == self._owner or self._is_dead(holder):
            self.seize()
            return True
        return False

    def seize(self) -> None:
        """Become the holder, whoever was: who finds itself replaced stops by itself."""
        self._beat += 1
        content = {"owner": self._owner, "host": socket.gethostname(), "pid": os.getpid(), "beat": self._beat}
        self._files.replace(self._path, json.dumps(content).encode())

    def release(self) -> None:
        """Let the next contender in at once."""
        holder = self._read()
        if holder is not None and holder.owner == self._owner:
            self._files.remove(self._path)

    def _is_dead(self, holder: _Holder) -> bool:
        if holder.host == socket.gethostname() and not Path(f"/proc/{holder.pid}").exists():
            return True
        if holder != self._watched:
            self._watched, self._since = holder, self._clock()
        return self._clock() - self._since > SILENCE_S

    def _read(self) -> _Holder | None:
        """Who holds the lease; None where nobody does, or the file says nothing readable."""
        try:
            return _Holder(**json.loads(self._files.read(self._path)))
        except (FileNotFoundError, ValueError, TypeError):
            return None
