"""What every stored number means: METRICS, and the record of one value.

checkpoint -> evaluator -> [metrics: MetricValue] -> store -> query
in    a metric's name and its value
out   a record with the metric's version and unit; nan and inf never get this far
not   torch, files

A metric whose meaning moves gets the next version here, never a silent change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from trainers.errors import InputError, nearest

Direction = Literal["lower_is_better", "higher_is_better", "descriptive"]
Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """version  raised when the meaning moves;  unit  "1" for a pure number;  source  the paper it is defined in"""

    name: str
    version: int
    unit: str
    direction: Direction
    source: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One number of one evaluation.

    value        in the metric's unit; None where the metric is undefined, with the reason in convention["undefined"]
    dataset      evaluation set, None for a metric of weights;  split  "heldout", "train" or None
    layer        0-based, None for the whole model
    n            how many things the value is a mean over or was computed from (rows, predictions)
    convention   what else one must know to compare the value with another
    """

    metric: str
    version: int
    value: float | None
    unit: str
    dataset: str | None
    split: str | None
    layer: int | None
    n: int | None
    convention: Mapping[str, Plain]


_ROY = "Roy & Vetterli, EUSIPCO 2007"
_MU = "Mu & Viswanath, ICLR 2018"
_GODEY = "Godey, de la Clergerie & Sagot, COLM 2024"
_ETHAYARAJH = "Ethayarajh, EMNLP 2019"
_VERSHYNIN = "Rudelson & Vershynin, J. ACM 2007"
_RUDMAN = "Rudman et al., Findings of ACL 2022"
_KORNBLITH = "Kornblith et al., ICML 2019"
_GAO = "Gao et al. 2017, bioRxiv 214262"
_FRANTAR = "Frantar et al., ICLR 2023 (GPTQ)"
_TUNED = "Kulkarni et al. 2026, arXiv 2602.20433"
_NUMPY = "numpy.linalg.matrix_rank, default tolerance"
_LINEAR_ALGEBRA = "Golub & Van Loan, Matrix Computations"
_BOTH_SIGNS = "minimum over maximum of Z(c), c over both signs of every right singular vector"


def _described(name: str, unit: str, source: str, meaning: str) -> Metric:
    return Metric(name=name, version=1, unit=unit, direction="descriptive", source=source, meaning=meaning)


def _lower(name: str, unit: str, source: str, meaning: str) -> Metric:
    return Metric(name=name, version=1, unit=unit, direction="lower_is_better", source=source, meaning=meaning)


def _quantised(bits: int) -> tuple[Metric, ...]:
    """Losses after the matrices of the blocks were cut to so many bits; embeddings, head, norms and biases stay."""
    gptq, nearest_level = f"GPTQ at {bits} bits", f"rounding to the nearest of {2**bits} levels"
    return (
        _lower(f"gptq_loss_{bits}bit", "nats/token", _FRANTAR, f"loss after {gptq}"),
        _lower(f"gptq_loss_increase_{bits}bit", "nats/token", _FRANTAR, f"gptq_loss_{bits}bit minus loss"),
        _lower(f"rtn_loss_{bits}bit", "nats/token", _FRANTAR, f"loss after {nearest_level}"),
        _lower(f"rtn_loss_increase_{bits}bit", "nats/token", _FRANTAR, f"rtn_loss_{bits}bit minus loss"),
    )


