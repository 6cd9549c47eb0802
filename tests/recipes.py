"""Recipes for tests: as small as they can be, every field spelled out once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainers.config import Data, Model, Optimizer, Recipe, Schedule
from trainers.scales import model_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tiny_recipe(
    *,
    family: Any = "olmo",
    scale: str = "tiny-32",
    context: int = 32,
    vocab_size: int = 500,
    tied: bool = False,
    batch_size: int = 8,
    token_budget: int = 8192,
    peak_lr: float = 1e-2,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    shape: Any = "cosine",
    warmup_tokens: int = 1024,
    decay_tokens: int | None = None,
    final_fraction: float = 0.1,
    seed: int = 0,
    repeat: bool = False,
    digest: str = "none",
) -> Recipe:
    """olmo tiny-32 on sequences of 32 tokens: 256 tokens a step, 32 steps."""
    return Recipe(
        model=model_of(
            family,
            scale,
            context=context,
            vocab_size=vocab_size,
            attention="parallel" if family == "pythia" else "sequential",
            tied=tied,
            init_std=0.02,
        ),
        data=Data(corpus="test", digest=digest, repeat=repeat),
        optimizer=Optimizer(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=weight_decay, decay_all=True, clip=clip),
        schedule=Schedule(
            shape=shape,
            peak_lr=peak_lr,
            warmup_tokens=warmup_tokens,
            decay_tokens=decay_tokens,
            final_fraction=final_fraction,
        ),
        batch_size=batch_size,
        token_budget=token_budget,
        seed=seed,
        precision="float32",
    )


def hugging_face_model(model: Model, seed: int) -> PreTrainedModel:
    """The class of transformers with the fresh weights of a trial."""
    from trainers.hugging_face import empty_hugging_face_model
    from trainers.model import build_model

    network = empty_hugging_face_model(model)
    network.load_state_dict(build_model(model, seed).state_dict())
    return network
