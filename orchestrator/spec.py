"""Read one sweep file and say everything that is wrong with it in one answer.

sweeps/*.yaml -> [spec: SweepSpec] -> plan -> segments -> checkpoints -> evaluations -> metrics
in    the text of a sweep file
out   SweepSpec: a base recipe with holes that its preset fills, grids of axes, checkpoints, evaluations, execution
not   ids, cells, cost (plan.py); corpora, Ray, torch

Fields of `base` have the same names as axes; a dotted name (`schedule.shape`) is a field inside another.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from evaluators.config import EVALUATOR_SETTINGS, EvaluatorSettings
from trainers.config import (
    Attention,
    Family,
    Fraction,
    Frozen,
    NonNegative,
    Positive,
    Precision,
    Shape,
)
from trainers.errors import InputError, nearest

SHIPPED = Path(__file__).resolve().parent.parent / "sweeps"
FIELDS_PAGE = "every field and its unit: sweeps/README.md"

_SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _whole_number(given: object) -> object:
    """Accept 250_000, "3e8", 8.0e9, "8B" as the whole number each plainly is; leave the rest for the type to refuse."""
    if isinstance(given, bool) or given is None:
        raise ValueError(f"{given!r} is not a whole number")
    text = str(given).replace("_", "")
    factor = _SUFFIXES.get(text[-1:], 1)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise ValueError(f"{given!r} is not a whole number such as 250_000, 3e8 or 8B") from None
    if value != int(value):
        raise ValueError(f"{given!r} is not a whole number")
    return int(text) if text.isdigit() else int(value)


_BYTE_SUFFIXES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _byte_count(given: object) -> object:
    """Accept 10GB as the number of bytes that it is; a plain number goes on as it is."""
    if isinstance(given, str) and (factor := _BYTE_SUFFIXES.get(given[-2:])):
        try:
            return round(float(given[:-2]) * factor)
        except ValueError:
            raise ValueError(f"{given!r} is not a number of bytes such as 500MB, 10GB or 1.5TB") from None
    return _whole_number(given)


Tokens = Annotated[int, Field(ge=0), BeforeValidator(_whole_number)]
Whole = Annotated[int, Field(gt=0), BeforeValidator(_whole_number)]
Bytes = Annotated[int, Field(gt=0), BeforeValidator(_byte_count)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class ScheduleFields(Frozen):
    """The learning rate over tokens.

    shape            cosine | linear | constant | wsd (warm-up, stable, linear decay)
    warmup_tokens    tokens of linear warm-up from 0
    decay_tokens     tokens of the decay at the end; shape wsd only
    decay_fraction   the decay as a fraction of the trial's budget, to the nearest token; instead of decay_tokens
    final_fraction   learning rate of the last step, as a fraction of the peak
    """

    shape: Shape | None = None
    warmup_tokens: Tokens | None = None
    decay_tokens: Whole | None = None
    decay_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    final_fraction: Fraction | None = None


class Base(Frozen):
    """One recipe; what is not set here, and is no axis, the preset fills.

    preset                    tiny | ladder | pythia: where the values of the missing fields come from
    family                    olmo | pythia
    scale                     a published scale of the family (4M ... 150M; 14M ... 410M) or tiny-32, tiny-64, tiny-96
    corpus                    name of a prepared corpus
    context                   tokens of a training sequence
    batch_size                sequences a step
    token_budget              tokens of the whole trial; a whole number of steps
    learning_rate             peak learning rate, absolute
    learning_rate_multiplier  peak as a multiple of the preset's rule for this scale; instead of learning_rate
    schedule                  the learning rate over tokens, see base.schedule
    weight_decay              decoupled weight decay of AdamW
    decay_all                 weight decay also on norm gains, biases and embeddings
    beta1, beta2, eps         AdamW
    clip                      largest global norm of the gradient
    seed                      of fresh weights and data order
    attention                 sequential | parallel residual layout
    tied                      input and output embedding are one matrix
    init_std                  standard deviation of fresh weights
    precision                 float32 | bfloat16 (autocast over float32 weights)
    repeat                    allow more than one pass over the corpus
    """

    preset: Literal["tiny", "ladder", "pythia"]
    family: Family | None = None
    scale: str | None = None
    corpus: Name | None = None
    context: Whole | None = None
    batch_size: Whole | None = None
    token_budget: Whole | None = None
    learning_rate: Positive | None = None
    learning_rate_multiplier: Positive | None = None
    schedule: ScheduleFields = ScheduleFields()
    weight_decay: NonNegative | None = None
    decay_all: bool | None = None
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    eps: Positive | None = None
    clip: Positive | None = None
    seed: Tokens | None = None
    attention: Attention | None = None
    tied: bool | None = None
    init_std: Positive | None = None
    precision: Precision | None = None
    repeat: bool | None = None


class Grid(Frozen):
    """A product of axes. A key with commas ("token_budget, batch_size") ties its fields into one axis of tuples.

    name   shown beside each cell that the grid asks for
    axes   field of base -> its values
    """

    name: Name
    axes: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]]


class Checkpoints(Frozen):
    """When a trial leaves checkpoints; exactly one of the three. The end of a trial always is one.

    at_fractions   fractions of the trial's budget; each means the step boundary nearest to it
    at_tokens      token counts; each must be a step boundary of every trial and within its budget
    every_tokens   an interval in tokens; must be a whole number of steps of every trial
    """

    at_fractions: tuple[Fraction, ...] | None = None
    at_tokens: tuple[Tokens, ...] | None = None
    every_tokens: Whole | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Checkpoints:
        if sum(getattr(self, name) is not None for name in ("at_fractions", "at_tokens", "every_tokens")) != 1:
            raise ValueError("needs exactly one of at_fractions, at_tokens, every_tokens")
        return self


class Asked(Frozen):
    """One evaluator with its settings, and the checkpoints that it is asked for."""

    settings: EvaluatorSettings
    at: Literal["every", "last"] = "every"

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, given: object) -> object:
        """In the file, `at` stands beside the evaluator's settings."""
        if not isinstance(given, Mapping) or "settings" in given:
            return given
        rest = {key: value for key, value in given.items() if key != "at"}
        return {"settings": rest, **({"at": given["at"]} if "at" in given else {})}