_GEOMETRY = (
    _described("effective_rank", "directions", _ROY, "exp of the entropy of the singular values s scaled to sum 1"),
    _described("effective_rank_share", "1", _ROY, "effective_rank / min(rows, columns)"),
    _described("effective_rank_centred", "directions", _ROY, "effective_rank after the mean row is subtracted"),
    _described("effective_rank_padded", "directions", _ROY, "effective_rank with the padding rows kept"),
    _described("effective_rank_squared", "directions", _ROY, "the same entropy of s^2 instead of s: another metric"),
    _described("singular_entropy", "nats", _GODEY, "ln min(rows, columns) - ln effective_rank: 0 when all s are equal"),
    _described("participation_ratio", "directions", _GAO, "(sum s^2)^2 / sum s^4"),
    _described("stable_rank", "directions", _VERSHYNIN, "sum s^2 / max s^2"),
    _described("numerical_rank", "directions", _NUMPY, "singular values above max(rows, columns) * 2^-52 * max s"),
    _described("condition_number", "1", _LINEAR_ALGEBRA, "max s / min s; undefined below full rank"),
    _described("top1_variance_share", "1", _LINEAR_ALGEBRA, "largest s^2 / sum s^2"),
    _described("topk_variance_share", "1", _LINEAR_ALGEBRA, "k largest s^2 / sum s^2; k in the convention"),
    _described(
        "spectral_exponent",
        "1",
        "Agrawal et al., NeurIPS 2022 (alpha-ReQ)",
        "a in s_i^2 ~ i^-a: least squares of ln s_i^2 on ln i over the ranks i in the convention",
    ),
    _described("isotropy", "1", _MU, f"{_BOTH_SIGNS}; Z(c) = sum over rows w of exp(<w, c>)"),
    _described("log_isotropy", "nats", _MU, "ln of isotropy: keeps its value where isotropy underflows"),
    _described("isotropy_centred", "1", _MU, "isotropy after the mean row is subtracted"),
    _described("log_isotropy_centred", "nats", _MU, "ln of isotropy_centred"),
    _described("isotropy_padded", "1", _MU, "isotropy with the padding rows kept"),
    _described(
        "isotropy_one_sign",
        "1",
        _MU,
        "the published form, c over one sign of each vector: it depends on the sign, here the first entry "
        "of largest magnitude is positive",
    ),
    _described("isotropy_one_sign_centred", "1", _MU, "isotropy_one_sign after the mean row is subtracted"),
    _described("isoscore", "1", _RUDMAN, "share of dimensions used isotropically by the rows, mean subtracted"),
    _described("average_cosine", "1", _ETHAYARAJH, "mean cosine over all pairs of different non-zero rows"),
    _described("average_cosine_centred", "1", _ETHAYARAJH, "average_cosine after the mean row is subtracted"),
    _described("average_cosine_padded", "1", _ETHAYARAJH, "average_cosine with the padding rows kept"),
    _described("cosine_variance", "1", _ETHAYARAJH, "variance of the cosine over the same pairs"),
    _described("zero_rows", "rows", _ETHAYARAJH, "rows without a direction, left out of the cosines"),
    _described("row_norm_mean", "1", _LINEAR_ALGEBRA, "mean Euclidean length of the rows"),
    _described("row_norm_max", "1", _LINEAR_ALGEBRA, "length of the longest row"),
    _described("row_norm_min", "1", _LINEAR_ALGEBRA, "length of the shortest row"),
)

_LOSSES = (
    _lower("loss", "nats/token", "Shannon 1948", "mean of -ln p over the predicted tokens"),
    _lower("loss_by_domain", "nats/token", "Magnusson et al. 2023 (Paloma)", "mean over the domains of their losses"),
    _lower(
        "bits_per_byte",
        "bits/byte",
        "Gao et al. 2020 (The Pile), section 3.1",
        "-log2 p summed over the predicted tokens / UTF-8 bytes of exactly these tokens",
    ),
    _lower("finetune_loss", "nats/token", _TUNED, "loss on the target after fine-tuning, at the best learning rate"),
    _lower("finetune_loss_before", "nats/token", _TUNED, "loss on the target before"),
    Metric(
        name="finetune_gain",
        version=1,
        unit="nats/token",
        direction="higher_is_better",
        source=_TUNED,
        meaning="finetune_loss_before minus finetune_loss",
    ),
    _lower("retained_loss", "nats/token", _TUNED, "loss on the pre-training mix after that fine-tuning"),
    _lower("retained_loss_before", "nats/token", _TUNED, "loss on the pre-training mix before"),
    _lower("forgetting", "nats/token", _TUNED, "retained_loss minus retained_loss_before"),
    Metric(
        name="finetune_learning_rate",
        version=1,
        unit="1",
        direction="descriptive",
        source=_TUNED,
        meaning="learning rate that gave finetune_loss",
    ),
    *(metric for bits in (2, 3, 4, 8) for metric in _quantised(bits)),
)

_OF_HIDDEN_STATES = tuple(
    replace(metric, name=f"hidden_{metric.name}", meaning=f"{metric.meaning}; of the last hidden states of sequences")
    for metric in _GEOMETRY
    if not metric.name.endswith("_padded")
)

_OF_PAIRS = (
    _described("linear_cka", "1", _KORNBLITH, "centred kernel alignment of two unembeddings"),
    _described("largest_principal_angle", "radians", _LINEAR_ALGEBRA, "between the column spaces of two unembeddings"),
)

METRICS: Mapping[str, Metric] = {
    metric.name: metric for metric in (*_GEOMETRY, *_OF_HIDDEN_STATES, *_LOSSES, *_OF_PAIRS)
}


def metric_value(
    name: str,
    value: float | None,
    *,
    dataset: str | None = None,
    split: str | None = None,
    layer: int | None = None,
    n: int | None = None,
    convention: Mapping[str, Plain],
) -> MetricValue:
    """The record of one value, with the metric's version and unit filled in.

    raises   InputError if METRICS has no such name, if the value is nan or inf, or if it is None without a reason
             in convention["undefined"]
    """
    if name not in METRICS:
        raise InputError(f"no metric is called '{name}'{nearest(name, METRICS)}")
    if value is not None and not math.isfinite(value):
        raise InputError(f"metric '{name}' is {value}: a stored value is finite, or None with a reason")
    if value is None and "undefined" not in convention:
        raise InputError(f"metric '{name}' is None without a reason in convention['undefined']")
    metric = METRICS[name]
    return MetricValue(
        metric=name,
        version=metric.version,
        value=None if value is None else float(value),
        unit=metric.unit,
        dataset=dataset,
        split=split,
        layer=layer,
        n=n,
        convention=dict(convention),
    )
