"""The kinds of error that a person or a scheduler treats differently.

everything -> [errors]: this module imports nothing of ours, everybody may import it
InputError         the caller's mistake: all problems at once, never retried, exit code 2
EnvironmentFault   the machine's: lost node, full disk; retried and counted, exit code 3
everything else    a bug: it propagates
A diverged loss is a result and has no error class.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import ClassVar


class GeosweepError(Exception):
    """What a command prints as a message instead of a traceback, and ends with: 3, the machine's; 2, the caller's."""

    exit_code: ClassVar[int] = 3


class InputError(GeosweepError):
    """Something the caller wrote or passed is wrong.

    headline   what was looked at and what did not happen: "sweeps/a.yaml: 2 problems, nothing was planned"
    problems   one line each: field path, what was given, what is allowed, nearest name
    next_step  the command or page that helps
    """

    exit_code = 2

    def __init__(self, headline: str, problems: Sequence[str] = (), next_step: str = "") -> None:
        super().__init__(headline, tuple(problems), next_step)
        self.headline = headline
        self.problems = tuple(problems)
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.headline, *(f"  {problem}" for problem in self.problems)]
        return "\n".join([*lines, self.next_step] if self.next_step else lines)


class EnvironmentFault(GeosweepError):
    """The machine, not the caller, is at fault; the same command may work later.

    kind       a word of the events table: storage_error, node_lost, worker_killed, out_of_memory, corrupt_file, ...
    what       the file or resource and what happened to it
    next_step  what a person does about it
    """

    def __init__(self, kind: str, what: str, next_step: str = "") -> None:
        super().__init__(kind, what, next_step)
        self.kind = kind
        self.what = what
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.what}\n{self.next_step}" if self.next_step else self.what


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A hint for messages: "; nearest is 'tokens'", or the whole list where nothing is near."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1, cutoff=0.6)
    if close:
        return f"; nearest is '{close[0]}'"
    return f"; allowed: {', '.join(names)}" if names else ""