class Keep(Frozen):
    """Which checkpoints stay in the store; none goes while a segment or an evaluation still needs it.

    weights   all | last: of every checkpoint that the sweep asks for, or of each trial's last one only
    state     last | all | none: optimizer state, without which training cannot go on; twice the size of the weights
    """

    weights: Literal["all", "last"] = "all"
    state: Literal["last", "all", "none"] = "last"


class Limits(Frozen):
    """What a plan may cost; above it nothing starts.

    max_gpu_hours   hours of one GPU for the whole plan
    gpu             the type that max_gpu_hours counts, as `geosweep plan` names it; absent: the slowest in the table,
                    so that the limit holds on each
    max_bytes       of checkpoints at the peak: 500MB, 10GB, 1.5TB
    """

    max_gpu_hours: Positive | None = None
    gpu: str | None = None
    max_bytes: Bytes | None = None


class Resources(Frozen):
    """What a trial of one scale holds while it trains.

    cpus   also its number of threads
    gpus   may be a fraction: 0.25 lets four trials share one
    """

    cpus: Whole = 1
    gpus: NonNegative = 0.0


class Execution(Frozen):
    """How and where; never part of an id.

    resources              scale -> what a trial of it holds; `default` for the scales not named
    evaluators             evaluation actors beside the trials
    micro_batch            sequences of one forward pass; absent: the whole batch
    rescue_seconds         a trial saves its state at least this often, between its checkpoints
    retries                attempts at a segment after a fault of the machine
    compress_checkpoints   files of tensors are packed (bytes split by place, zstd): about a seventh smaller, several
                           times the CPU to write and read; the same checkpoint by its digest
    track                  tensorboard | wandb | mlflow: they get the newest step of each running trial, about once a
                           second
    """

    resources: dict[str, Resources] = Field(default={"default": Resources()})
    evaluators: Whole = 2
    micro_batch: Whole | None = None
    rescue_seconds: Positive = 600.0
    retries: Tokens = 3
    compress_checkpoints: bool = False
    track: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()

    @model_validator(mode="after")
    def _each_tracker_once(self) -> Execution:
        if len(set(self.track)) < len(self.track):
            raise ValueError("track names a tracker twice")
        return self

    def resources_of(self, scale: str) -> Resources:
        return self.resources.get(scale) or self.resources.get("default") or Resources()


