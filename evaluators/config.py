"""The settings of each evaluator: every field that can change a number, and nothing else.

sweep file -> spec -> [config: EvaluatorSettings] -> evaluation
in    what a sweep file says: {evaluator: loss, suite: builtin}
out   a frozen record with every field filled; the filled record is what an evaluation's id is made of
not   torch; paths, devices, threads; at which checkpoints (that is the plan's)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from trainers.config import Count, Fraction, Frozen, NonNegative, Positive, PositiveInt, Precision
from trainers.errors import InputError, nearest

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Settings(Frozen):
    """What the settings of all evaluators have."""

    @property
    def corpora(self) -> tuple[str, ...]:
        """Names of the prepared corpora that the evaluator reads, besides the one that a checkpoint was trained on."""
        return ()


class MatrixSettings(_Settings):
    """Geometry of a matrix.

    top_k             k of topk_variance_share
    power_law_ranks   spectral_exponent is fitted over these shares of the numerical rank: without the few leading
                      directions and without the tail, where a finite matrix falls off
    """

    top_k: PositiveInt = 10
    power_law_ranks: tuple[Share, Share] = (0.1, 0.5)

    @model_validator(mode="after")
    def _ranks_rise(self) -> Self:
        low, high = self.power_law_ranks
        if low >= high:
            raise ValueError(f"power_law_ranks [{low:g}, {high:g}] must rise")
        return self


class GeometrySettings(MatrixSettings):
    """Geometry of the unembedding."""

    evaluator: Literal["geometry"] = "geometry"


class HiddenSettings(MatrixSettings):
    """Geometry of the last hidden states, one of each sequence.

    suite             name of the corpus whose text the model reads
    domain            of the corpus; None: the first one of its pre-training mix
    split             heldout or train
    sequences         from the start of the split, one after the other
    sequence_tokens   length of a sequence; None: the model's context
    position          of the state in its sequence, from 0; -1 is the last
    """

    evaluator: Literal["hidden"] = "hidden"
    suite: str
    domain: str | None = None
    split: Literal["heldout", "train"] = "heldout"
    sequences: Annotated[int, Field(ge=2, strict=True)] = 256
    sequence_tokens: Annotated[int, Field(ge=2, strict=True)] | None = None
    position: Annotated[int, Field(strict=True)] = -1

    @property
    def corpora(self) -> tuple[str, ...]:
        return (self.suite,)


class LossSettings(_Settings):
    """Token loss and bits per byte on every evaluation set of a suite.

    suite               name of the suite; a prepared corpus is a suite of that name
    tokens_per_domain   tokens read from the start of each held-out split, a whole number of sequences; None: all that
                        fill one
    sequence_tokens     length of a sequence; None: the model's context
    """

    evaluator: Literal["loss"] = "loss"
    suite: str
    tokens_per_domain: PositiveInt | None = 8192
    sequence_tokens: Annotated[int, Field(ge=2, strict=True)] | None = None

    @property
    def corpora(self) -> tuple[str, ...]:
        return (self.suite,)


Bits = Literal[2, 3, 4, 8]


class FinetuneSettings(_Settings):
    """Fine-tuning on one domain, and what is forgotten of the pre-training mix.

    suite               name of the corpus that holds the target domain
    domain              whose training split is trained on and whose held-out split is measured
    retained            corpus whose mix is measured for forgetting; None: the one that the checkpoint was trained on
    tokens              to train on, less than one pass; a whole number of steps
    batch_size          sequences a step, of the model's context
    learning_rates      each from the checkpoint's weights; falling along a line, no warm-up
    final_fraction      of a learning rate, at its last step
    weight_decay, beta1, beta2, eps, clip   of AdamW, whose state starts at zero
    seed                of the order of the sequences
    precision           of the training; losses are measured in float32
    tokens_per_domain   of each held-out set
    source              of the defaults: jakespringer/experiments; batch_size: arXiv 2602.20433
    """

    evaluator: Literal["finetune"] = "finetune"
    suite: str
    domain: str
    retained: str | None = None
    tokens: PositiveInt = 20_971_520
    batch_size: PositiveInt = 32
    learning_rates: Annotated[tuple[Positive, ...], Field(min_length=1)] = (4e-5, 2e-4, 1e-3)
    final_fraction: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-8
    clip: Positive = 1.0
    seed: Count = 0
    precision: Precision = "float32"
    tokens_per_domain: PositiveInt = 8192

    @property
    def corpora(self) -> tuple[str, ...]:
        return tuple(name for name in (self.suite, self.retained) if name is not None)

    @model_validator(mode="after")
    def _rates_rise(self) -> Self:
        if list(self.learning_rates) != sorted(set(self.learning_rates)):
            raise ValueError(f"learning_rates {list(self.learning_rates)} must rise")
        return self


class QuantizeSettings(_Settings):
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

    @property
    def corpora(self) -> tuple[str, ...]:
        return tuple(name for name in (self.suite, self.calibration_corpus) if name is not None)


AnySettings = GeometrySettings | HiddenSettings | LossSettings | FinetuneSettings | QuantizeSettings
EvaluatorSettings = Annotated[AnySettings, Field(discriminator="evaluator")]

EVALUATOR_SETTINGS: Mapping[str, type[AnySettings]] = {
    "geometry": GeometrySettings,
    "hidden": HiddenSettings,
    "loss": LossSettings,
    "finetune": FinetuneSettings,
    "quantize": QuantizeSettings,
}

EVALUATOR_VERSIONS: Mapping[str, int] = {"geometry": 1, "hidden": 1, "loss": 1, "finetune": 1, "quantize": 1}

_SETTINGS: TypeAdapter[AnySettings] = TypeAdapter(EvaluatorSettings)


def settings_from(values: Mapping[str, object]) -> AnySettings:
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


def entry_from(text: str, option: str) -> Mapping[str, object]:
    """The mapping that an option of a command line holds as YAML, such as {group_size: 32}; else InputError."""
    try:
        entry = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{option} {text}: is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(entry, dict):
        raise InputError(f"{option} {text}: no mapping such as {{evaluator: geometry}}")
    return entry


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
