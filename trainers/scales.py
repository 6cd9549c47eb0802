"""The published model scales and their rules, and what a model counts: parameters and FLOPs.

sweep file -> spec -> [scales] -> recipe
Sources: OLMo model ladder (allenai/OLMo scripts/ladder.py, allenai/DataDecide README); Pythia (EleutherAI/pythia
models/*.yml). `tiny-*` are our own, for laptops and tests. N below is the ladder's count: without the input embedding,
with the unembedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainers.config import Attention, Family, Model
from trainers.errors import InputError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Shape of one published model; batch_size in sequences and peak_lr where the source states them."""

    hidden_size: int
    layers: int
    heads: int
    batch_size: int | None = None
    peak_lr: float | None = None


def _olmo(d: int, layers: int, heads: int, batch_size: int | None, peak_lr: float | None) -> Scale:
    return Scale(hidden_size=d, layers=layers, heads=heads, batch_size=batch_size, peak_lr=peak_lr)


_TINY = {
    f"tiny-{d}": Scale(hidden_size=d, layers=layers, heads=heads)
    for d, layers, heads in ((32, 2, 2), (64, 2, 4), (96, 2, 4))
}

SCALES: dict[Family, dict[str, Scale]] = {
    "olmo": {
        "4M": _olmo(64, 8, 8, 32, 1.4e-2),
        "6M": _olmo(96, 8, 8, 32, 1.2e-2),
        "8M": _olmo(128, 8, 8, 32, 1.1e-2),
        "10M": _olmo(144, 8, 8, 32, 1.0e-2),
        "12M": _olmo(168, 8, 8, None, None),  # heads of 21 dimensions: counted, but no rotary model can be built
        "14M": _olmo(192, 8, 8, 32, 9.2e-3),
        "16M": _olmo(208, 8, 8, 32, 8.9e-3),
        "20M": _olmo(192, 16, 8, 64, 8.4e-3),
        "60M": _olmo(384, 16, 12, 96, 5.8e-3),
        "90M": _olmo(528, 16, 12, 160, 4.9e-3),
        "150M": _olmo(768, 12, 12, 192, 4.2e-3),
        **_TINY,
    },
    "pythia": {
        "14M": Scale(hidden_size=128, layers=6, heads=4, batch_size=1024, peak_lr=1e-3),
        "31M": Scale(hidden_size=256, layers=6, heads=8, batch_size=1024, peak_lr=1e-3),
        "70M": Scale(hidden_size=512, layers=6, heads=8, batch_size=1024, peak_lr=1e-3),
        "160M": Scale(hidden_size=768, layers=12, heads=12, batch_size=1024, peak_lr=6e-4),
        "410M": Scale(hidden_size=1024, layers=24, heads=16, batch_size=1024, peak_lr=3e-4),
        **_TINY,
    },
}

_ROTARY_FRACTION = {"olmo": 1.0, "pythia": 0.25}
_NORM_EPS = {"olmo": 1e-6, "pythia": 1e-5}
_PADDING_MULTIPLE = 128


def scale_of(family: Family, name: str) -> Scale:
    """Shape of a published or tiny model; InputError with the nearest name if the family has no such scale."""
    scales = SCALES[family]
    if name not in scales:
        raise InputError(f"family '{family}' has no scale '{name}'{nearest(name, scales)}")
    return scales[name]


def model_of(
    family: Family, name: str, *, context: int, vocab_size: int, attention: Attention, tied: bool, init_std: float
) -> Model:
    """The filled model of a scale; vocabulary rows padded to a multiple of 128 (50,280 and 50,277 -> 50,304)."""
    scale = scale_of(family, name)
    return Model(
        family=family,
        scale=name,
        hidden_size=scale.hidden_size,
        mlp_size=4 * scale.hidden_size,
        layers=scale.layers,
        heads=scale.heads,
        context=context,
        vocab_size=vocab_size,
        vocab_rows=-(-vocab_size // _PADDING_MULTIPLE) * _PADDING_MULTIPLE,
        attention=attention,
        tied=tied,
        rotary_theta=10_000.0,
        rotary_fraction=_ROTARY_FRACTION[family],
        norm_eps=_NORM_EPS[family],
        init_std=init_std,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """all; without the input embedding (the ladder's N; equal to all when tied); body, without both embeddings."""

    all: int
    no_input_embedding: int
    body: int


def count_parameters(model: Model) -> ParameterCounts:
    """Parameters of a model, padding rows included, by arithmetic alone.

    source   olmo: L (16 D^2 + 2 D) + D;  pythia: L (12 D^2 + 13 D) + 2 D;  each embedding: V D
    """
    D, L, mlp = model.hidden_size, model.layers, model.mlp_size
    if model.family == "olmo":
        block = 4 * D * D + 3 * D * mlp + 2 * D
        final_norm = D
    else:
        block = 4 * D * D + 2 * D * mlp + (4 * D + mlp + D) + 4 * D
        final_norm = 2 * D
    body = L * block + final_norm
    embedding = model.vocab_rows * D
    if model.tied:
        return ParameterCounts(all=body + embedding, no_input_embedding=body + embedding, body=body)
    return ParameterCounts(all=body + 2 * embedding, no_input_embedding=body + embedding, body=body)


def flops_per_token(model: Model) -> float:
    """Floating-point operations to train on one token, forward and backward, the head counted.

    source   6 N with N the matrix parameters that a token meets (blocks and head), plus 12 L D T for attention scores,
             T the full context: PaLM's convention (Chowdhery et al. 2022, appendix B)
    """
    D, L = model.hidden_size, model.layers
    matrices = (3 if model.family == "olmo" else 2) * D * model.mlp_size + 4 * D * D
    return 6.0 * (L * matrices + model.vocab_rows * D) + 12.0 * L * D * model.context


LADDER_REFERENCE_N = 108_000_000


def ladder_peak_lr(parameters: int) -> float:
    """Peak learning rate of the OLMo ladder for N parameters (no input embedding)."""
    return 0.0047 * math.pow(parameters / LADDER_REFERENCE_N, -1 / 3)


def ladder_batch_size(parameters: int) -> int:
    """Batch of the OLMo ladder in sequences of 2,048 tokens: a multiple of 32, at least 32."""
    return max(32, 32 * round(160 * math.pow(parameters / LADDER_REFERENCE_N, 2 / 3) / 32))


def ladder_warmup_tokens(parameters: int) -> int:
    """Warm-up of the OLMo ladder: N / (batch * 2048) steps, which is N tokens."""
    return parameters
