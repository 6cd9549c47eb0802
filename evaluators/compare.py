"""How alike the unembeddings of two checkpoints are: of two seeds, two recipes, two moments of one trial.

two checkpoint folders -> [compare] -> metric values
in    checkpoints with the same vocabulary; the hidden sizes may differ
out   similarities that do not change when a matrix is rotated or scaled
not   the store: a value belongs to a pair, and rows of `metrics` belong to one checkpoint

Letters: R token rows (padding left out), D and E hidden sizes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import subspace_angles

from evaluators.metrics import MetricValue, Plain, metric_value
from trainers.checkpoint import read_manifest, read_tensor
from trainers.errors import InputError

Matrix = NDArray[np.float64]


def linear_cka(first_RD: Matrix, second_RE: Matrix) -> float:
    """Linear centred kernel alignment, 0 to 1; 1 for matrices that a rotation, a scale and a shift make equal.

    source   Kornblith et al., ICML 2019, equation 5; columns are centred
    raises   InputError if the rows of a matrix are all the same
    """
    first, second = (matrix - matrix.mean(axis=0) for matrix in (first_RD, second_RE))
    scale = np.linalg.norm(first.T @ first) * np.linalg.norm(second.T @ second)
    if scale == 0:
        raise InputError("linear CKA: the rows of a matrix are all the same, nothing was compared")
    return float(np.linalg.norm(second.T @ first) ** 2 / scale)


def largest_principal_angle(first_RD: Matrix, second_RE: Matrix) -> float:
    """Largest angle between the column spaces, in radians, 0 to pi / 2; exact for tiny angles too.

    source   Bjorck & Golub 1973, by sines where angles are small (Knyazev & Argentati 2002; scipy)
    """
    return float(subspace_angles(first_RD, second_RE)[0])


def unembedding_similarity(first_dir: Path, second_dir: Path) -> list[MetricValue]:
    """Both measures of the two unembeddings.

    raises   InputError if the vocabularies differ in size; EnvironmentFault if a file is corrupt
    """
    sizes = [read_manifest(folder).network.vocab_size for folder in (first_dir, second_dir)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{second_dir}: its vocabulary has {sizes[1]:,} entries, that of {first_dir} {sizes[0]:,}; rows of other "
            f"tokens cannot be compared"
        )
    first, second = (_rows(folder) for folder in (first_dir, second_dir))
    convention: dict[str, Plain] = {"matrix": "unembedding", "against": read_manifest(second_dir).checkpoint}
    return [
        metric_value("linear_cka", linear_cka(first, second), n=sizes[0], convention=convention),
        metric_value(
            "largest_principal_angle", largest_principal_angle(first, second), n=sizes[0], convention=convention
        ),
    ]


def _rows(folder: Path) -> Matrix:
    manifest = read_manifest(folder)
    weight: Matrix = read_tensor(folder, manifest.unembedding)[: manifest.network.vocab_size].double().numpy()
    return weight
