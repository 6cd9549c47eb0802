"""One driver a store, wherever it is: a lease with a heartbeat, and a fencing number for a driver that comes back late.

run, eval, import, gc -> [driving] -> leases/driver.json, leases/driver/<number>.json
in    a store, what is to be done, for the message that another driver gets
out   Driver, whose `superseded` is set when somebody else has taken over
not   what a driver does

The beat comes from a thread of its own, so no checkpoint, compilation or long query makes it late; only a process that
is stopped, or a machine that is cut off from the store, falls silent for leases.SILENCE_S.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.store.fences import claim, is_newest
from orchestrator.store.layout import StoreLayout, stop_file
from orchestrator.store.leases import SILENCE_S, Holder, Lease
from trainers.errors import EnvironmentFault, InputError

WHAT = "driver"
BEAT_S = 5.0
_LOOK_S = 0.5


class Driver:
    """This process as the driver of a store."""

    def __init__(self, layout: StoreLayout, lease: Lease) -> None:
        self._layout, self._lease = layout, lease
        self._term = claim(layout, WHAT)
        self._lease.seize()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="driver lease", daemon=True)
        self.superseded = threading.Event()
        """Another driver has taken over: this one must stop, and nothing that it began counts any more."""

    def start(self) -> None:
        self._thread.start()

    def is_current(self) -> bool:
        return is_newest(self._layout, WHAT, self._term)

    def end(self) -> None:
        self._over.set()
        self._thread.join()
        self._lease.release()

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                if not self.is_current():
                    self.superseded.set()
                    return
                self._lease.seize()
            except EnvironmentFault:  # the store is out of reach just now: the next beat tries again
                continue


@contextmanager
def only_driver(layout: StoreLayout, doing: str, say: Callable[[str], None] = lambda _line: None) -> Iterator[Driver]:
    """Be the driver of a store for the body; one that died is waited out, one that lives is not disturbed.

    doing   "run demo": what others are told
    say     gets a line when the wait for another driver begins
    raises  EnvironmentFault (store_busy) when another driver lives
    """
    lease = Lease(layout, WHAT, doing=doing)
    _wait_until_free(layout, lease, say)
    driver = Driver(layout, lease)
    if not driver.is_current():  # two began at once, and the other has the higher number
        raise _busy(layout, lease.holder())
    driver.start()
    try:
        yield driver
    finally:
        driver.end()


def current_driver(layout: StoreLayout) -> Holder | None:
    """Who drives the store, or died doing so less than half a minute ago; None where nobody does."""
    return Lease(layout, WHAT).holder()


def _wait_until_free(layout: StoreLayout, lease: Lease, say: Callable[[str], None]) -> None:
    first: Holder | None = None
    while not lease.is_free():
        holder = lease.holder()
        if first is None and holder is not None:
            first = holder
            say(f"{_name(first)} drives this store or died doing so: waiting up to {SILENCE_S:g} s for a sign of life")
        elif first is not None and holder is not None and (holder.owner, holder.beat) != (first.owner, first.beat):
            raise _busy(layout, holder)
        time.sleep(_LOOK_S)


def _busy(layout: StoreLayout, holder: Holder | None) -> EnvironmentFault:
    return EnvironmentFault(
        "store_busy",
        f"{layout.url}: {_name(holder)} works on this store; nothing was started",
        "wait for it, stop it with Ctrl-C or `geosweep stop NAME`, or use another --store",
    )


def _name(holder: Holder | None) -> str:
    if holder is None:
        return "another driver"
    return f"`geosweep {holder.doing}` (process {holder.pid} on {holder.host})"


def ask_to_stop(layout: StoreLayout, sweep: str, wait_s: float, say: Callable[[str], None]) -> bool:
    """Ask the driver of a sweep, wherever it is, to let the trials save their state and end.

    returns  whether it has ended within `wait_s`
    raises   InputError if nobody drives the store, or drives it for another sweep
    """
    lease = Lease(layout, WHAT)
    holder = lease.holder()
    if holder is None or lease.is_free():
        raise InputError(f"{layout.url}: nothing works on this store, so there is nothing to stop")
    if holder.doing.split()[-1:] != [sweep]:
        raise InputError(f"{layout.url}: {_name(holder)} works on this store, not on '{sweep}'; nothing was stopped")
    layout.files.replace(stop_file(layout, sweep), b"")
    say(f"asked {_name(holder)} to stop")
    until = time.monotonic() + wait_s
    while not lease.is_free():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True
