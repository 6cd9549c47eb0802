"""What a person sees while a session goes on: a bar a running leg in a terminal, plain lines elsewhere.

run -> [progress] -> terminal
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from orchestrator.legs import Leg

PLAIN_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Where the sweep stands: checkpoints (segments) and evaluations, done of asked, and what went wrong."""

    segments: int
    segments_done: int
    evaluations: int
    evaluations_done: int
    diverged: int
    failed: int

    def __str__(self) -> str:
        wrong = f", {self.diverged} diverged" * bool(self.diverged) + f", {self.failed} failed" * bool(self.failed)
        return (
            f"checkpoints {self.segments_done}/{self.segments}, "
            f"evaluations {self.evaluations_done}/{self.evaluations}{wrong}"
        )


class Screen(Protocol):
    """Shows a session; `leg` may be called from another thread."""

    def __enter__(self) -> Screen: ...
    def __exit__(self, *_: object) -> None: ...
    def leg(self, leg: Leg, progress: Mapping[str, Any]) -> None: ...
    def counts(self, counts: Counts) -> None: ...
    def say(self, line: str) -> None: ...


def screen_for(console: Console) -> Screen:
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


def describe(leg: Leg) -> str:
    """A running leg for people: which recipe, and the tokens that it trains."""
    recipe = leg.recipe
    return (
        f"{recipe.model.family} {recipe.model.scale} batch {recipe.batch_size} "
        f"wd {recipe.optimizer.weight_decay:g} lr {recipe.schedule.peak_lr:.2g}"
    )


class PlainScreen:
    """Lines for logs: what ended, and the counts every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *_: object) -> None: ...

    def leg(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        if progress["state"] == "committed" and progress.get("loss") is not None:
            self.say(f"trained {describe(leg)} to {leg.to_tokens:,} tokens, training loss {progress['loss']:.3f}")

    def counts(self, counts: Counts) -> None:
        if (now := time.monotonic()) >= self._next:
            self._next = now + PLAIN_INTERVAL_S
            self.say(str(counts))

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveScreen:
    """A bar for each running leg, and one line of counts below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>10,.0f} of {task.total:,.0f} tokens"),
            TextColumn("{task.fields[facts]}"),
            console=console,
        )
        self._counts = Text("starting Ray ...")
        self._live = Live(Group(self._bars, self._counts), console=console, refresh_per_second=8, transient=True)
        self._ids: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def leg(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        with self._lock:
            if progress["state"] in ("starting", "training", "retrying"):
                self._advance(leg, progress)
            elif (bar := self._ids.pop(leg.id, None)) is not None:
                self._bars.remove_task(bar)

    def _advance(self, leg: Leg, progress: Mapping[str, Any]) -> None:
        if leg.id not in self._ids:
            self._ids[leg.id] = self._bars.add_task(describe(leg), total=leg.to_tokens, facts="")
        loss, speed = progress.get("loss"), progress.get("tokens_per_s")
        facts = (
            f"loss {loss:.3f}  {speed:,.0f} tokens/s" if loss is not None and speed is not None else progress["state"]
        )
        self._bars.update(self._ids[leg.id], completed=progress.get("tokens"), facts=facts)

    def counts(self, counts: Counts) -> None:
        self._counts.plain = str(counts)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)
