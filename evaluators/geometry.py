"""The shape of a matrix: its spectrum, how evenly its rows point, how alike they are.

checkpoint -> unembedding W -> [geometry] -> metric values
in    a matrix of any float dtype, (V, D): rows of W (tokens) or hidden states
out   one MetricValue per metric of METRICS that a matrix has
not   a checkpoint or a model: evaluate.py reads the tensor

How: float64 throughout, in blocks of rows, so memory stays near the matrix's own. The entries are first scaled by a
power of two, which is exact, so no square underflows or overflows. One pass gives the mean row, the norms, the cosines
and the Gram matrix; its eigenvectors are the right singular vectors. A Gram matrix squares the condition number, so
directions below 1e-3 of the largest are projected out and done again by themselves ("deflation") until none is left.
A second pass projects the rows on the directions for the isotropy.

Letters: V rows, D columns, R = min(V, D) singular values, K directions (columns of a basis), N rows of one block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from evaluators.config import MatrixSettings
from evaluators.metrics import MetricValue, Plain, metric_value
from trainers.errors import InputError

Floats = NDArray[np.float64]
Matrix = NDArray[np.floating] | torch.Tensor

_EPS = 2.0**-52
_BLOCK_ENTRIES = 2**17  # 1 MB of float64: a block and its projections stay in the processor's cache
_DEFLATE_BELOW = 1e-3  # of the largest singular value: there the Gram matrix has lost 6 of its 16 digits
_AMBIGUOUS_GAP = 1e-9  # relative gap below which two singular vectors are not told apart
_SAFE_EXPONENT = 300.0  # |<w, c>| up to here: exp and its reciprocal, and sums of them, are far from overflow
_SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A finite matrix, read as float64 blocks of rows.

    exponent   a block holds the entries times 2^-exponent: the largest is between 1/2 and 1 (see rows_of)
    shift      (D,) subtracted from every scaled row; None for the raw matrix
    """

    matrix: Matrix
    exponent: int
    shift: Floats | None = None

    @property
    def count(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def columns(self) -> int:
        return int(self.matrix.shape[1])

    @property
    def unit(self) -> float:
        """Length in the matrix's own scale of 1 in the blocks."""
        return math.ldexp(1.0, self.exponent)

    def blocks(self) -> Iterator[Floats]:
        step = max(64, _BLOCK_ENTRIES // self.columns)
        for start in range(0, self.count, step):
            block_ND = _float64(self.matrix[start : start + step])
            block_ND *= math.ldexp(1.0, -self.exponent)
            if self.shift is not None:
                block_ND -= self.shift
            yield block_ND

    def mean(self) -> Floats:
        total_D = np.zeros(self.columns)
        for block_ND in self.blocks():
            total_D += block_ND.sum(axis=0)
        return total_D / self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """Singular values in the scale of Rows' blocks, largest first, and the right singular vectors.

    values       (R,);  vectors  (D, D), column k belongs to value k; columns from R on span the null space
    tolerance    below it a value is rounding: max(V, D) * 2^-52 * the largest value of the raw matrix
    """

    values: Floats
    vectors: Floats
    tolerance: float

    @property
    def rank(self) -> int:
        """The numerical rank."""
        return int(np.count_nonzero(self.values > self.tolerance))

    @property
    def has_equal_values(self) -> bool:
        """Whether two singular vectors are not told apart by their values: then any rotation of them is as right."""
        real = self.values[: self.rank]
        return bool(np.any(real[:-1] - real[1:] <= _AMBIGUOUS_GAP * real[:-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Isotropy:
    """ln of min Z / max Z over both signs of every direction, and over the fixed sign alone."""

    log_both_signs: float
    log_one_sign: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRows:
    """Sums over the rows that have a direction, each scaled to length 1: all pairs' cosines follow from them.

    count   how many such rows;  sum  (D,) their sum;  gram  (D, D) sum of u u', None where only the mean is wanted
    """

    count: int
    sum: Floats
    gram: Floats | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What one pass over the rows gives, in the scale of the blocks: norms (V,), mean (D,), Gram matrices (D, D)."""

    norms: Floats
    mean: Floats
    gram: Floats
    gram_centred: Floats
    unit: UnitRows
    unit_centred: UnitRows

    @property
    def longest_centred(self) -> float:
        """Upper bound of the norms of the centred rows."""
        return float(self.norms.max() + np.linalg.norm(self.mean))


# ---- reading -------------------------------------------------------------------------------------------------------


def rows_of(matrix_VD: Matrix) -> Rows:
    """The matrix as Rows.

    raises   InputError if it is not two-dimensional, is empty, is not of a float dtype, or has nan or inf: then with
             the numbers of the rows
    """
    shape = tuple(matrix_VD.shape)
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"a matrix has rows and columns, this has shape {shape}")
    floating = matrix_VD.is_floating_point() if isinstance(matrix_VD, torch.Tensor) else matrix_VD.dtype.kind == "f"
    if not floating:
        raise InputError(f"a matrix of floats is needed, this holds {matrix_VD.dtype}")
    largest = max(float(matrix_VD.max()), -float(matrix_VD.min()))
    if not math.isfinite(largest):
        raise _non_finite(matrix_VD)
    # Within 2^+-1000 the scale and its reciprocal are float64 numbers; 5e-324 and 1e308 then have squares in range.
    return Rows(matrix=matrix_VD, exponent=min(1000, max(-1000, math.frexp(largest)[1])))


def _non_finite(matrix_VD: Matrix) -> InputError:
    bad = np.flatnonzero(~np.isfinite(_float64(matrix_VD)).all(axis=1))
    shown = ", ".join(map(str, bad[:_SHOWN_ROWS])) + (", ..." if len(bad) > _SHOWN_ROWS else "")
    return InputError(
        f"non_finite: {len(bad)} of {matrix_VD.shape[0]} rows hold nan or inf",
        [f"rows {shown}"],
        "nothing was measured",
    )


def _float64(rows_ND: Matrix) -> Floats:
    if isinstance(rows_ND, torch.Tensor):
        return rows_ND.detach().to("cpu", torch.float64, copy=True).numpy()
    return rows_ND.astype(np.float64)


def survey(rows: Rows) -> Survey:
    """Everything that one pass over raw rows gives, and one before it for the mean; rows.shift must be None."""
    mean_D = rows.mean()
    square = (rows.columns, rows.columns)
    gram_centred_DD, gram_unit_DD = np.zeros(square), np.zeros(square)
    sum_unit_D, sum_unit_centred_D = np.zeros(rows.columns), np.zeros(rows.columns)
    norms, norms_centred = [], []
    # A centred row that is only the rounding of the mean, a sum of V numbers, has no direction.
    rounding = rows.count * _EPS * float(np.linalg.norm(mean_D))
    for block_ND in rows.blocks():
        norms.append(_norms(block_ND))
        scale_N = _reciprocal(norms[-1], longer_than=0.0)
        unit_ND = block_ND * scale_N[:, None]
        gram_unit_DD += unit_ND.T @ unit_ND
        sum_unit_D += scale_N @ block_ND
        centred_ND = np.subtract(block_ND, mean_D, out=block_ND)
        norms_centred.append(_norms(centred_ND))
        gram_centred_DD += centred_ND.T @ centred_ND
        sum_unit_centred_D += _reciprocal(norms_centred[-1], longer_than=rounding) @ centred_ND
    norms_V, norms_centred_V = np.concatenate(norms), np.concatenate(norms_centred)
    return Survey(
        norms=norms_V,
        mean=mean_D,
        # A sum of positive parts: nothing cancels, as it would if the centred one were derived from the raw one.
        gram=gram_centred_DD + rows.count * np.outer(mean_D, mean_D),
        gram_centred=gram_centred_DD,
        unit=UnitRows(count=int((norms_V > 0).sum()), sum=sum_unit_D, gram=gram_unit_DD),
        unit_centred=UnitRows(count=int((norms_centred_V > rounding).sum()), sum=sum_unit_centred_D, gram=None),
    )


def _norms(block_ND: Floats) -> Floats:
    norms_N: Floats = np.sqrt(np.einsum("nd,nd->n", block_ND, block_ND))
    return norms_N


def _reciprocal(norms_N: Floats, longer_than: float) -> Floats:
    """1 / norm, and 0 for the rows that are not longer."""
    reciprocal_N: Floats = np.divide(1.0, norms_N, out=np.zeros_like(norms_N), where=norms_N > longer_than)
    return reciprocal_N


def average_cosine(unit: UnitRows) -> float | None:
    """Mean cosine over all pairs of different rows, without forming a pair; None with fewer than two rows.

    source     sum over ordered pairs of cos = |sum u|^2 - n
    """
    pairs = unit.count * (unit.count - 1)
    return (float(unit.sum @ unit.sum) - unit.count) / pairs if pairs else None


def cosine_variance(unit: UnitRows) -> float | None:
    """Variance of the cosine over the same pairs; None with fewer than two rows.

    source     sum over ordered pairs of cos^2 = |sum u u'|_F^2 - n
    """
    mean = average_cosine(unit)
    if mean is None:
        return None
    assert unit.gram is not None
    mean_square = (float(np.sum(unit.gram**2)) - unit.count) / (unit.count * (unit.count - 1))
    return max(0.0, mean_square - mean * mean)


# ---- spectrum ------------------------------------------------------------------------------------------------------


def spectrum(rows: Rows, gram_DD: Floats, tolerance: float | None = None) -> Spectrum:
    """Singular values and right singular vectors of the rows, from their Gram matrix and deflation.

    tolerance   of the raw matrix, for a centred one: what is left of equal rows is rounding; None: from these values
    error       of a value, relative to the largest: about 1e-13; of R below 1e-9 (against an SVD and TSQR in float64)
    """
    values, vectors = [], []
    basis_DK = np.eye(rows.columns)
    gram_KK = gram_DD
    largest = 0.0
    while True:
        squares_K, turn_KK = np.linalg.eigh(gram_KK)
        values_K = np.sqrt(np.maximum(squares_K, 0.0))
        largest = max(largest, float(values_K[-1]))
        limit = max(rows.count, rows.columns) * _EPS * largest
        # Below the limit everything is rounding: nothing more to resolve, the values are taken as they are.
        settled = (values_K >= _DEFLATE_BELOW * values_K[-1]) | (values_K[-1] <= limit)
        values.append(values_K[settled])
        vectors.append(basis_DK @ turn_KK[:, settled])
        if settled.all():
            break
        basis_DK = basis_DK @ turn_KK[:, ~settled]
        gram_KK = _projected_gram(rows, basis_DK)
    all_values = np.concatenate(values)
    order = np.argsort(-all_values, kind="stable")
    return Spectrum(
        values=all_values[order][: min(rows.count, rows.columns)],
        vectors=np.concatenate(vectors, axis=1)[:, order],
        tolerance=limit if tolerance is None else tolerance,
    )


def _projected_gram(rows: Rows, basis_DK: Floats) -> Floats:
    gram_KK = np.zeros((basis_DK.shape[1], basis_DK.shape[1]))
    for block_ND in rows.blocks():
        projected_NK = block_ND @ basis_DK
        gram_KK += projected_NK.T @ projected_NK
    return gram_KK


def singular_values(matrix_VD: Matrix) -> Floats:
    """All min(V, D) singular values, largest first, in the matrix's own scale; computed in float64."""
    rows = rows_of(matrix_VD)
    values_R: Floats = spectrum(rows, _projected_gram(rows, np.eye(rows.columns))).values * rows.unit
    return values_R


def effective_rank(values_R: Floats) -> float:
    """How many directions a matrix uses: 1 to R, no unit.

    values_R   (R,) singular values, not all zero, in any scale; zeros count nothing
    returns    exp of the entropy (nats) of the values scaled to sum 1
    source     Roy & Vetterli, "The effective rank", EUSIPCO 2007
    """
    shares = values_R[values_R > 0] / values_R.sum()
    return math.exp(-float(shares @ np.log(shares)))


def participation_ratio(values_R: Floats) -> float:
    """(sum s^2)^2 / sum s^4 of singular values that are not all zero: 1 to R."""
    squares_R = (values_R / values_R[0]) ** 2
    return float(squares_R.sum() ** 2 / (squares_R @ squares_R))


def variance_share(values_R: Floats, k: int) -> float:
    """Share of sum s^2 that the k largest singular values hold."""
    squares_R = (values_R / values_R[0]) ** 2
    return float(squares_R[:k].sum() / squares_R.sum())


def isoscore(centred_values_R: Floats, columns: int) -> float:
    """How evenly the variance of the centred rows fills the D >= 2 columns: 0 (one direction) to 1.

    source     Rudman et al. 2022, algorithm 1. Its last step is (D phi - 1) / (D - 1) with D phi = (sum v)^2 / sum v^2,
               v the variances along the principal components: the participation ratio of the centred rows.
    """
    return (participation_ratio(centred_values_R) - 1.0) / (columns - 1.0)


def spectral_exponent(values_R: Floats, first: int, last: int) -> float:
    """a in s_i^2 ~ i^-a, by least squares of ln s_i^2 on ln i over the ranks first..last, counted from 1."""
    log_rank = np.log(np.arange(first, last + 1))
    log_square = 2.0 * np.log(values_R[first - 1 : last])
    deviation = log_rank - log_rank.mean()
    return -float(deviation @ log_square / (deviation @ deviation))


# ---- isotropy ------------------------------------------------------------------------------------------------------


def isotropy(rows: Rows, directions: Spectrum, longest: float) -> Isotropy:
    """How even the partition function Z(c) = sum over rows w of exp(<w, c>) is over the singular directions c.

    longest   upper bound of the row norms, in the scale of the blocks
    source    Mu & Viswanath 2018, equation 4. They leave the sign of c to chance; both signs are well defined, and the
              one-sign form here takes c with its first entry of largest magnitude positive.
    """
    log_plus_D, log_minus_D = _log_partitions(rows, directions.vectors, longest)
    # Along the null space <w, c> is zero by definition, and rounding otherwise, which large rows would magnify.
    log_plus_D[directions.rank :] = log_minus_D[directions.rank :] = math.log(rows.count)
    both = np.concatenate([log_plus_D, log_minus_D])
    one = np.where(_leading_sign(directions.vectors) > 0, log_plus_D, log_minus_D)
    return Isotropy(log_both_signs=float(both.min() - both.max()), log_one_sign=float(one.min() - one.max()))


def _leading_sign(vectors_DD: Floats) -> Floats:
    """Sign of each column's first entry of largest magnitude; entries equal but for rounding are equal."""
    sizes = np.abs(vectors_DD)
    first = np.argmax(sizes >= sizes.max(axis=0) * (1.0 - 1e-6), axis=0)
    signs: Floats = np.sign(vectors_DD[first, np.arange(vectors_DD.shape[1])])
    return signs


def _log_partitions(rows: Rows, vectors_DD: Floats, longest: float) -> tuple[Floats, Floats]:
    """ln Z(+c) and ln Z(-c) of each column c, in the matrix's own scale."""
    if longest * rows.unit <= _SAFE_EXPONENT:
        return _short_row_partitions(rows, vectors_DD)
    log_plus_D = np.full(rows.columns, -np.inf)
    log_minus_D = np.full(rows.columns, -np.inf)
    for block_ND in rows.blocks():
        products_ND = block_ND @ vectors_DD * rows.unit
        log_plus_D = np.logaddexp(log_plus_D, _logsumexp(products_ND))
        log_minus_D = np.logaddexp(log_minus_D, _logsumexp(-products_ND))
    return log_plus_D, log_minus_D


def _short_row_partitions(rows: Rows, vectors_DD: Floats) -> tuple[Floats, Floats]:
    """The same where no exp can overflow: one exp serves both signs."""
    plus_D, minus_D = np.zeros(rows.columns), np.zeros(rows.columns)
    directions_DD = vectors_DD * rows.unit
    for block_ND in rows.blocks():
        factors_ND = block_ND @ directions_DD
        np.exp(factors_ND, out=factors_ND)
        plus_D += factors_ND.sum(axis=0)
        minus_D += np.reciprocal(factors_ND, out=factors_ND).sum(axis=0)
    return np.log(plus_D), np.log(minus_D)


def _logsumexp(products_ND: Floats) -> Floats:
    top_D = products_ND.max(axis=0)
    total_D: Floats = top_D + np.log(np.exp(products_ND - top_D).sum(axis=0))
    return total_D


# ---- metric values -------------------------------------------------------------------------------------------------

_ZERO = "the matrix is zero"
_FEW_ROWS = "fewer than two rows have a direction"


def geometry(matrix_VD: Matrix, settings: MatrixSettings, convention: Mapping[str, Plain]) -> list[MetricValue]:
    """Every geometry metric of a matrix; one that is undefined for it is None with the reason.

    matrix_VD    (V, D), any float dtype; computed in float64
    convention   what every value of it carries
    raises       InputError if an entry is nan or inf, with the numbers of the rows
    """
    rows = rows_of(matrix_VD)
    return _geometry(rows, survey(rows), settings, convention)


def unembedding_geometry(
    weight_RD: Matrix, vocab_size: int, settings: MatrixSettings, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    """Geometry of an unembedding without its padding rows; beside it, with them, what published numbers include.

    weight_RD    (R, D) with R >= vocab_size; rows from vocab_size on are padding
    """
    everything = rows_of(weight_RD)
    assert vocab_size <= everything.count, f"{vocab_size:,} tokens but {everything.count:,} rows"
    tokens = replace(everything, matrix=weight_RD[:vocab_size])
    first = survey(tokens)
    values = _geometry(tokens, first, settings, {**convention, "padding_rows": "removed"})
    gram_DD, unit, longest = first.gram, first.unit, float(first.norms.max())
    padding = everything.count - vocab_size
    if padding:
        more = survey(replace(everything, matrix=weight_RD[vocab_size:]))
        gram_DD = gram_DD + more.gram
        unit = replace(unit, count=unit.count + more.unit.count, sum=unit.sum + more.unit.sum)
        longest = max(longest, float(more.norms.max()))
    with_padding: dict[str, Plain] = {**convention, "padding_rows": f"{padding} kept"}
    return [*values, *_padded_values(everything, spectrum(everything, gram_DD), unit, longest, with_padding)]


def _geometry(
    rows: Rows, first: Survey, settings: MatrixSettings, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    centred_rows = replace(rows, shift=first.mean)
    raw = spectrum(rows, first.gram)
    centred = spectrum(centred_rows, first.gram_centred, raw.tolerance)
    return [
        *_spectrum_values(rows, raw, settings, convention),
        *_centred_values(rows, centred, convention),
        *_isotropy_values(isotropy(rows, raw, float(first.norms.max())), rows, raw, "", convention),
        *_isotropy_values(
            isotropy(centred_rows, centred, first.longest_centred), rows, centred, "_centred", convention
        ),
        *_row_values(rows, first, convention),
    ]


def _value(name: str, value: float | None, n: int, convention: Mapping[str, Plain], undefined: str = "") -> MetricValue:
    """`undefined` is the reason that a None is stored with."""
    return metric_value(
        name, value, n=n, convention=convention if value is not None else {**convention, "undefined": undefined}
    )


# What singular values that are not all zero say by themselves.
_SPECTRAL: Mapping[str, Callable[[Floats], float]] = {
    "effective_rank": effective_rank,
    "effective_rank_share": lambda values_R: effective_rank(values_R) / len(values_R),
    "effective_rank_squared": lambda values_R: effective_rank(values_R**2),
    "singular_entropy": lambda values_R: math.log(len(values_R)) - math.log(effective_rank(values_R)),
    "participation_ratio": participation_ratio,
    "stable_rank": lambda values_R: 1.0 / variance_share(values_R, 1),
    "top1_variance_share": lambda values_R: variance_share(values_R, 1),
}


def _spectrum_values(
    rows: Rows, raw: Spectrum, settings: MatrixSettings, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    values_R, n = raw.values, rows.count
    top_k = variance_share(values_R, settings.top_k) if raw.rank else None
    full = raw.rank == len(values_R)
    return [
        *(_value(name, f(values_R) if raw.rank else None, n, convention, _ZERO) for name, f in _SPECTRAL.items()),
        _value("topk_variance_share", top_k, n, {**convention, "k": settings.top_k}, _ZERO),
        _value("numerical_rank", raw.rank, n, convention),
        _value(
            "condition_number",
            float(values_R[0] / values_R[-1]) if full else None,
            n,
            convention,
            f"the numerical rank is {raw.rank} of {len(values_R)}",
        ),
        _spectral_exponent_value(raw, n, settings, convention),
    ]


def _spectral_exponent_value(
    raw: Spectrum, n: int, settings: MatrixSettings, convention: Mapping[str, Plain]
) -> MetricValue:
    low, high = settings.power_law_ranks
    first, last = max(1, math.ceil(low * raw.rank)), math.floor(high * raw.rank)
    enough = last - first >= 2
    return _value(
        "spectral_exponent",
        spectral_exponent(raw.values, first, last) if enough else None,
        n,
        {**convention, "fit": "least squares of ln s^2 on ln rank", "first_rank": first, "last_rank": last},
        "a fit needs three ranks",
    )


def _centred_values(rows: Rows, centred: Spectrum, convention: Mapping[str, Plain]) -> list[MetricValue]:
    values_R = centred.values
    rank = effective_rank(values_R) if centred.rank else None
    score = isoscore(values_R, rows.columns) if centred.rank and rows.columns > 1 else None
    reason = "all rows are equal" if centred.rank == 0 else "one column is isotropic by definition"
    return [
        _value("effective_rank_centred", rank, rows.count, convention, reason),
        _value("isoscore", score, rows.count, convention, reason),
    ]


def _isotropy_values(
    measured: Isotropy, rows: Rows, directions: Spectrum, suffix: str, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    noted = {**convention, "equal_singular_values": directions.has_equal_values}
    return [
        _value(f"isotropy{suffix}", math.exp(measured.log_both_signs), rows.count, noted),
        _value(f"log_isotropy{suffix}", measured.log_both_signs, rows.count, noted),
        _value(f"isotropy_one_sign{suffix}", math.exp(measured.log_one_sign), rows.count, noted),
    ]


def _row_values(rows: Rows, first: Survey, convention: Mapping[str, Plain]) -> list[MetricValue]:
    norms_V, unit, centred = first.norms * rows.unit, first.unit, first.unit_centred
    return [
        _value("average_cosine", average_cosine(unit), unit.count, convention, _FEW_ROWS),
        _value("cosine_variance", cosine_variance(unit), unit.count, convention, _FEW_ROWS),
        _value("average_cosine_centred", average_cosine(centred), centred.count, convention, _FEW_ROWS),
        _value("zero_rows", rows.count - unit.count, rows.count, convention),
        _value("row_norm_mean", float(norms_V.mean()), rows.count, convention),
        _value("row_norm_max", float(norms_V.max()), rows.count, convention),
        _value("row_norm_min", float(norms_V.min()), rows.count, convention),
    ]


def _padded_values(
    rows: Rows, raw: Spectrum, unit: UnitRows, longest: float, convention: Mapping[str, Plain]
) -> list[MetricValue]:
    rank = effective_rank(raw.values) if raw.rank else None
    noted = {**convention, "equal_singular_values": raw.has_equal_values}
    return [
        _value("effective_rank_padded", rank, rows.count, convention, _ZERO),
        _value("isotropy_padded", math.exp(isotropy(rows, raw, longest).log_both_signs), rows.count, noted),
        _value("average_cosine_padded", average_cosine(unit), unit.count, convention, _FEW_ROWS),
    ]
