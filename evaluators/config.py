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

from trainers.config import Count, Frozen, PositiveInt, Precision
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


Bits = Literal[2, 3, 4, 8]


class QuantizeSettings(Frozen):
    """GPTQ and round-to-nearest: the token loss on a suite before and after.

    suite, tokens_per_domain   as for the loss
    precision                  of the weights and activations when the losses are measured; GPTQ itself is in float32
                               and float64
    bits                       of a weight, rising; each is quantised from the original weights
    group_size                 inputs of a matrix that share a scale in a row; None: the whole row
    undivided                  what a matrix gets whose inputs group_size does not divide: a scale for the whole row,
                               or a short last group
    symmetric                  the scale is set by the largest magnitude of the group; else by its smallest and largest
    activation_order           columns in falling order of their input's power; else in the order of the matrix
    damp                       of the mean diagonal of the Hessian, added to the diagonal
    block_columns              columns after which the error is passed on to all later ones; a group that begins within
                               a block takes its scale from weights as they were when the block began (as auto-gptq)
    calibration_corpus         whose training split is read; None: the one that the checkpoint was trained on
    calibration_sequences      of the model's context; the first of the order of calibration_seed
    calibration_seed           of the order of the calibration sequences
    """

    evaluator: Literal["quantize"] = "quantize"
    suite: str
    tokens_per_domain: PositiveInt = 8192
    precision: Precision = "float32"
    bits: Annotated[tuple[Bits, ...], Field(min_length=1)] = (3, 4)
    group_size: PositiveInt | None = 128
    undivided: Literal["row", "short"] = "row"
    symmetric: bool = True
    activation_order: bool = False
    damp: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.01
    block_columns: PositiveInt = 128
    calibration_corpus: str | None = None
    calibration_sequences: PositiveInt = 128
    calibration_seed: Count = 0

    @model_validator(mode="after")
    def _bits_rise(self) -> Self:
        if list(self.bits) != sorted(set(self.bits)):
            raise ValueError(f"bits {list(self.bits)} must rise")
        return self


EvaluatorSettings = Annotated[GeometrySettings | LossSettings | QuantizeSettings, Field(discriminator="evaluator")]

EVALUATOR_SETTINGS: Mapping[str, type[GeometrySettings | LossSettings | QuantizeSettings]] = {
    "geometry": GeometrySettings,
    "loss": LossSettings,
    "quantize": QuantizeSettings,
}

EVALUATOR_VERSIONS: Mapping[str, int] = {"geometry": 1, "loss": 1, "quantize": 1}

_SETTINGS: TypeAdapter[GeometrySettings | LossSettings | QuantizeSettings] = TypeAdapter(EvaluatorSettings)


def settings_from(values: Mapping[str, object]) -> GeometrySettings | LossSettings | QuantizeSettings:
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
            return f"{field}: no such field{nearest(field, EVALUATOR_SETTINGS[evaluator].model_fields)}"
        case "missing":
            return f"{field}: missing"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case _:
            return f"{field}: {detail['msg']}, given {detail['input']!r}"
