"""Fill the holes of a base recipe from a preset; every filled value says where it comes from.

spec -> [presets: Filled] -> plan
in    Base (one cell's fields, validated) and the facts of its corpus
out   Recipe, and field -> source for what the preset filled
not   files, clocks: the facts of a corpus are passed in
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from orchestrator.spec import Base, field_value
from trainers.config import Data, Model, Optimizer, Recipe, Schedule
from trainers.errors import InputError
from trainers.scales import (
    count_parameters,
    ladder_batch_size,
    ladder_peak_lr,
    ladder_warmup_tokens,
    model_of,
    scale_of,
)

LADDER = "OLMo model ladder (allenai/OLMo scripts/ladder.py)"
PYTHIA = "Pythia (EleutherAI/pythia models/*.yml)"
OURS = "geosweep's own, for small models on small text"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What a plan needs to know of a prepared corpus.

    digest            None: assumed, since it is not prepared
    tokens            for training; heldout_domains: evaluation sets that it is a suite of
    """

    name: str
    digest: str | None
    vocab_size: int
    tokens: int | None
    heldout_domains: int = 0


def assumed_corpus(name: str) -> CorpusFacts:
    """Stands in for a corpus that is not prepared: the vocabulary of the OLMo tokenizer, any number of tokens."""
    return CorpusFacts(name=name, digest=None, vocab_size=50_280, tokens=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A cell's recipe, and the source of each field that its preset filled."""

    recipe: Recipe
    sources: Mapping[str, str]


_FIXED: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "tiny": {
        "family": ("olmo", OURS),
        "scale": ("tiny-64", OURS),
        "context": (128, OURS),
        "batch_size": (16, OURS),
        "weight_decay": (0.1, OURS),
        "schedule.final_fraction": (0.1, OURS),
        "precision": ("float32", OURS),
        "decay_all": (True, LADDER),
    },
    "ladder": {
        "family": ("olmo", LADDER),
        "context": (2048, LADDER),
        "weight_decay": (0.05, LADDER),
        "schedule.final_fraction": (0.01, LADDER),
        "precision": ("bfloat16", LADDER),
        "decay_all": (True, LADDER),
    },
    "pythia": {
        "family": ("pythia", PYTHIA),
        "context": (2048, PYTHIA),
        "batch_size": (1024, PYTHIA),
        "weight_decay": (0.1, PYTHIA),
        "schedule.final_fraction": (0.1, PYTHIA),
        "precision": ("bfloat16", OURS + "; the published runs used float16"),
        "decay_all": (False, PYTHIA),
    },
}

_SHARED: Mapping[str, tuple[Any, str]] = {
    "corpus": ("builtin", "text of the Python installation"),
    "schedule.shape": ("cosine", "OLMo and Pythia alike"),
    "beta1": (0.9, "OLMo and Pythia alike"),
    "beta2": (0.95, "OLMo and Pythia alike"),
    "eps": (1e-8, "OLMo and Pythia alike"),
    "clip": (1.0, "OLMo and Pythia alike"),
    "init_std": (0.02, "OLMo and Pythia alike"),
    "tied": (False, "OLMo and Pythia alike"),
    "seed": (0, OURS),
    "repeat": (False, OURS),
}


