"""Cut what is left of a plan into legs, and hand them out: the longest remaining path first.

plan + what the store holds -> [legs] -> tune -> attempt
A leg is a run of segments without a branch: one machine trains it in one go and leaves a checkpoint at the end of each
segment. Where trials part, legs part.
not   files, clocks, Ray: the caller says which segments are committed, diverged or failed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.identity import canonical_json
from orchestrator.plan import Plan
from orchestrator.sharing import Segment
from trainers.config import Frozen, Recipe


class LegSegment(Frozen):
    """What an attempt needs to know of a segment; fields as in plan.Segment."""

    id: str
    parent: str | None
    from_tokens: int
    to_tokens: int
    history: str


class Leg(Frozen):
    """Segments in order, each the parent of the next; recipe: of a trial that all of them belong to."""

    segments: tuple[LegSegment, ...]
    recipe: Recipe

    @property
    def id(self) -> str:
        return self.segments[-1].id

    @property
    def to_tokens(self) -> int:
        return self.segments[-1].to_tokens

    def to_json(self) -> str:
        return canonical_json(self.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class _Remaining:
    """The segments that are left, who follows whom among them, and the FLOPs of the longest path from each."""

    segments: Mapping[str, Segment]
    children: Mapping[str | None, list[str]]
    longest: Mapping[str, float]


class LegQueue:
    """The legs of one session: `take` what can start now, `committed` and `lost` unlock or drop what follows."""

    def __init__(self, plan: Plan, committed: Iterable[str], lost: Iterable[str]) -> None:
        """lost: segments that diverged; whatever follows them is never handed out."""
        self._committed = set(committed)
        self._remaining = _remaining(plan, self._committed)
        self._waiting = set(self._remaining.segments)
        self._running: dict[str, Leg] = {}
        for segment in lost:
            self._drop(segment)

    @property
    def exhausted(self) -> bool:
        """Nothing runs and nothing will become ready."""
        return not self._waiting and not self._running

    def take(self) -> Leg | None:
        """The ready leg with the longest path behind it, or None while all that is left waits for parents."""
        ready = [id for id in self._waiting if self._parent_is_there(id)]
        if not ready:
            return None
        first = max(ready, key=lambda id: (self._remaining.longest[id], id))
        leg = self._leg_from(first)
        self._waiting -= {segment.id for segment in leg.segments}
        self._running[leg.id] = leg
        return leg

    def committed(self, leg: Leg) -> None:
        """The whole leg is in the store."""
        self._running.pop(leg.id)
        self._committed |= {segment.id for segment in leg.segments}

    def lost(self, leg: Leg) -> None:
        """The leg diverged, failed or was stopped: what follows it is not handed out in this session."""
        self._running.pop(leg.id)
        self._drop(leg.id)

    def _parent_is_there(self, id: str) -> bool:
        parent = self._remaining.segments[id].parent
        return parent is None or parent in self._committed

    def _leg_from(self, first: str) -> Leg:
        ids = [first]
        while len(following := self._remaining.children.get(ids[-1], [])) == 1 and following[0] in self._waiting:
            ids.append(following[0])
        segments = [self._remaining.segments[id] for id in ids]
        return Leg(
            segments=tuple(
                LegSegment(
                    id=s.id, parent=s.parent, from_tokens=s.from_tokens, to_tokens=s.to_tokens, history=s.history
                )
                for s in segments
            ),
            recipe=segments[-1].recipe,
        )

    def _drop(self, id: str) -> None:
        self._waiting.discard(id)
        for child in self._remaining.children.get(id, []):
            self._drop(child)


def _remaining(plan: Plan, committed: set[str]) -> _Remaining:
    segments = {segment.id: segment for segment in plan.segments if segment.id not in committed}
    children: dict[str | None, list[str]] = {}
    for segment in segments.values():
        children.setdefault(segment.parent, []).append(segment.id)
    longest: dict[str, float] = {}
    for segment in sorted(segments.values(), key=lambda s: s.to_tokens, reverse=True):
        after = max((longest[child] for child in children.get(segment.id, [])), default=0.0)
        longest[segment.id] = segment.flops + after
    return _Remaining(segments=segments, children=children, longest=longest)
