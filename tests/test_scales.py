"""Published scales: counts against the sources' own numbers, and against the models that are built."""

from __future__ import annotations

from typing import Any

import pytest

from trainers.config import Model
from trainers.errors import InputError
from trainers.model import build_model
from trainers.scales import (
    SCALES,
    count_parameters,
    flops_per_token,
    ladder_batch_size,
    ladder_peak_lr,
    ladder_warmup_tokens,
    model_of,
    scale_of,
)

# allenai/OLMo scripts/ladder.py: without the input embedding, with the unembedding and its padding rows
LADDER_N = {
    "4M": 3_744_832,
    "6M": 6_010_464,
    "8M": 8_538_240,
    "10M": 9_900_432,
    "12M": 12_066_600,
    "14M": 14_380_224,
    "16M": 16_004_560,
    "20M": 19_101_888,
    "60M": 57_078_144,
    "90M": 97_946_640,
}
PYTHIA_MILLIONS = {"14M": "14.1", "31M": "30.5", "70M": "70.4", "160M": "162", "410M": "405"}


def model(family: Any, name: str, *, vocab_size: int, tied: bool = False, attention: Any = "sequential") -> Model:
    return model_of(family, name, context=64, vocab_size=vocab_size, attention=attention, tied=tied, init_std=0.02)


@pytest.mark.parametrize("name", LADDER_N)
def test_ladder_scales_have_the_published_parameter_counts_exactly(name: str) -> None:
    counts = count_parameters(model("olmo", name, vocab_size=50_280))
    assert counts.no_input_embedding == LADDER_N[name]


def test_the_largest_ladder_scale_has_the_published_count_to_four_digits() -> None:
    assert f"{count_parameters(model('olmo', '150M', vocab_size=50_280)).no_input_embedding / 1e6:.1f}" == "151.9"


@pytest.mark.parametrize("name", PYTHIA_MILLIONS)
def test_pythia_scales_have_the_published_counts_to_three_digits(name: str) -> None:
    millions = count_parameters(model("pythia", name, vocab_size=50_277)).all / 1e6
    assert f"{millions:.3g}" == PYTHIA_MILLIONS[name]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "name"), [("olmo", "tiny-64"), ("olmo", "4M"), ("pythia", "tiny-64"), ("pythia", "14M")]
)
def test_counted_parameters_are_those_of_the_built_model(family: str, name: str, tied: bool) -> None:
    described = model(family, name, vocab_size=1000, tied=tied)
    network, counts = build_model(described, seed=0), count_parameters(described)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    embeddings = {name: size for name, size in sizes.items() if ".layers." not in name and "norm" not in name}
    assert counts.all == sum(sizes.values())
    assert counts.body == sum(sizes.values()) - sum(embeddings.values())
    assert len(embeddings) == (1 if tied else 2)


def test_vocabulary_rows_are_padded_to_a_multiple_of_128() -> None:
    assert model("olmo", "4M", vocab_size=50_280).vocab_rows == 50_304
    assert model("pythia", "14M", vocab_size=50_277).vocab_rows == 50_304
    assert model("olmo", "4M", vocab_size=2048).vocab_rows == 2048


def test_flops_of_a_token_are_those_worked_by_hand() -> None:
    # one layer's matrices 4 D^2 + 3 D 4D = 16 D^2; two layers, head of 1,024 rows; attention 12 L D T
    assert (
        flops_per_token(model("olmo", "tiny-32", vocab_size=1000))
        == 6 * (2 * 16 * 32**2 + 1024 * 32) + 12 * 2 * 32 * 64
    )


def test_ladder_rules_at_their_reference_give_their_constants() -> None:
    assert ladder_peak_lr(108_000_000) == pytest.approx(0.0047)
    assert ladder_peak_lr(LADDER_N["4M"]) == pytest.approx(1.4e-2, rel=0.03)
    assert ladder_batch_size(108_000_000) == 160
    assert [ladder_batch_size(LADDER_N[name]) for name in ("4M", "20M", "60M", "90M")] == [32, 64, 96, 160]
    assert ladder_warmup_tokens(LADDER_N["4M"]) == LADDER_N["4M"]


def test_an_unknown_scale_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match="no scale 'tiny64'; nearest is 'tiny-64'"):
        scale_of("olmo", "tiny64")


def test_every_scale_divides_into_its_heads() -> None:
    for scales in SCALES.values():
        assert all(scale.hidden_size % scale.heads == 0 for scale in scales.values())