class SweepSpec(Frozen):
    """A whole sweep file.

    name          of the sweep, in the store and on the command line
    question      what the sweep is to answer
    base          one recipe
    grids         products of axes; equal cells of several grids are one trial
    checkpoints   when trials leave checkpoints
    evaluations   what is computed from which checkpoints
    sources       field -> where its value comes from, for readers; shown beside what the preset says of its fields
    keep          which checkpoints stay in the store
    limits        what the plan may cost
    execution     how and where; never part of an id
    """

    name: Name
    question: str
    base: Base
    grids: Annotated[tuple[Grid, ...], Field(min_length=1)]
    checkpoints: Checkpoints
    evaluations: tuple[Asked, ...]
    sources: dict[str, str] = Field(default={})
    keep: Keep = Keep()
    limits: Limits = Limits()
    execution: Execution = Execution()


# --- axes -----------------------------------------------------------------------------------------------------------

AXES = tuple(
    [name for name in Base.model_fields if name not in ("preset", "schedule")]
    + [f"schedule.{name}" for name in ScheduleFields.model_fields]
)


def axis_fields(key: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in key.split(","))


def axis_values(key: str, value: object) -> tuple[object, ...]:
    """The values of one point of an axis, one per field; ValueError if a tied axis gets no tuple of its length."""
    fields = axis_fields(key)
    if len(fields) == 1:
        return (value,)
    if not isinstance(value, list | tuple) or len(value) != len(fields):
        raise ValueError(f"{value!r} is no tuple of {len(fields)} values for {', '.join(fields)}")
    return tuple(value)


def points(grid: Grid) -> Iterator[dict[str, object]]:
    """Every cell of a grid as field -> value, in the order of the file; the last axis moves fastest."""
    for combination in itertools.product(*grid.axes.values()):
        point: dict[str, object] = {}
        for key, value in zip(grid.axes, combination, strict=True):
            point.update(zip(axis_fields(key), axis_values(key, value), strict=True))
        yield point


def with_fields(base: Base, fields: Mapping[str, object]) -> Base:
    """The base with some fields replaced, validated again; ValidationError if a value does not suit its field."""
    values = base.model_dump(exclude_unset=True)
    for name, value in fields.items():
        *above, leaf = name.split(".")
        target = values
        for part in above:
            target = target.setdefault(part, {})
        target[leaf] = value
    return Base.model_validate(values)


def field_value(base: Base, name: str) -> Any:
    """The value of a field of the base by its dotted name; None where the file leaves it to the preset."""
    value: Any = base
    for part in name.split("."):
        value = getattr(value, part)
    return value


# --- reading --------------------------------------------------------------------------------------------------------


def find_sweep(sweep: str) -> Path:
    """The file of SWEEP: a path, or the name of a sweep that ships with the package."""
    if (path := Path(sweep)).is_file():
        return path
    if (shipped := SHIPPED / f"{sweep}.yaml").is_file():
        return shipped
    names = [file.stem for file in SHIPPED.glob("*.yaml")]
    raise InputError(f"no sweep file '{sweep}', and no shipped sweep of that name{nearest(sweep, names)}")


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error


