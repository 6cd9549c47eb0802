"""Two unembeddings against each other: the cases of the study, invariances, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_checkpoint import write

from evaluators.__main__ import main
from evaluators.compare import largest_principal_angle, linear_cka, unembedding_similarity
from trainers.errors import InputError

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "assets/geometry_cases.json").read_text())["cases"]
}


def inputs(name: str) -> dict[str, Any]:
    names: dict[str, Any] = {"np": np}
    exec(CASES[name]["input"]["recipe"]["code"], names)  # our own file
    return names


def test_a_tiny_angle_is_not_lost_to_the_arc_cosine() -> None:
    case, given = CASES["subspace_angle_small"], inputs("subspace_angle_small")
    found = largest_principal_angle(given["A"], given["B"])
    assert found == pytest.approx(case["expect"]["angle"], rel=case["rel_tol"])


def test_rotated_scaled_and_shifted_rows_are_the_same_to_cka() -> None:
    case, given = CASES["cka_rotation"], inputs("cka_rotation")
    first, rotation = given["W"], given["Q"]
    shift = np.arange(5.0)
    for second in (7 * first @ rotation, first + shift):
        assert linear_cka(first, second) == pytest.approx(case["expect"]["CKA"], rel=case["rel_tol"])


def test_cka_of_kernels_by_their_definition() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.standard_normal((30, 4)), rng.standard_normal((30, 7))
    centring = np.eye(30) - 1 / 30
    one, two = (centring @ matrix @ matrix.T @ centring for matrix in (first, second))
    expected = np.trace(one @ two) / math.sqrt(np.trace(one @ one) * np.trace(two @ two))
    assert linear_cka(first, second) == pytest.approx(expected, rel=1e-12)


def test_equal_rows_have_no_cka() -> None:
    with pytest.raises(InputError, match="all the same"):
        linear_cka(np.ones((5, 2)), np.eye(5))


def test_two_seeds_are_compared_and_a_checkpoint_is_like_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        write(tmp_path / str(seed), seed=seed)
    cka, angle = unembedding_similarity(tmp_path / "0", tmp_path / "0")
    assert (cka.value, angle.value) == (pytest.approx(1), pytest.approx(0, abs=1e-6))
    arguments = [str(tmp_path / "0"), "--evaluator", "geometry", "--against", str(tmp_path / "1"), "--json"]
    assert main(arguments) == 0
    found = {value["metric"]: value["value"] for value in json.loads(capsys.readouterr().out)}
    assert 0 < found["linear_cka"] < 0.3
    assert found["largest_principal_angle"] > 1


def test_vocabularies_of_two_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "first")
    write(tmp_path / "second", vocab_size=300)
    with pytest.raises(InputError, match="its vocabulary has 300 entries"):
        unembedding_similarity(tmp_path / "first", tmp_path / "second")
