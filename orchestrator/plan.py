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
from orchestrator.spec import Asked, Checkpoints, SweepSpec, parse, points, refuse, with_fields
from trainers.config import Recipe
from trainers.errors import InputError
from trainers.scales import flops_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One point of the sweep. varied: the value of each field that some grid varies; chain: segment ids in order."""

    id: str
    grids: tuple[str, ...]
    varied: Mapping[str, Any]
    recipe: Recipe
    sources: Mapping[str, str]
    chain: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Training from fresh weights (parent None) or from the parent's end to to_tokens, where it leaves a checkpoint.

    history   digest of everything realised up to to_tokens; equal histories are the same training
    recipe    of one of the trials: they all agree up to to_tokens
    """

    id: str
    parent: str | None
    from_tokens: int
    to_tokens: int
    history: str
    recipe: Recipe
    trials: tuple[str, ...]

    @property
    def flops(self) -> float:
        return (self.to_tokens - self.from_tokens) * flops_per_token(self.recipe.model)


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
    """Everything that a sweep asks for. provisional: corpora that are not prepared, so ids will change."""

    sweep: str
    question: str
    cells: int
    trials: tuple[Trial, ...]
    segments: tuple[Segment, ...]
    evaluations: tuple[Evaluation, ...]
    provisional: tuple[str, ...]

    @cached_property
    def revision(self) -> str:
        """Twelve hex digits over what the sweep asks for; comments and execution do not count."""
        asked = [
            [[trial.id, list(trial.grids), dict(trial.varied), list(trial.chain)] for trial in self.trials],
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
        return sum(segment.to_tokens - segment.from_tokens for segment in self.segments)


def load_plan(text: str, source: str, corpora: Mapping[str, CorpusFacts]) -> tuple[SweepSpec, Plan]:
    """Spec and plan of a sweep file's text; InputError with every problem of the file and of its cells at once."""
    spec, problems = parse(text, source)
    if spec is not None:
        plan, more = make_plan(spec, corpora)
        if not problems and plan is not None:
            return spec, plan
        # What a cell lacks may be what was taken out above because it was wrong.
        problems += [problem for problem in more if not problems or "is missing" not in problem]
    raise refuse(source, problems)


def make_plan(spec: SweepSpec, corpora: Mapping[str, CorpusFacts]) -> tuple[Plan | None, list[str]]:
    """The plan of a spec, or None and what is wrong with its cells, one line a problem.

    corpora   facts of the prepared corpora by name (presets.fill)
    """
    cells, problems = _cells(spec, corpora)
    if problems:
        return None, problems
    merged: dict[str, Trial] = {}
    segments: dict[str, Segment] = {}
    for cell in cells:
        trial = _trial(cell, spec.checkpoints, segments)
        known = merged.get(trial.id)
        merged[trial.id] = trial if known is None else _both(known, trial)
    trials = tuple(merged.values())
    corpora_used = dict.fromkeys(trial.recipe.data.corpus for trial in trials)
    return Plan(
        sweep=spec.name,
        question=spec.question,
        cells=len(cells),
        trials=trials,
        segments=_with_trials(segments, trials),
        evaluations=_evaluations(spec.evaluations, trials, segments),
        provisional=tuple(name for name in corpora_used if name not in corpora),
    ), []


# --- cells ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    grid: str
    varied: Mapping[str, Any]
    filled: Filled


def _cells(spec: SweepSpec, corpora: Mapping[str, CorpusFacts]) -> tuple[list[_Cell], list[str]]:
    cells: list[_Cell] = []
    faults: dict[str, list[str]] = {}
    for index, grid in enumerate(spec.grids):
        for point in points(grid):
            try:
                filled = fill(with_fields(spec.base, point), corpora)
                _checkpoint_tokens(spec.checkpoints, filled.recipe)
                cells.append(_Cell(grid=grid.name, varied=point, filled=filled))
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


# --- trials and segments --------------------------------------------------------------------------------------------


def _trial(cell: _Cell, checkpoints: Checkpoints, segments: dict[str, Segment]) -> Trial:
    """The trial of a cell; adds the segments of its chain that are not known yet."""
    recipe = cell.filled.recipe
    chain: list[str] = []
    before: Segment | None = None
    for tokens, history in identity.histories(recipe, _checkpoint_tokens(checkpoints, recipe)).items():
        before = Segment(
            id=identity.segment_id(recipe, tokens, history),
            parent=before.id if before else None,
            from_tokens=before.to_tokens if before else 0,
            to_tokens=tokens,
            history=history,
            recipe=recipe,
            trials=(),
        )
        segments.setdefault(before.id, before)
        chain.append(before.id)
    return Trial(
        id=identity.trial_id(recipe),
        grids=(cell.grid,),
        varied=cell.varied,
        recipe=recipe,
        sources=cell.filled.sources,
        chain=tuple(chain),
    )


def _both(first: Trial, second: Trial) -> Trial:
    """One trial for equal cells of different grids; it carries both grids' names and both grids' fields."""
    return Trial(
        id=first.id,
        grids=tuple(dict.fromkeys(first.grids + second.grids)),
        varied={**second.varied, **first.varied},
        recipe=first.recipe,
        sources=first.sources,
        chain=first.chain,
    )


def _with_trials(segments: Mapping[str, Segment], trials: Sequence[Trial]) -> tuple[Segment, ...]:
    users: dict[str, list[str]] = {id: [] for id in segments}
    for trial in trials:
        for id in trial.chain:
            users[id].append(trial.id)
    return tuple(
        Segment(
            id=segment.id,
            parent=segment.parent,
            from_tokens=segment.from_tokens,
            to_tokens=segment.to_tokens,
            history=segment.history,
            recipe=segment.recipe,
            trials=tuple(users[segment.id]),
        )
        for segment in segments.values()
    )


def _evaluations(
    asked: Sequence[Asked], trials: Sequence[Trial], segments: Mapping[str, Segment]
) -> tuple[Evaluation, ...]:
    found: dict[tuple[str, str, str], Evaluation] = {}
    for request in asked:
        settings_digest = identity.settings_digest(request.settings.model_dump(mode="json"))
        evaluator = request.settings.evaluator
        for trial in trials:
            for segment in trial.chain if request.at == "every" else trial.chain[-1:]:
                found.setdefault(
                    (segment, evaluator, settings_digest),
                    Evaluation(
                        segment=segment,
                        tokens=segments[segment].to_tokens,
                        evaluator=evaluator,
                        version=EVALUATOR_VERSIONS[evaluator],
                        settings=request.settings,
                        settings_digest=settings_digest,
                    ),
                )
    return tuple(found.values())