class _Draft:
    """A cell being filled: `take` gives a field's own value, else the preset's, and notes the source."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self.sources: dict[str, str] = {}

    def take(self, field: str, rule: Callable[[], tuple[Any, str]] | None = None) -> Any:
        value = field_value(self._base, field)
        if value is not None:
            return value
        preset = self._base.preset
        if rule is not None:
            value, source = rule()
        elif (found := {**_SHARED, **_FIXED[preset]}.get(field)) is not None:
            value, source = found
        else:
            raise InputError(f"base.{field}: is missing; preset '{preset}' has no value for it")
        self.sources[field] = source
        return value


def fill(base: Base, corpora: Mapping[str, CorpusFacts]) -> Filled:
    """The recipe of one cell.

    corpora   facts of the prepared corpora by name; an unprepared one is assumed (assumed_corpus)
    raises    InputError with one problem a line, without file or cell: the planner adds them
    """
    draft = _Draft(base)
    facts_name = draft.take("corpus")
    facts = corpora.get(facts_name) or assumed_corpus(facts_name)
    try:
        recipe = _recipe(draft, base, facts)
    except ValidationError as error:
        problems = [str(item["ctx"]["error"]) if "ctx" in item else item["msg"] for item in error.errors()]
        raise InputError("; ".join(problems)) from error
    if facts.tokens is not None and recipe.token_budget > facts.tokens and not recipe.data.repeat:
        raise InputError(
            f"token_budget {recipe.token_budget:,} is more than the {facts.tokens:,} training tokens of corpus "
            f"'{facts.name}'; set repeat: true to pass over it again, or prepare a larger corpus"
        )
    return Filled(recipe=recipe, sources=draft.sources)


def _recipe(draft: _Draft, base: Base, facts: CorpusFacts) -> Recipe:
    model = _model(draft, facts)
    parameters = count_parameters(model).no_input_embedding
    batch_size = draft.take("batch_size", _batch_rule(model, parameters) if base.preset == "ladder" else None)
    budget = draft.take("token_budget")
    return Recipe(
        model=model,
        data=Data(corpus=facts.name, digest=facts.digest or "not-prepared", repeat=draft.take("repeat")),
        optimizer=Optimizer(
            beta1=draft.take("beta1"),
            beta2=draft.take("beta2"),
            eps=draft.take("eps"),
            weight_decay=draft.take("weight_decay"),
            decay_all=draft.take("decay_all"),
            clip=draft.take("clip"),
        ),
        schedule=_schedule(draft, base, model, parameters, budget),
        batch_size=batch_size,
        token_budget=budget,
        seed=draft.take("seed"),
        precision=draft.take("precision"),
    )


def _model(draft: _Draft, facts: CorpusFacts) -> Model:
    family = draft.take("family")
    layout = "parallel" if family == "pythia" else "sequential"
    return model_of(
        family,
        draft.take("scale"),
        context=draft.take("context"),
        vocab_size=facts.vocab_size,
        attention=draft.take("attention", lambda: (layout, f"what family '{family}' is published with")),
        tied=draft.take("tied"),
        init_std=draft.take("init_std"),
    )


def _batch_rule(model: Model, parameters: int) -> Callable[[], tuple[int, str]]:
    published = scale_of(model.family, model.scale).batch_size
    if published is not None:
        return lambda: (published, LADDER)
    return lambda: (ladder_batch_size(parameters), LADDER + ", its rule 160 (N / 108e6)^(2/3)")


def _schedule(draft: _Draft, base: Base, model: Model, parameters: int, budget: int) -> Schedule:
    shape = draft.take("schedule.shape")
    own_final = base.schedule.final_fraction
    final = 1.0 if shape == "constant" and own_final is None else draft.take("schedule.final_fraction")
    return Schedule(
        shape=shape,
        peak_lr=_peak_lr(draft, base, model, parameters),
        warmup_tokens=draft.take("schedule.warmup_tokens", _warmup_rule(base, parameters, budget)),
        decay_tokens=_decay_tokens(base, budget),
        final_fraction=final,
    )


def _decay_tokens(base: Base, budget: int) -> int | None:
    tokens, fraction = base.schedule.decay_tokens, base.schedule.decay_fraction
    if tokens is not None and fraction is not None:
        raise InputError("schedule.decay_tokens and schedule.decay_fraction are both set; keep one")
    return tokens if fraction is None else round(fraction * budget)


def _warmup_rule(base: Base, parameters: int, budget: int) -> Callable[[], tuple[int, str]]:
    match base.preset:
        case "ladder":
            return lambda: (ladder_warmup_tokens(parameters), LADDER + ": N tokens")
        case "pythia":
            return lambda: (budget // 100, PYTHIA + ": 1 % of the budget")
        case "tiny":
            return lambda: (budget // 20, OURS + ": 5 % of the budget")


_TINY_PEAK_LR = (
    3e-3  # the best of 3e-3, 5e-3, 1e-2 and 2e-2 at tiny-64 and tiny-96, 262,144 tokens of the built-in corpus
)


def _peak_lr(draft: _Draft, base: Base, model: Model, parameters: int) -> float:
    if base.learning_rate is not None and base.learning_rate_multiplier is not None:
        raise InputError("learning_rate and learning_rate_multiplier are both set; keep one")
    if base.learning_rate is not None:
        return base.learning_rate
    multiplier = base.learning_rate_multiplier or 1.0
    published = scale_of(model.family, model.scale).peak_lr
    if base.preset == "tiny":
        rule, source = _TINY_PEAK_LR, OURS
    elif base.preset == "pythia" and published is not None and model.family == "pythia":
        rule, source = published, PYTHIA
    else:
        rule, source = ladder_peak_lr(parameters), LADDER + ", its rule 0.0047 (N / 108e6)^(-1/3)"
    draft.sources["learning_rate"] = source if multiplier == 1 else f"{multiplier:g} x {rule:.3g}: {source}"
    return multiplier * rule
