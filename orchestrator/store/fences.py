"""Number the attempts at a thing, so that only the newest may commit.

attempt, driver -> [fences] -> leases/<what>/<number>.json
in    a store, the name of what is attempted: a segment, or the driving of the store
out   a fencing number: one more than every number given before, given once
not   whether an older holder still lives: it is outdated in any case, and finds that out by itself

A number is a file that is published without overwriting, the one operation that every kind of store has. Of two who
begin at once one gets n, the other n + 1, and n is outdated.
A check and the commit after it are two operations. Between them a newer attempt may begin and even commit. That is
harmless: a checkpoint appears by one operation that never overwrites, so of two attempts one commits; and where both
computed the same bits, the second finds the equal checkpoint there and changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from pathlib import Path

from orchestrator.store.layout import StoreLayout


class Outdated(Exception):
    """A newer attempt has begun; this one leaves without a trace."""


def claim(layout: StoreLayout, what: str) -> int:
    """A new attempt at `what`; every earlier one is outdated when this returns. raises EnvironmentFault"""
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "claim": uuid.uuid4().hex}).encode()
    while True:
        given = _given(layout, what)
        number = max(given, default=0) + 1
        if not layout.files.publish(_file(layout, what, number), content):
            continue
        if is_newest(layout, what, number):  # else it was given before, and removed since by a newer attempt
            for older in given:
                layout.files.remove(_file(layout, what, older))
            return number
        layout.files.remove(_file(layout, what, number))


def newest(layout: StoreLayout, what: str) -> int:
    """The highest number that was given; 0 where none was. raises EnvironmentFault"""
    return max(_given(layout, what), default=0)


def is_newest(layout: StoreLayout, what: str, number: int) -> bool:
    """Whether no later attempt has begun."""
    return newest(layout, what) <= number


def require_newest(layout: StoreLayout, what: str, number: int) -> None:
    """raises Outdated if a later attempt has begun"""
    if not is_newest(layout, what, number):
        raise Outdated(f"attempt {number} at {what} was replaced by a newer one")


def _given(layout: StoreLayout, what: str) -> list[int]:
    names = (path.stem for path in layout.files.children(layout.claims(what)))
    return [int(name) for name in names if name.isdigit()]


def _file(layout: StoreLayout, what: str, number: int) -> Path:
    return layout.claims(what) / f"{number}.json"
