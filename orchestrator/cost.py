"""The bill of a plan, before anything starts: tokens, FLOPs, hours, bytes, evaluations.

plan, standing, speeds -> [cost] -> plan page, run
in    a Plan, what of it is left, the devices (machines.py)
out   Bill; refusals where it is above the sweep's limits
not   the store, clocks
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evaluators.config import (
    EvaluatorSettings,
    FinetuneSettings,
    GeometrySettings,
    HiddenSettings,
    LossSettings,
    QuantizeSettings,
)
from orchestrator.machines import Device
from orchestrator.plan import Evaluation, Plan
from orchestrator.retention import kept
from orchestrator.sharing import Segment
from orchestrator.spec import Keep, Limits
from trainers.config import Model
from trainers.errors import nearest
from trainers.scales import count_parameters, flops_per_token

FLOPS_CONVENTION = "6 a token for each matrix parameter, the head counted, plus attention scores"
WEIGHT_BYTES, STATE_BYTES = 4, 8  # a parameter: float32; AdamW's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHours:
    """Hours of one device for the whole plan and for what is left of it; source: how sure that is.

    kind   cuda or cpu
    """

    device: str
    kind: str
    hours: float
    hours_left: float
    measured: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCost:
    """Evaluations of one kind. flops: of all that are asked, None where the kind has no estimate."""

    evaluator: str
    asked: int
    owed: int
    flops: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a plan costs.

    tokens_asked     sum of the trials' budgets; tokens_trained: of the segments, what is shared counted once
    tokens_left      still to be trained, given what the store holds; flops_left likewise
    bytes_kept       of the checkpoints that stay when all is done
    bytes_peak       at most on the disk at one time: all trials under way at once, each with the newest state of its
                     own beside what is kept, and every fork still there
    """

    tokens_asked: int
    tokens_trained: int
    tokens_left: int
    flops: float
    flops_left: float
    hours: tuple[DeviceHours, ...]
    bytes_kept: int
    bytes_peak: int
    evaluations: tuple[EvaluationCost, ...]

    @property
    def saved(self) -> float:
        """Share of the asked tokens that sharing saves."""
        return 1 - self.tokens_trained / self.tokens_asked


def make_bill(
    plan: Plan,
    keep: Keep,
    left: Sequence[Segment],
    owed: Collection[Evaluation],
    devices: Iterable[Device],
    domains: Mapping[str, int],
) -> Bill:
    """Add up a plan.

    left      what is still to be trained (legs.work_left); owed: evaluations that the store does not hold
    domains   evaluation sets of each prepared suite; one is assumed for a suite that is not prepared
    """
    all_costs, costs_left = _tokens_by_cost(plan.segments), _tokens_by_cost(left)
    bytes_kept, bytes_peak = _checkpoint_bytes(plan, keep)
    return Bill(
        tokens_asked=plan.tokens_asked,
        tokens_trained=plan.tokens_trained,
        tokens_left=sum(costs_left.values()),
        flops=_flops(all_costs),
        flops_left=_flops(costs_left),
        hours=tuple(
            DeviceHours(
                device=device.name,
                kind=device.kind,
                hours=_hours(all_costs, device),
                hours_left=_hours(costs_left, device),
                measured=bool(device.measured),
                source=device.source,
            )
            for device in devices
        ),
        bytes_kept=bytes_kept,
        bytes_peak=bytes_peak,
        evaluations=_evaluation_costs(plan, owed, domains),
    )


def over_limits(bill: Bill, limits: Limits) -> list[str]:
    """What of a bill is above the sweep's limits, one line each; empty: it may start."""
    problems = []
    if limits.max_bytes is not None and bill.bytes_peak > limits.max_bytes:
        problems.append(
            f"limits.max_bytes: {bill.bytes_peak:,} bytes of checkpoints at the peak, {limits.max_bytes:,} are "
            f"allowed; fewer checkpoints or `keep: {{weights: last}}` need less"
        )
    if limits.gpu is not None and limits.gpu not in (names := [hours.device for hours in bill.hours]):
        return [*problems, f"limits.gpu: no GPU type '{limits.gpu}'{nearest(limits.gpu, names)}"]
    if limits.max_gpu_hours is not None:
        chosen = [h for h in bill.hours if h.device == limits.gpu or (limits.gpu is None and h.kind == "cuda")]
        most = max(chosen, key=lambda hours: hours.hours)
        if most.hours > limits.max_gpu_hours:
            problems.append(
                f"limits.max_gpu_hours: {most.hours:,.4g} hours of {most.device} ({most.source}), "
                f"{limits.max_gpu_hours:g} are allowed"
            )
    return problems


# --- training -------------------------------------------------------------------------------------------------------


