"""Geometry against algebra, 50-digit arithmetic, numpy's SVD, TSQR and pairs formed one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import strategies as st
from IsoScore.IsoScore import IsoScore
from numpy.typing import NDArray

from evaluators.config import GeometrySettings
from evaluators.geometry import (
    Matrix,
    average_cosine,
    geometry,
    rows_of,
    singular_values,
    spectrum,
    survey,
    unembedding_geometry,
)
from evaluators.metrics import METRICS, MetricValue
from trainers.errors import InputError

CASES = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "assets/geometry_cases.json").read_text())["cases"]
}
HEAVY = {"gaussian_50304x2048"}
TORCH_DTYPES = {"bfloat16": torch.bfloat16}

# Expectations that are about another function. A case with only these is checked to be listed here, nothing more.
NOT_A_METRIC_OF_OURS = {
    "angle": "an angle between two subspaces: tests/test_compare.py",
    "CKA": "a similarity of two matrices: tests/test_compare.py",
    "RankMe_eps1e-7": "RankMe is another definition, its epsilon is what the case warns of",
}


def measured(matrix: Matrix, settings: GeometrySettings | None = None) -> dict[str, float | None]:
    return {value.metric: value.value for value in geometry(matrix, settings or GeometrySettings(), {})}


def value_of(matrix: Matrix, metric: str) -> MetricValue:
    return next(value for value in geometry(matrix, GeometrySettings(), {}) if value.metric == metric)


def z_along(matrix: Matrix, direction: list[float]) -> float:
    """Z(c) for a unit vector, as the definition says it."""
    c = np.array(direction) / np.linalg.norm(direction)
    return float(np.exp(np.asarray(matrix) @ c).sum())


def effective_rank_by_svd(matrix: NDArray[np.float64]) -> float:
    s = np.linalg.svd(matrix, compute_uv=False)
    p = s[s > 0] / s.sum()
    return float(np.exp(-(p * np.log(p)).sum()))


NAMES = {
    "R": "effective_rank",
    "R_squared_variant": "effective_rank_squared",
    "participation_ratio": "participation_ratio",
    "stable_rank": "stable_rank",
    "top1_variance": "top1_variance_share",
    "numerical_rank": "numerical_rank",
    "mean_cosine_pairs": "average_cosine",
    "zero_rows": "zero_rows",
    "I_pm": "isotropy",
    "logI_pm": "log_isotropy",
    "R_centred": "effective_rank_centred",
    "R_shift_removed": "effective_rank_centred",
    "mean_cosine_centred": "average_cosine_centred",
    "mean_cosine_shift_removed": "average_cosine_centred",
}


def both_signs(matrix: Matrix, basis: list[list[float]]) -> float:
    z = [z_along(matrix, [sign * x for x in c]) for c in basis for sign in (1.0, -1.0)]
    return min(z) / max(z)


HADAMARD = [[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, -1.0, 1.0]]

# Expectations that are not one metric of the whole matrix: how our public functions give them.
DERIVED: dict[str, Callable[[Any], Any]] = {
    "isotropy_is_ambiguous": lambda m: value_of(m, "isotropy").convention["equal_singular_values"],
    "I_pm_standard_basis": lambda m: both_signs(m, np.eye(4).tolist()),
    "I_pm_hadamard_basis": lambda m: both_signs(m, HADAMARD),
    "I_by_sign_choice": lambda m: {
        f"{a}e1{b}e2": min(z) / max(z)
        for a in "+-"
        for b in "+-"
        for z in [[z_along(m, [float(a + "1"), 0.0]), z_along(m, [0.0, float(b + "1")])]]
    },
    "Z_standard": lambda m: z_along(m, [1.0, 0.0]),
    "Z_rotated_45deg": lambda m: z_along(m, [1.0, 1.0]),
    "I_within_either_basis": lambda m: both_signs(m, [[1.0, 1.0], [1.0, -1.0]]),
    "smallest_sigma": lambda m: singular_values(m)[-1],
    "largest_sigma": lambda m: singular_values(m)[0],
    "R_without_row": lambda m: measured(m[:-1])["effective_rank"],
    "R_without_last": lambda m: measured(m[:-1])["effective_rank"],
    "mean_cosine_without_last": lambda m: measured(m[:-1])["average_cosine"],
    "R_first4": lambda m: measured(m[:4])["effective_rank"],
    "mean_cosine_pairs_transposed": lambda m: measured(m.T)["average_cosine"],
}


def matrix_of(case: dict[str, Any]) -> Matrix:
    if "array" in case["input"]:
        return np.array(case["input"]["array"], dtype=case["dtype"])
    recipe = case["input"]["recipe"]
    names = {"np": np, "torch": torch, "seed": 0, **{k: recipe[k] for k in ("n", "eps") if k in recipe}}
    with np.errstate(over="ignore"):  # the case is the overflow
        matrix: Matrix = eval(recipe["code"], names)  # our own file
    return matrix


def measurable(case: dict[str, Any]) -> bool:
    return not set(case["expect"]) <= set(NOT_A_METRIC_OF_OURS)


def case_parameters() -> list[Any]:
    return [
        pytest.param(case, id=name, marks=[pytest.mark.soak, pytest.mark.timeout(600)] if name in HEAVY else [])
        for name, case in CASES.items()
        if measurable(case) and "error" not in case["expect"]
    ]


@pytest.mark.parametrize("case", case_parameters())
def test_every_expectation_of_a_case_is_met(case: dict[str, Any]) -> None:
    matrix = matrix_of(case)
    found = measured(matrix)
    for name, expected in case["expect"].items():
        if name in NOT_A_METRIC_OF_OURS:
            continue
        got = DERIVED[name](matrix) if name in DERIVED else found[NAMES[name]]
        if expected is None:
            assert got is None, name
        else:
            # a value that should be 0 is judged on the scale of 1
            assert got == pytest.approx(expected, rel=case["rel_tol"], abs=case["rel_tol"]), name


@pytest.mark.parametrize("case", [c for c in CASES.values() if "error" in c["expect"]], ids=lambda c: c["id"])
def test_rows_with_nan_or_inf_are_refused_by_number(case: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        geometry(matrix_of(case), GeometrySettings(), {})
    assert caught.value.headline.startswith(case["expect"]["error"])
    assert caught.value.problems == (f"rows {', '.join(map(str, case['expect']['bad_rows']))}",)


def test_cases_that_are_not_measured_are_the_listed_ones() -> None:
    assert {name for name, case in CASES.items() if not measurable(case)} == {"subspace_angle_small", "cka_rotation"}


def test_degenerate_basis_case_is_flagged_and_a_plain_spectrum_is_not() -> None:
    assert value_of(matrix_of(CASES["isotropy_degenerate_basis"]), "isotropy").convention["equal_singular_values"]
    assert not value_of(matrix_of(CASES["diag_3_4"]), "isotropy").convention["equal_singular_values"]


def test_one_sign_isotropy_takes_the_vector_whose_largest_entry_is_positive() -> None:
    case = CASES["isotropy_sign_lottery"]
    expected = case["expect"]["I_by_sign_choice"]["+e1+e2"]
    assert measured(matrix_of(case))["isotropy_one_sign"] == pytest.approx(expected, rel=1e-10)


def test_every_geometry_metric_is_measured_once() -> None:
    values = unembedding_geometry(np.random.default_rng(0).standard_normal((40, 6)), 37, GeometrySettings(), {})
    others = ("hidden_", "finetune_", "linear_cka", "largest_principal_angle")
    descriptive = [n for n, metric in METRICS.items() if metric.direction == "descriptive" and not n.startswith(others)]
    assert sorted(v.metric for v in values) == sorted(descriptive)


# ---- against independent computations --------------------------------------------------------------------------------

shapes = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**32 - 1), st.floats(0, 6))


def random_matrix(shape: tuple[int, int, int, float]) -> NDArray[np.float64]:
    """Gaussian rows whose columns fall off over up to 6 powers of ten."""
    rows, columns, seed, decades = shape
    gaussian = np.random.default_rng(seed).standard_normal((rows, columns))
    return gaussian * np.logspace(0, -decades, columns)


@hypothesis.given(shapes)
def test_singular_values_of_any_aspect_agree_with_those_of_numpy_scipy_and_torch(
    shape: tuple[int, int, int, float],
) -> None:
    matrix = random_matrix(shape)
    for expected in (
        np.linalg.svd(matrix, compute_uv=False),
        scipy.linalg.svdvals(matrix),
        torch.linalg.svdvals(torch.from_numpy(matrix)).numpy(),
    ):
        np.testing.assert_allclose(singular_values(matrix), expected, rtol=0, atol=1e-9 * expected[0])
        shares = expected[expected > 0] / expected.sum()
        rank = np.exp(-(shares * np.log(shares)).sum())
        assert measured(matrix)["effective_rank"] == pytest.approx(rank, rel=1e-9)


@hypothesis.given(shapes)
def test_centred_spectrum_agrees_with_numpy_svd_of_the_centred_matrix(shape: tuple[int, int, int, float]) -> None:
    matrix = random_matrix(shape) + 1000.0
    hypothesis.assume(len(matrix) > 1)
    expected = effective_rank_by_svd(matrix - matrix.mean(axis=0))
    assert measured(matrix)["effective_rank_centred"] == pytest.approx(expected, rel=1e-8)


@hypothesis.given(shapes, st.integers(-120, 120))
def test_rank_does_not_change_with_scale_rotation_or_order_of_rows(
    shape: tuple[int, int, int, float], power: int
) -> None:
    matrix = random_matrix(shape)
    rng = np.random.default_rng(shape[2])
    rotation = np.linalg.qr(rng.standard_normal((shape[1], shape[1])))[0]
    changed = (matrix @ rotation)[rng.permutation(len(matrix))] * 10.0**power
    before, after = measured(matrix), measured(changed)
    for name in ("effective_rank", "participation_ratio", "stable_rank", "average_cosine", "cosine_variance"):
        if before[name] is None:
            assert after[name] is None
        else:
            assert after[name] == pytest.approx(before[name], rel=1e-8, abs=1e-9), name


@hypothesis.given(shapes)
def test_isotropy_does_not_change_with_rotation_and_is_what_the_definition_says(
    shape: tuple[int, int, int, float],
) -> None:
    rows, columns, seed, _ = shape
    matrix = random_matrix((rows + columns, columns, seed, 0.5))
    directions = np.linalg.svd(matrix)[2]
    z = np.exp(matrix @ np.concatenate([directions, -directions]).T).sum(axis=0)
    assert measured(matrix)["isotropy"] == pytest.approx(z.min() / z.max(), rel=1e-6)
    rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((columns, columns)))[0]
    assert measured(matrix @ rotation)["isotropy"] == pytest.approx(z.min() / z.max(), rel=1e-6)


@hypothesis.given(st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_orthonormal_columns_use_every_direction(columns: int, more_rows: int, seed: int) -> None:
    gaussian = np.random.default_rng(seed).standard_normal((columns + more_rows, columns))
    values = measured(np.linalg.qr(gaussian)[0])
    for name in ("effective_rank", "effective_rank_squared", "participation_ratio", "stable_rank", "numerical_rank"):
        assert values[name] == pytest.approx(columns, rel=1e-12)
    assert values["singular_entropy"] == pytest.approx(0.0, abs=1e-12)
    assert values["effective_rank_share"] == pytest.approx(1.0, rel=1e-12)


@hypothesis.given(shapes)
def test_cosines_agree_with_pairs_formed_one_by_one(shape: tuple[int, int, int, float]) -> None:
    matrix = random_matrix(shape) + 0.3
    hypothesis.assume(len(matrix) > 1)
    matrix[0] = 0.0
    unit = matrix[1:] / np.linalg.norm(matrix[1:], axis=1)[:, None]
    pairs = [float(unit[i] @ unit[j]) for i in range(len(unit)) for j in range(i)]
    values = measured(matrix)
    assert values["zero_rows"] == 1
    if not pairs:
        assert values["average_cosine"] is None
        return
    assert values["average_cosine"] == pytest.approx(np.mean(pairs), abs=1e-12)
    assert values["cosine_variance"] == pytest.approx(np.var(pairs), abs=1e-12)


def tsqr_singular_values(matrix: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """QR of stacked triangles: an SVD that never forms a Gram matrix."""
    triangle = np.zeros((0, matrix.shape[1]))
    for start in range(0, len(matrix), block):
        triangle = np.linalg.qr(np.concatenate([triangle, matrix[start : start + block]]), mode="r")
    return np.linalg.svd(triangle, compute_uv=False)


@pytest.mark.parametrize(
    ("columns", "decades"), [(64, 0.3), (64, 2), (64, 8), (64, 12), (200, 4)], ids=lambda x: f"{x:g}"
)
def test_ill_conditioned_tall_matrix_agrees_with_tsqr(columns: int, decades: float) -> None:
    matrix = random_matrix((5000, columns, 7, decades))
    matrix = matrix @ np.linalg.qr(np.random.default_rng(8).standard_normal((columns, columns)))[0]
    expected = tsqr_singular_values(matrix, 777)
    np.testing.assert_allclose(singular_values(matrix), expected, rtol=0, atol=1e-12 * expected[0])
    p = expected / expected.sum()
    assert measured(matrix)["effective_rank"] == pytest.approx(math.exp(-float(p @ np.log(p))), rel=1e-10)
    if decades <= 8:
        assert measured(matrix)["condition_number"] == pytest.approx(expected[0] / expected[-1], rel=1e-6)


def isoscore_step_by_step(points: NDArray[np.float64]) -> float:
    """Algorithm 1 of Rudman et al. 2022, step by step; points (samples, dimensions)."""
    n = points.shape[1]
    variances = np.linalg.eigvalsh(np.cov(points.T))
    normalised = math.sqrt(n) * variances / np.linalg.norm(variances)
    defect = np.linalg.norm(normalised - 1.0) / math.sqrt(2.0 * (n - math.sqrt(n)))
    share = (n - defect**2 * (n - math.sqrt(n))) ** 2 / n**2
    return (n * share - 1.0) / (n - 1.0)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("shape", [(400, 12), (2000, 64), (30, 20)])
def test_isoscore_is_that_of_the_authors_package(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(shape[1])
    points = rng.normal(size=shape) * np.linspace(0.1, 3, shape[1]) + rng.normal(size=shape[1])
    theirs = float(IsoScore(torch.from_numpy(points)))
    # the package counts in float32 from its constants on
    assert measured(points)["isoscore"] == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_isoscore_is_what_the_steps_of_the_paper_give() -> None:
    points = random_matrix((300, 12, 3, 1.0)) + 5.0
    assert measured(points)["isoscore"] == pytest.approx(isoscore_step_by_step(points), rel=1e-10)


def test_spectral_exponent_of_an_exact_power_law_is_its_exponent() -> None:
    ranks = np.arange(1, 51)
    value = value_of(np.diag(ranks**-0.7), "spectral_exponent")
    assert value.value == pytest.approx(1.4, rel=1e-9)
    assert (value.convention["first_rank"], value.convention["last_rank"]) == (5, 25)


# ---- hard inputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1.0, 1e25], ids=lambda x: f"{x:g}")
def test_fp32_of_any_scale_gives_the_same_rank_and_cosine(scale: float) -> None:
    # powers of two keep every entry exact, also among the subnormal numbers
    scale = math.ldexp(1.0, round(math.log2(scale)))
    whole = np.random.default_rng(5).integers(-64, 64, (300, 8)).astype(np.float64)
    values, expected = measured((whole * scale).astype(np.float32)), measured(whole)
    for name in ("effective_rank", "average_cosine", "isoscore", "condition_number"):
        assert values[name] == pytest.approx(expected[name], rel=1e-12)
    assert values["row_norm_max"] == pytest.approx(np.linalg.norm(whole, axis=1).max() * scale, rel=1e-12)


@pytest.mark.parametrize("entry", [5e-324, 1e-200, 1e300], ids=lambda x: f"{x:g}")
def test_float64_at_the_ends_of_its_range_gives_the_same_rank(entry: float) -> None:
    assert measured(np.diag([entry, entry]))["effective_rank"] == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_torch_tensor_gives_what_its_float64_copy_gives(dtype: torch.dtype) -> None:
    tensor = torch.randn(500, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert measured(tensor) == measured(tensor.to(torch.float64).numpy())


def test_measuring_leaves_the_matrix_as_it_was() -> None:
    matrix = np.random.default_rng(2).standard_normal((50, 5))
    tensor = torch.from_numpy(matrix.copy())
    measured(matrix)
    measured(tensor)
    np.testing.assert_array_equal(tensor.numpy(), matrix)


def test_blocks_of_rows_give_what_one_block_gives() -> None:
    matrix = np.random.default_rng(4).standard_normal((9000, 40)) + 0.5  # three blocks
    values = measured(matrix)
    assert values["effective_rank"] == pytest.approx(effective_rank_by_svd(matrix), rel=1e-12)
    z = np.exp(matrix @ np.concatenate([(v := np.linalg.svd(matrix, full_matrices=False)[2]), -v]).T).sum(axis=0)
    assert values["isotropy"] == pytest.approx(z.min() / z.max(), rel=1e-9)


def test_long_rows_and_short_rows_take_the_same_isotropy() -> None:
    # 299 and 301: either side of where exp is taken directly
    short, long = (measured(np.array([[length, 0.0], [0.0, 1.0]])) for length in (299.0, 301.0))
    assert short["log_isotropy"] == pytest.approx(-299.0, rel=1e-12)
    assert long["log_isotropy"] == pytest.approx(-301.0, rel=1e-12)


def test_equal_rows_have_no_centred_geometry_and_say_why() -> None:
    rows = np.tile(np.array([[0.3, -0.4, 1.2]]), (1000, 1))
    for metric in ("effective_rank_centred", "isoscore"):
        value = value_of(rows, metric)
        assert value.value is None
        assert value.convention["undefined"] == "all rows are equal"
    assert value_of(rows, "average_cosine_centred").convention["undefined"] == "fewer than two rows have a direction"
    assert measured(rows)["isotropy_centred"] == pytest.approx(1.0)


def test_zero_matrix_has_no_rank_metric_and_says_why() -> None:
    for value in geometry(np.zeros((3, 2)), GeometrySettings(), {}):
        assert value.value is not None or value.convention["undefined"]
    assert value_of(np.zeros((3, 2)), "effective_rank").convention["undefined"] == "the matrix is zero"


def test_condition_number_below_full_rank_is_undefined() -> None:
    value = value_of(np.array([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]]), "condition_number")
    assert (value.value, value.convention["undefined"]) == (None, "the numerical rank is 1 of 2")


@pytest.mark.parametrize(
    ("matrix", "says"),
    [
        (np.zeros(3), "shape (3,)"),
        (np.zeros((0, 3)), "shape (0, 3)"),
        (np.zeros((2, 2), dtype=np.int64), "int64"),
        (torch.zeros(2, 2, dtype=torch.int8), "int8"),
    ],
    ids=["vector", "empty", "integers", "quantised"],
)
def test_what_is_no_float_matrix_is_refused(matrix: Any, says: str) -> None:
    with pytest.raises(InputError, match=says.replace("(", r"\(").replace(")", r"\)")):
        geometry(matrix, GeometrySettings(), {})


# ---- padding rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "zero", "random"])
def test_padding_rows_are_left_out_of_the_main_values_and_kept_in_the_padded_ones(padding: str) -> None:
    rng = np.random.default_rng(9)
    tokens = rng.standard_normal((300, 12)) + 0.2
    more = {"none": np.zeros((0, 12)), "zero": np.zeros((20, 12)), "random": 3 * rng.standard_normal((20, 12))}[padding]
    weight = np.concatenate([tokens, more])
    values = {v.metric: v.value for v in unembedding_geometry(weight, 300, GeometrySettings(), {})}
    alone, everything = measured(tokens), measured(weight)
    for name, value in alone.items():
        assert values[name] == pytest.approx(value, rel=1e-12), name
    for name in ("effective_rank", "isotropy", "average_cosine"):
        assert values[f"{name}_padded"] == pytest.approx(everything[name], rel=1e-12), name


def test_public_steps_can_be_used_one_by_one() -> None:
    rows = rows_of(np.array([[3.0, 0.0], [0.0, 4.0]]))
    first = survey(rows)
    found = spectrum(rows, first.gram)
    np.testing.assert_allclose(found.values * rows.unit, [4.0, 3.0])
    np.testing.assert_allclose(np.abs(found.vectors), [[0.0, 1.0], [1.0, 0.0]])
    assert average_cosine(first.unit) == 0.0
