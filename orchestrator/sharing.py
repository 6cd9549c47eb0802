"""Cut trials into the least set of segments: what is equal is trained once.

spec -> plan: trials -> [sharing] -> segments, chains
in    trials with their recipes, and the token counts where each wants a checkpoint
out   Segments in the order parents first, and each trial's chain of them
not   the store, cost, evaluations

Two trials share training up to the first optimizer step at which anything realised differs. Trials of equal conditions
(all but the learning rate) therefore form a tree over steps, whose branches part where the pieces of their schedules
do (trainers.schedule). A cut lies where some trial wants a checkpoint, and where branches part: there the checkpoint
is a *fork*, wanted by nobody but the branches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator import identity
from trainers.config import Recipe
from trainers.scales import flops_per_token
from trainers.schedule import Piece, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Training from fresh weights (parent None) or from the parent's end to to_tokens, where it leaves a checkpoint.

    history   digest of everything realised up to to_tokens; equal histories are the same training
    recipe    of one of its trials: they all agree up to to_tokens
    trials    whose chain it is part of
    """

    id: str
    parent: str | None
    from_tokens: int
    to_tokens: int
    history: str
    recipe: Recipe
    trials: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return self.to_tokens - self.from_tokens

    @property
    def flops(self) -> float:
        return self.tokens * flops_per_token(self.recipe.model)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldState:
    """A checkpoint in the store that training can go on from, whichever sweep asked for it: weights and state."""

    segment: str
    tokens: int
    history: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What one trial wants of the planner.

    checkpoints   token counts, ascending step boundaries; the last is the trial's end
    """

    trial: str
    recipe: Recipe
    checkpoints: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Segments, parents before children, and for each trial the ids of all segments on its path."""

    segments: tuple[Segment, ...]
    chains: Mapping[str, tuple[str, ...]]


def cut(courses: Sequence[Course], *, share: bool = True) -> Cuts:
    """The least set of segments in which each trial finds its checkpoints and nothing is trained twice.

    courses   one per trial
    share     False: each trial keeps its training for itself, under ids of its own
    """
    drafts: dict[str, _Draft] = {}
    for alike in _of_equal_conditions(courses, share):
        _cut_tree(alike, drafts, share)
    chains: dict[str, list[str]] = {course.trial: [] for course in courses}
    for id, draft in drafts.items():
        for trial in draft.trials:
            chains[trial].append(id)
    return Cuts(
        segments=tuple(draft.segment(id) for id, draft in drafts.items()),
        chains={trial: tuple(chain) for trial, chain in chains.items()},
    )


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A segment whose trials are still being collected."""

    parent: str | None
    from_tokens: int
    to_tokens: int
    history: str
    recipe: Recipe
    trials: list[str] = field(default_factory=list)

    def segment(self, id: str) -> Segment:
        return Segment(
            id=id,
            parent=self.parent,
            from_tokens=self.from_tokens,
            to_tokens=self.to_tokens,
            history=self.history,
            recipe=self.recipe,
            trials=tuple(self.trials),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """A course with its schedule, as the tree looks at it."""

    course: Course
    conditions: str
    pieces: tuple[Piece, ...]

    @property
    def last_step(self) -> int:
        return self.pieces[-1].last_step

    def piece_after(self, step: int) -> Piece:
        return next(piece for piece in self.pieces if piece.last_step > step)

    def checkpoints_between(self, after: int, until: int) -> tuple[int, ...]:
        """Token counts t of its checkpoints with after < t <= until."""
        wanted = self.course.checkpoints
        return wanted[bisect_right(wanted, after) : bisect_right(wanted, until)]


def _of_equal_conditions(courses: Iterable[Course], share: bool) -> Iterable[list[_Path]]:
    groups: dict[str, list[_Path]] = {}
    for course in courses:
        conditions = identity.conditions_digest(course.recipe)
        path = _Path(course=course, conditions=conditions, pieces=pieces(course.recipe))
        groups.setdefault(conditions if share else course.trial, []).append(path)
    return groups.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trunk:
    """Steps after first_step to last_step, which all of `paths` train alike; at the end some may stop or part."""

    first_step: int
    last_step: int
    paths: list[_Path]
    parts: bool


def _trunks(paths: list[_Path]) -> Iterator[tuple[_Trunk, int]]:
    """The tree of paths, parents first: each trunk with the position of its parent among them (-1: none)."""
    waiting = [(0, branch, -1) for branch in _by_next_law(paths, 0)][::-1]
    position = -1
    while waiting:
        first, members, parent = waiting.pop()
        last = min(path.piece_after(first).last_step for path in members)
        branches = _by_next_law([path for path in members if path.last_step > last], last)
        position += 1
        yield _Trunk(first_step=first, last_step=last, paths=members, parts=len(branches) > 1), parent
        waiting += [(last, branch, position) for branch in branches[::-1]]


def _by_next_law(paths: Iterable[_Path], step: int) -> list[list[_Path]]:
    branches: dict[tuple[str | float, ...], list[_Path]] = {}
    for path in paths:
        branches.setdefault(path.piece_after(step).law, []).append(path)
    return list(branches.values())


def _cut_tree(paths: list[_Path], drafts: dict[str, _Draft], share: bool) -> None:
    """Add the segments of trials of equal conditions to `drafts`."""
    root = _fresh_weights(paths, drafts, share)
    ends: list[tuple[str | None, int]] = []  # of each trunk so far: the last cut on the way to its end
    for trunk, above in _trunks(paths):
        parent, start = ends[above] if above >= 0 else (root, 0)
        first = min(trunk.paths, key=lambda path: path.course.trial)  # whichever: the order of the file must not count
        recipe, trials = first.course.recipe, [path.course.trial for path in trunk.paths]
        for tokens in _cuts_of(trunk, recipe.tokens_per_step):
            history = identity.history_at(first.conditions, first.pieces, tokens // recipe.tokens_per_step)
            id = _name(recipe, tokens, history, first.course.trial, share)
            drafts[id] = _Draft(
                parent=parent, from_tokens=start, to_tokens=tokens, history=history, recipe=recipe, trials=trials
            )
            parent, start = id, tokens
        ends.append((parent, start))


def _cuts_of(trunk: _Trunk, tokens_per_step: int) -> list[int]:
    after, until = trunk.first_step * tokens_per_step, trunk.last_step * tokens_per_step
    cuts = {tokens for path in trunk.paths for tokens in path.checkpoints_between(after, until)}
    return sorted(cuts | {until} if trunk.parts else cuts)


def _fresh_weights(paths: list[_Path], drafts: dict[str, _Draft], share: bool) -> str | None:
    """The segment of no tokens, if one of the paths wants a checkpoint of the fresh weights.

    Fresh weights depend on the model and the seed alone, so trials of other conditions may have put it there.
    """
    if not any(bisect_left(path.course.checkpoints, 1) for path in paths):
        return None
    recipe, trials = paths[0].course.recipe, [path.course.trial for path in paths]
    history = identity.fresh_digest(recipe)
    id = _name(recipe, 0, history, trials[0], share)
    fresh = _Draft(parent=None, from_tokens=0, to_tokens=0, history=history, recipe=recipe)
    drafts.setdefault(id, fresh).trials += trials
    return id


def _name(recipe: Recipe, to_tokens: int, history: str, trial: str, share: bool) -> str:
    if share:
        return identity.segment_id(recipe, to_tokens, history)
    return identity.lone_segment_id(recipe, to_tokens, history, trial)