def parse(text: str, source: str) -> tuple[SweepSpec | None, list[str]]:
    """A sweep file's text as a spec, and the problems of its structure.

    source    name of the file, for messages
    returns   (spec, []) when all is well; otherwise the spec of what remains without the faulty entries, so that the
              planner can look for further problems in it, or None where nothing useful remains
    raises    InputError if the text is no YAML mapping
    """
    raw = _load_yaml(text, source)
    problems: list[str] = []
    for _ in range(8):  # each round removes what the round before complained about; the first has seen the whole file
        try:
            spec, axis_problems = _without_faulty_axes(SweepSpec.model_validate(raw))
            return spec, _unique(problems + axis_problems)
        except ValidationError as error:
            problems = problems or [_problem(item, raw) for item in error.errors()]
            if not _without_faults(raw, error):
                break
    return None, _unique(problems)


def refuse(source: str, problems: list[str], consequence: str = "nothing was planned") -> InputError:
    many = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
    return InputError(f"{source}: {many}, {consequence}", problems, FIELDS_PAGE)


class _Loader(yaml.SafeLoader):
    """YAML without silent overwriting of a key that stands twice."""


def _mapping_without_doubles(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"'{key}' stands twice", key_node.start_mark)
        seen.add(key)
    return dict(loader.construct_pairs(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_doubles)


def _load_yaml(text: str, source: str) -> dict[str, Any]:
    try:
        raw = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{source}: is no YAML: {' '.join(str(error).split())}", next_step=FIELDS_PAGE) from error
    if not isinstance(raw, dict):
        raise InputError(f"{source}: is a {type(raw).__name__}, not a mapping of fields", next_step=FIELDS_PAGE)
    return raw


def _unique(problems: list[str]) -> list[str]:
    return list(dict.fromkeys(problems))


def _without_faults(raw: dict[str, Any], error: ValidationError) -> bool:
    """Remove what each fault points at, or what lacks a field; whether anything could be removed."""
    faulty = [(_path_in_file(item["loc"]), item["type"]) for item in error.errors()]
    paths = {path[:-1] if kind == "missing" else path for path, kind in faulty if len(path) > (kind == "missing")}
    last_first = sorted(paths, key=lambda path: [(isinstance(part, str), part) for part in path], reverse=True)
    return any([_remove(raw, path) for path in last_first])


def _remove(raw: Any, path: tuple[int | str, ...]) -> bool:
    try:
        for part in path[:-1]:
            raw = raw[part]
        del raw[path[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True


_PYDANTIC_STEPS = re.compile(r"^(function-.*|tagged-union.*|is-instance.*|nullable.*|json-or-python.*)$")


def _path_in_file(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """A pydantic location without the steps that are not in the file (settings, and the evaluator's tag below it)."""
    path: list[int | str] = []
    parts = iter(part for part in location if not (isinstance(part, str) and _PYDANTIC_STEPS.match(part)))
    for part in parts:
        if part == "settings" and path[:1] == ["evaluations"]:
            next(parts, None)
            continue
        path.append(part)
    return tuple(path)


def _spelled(path: tuple[int | str, ...]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "file"


def _problem(item: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """One pydantic error as a line: where, what was given, what is allowed."""
    path = _path_in_file(item["loc"])
    where = _spelled(path)
    given = item.get("input")
    match item["type"]:
        case "extra_forbidden":
            return f"{where}: no such field{nearest(str(path[-1]), _siblings(path, raw))}"
        case "missing":
            return f"{where}: is missing"
        case "union_tag_invalid":
            tag = item["ctx"]["tag"]
            return f"{where}.evaluator: no evaluator '{tag}'{nearest(tag, EVALUATOR_SETTINGS)}"
        case "union_tag_not_found":
            return f"{where}.evaluator: is missing"
        case "value_error":
            return f"{where}: {item['ctx']['error']}"
        case "string_pattern_mismatch":
            return f"{where}: {given!r} is no name: letters, digits, '.', '_' and '-' only, at most 64"
        case "literal_error" | "enum":
            allowed = [word.strip().strip("'") for word in re.split(r",| or ", item["ctx"]["expected"])]
            return f"{where}: {given!r} is not allowed; allowed: {', '.join(allowed)}"
        case "too_short":
            return f"{where}: is empty, at least one is needed"
        case "float_parsing" | "float_type":
            return f"{where}: {given!r} is {_kind(given)}, a number is needed"
        case _:
            return f"{where}: {given!r}: {item['msg'][:1].lower()}{item['msg'][1:]}"


def _kind(given: object) -> str:
    names = {str: "text", list: "a list", dict: "a mapping", bool: "true or false", type(None): "nothing"}
    return names.get(type(given), type(given).__name__)


_MODELS: Mapping[str, type[Frozen]] = {
    "base": Base,
    "grids": Grid,
    "checkpoints": Checkpoints,
    "keep": Keep,
    "limits": Limits,
    "execution": Execution,
    "base.schedule": ScheduleFields,
    "execution.resources": Resources,
}


def _siblings(path: tuple[int | str, ...], raw: Mapping[str, Any]) -> list[str]:
    """Fields that are allowed where `path` points."""
    above = ".".join(part for part in path[:-1] if isinstance(part, str))
    if above == "evaluations":
        return _evaluator_fields(raw, path)
    while above and above not in _MODELS:
        above = above.rpartition(".")[0]
    return list((_MODELS[above] if above else SweepSpec).model_fields)


def _evaluator_fields(raw: Mapping[str, Any], path: tuple[int | str, ...]) -> list[str]:
    """Fields of the evaluator that the entry names."""
    settings = EVALUATOR_SETTINGS[raw["evaluations"][path[1]]["evaluator"]]
    return [*settings.model_fields, "at"]


# --- axis problems --------------------------------------------------------------------------------------------------


def _without_faulty_axes(spec: SweepSpec) -> tuple[SweepSpec, list[str]]:
    """Check each value of each axis against its field; keep the good ones."""
    problems: list[str] = []
    grids = []
    for index, grid in enumerate(spec.grids):
        good: dict[str, tuple[Any, ...]] = {}
        for key, values in grid.axes.items():
            where = f"grids[{index}].axes.{key}"
            unknown = [field for field in axis_fields(key) if field not in AXES]
            problems += [f"{where}: no such field '{field}'{nearest(field, AXES)}" for field in unknown]
            if not unknown:
                good[key], faults = _check_values(spec.base, key, values, where)
                problems += faults
        problems += _fields_in_two_axes(index, grid)
        grids.append(grid.model_copy(update={"axes": {key: values for key, values in good.items() if values}}))
    problems += _doubled_names(spec)
    problems += [f"sources.{name}: no such field{nearest(name, AXES)}" for name in spec.sources if name not in AXES]
    return spec.model_copy(update={"grids": tuple(grids)}), problems


def _fields_in_two_axes(index: int, grid: Grid) -> list[str]:
    fields = [field for key in grid.axes for field in axis_fields(key)]
    doubled = sorted({field for field in fields if fields.count(field) > 1})
    return [f"grids[{index}].axes: field '{field}' stands in two axes; tie them into one" for field in doubled]


def _doubled_names(spec: SweepSpec) -> list[str]:
    names = [grid.name for grid in spec.grids]
    return [f"grids: the name '{name}' stands twice" for name in sorted({n for n in names if names.count(n) > 1})]


def _check_values(base: Base, key: str, values: tuple[Any, ...], where: str) -> tuple[tuple[Any, ...], list[str]]:
    kept, problems = [], []
    for position, value in enumerate(values):
        place = f"{where}[{position}]"
        try:
            with_fields(base, dict(zip(axis_fields(key), axis_values(key, value), strict=True)))
            kept.append(value)
        except ValidationError as error:
            problems += [_problem({**item, "loc": (place,)}, {}) for item in error.errors()]
        except ValueError as error:
            problems.append(f"{place}: {error}")
    repeated = [value for position, value in enumerate(values) if value in values[:position]]
    problems += [f"{where}: {value!r} stands twice" for value in repeated]
    return tuple(kept), problems
