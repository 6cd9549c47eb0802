"""The recipe of one trial: every field that can change a number, and nothing else.

sweep file -> spec -> [config: Recipe] -> segments -> checkpoints
in    plain values, already filled from a preset: no field has a default, so nothing is set silently
out   frozen records that hash to the same id on every machine
not   paths, devices, threads, logging: they live in Execution (loop.py) and never enter an id

Letters: B sequences in a batch, T tokens in a sequence, V rows of the vocabulary, D hidden size, L layers, H heads.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Family = Literal["olmo", "pythia"]
Attention = Literal["sequential", "parallel"]
Shape = Literal["cosine", "linear", "constant", "wsd"]
Precision = Literal["float32", "bfloat16"]

PositiveInt = Annotated[int, Field(gt=0, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Frozen(BaseModel):
    """A record from a file: unchangeable, and a field it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Model(Frozen):
    """The network and its fresh weights.

    vocab_size   entries of the tokenizer
    vocab_rows   rows of the embeddings: vocab_size padded to a multiple of 128; the rows above vocab_size are padding
    attention    residual layout of a block: attention then MLP (sequential) or both from one input (parallel)
    init_std     standard deviation of fresh weights; normal, cut off at 3 standard deviations
    """

    family: Family
    scale: str
    hidden_size: PositiveInt
    mlp_size: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    context: PositiveInt
    vocab_size: PositiveInt
    vocab_rows: PositiveInt
    attention: Attention
    tied: bool
    rotary_theta: Positive
    rotary_fraction: Annotated[float, Field(gt=0, le=1)]
    norm_eps: Positive
    init_std: Positive

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if self.vocab_rows < self.vocab_size:
            raise ValueError(f"vocab_rows {self.vocab_rows} is less than vocab_size {self.vocab_size}")
        if self.family == "olmo" and self.attention == "parallel":
            raise ValueError("attention 'parallel' exists in family 'pythia' only; allowed for 'olmo': sequential")
        return self


class Data(Frozen):
    """Which tokens, in which order: sequence i is a function of (digest, seed of the recipe, i) alone.

    corpus   name of the prepared corpus; digest   that of its manifest
    repeat   whether training may pass over the data more than once, each pass in an order of its own
    """

    corpus: str
    digest: str
    repeat: bool


class Optimizer(Frozen):
    """AdamW.

    weight_decay   decoupled; one step multiplies a weight by 1 - lr * weight_decay
    decay_all      also on norm gains, biases and embeddings (as OLMo's ladder does), else on matrices of the blocks
                   and the unembedding only
    clip           largest global norm of the gradient
    """

    beta1: Fraction
    beta2: Fraction
    eps: Positive
    weight_decay: NonNegative
    decay_all: bool
    clip: Positive


class Schedule(Frozen):
    """The learning rate over tokens: linear warm-up from 0, then `shape` down to final_fraction * peak_lr.

    decay_tokens   length of the linear decay at the end of `wsd`; None for the other shapes
    """

    shape: Shape
    peak_lr: Positive
    warmup_tokens: Count
    decay_tokens: PositiveInt | None
    final_fraction: Fraction

    @model_validator(mode="after")
    def _shape_has_what_it_needs(self) -> Self:
        if (self.shape == "wsd") != (self.decay_tokens is not None):
            raise ValueError("decay_tokens belongs to shape 'wsd', and only there")
        if self.shape == "constant" and self.final_fraction != 1:
            raise ValueError(f"shape 'constant' ends at its peak: final_fraction is {self.final_fraction:g}, must be 1")
        return self


class Recipe(Frozen):
    """One trial, from fresh weights to its last token.

    batch_size     sequences a step
    token_budget   tokens in all; a whole number of steps
    seed           of the fresh weights and of the data order
    precision      float32, or bfloat16 autocast over float32 weights
    """

    model: Model
    data: Data
    optimizer: Optimizer
    schedule: Schedule
    batch_size: PositiveInt
    token_budget: PositiveInt
    seed: Count
    precision: Precision

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.model.context

    @property
    def steps(self) -> int:
        return self.token_budget // self.tokens_per_step

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        problems = [*_rotary_problems(self.model), *_budget_problems(self)]
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Imported(Frozen):
    """A model that was trained elsewhere: what is known of it instead of a recipe.

    source            folder or hub id that it was read from; revision   of the hub, None for a folder
    config            its transformers configuration as JSON, tie_word_embeddings as the weights really are
    family            transformers' model_type
    context           longest sequence that it takes, in tokens
    vocab_size        entries of its tokenizer; vocab_rows   rows of its unembedding, the ones above are padding
    tokenizer         tokens.tokenizer_identity of its tokenizer.json; None: it came without one
    """

    source: str
    revision: str | None
    config: str
    family: str
    context: PositiveInt
    vocab_size: PositiveInt
    vocab_rows: PositiveInt
    tokenizer: str | None


def _rotary_problems(model: Model) -> list[str]:
    head_size = model.hidden_size // model.heads
    rotated = int(head_size * model.rotary_fraction)
    if rotated > 0 and rotated % 2 == 0:
        return []
    return [
        f"scale '{model.scale}' of '{model.family}' has heads of {head_size} dimensions, of which {rotated} would "
        f"rotate; rotary positions need a positive even number, so this scale can be counted but not trained"
    ]


def _budget_problems(recipe: Recipe) -> list[str]:
    problems = []
    step, budget = recipe.tokens_per_step, recipe.token_budget
    if budget % step:
        below = budget - budget % step
        problems.append(
            f"token_budget {budget:,} is not a whole number of steps of {recipe.batch_size} x {recipe.model.context} = "
            f"{step:,} tokens; nearest are {below:,} and {below + step:,}"
        )
    needed = recipe.schedule.warmup_tokens + (recipe.schedule.decay_tokens or 0)
    if needed > budget:
        problems.append(f"warm-up and decay take {needed:,} tokens, more than token_budget {budget:,}")
    return problems
