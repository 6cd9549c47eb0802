"""Turn a sweep into the least work that answers it.

spec -> [plan] -> segments -> checkpoints -> evaluations -> metrics
in    SweepSpec (spec.py) and the facts of the prepared corpora
out   Plan: trials, the segments that they consist of, the evaluations asked for
not   Ray, files, clocks, random numbers: the same spec gives the same plan, byte for byte
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from evaluators.config import EVALUATOR_VERSIONS, EvaluatorSettings
from orchestrator import identity
from orchestrator.presets import CorpusFacts, Filled, fill
from orchestrator.sharing import Course, Segment, cut
from orchestrator.spec import Asked, Checkpoints, SweepSpec, field_value, parse, points, refuse, with_fields
from trainers.config import Recipe
from trainers.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point of the sweep.

    varied        the value of each field that some grid varies
    chain         ids of all segments on its path, in order
    checkpoints   those of them at whose end the sweep wants a checkpoint; the others end in forks (sharing.py)
    """

    id: str
    grids: tuple[str, ...]
    varied: Mapping[str, Any]
    recipe: Recipe
    sources: Mapping[str, str]
    chain: tuple[str, ...]
    checkpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluator with one setting, asked for at the end of one segment."""

    segment: str
    tokens: int
    evaluator: str
    version: int
    settings: EvaluatorSettings
    settings_digest: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that a sweep asks for.

    cells         points of all grids; equal ones are one trial
    shared        trials share what they have in common; False: each trains alone
    provisional   corpora that are not prepared, so ids will change
    """

    sweep: str
    question: str
    cells: int
    trials: tuple[Trial, ...]
    segments: tuple[Segment, ...]
    evaluations: tuple[Evaluation, ...]
    shared: bool
    provisional: tuple[str, ...]

    @cached_property
    def revision(self) -> str:
        """Twelve hex digits over what the sweep asks for; comments and execution do not count."""
        asked = [
            [[trial.id, list(trial.grids), dict(trial.varied), list(trial.checkpoints)] for trial in self.trials],
            [[e.segment, e.evaluator, e.version, e.settings_digest] for e in self.evaluations],
        ]
        return identity.digest([self.sweep, self.question, asked])[:12]

    @cached_property
    def segment_by_id(self) -> Mapping[str, Segment]:
        return {segment.id: segment for segment in self.segments}

    @property
    def tokens_asked(self) -> int:
        return sum(trial.recipe.token_budget for trial in self.trials)

    @property
    def tokens_trained(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    @property
    def forks(self) -> frozenset[str]:
        """Segments whose checkpoint is wanted by nobody but the branches that start from it."""
        return frozenset(self.segment_by_id) - {id for trial in self.trials for id in trial.checkpoints}


def load_plan(
    text: str, source: str, corpora: Mapping[str, CorpusFacts], *, share: bool = True
) -> tuple[SweepSpec, Plan]:
    """Spec and plan of a sweep file's text; InputError with every problem of the file and of its cells at once."""
    spec, problems = parse(text, source)
    if spec is not None:
        plan, more = make_plan(spec, corpora, share=share)
        if not problems and plan is not None:
            return spec, plan
        # What a cell lacks may be what was taken out above because it was wrong.
        problems += [problem for problem in more if not problems or "is missing" not in problem]
    raise refuse(source, problems)


def make_plan(
    spec: SweepSpec, corpora: Mapping[str, CorpusFacts], *, share: bool = True
) -> tuple[Plan | None, list[str]]:
    """The plan of a spec, or None and what is wrong with its cells, one line a problem.

    corpora   facts of the prepared corpora by name (presets.fill)
    share     False: each trial trains alone, whatever others have in common with it
    """
    cells, problems = _cells(spec, corpora)
    if problems:
        return None, problems
    merged = _merged(cells)
    courses = [Course(trial=id, recipe=c[0].filled.recipe, checkpoints=c[0].checkpoints) for id, c in merged.items()]
    cuts = cut(courses, share=share)
    ends = {segment.id: segment.to_tokens for segment in cuts.segments}
    trials = tuple(_trial(id, same, cuts.chains[id], ends, spec.sources) for id, same in merged.items())
    corpora_used = dict.fromkeys(trial.recipe.data.corpus for trial in trials)
    return Plan(
        sweep=spec.name,
        question=spec.question,
        cells=len(cells),
        trials=trials,
        segments=cuts.segments,
        evaluations=_evaluations(spec.evaluations, trials, ends),
        shared=share,
        provisional=tuple(name for name in corpora_used if name not in corpora),
    ), []


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    grid: str
    varied: Mapping[str, Any]
    filled: Filled
    checkpoints: tuple[int, ...]


def _cells(spec: SweepSpec, corpora: Mapping[str, CorpusFacts]) -> tuple[list[_Cell], list[str]]:
    cells: list[_Cell] = []
    faults: dict[str, list[str]] = {}
    for index, grid in enumerate(spec.grids):
        for point in points(grid):
            try:
                base = with_fields(spec.base, point)
                filled = fill(base, corpora)
                varied = {name: field_value(base, name) for name in point}
                tokens = _checkpoint_tokens(spec.checkpoints, filled.recipe)
                cells.append(_Cell(grid=grid.name, varied=varied, filled=filled, checkpoints=tokens))
            except InputError as error:
                where = ", ".join(f"{name} {value}" for name, value in point.items())
                faults.setdefault(f"{error.headline}", []).append(f"grids[{index}] at {where}")
    return cells, [_cell_problem(places, what) for what, places in faults.items()]


def _cell_problem(places: Sequence[str], what: str) -> str:
    others = f" and {len(places) - 1} more cells" if len(places) > 1 else ""
    return f"{places[0]}{others}: {what}"


def _checkpoint_tokens(checkpoints: Checkpoints, recipe: Recipe) -> tuple[int, ...]:
    """Token counts of a trial's checkpoints, ascending, its end included; InputError if one lies inside a step."""
    step, budget = recipe.tokens_per_step, recipe.token_budget
    if checkpoints.at_fractions is not None:
        asked: Iterable[int] = (round(fraction * recipe.steps) * step for fraction in checkpoints.at_fractions)
    elif checkpoints.every_tokens is not None:
        asked = range(0, budget + 1, checkpoints.every_tokens)
    else:
        asked = checkpoints.at_tokens or ()
    tokens = sorted({*asked, budget})
    if inside := [count for count in tokens if count % step]:
        raise InputError(f"checkpoints: {inside[0]:,} tokens lie inside a step of {step:,}; use a multiple of {step:,}")
    if tokens[-1] > budget:
        raise InputError(f"checkpoints.at_tokens: {tokens[-1]:,} is beyond token_budget {budget:,}")
    return tuple(tokens)


# --- trials ---------------------------------------------------------------------------------------------------------


def _merged(cells: Iterable[_Cell]) -> dict[str, list[_Cell]]:
    """Trial id -> the equal cells that it stands for."""
    merged: dict[str, list[_Cell]] = {}
    for cell in cells:
        merged.setdefault(identity.trial_id(cell.filled.recipe), []).append(cell)
    return merged


def _trial(
    id: str, cells: Sequence[_Cell], chain: tuple[str, ...], ends: Mapping[str, int], sources: Mapping[str, str]
) -> Trial:
    """One trial for equal cells of different grids; it carries all their grids' names and fields."""
    first = cells[0]
    varied = {name: value for cell in cells[::-1] for name, value in cell.varied.items()}
    wanted = set(first.checkpoints)
    return Trial(
        id=id,
        grids=tuple(dict.fromkeys(cell.grid for cell in cells)),
        varied=varied,
        recipe=first.filled.recipe,
        sources={**first.filled.sources, **sources},
        chain=chain,
        checkpoints=tuple(segment for segment in chain if ends[segment] in wanted),
    )


def _evaluations(asked: Sequence[Asked], trials: Sequence[Trial], ends: Mapping[str, int]) -> tuple[Evaluation, ...]:
    found: dict[tuple[str, str], Evaluation] = {}
    for request in asked:
        settings_digest = identity.settings_digest(request.settings.model_dump(mode="json"))
        evaluator = request.settings.evaluator
        for trial in trials:
            for segment in trial.checkpoints if request.at == "every" else trial.checkpoints[-1:]:
                found.setdefault(
                    (segment, settings_digest),
                    Evaluation(
                        segment=segment,
                        tokens=ends[segment],
                        evaluator=evaluator,
                        version=EVALUATOR_VERSIONS[evaluator],
                        settings=request.settings,
                        settings_digest=settings_digest,
                    ),
                )
    return tuple(found.values())
