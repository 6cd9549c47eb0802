"""Find out what is left of a plan, cut it into legs, and hand them out: the longest remaining path first.

plan + what the store holds -> [legs] -> tune -> attempt
A leg is a run of segments without a branch: one machine trains it in one go and leaves a checkpoint at the end of each
segment. Where trials part, legs part.
not   files, clocks, Ray: the caller says which segments are committed or lost, and which states the store holds
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from orchestrator import identity
from orchestrator.plan import Plan
from orchestrator.sharing import HeldState, Segment
from trainers.config import Frozen, Recipe
from trainers.schedule import pieces

# --- what is left ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Of a plan's segments.

    committed   whose checkpoint was made, by whichever sweep, even if it is not kept any more
    diverged    whose loss stopped being finite
    left        what is still to be trained, parents first, each from where it really starts (work_left)
    """

    committed: frozenset[str]
    diverged: frozenset[str]
    left: tuple[Segment, ...]

    @property
    def tokens_left(self) -> int:
        return sum(segment.tokens for segment in self.left)


def nothing_stored(plan: Plan) -> Standing:
    """Where a plan stands in a store that does not exist yet."""
    return Standing(committed=frozenset(), diverged=frozenset(), left=plan.segments)


def work_left(
    plan: Plan, committed: Iterable[str], lost: Iterable[str], held: Iterable[HeldState]
) -> tuple[Segment, ...]:
    """The segments that are still to be trained, parents first, each with the parent that it really starts from.

    committed   segments whose checkpoint was made, even if it is not kept any more
    lost        segments that diverged; nothing that follows them is left
    held        where training can start. A state of equal history inside a segment shortens it: its parent and
                from_tokens are then those of the state. A fork whose state is gone is left again if something new
                starts from it, and is not if nothing does.
    """
    committed, starts = set(committed), _Starts(held)
    gone = with_descendants(plan.segments, lost)
    asked = frozenset(plan.segment_by_id) - plan.forks
    continued: set[str] = set()  # segments that something left starts from
    left: list[Segment] = []
    for segment in reversed(plan.segments):  # children before parents
        wanted = segment.id in asked and segment.id not in committed
        needed = segment.id in continued and not starts.at(segment)
        if (wanted or needed) and segment.id not in gone:
            shortened = starts.inside(segment)
            left.append(shortened)
            if shortened.parent is not None:
                continued.add(shortened.parent)
    return tuple(left[::-1])


def with_descendants(segments: Sequence[Segment], lost: Iterable[str]) -> set[str]:
    """Lost segments and all that would start from them. segments: parents before children"""
    gone = set(lost)
    for segment in segments:
        if segment.parent in gone:
            gone.add(segment.id)
    return gone


class _Starts:
    """The held states, found by what they are equal to."""

    def __init__(self, held: Iterable[HeldState]) -> None:
        self._by_place = {(state.tokens, state.history): state for state in held}
        self._tokens = sorted({tokens for tokens, _ in self._by_place})

    def at(self, segment: Segment) -> bool:
        """Whether the state at the segment's end is held under the segment's own name, where its children look."""
        state = self._by_place.get((segment.to_tokens, segment.history))
        return state is not None and state.segment == segment.id

    def inside(self, segment: Segment) -> Segment:
        """The segment from the latest held state inside it; the segment itself where there is none."""
        first = bisect_right(self._tokens, segment.from_tokens)
        inside = self._tokens[first : bisect_left(self._tokens, segment.to_tokens)]
        if not inside:
            return segment
        recipe = segment.recipe
        conditions, schedule = identity.conditions_digest(recipe), pieces(recipe)
        for tokens in reversed(inside):
            if tokens % recipe.tokens_per_step == 0:
                history = identity.history_at(conditions, schedule, tokens // recipe.tokens_per_step)
                if state := self._by_place.get((tokens, history)):
                    return replace(segment, parent=state.segment, from_tokens=tokens)
        return segment


# --- legs -----------------------------------------------------------------------------------------------------------


class LegSegment(Frozen):
    """What an attempt needs to know of a segment; fields as in sharing.Segment.

    continued   something starts from its end, so its state must be there, not only its weights
    """

    id: str
    parent: str | None
    from_tokens: int
    to_tokens: int
    history: str
    continued: bool


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
        return identity.canonical_json(self.model_dump(mode="json"))


class LegQueue:
    """The legs of one session: `take` what can start now, `committed` and `lost` unlock or drop what follows."""

    def __init__(self, left: Sequence[Segment]) -> None:
        """left: what work_left says; a segment whose parent is not among them can start at once."""
        self._segments = {segment.id: segment for segment in left}
        self._children = _children(left)
        self._longest = _longest_paths(left, self._children)
        self._waiting = set(self._segments)
        self._running: dict[str, Leg] = {}
        self._ready: list[tuple[float, str]] = []
        for segment in left:
            if segment.parent not in self._segments:
                self._is_ready(segment.id)

    @property
    def exhausted(self) -> bool:
        """Nothing runs and nothing will become ready."""
        return not self._waiting and not self._running

    def take(self) -> Leg | None:
        """The ready leg with the longest path behind it, or None while all that is left waits for parents."""
        if not self._ready:
            return None
        _, first = heappop(self._ready)
        leg = self._leg_from(first)
        self._waiting -= {segment.id for segment in leg.segments}
        self._running[leg.id] = leg
        return leg

    def committed(self, leg: Leg) -> None:
        """The whole leg is in the store."""
        self._running.pop(leg.id)
        for child in self._children.get(leg.id, ()):
            self._is_ready(child)

    def again(self, leg: Leg) -> None:
        """An attempt at the leg died: it is ready once more."""
        self._running.pop(leg.id)
        self._waiting |= {segment.id for segment in leg.segments}
        self._is_ready(leg.segments[0].id)

    def lost(self, leg: Leg) -> None:
        """The leg diverged, failed or was stopped: what follows it is not handed out in this session."""
        self._running.pop(leg.id)
        following = list(self._children.get(leg.id, ()))
        while following:
            child = following.pop()
            self._waiting.discard(child)
            following += self._children.get(child, ())

    def _is_ready(self, id: str) -> None:
        heappush(self._ready, (-self._longest[id], id))

    def _leg_from(self, first: str) -> Leg:
        ids = [first]
        while len(following := self._children.get(ids[-1], [])) == 1:
            ids.append(following[0])
        segments = [self._segments[id] for id in ids]
        return Leg(segments=tuple(self._leg_segment(segment) for segment in segments), recipe=segments[-1].recipe)

    def _leg_segment(self, segment: Segment) -> LegSegment:
        return LegSegment(
            id=segment.id,
            parent=segment.parent,
            from_tokens=segment.from_tokens,
            to_tokens=segment.to_tokens,
            history=segment.history,
            continued=segment.id in self._children,
        )


def _children(segments: Iterable[Segment]) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for segment in segments:
        if segment.parent is not None:
            children.setdefault(segment.parent, []).append(segment.id)
    return children


def _longest_paths(left: Sequence[Segment], children: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """FLOPs of the longest path that begins with each segment."""
    longest: dict[str, float] = {}
    for segment in reversed(left):  # children before parents
        longest[segment.id] = segment.flops + max((longest[id] for id in children.get(segment.id, ())), default=0.0)
    return longest
