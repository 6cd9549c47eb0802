"""The settings of each evaluator: every field that can change a number, and nothing else.

sweep file -> spec -> [config: EvaluatorSettings] -> evaluation
in    what a sweep file says: {evaluator: loss, suite: builtin}
out   a frozen record with every field filled; the filled record is what an evaluation's id is made of
not   torch; paths, devices, threads; at which checkpoints (that is the plan's)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from trainers.config import Frozen, PositiveInt
from trainers.errors import InputError, nearest

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class GeometrySettings(Frozen):
    """Geometry of the unembedding.

    top_k             k of topk_variance_share
    power_law_ranks   spectral_exponent is fitted over these shares of the numerical rank: without the few leading
                      directions and without the tail, where a finite matrix falls off
    """

    evaluator: Literal["geometry"] = "geometry"
    top_k: PositiveInt = 10
    power_law_ranks: tuple[Share, Share] = (0.1, 0.5)

    @model_validator(mode="after")
    def _ranks_rise(self) -> Self:
        low, high = self.power_law_ranks
        if low >= high:
            raise ValueError(f"power_law_ranks [{low:g}, {high:g}] must rise")
        return self


class LossSettings(Frozen):
    """Token loss and bits per byte on every evaluation set of a suite.

    suite               name of the suite; a prepared corpus is a suite of that name
    tokens_per_domain   tokens read from the start of each held-out split; a whole number of contexts
    """

    evaluator: Literal["loss"] = "loss"
    suite: str
    tokens_per_domain: PositiveInt = 8192


EvaluatorSettings = Annotated[GeometrySettings | LossSettings, Field(discriminator="evaluator")]

EVALUATOR_SETTINGS: Mapping[str, type[GeometrySettings | LossSettings]] = {
    "geometry": GeometrySettings,
    "loss": LossSettings,
}

EVALUATOR_VERSIONS: Mapping[str, int] = {"geometry": 1, "loss": 1}

_SETTINGS: TypeAdapter[GeometrySettings | LossSettings] = TypeAdapter(EvaluatorSettings)


def settings_from(values: Mapping[str, object]) -> GeometrySettings | LossSettings:
    """The filled settings of one entry of `evaluations:`, without its `at`.

    raises   InputError with every problem of the entry: field, what was given, what is allowed, nearest name
    """
    name = values.get("evaluator")
    if not isinstance(name, str) or name not in EVALUATOR_VERSIONS:
        hint = nearest(str(name), EVALUATOR_VERSIONS)
        raise InputError(f"evaluator: there is no '{name}'{hint}" if name else f"evaluator: missing{hint}")
    try:
        return _SETTINGS.validate_python(dict(values))
    except ValidationError as error:
        problems = [_problem(name, detail) for detail in error.errors()]
        raise InputError(f"evaluator '{name}': {len(problems)} problem{'s'[: len(problems) > 1]}", problems) from None


def _problem(evaluator: str, detail: ErrorDetails) -> str:
    field = ".".join(map(str, detail["loc"][1:]))
    match detail["type"]:
        case "extra_forbidden":
            kind = GeometrySettings if evaluator == "geometry" else LossSettings
            return f"{field}: no such field{nearest(field, kind.model_fields)}"
        case "missing":
            return f"{field}: missing"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case _:
            return f"{field}: {detail['msg']}, given {detail['input']!r}"