def _tokens_by_cost(segments: Iterable[Segment]) -> dict[float, int]:
    """FLOPs a token -> tokens: models of equal cost are one line."""
    tokens: Counter[float] = Counter()
    for segment in segments:
        tokens[flops_per_token(segment.recipe.model)] += segment.tokens
    return dict(tokens)


def _flops(tokens_by_cost: Mapping[float, int]) -> float:
    return sum(cost * tokens for cost, tokens in tokens_by_cost.items())


def _hours(tokens_by_cost: Mapping[float, int], device: Device) -> float:
    return sum(cost * tokens / device.flops_per_s(cost) for cost, tokens in tokens_by_cost.items()) / 3600


# --- checkpoints ----------------------------------------------------------------------------------------------------


def _checkpoint_bytes(plan: Plan, keep: Keep) -> tuple[int, int]:
    """Bytes kept at the end, and at most at one time."""
    stays, forks = kept(plan, keep), plan.forks
    parameters = {segment.id: count_parameters(segment.recipe.model).all for segment in plan.segments}
    weights = sum(WEIGHT_BYTES * parameters[id] for id in stays.weights)
    state = sum(STATE_BYTES * parameters[id] for id in stays.state)
    whole = WEIGHT_BYTES + STATE_BYTES
    under_way = sum(whole * parameters[trial.chain[-1]] for trial in plan.trials)
    held_by_forks = sum(whole * parameters[id] for id in forks)
    return weights + state, weights + state + under_way + held_by_forks


# --- evaluations ----------------------------------------------------------------------------------------------------


def _evaluation_costs(
    plan: Plan, owed: Collection[Evaluation], domains: Mapping[str, int]
) -> tuple[EvaluationCost, ...]:
    asked = Counter(evaluation.evaluator for evaluation in plan.evaluations)
    still = Counter(evaluation.evaluator for evaluation in owed)
    flops: dict[str, float | None] = dict.fromkeys(asked, 0.0)
    for evaluation in plan.evaluations:
        model = plan.segment_by_id[evaluation.segment].recipe.model
        cost, so_far = _evaluation_flops(model, evaluation.settings, domains), flops[evaluation.evaluator]
        flops[evaluation.evaluator] = None if cost is None or so_far is None else so_far + cost
    return tuple(
        EvaluationCost(evaluator=name, asked=count, owed=still[name], flops=flops[name])
        for name, count in asked.items()
    )


def _evaluation_flops(model: Model, settings: EvaluatorSettings, domains: Mapping[str, int]) -> float | None:
    """FLOPs of one evaluation; None for a kind without an estimate."""
    estimate = _EVALUATION_FLOPS.get(settings.evaluator)
    return estimate(model, settings, domains) if estimate else None


def _geometry_flops(model: Model, _settings: GeometrySettings, _domains: Mapping[str, int]) -> float:
    """Two Gram matrices of W (V D^2 products each) and the eigenvectors of one (about 9 D^3)."""
    return 4.0 * model.vocab_rows * model.hidden_size**2 + 9.0 * model.hidden_size**3


def _loss_flops(model: Model, settings: LossSettings, domains: Mapping[str, int]) -> float | None:
    """The forward pass: a third of training on the same tokens; None where all the text of a suite is read."""
    if settings.tokens_per_domain is None:
        return None
    return flops_per_token(model) / 3 * settings.tokens_per_domain * domains.get(settings.suite, 1)


def _quantize_flops(model: Model, settings: QuantizeSettings, domains: Mapping[str, int]) -> float:
    """Losses of the model and two copies a width of bits; for each width two passes over the calibration tokens and the
    Hessians of the four inputs of each block.
    """
    forward, bits = flops_per_token(model) / 3, len(settings.bits)
    losses = (1 + 2 * bits) * forward * settings.tokens_per_domain * domains.get(settings.suite, 1)
    hessians = 2.0 * model.layers * (3 * model.hidden_size**2 + model.mlp_size**2)
    return losses + bits * settings.calibration_sequences * model.context * (2 * forward + hessians)


def _hidden_flops(model: Model, settings: HiddenSettings, _domains: Mapping[str, int]) -> float:
    """The forward pass over the sample; the geometry of so few rows is small beside it."""
    return flops_per_token(model) / 3 * settings.sequences * (settings.sequence_tokens or model.context)


def _finetune_flops(model: Model, settings: FinetuneSettings, _domains: Mapping[str, int]) -> float:
    """Training once a learning rate, and the losses on target and retained text before and after."""
    trained = settings.tokens * len(settings.learning_rates)
    measured = 2 * settings.tokens_per_domain * (1 + len(settings.learning_rates))
    return flops_per_token(model) * (trained + measured / 3)


_EVALUATION_FLOPS: Mapping[str, Callable[[Model, Any, Mapping[str, int]], float | None]] = {
    "geometry": _geometry_flops,
    "hidden": _hidden_flops,
    "loss": _loss_flops,
    "finetune": _finetune_flops,
    "quantize": _quantize_flops,
}
