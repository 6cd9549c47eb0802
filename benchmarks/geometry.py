"""Our whole set of geometry metrics against one SVD, and against computing them one after the other.

    python -m benchmarks.geometry [--widths 64 192 ...] [--repeats 3] [--json FILE]

For each width a random matrix with a decaying spectrum, 50,304 rows, float32. Every measurement is its own process,
with one thread, the three interleaved; the median of the CPU seconds counts. Memory is the growth of the process beyond
the matrix itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROWS = 50_304
WIDTHS = (64, 192, 384, 640, 1024)

_MATRIX = """
import json, math, resource, sys, time
import numpy as np
rows, width = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
weight = rng.standard_normal((rows, width), dtype=np.float32)
weight *= (1 + np.arange(width, dtype=np.float32)) ** np.float32(-0.5)
weight += rng.standard_normal(width, dtype=np.float32) * np.float32(0.1)
"""

_MEASURE = """
peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
work()
seconds = time.process_time() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"seconds": seconds, "mib": (peak - peak_before) / 1024}))
"""

_WORK = {
    "ours": """
from evaluators.config import GeometrySettings
from evaluators.geometry import unembedding_geometry
work = lambda: unembedding_geometry(weight, rows - 24, GeometrySettings(), {})
""",
    "one svdvals": """
import scipy.linalg
work = lambda: scipy.linalg.svdvals(weight.astype(np.float64), check_finite=False)
""",
    # What one writes first: each metric from the matrix, float64, raw and centred, with the padding rows and without.
    "naive": """
def ranks(matrix):
    s = np.linalg.svd(matrix, compute_uv=False)
    p, q = s / s.sum(), s**2 / (s**2).sum()
    entropies = [-(p * np.log(p)).sum(), -(q * np.log(q)).sum()]
    return [*map(math.exp, entropies), 1 / (q**2).sum(), 1 / q[0], s[0] / s[-1]]
def isotropy(matrix):
    vectors = np.linalg.eigh(matrix.T @ matrix)[1]
    z = np.concatenate([np.exp(matrix @ vectors).sum(axis=0), np.exp(-matrix @ vectors).sum(axis=0)])
    return z.min() / z.max()
def cosine(matrix):
    unit = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    total = unit.sum(axis=0)
    return (total @ total - len(unit)) / (len(unit) * (len(unit) - 1))
def isoscore(matrix):
    v = np.linalg.eigvalsh(np.cov(matrix.T))
    return (v.sum() ** 2 / (v**2).sum() - 1) / (len(v) - 1)
def work():
    padded = weight.astype(np.float64)
    tokens = padded[: rows - 24]
    centred = tokens - tokens.mean(axis=0)
    ranks(tokens), ranks(centred), ranks(padded)
    isotropy(tokens), isotropy(centred), isotropy(padded)
    cosine(tokens), cosine(centred), cosine(padded)
    isoscore(tokens)
""",
}


def measured(work: str, width: int) -> dict[str, float]:
    code = _MATRIX + _WORK[work] + _MEASURE
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROWS), str(width)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **threads},
    )
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def compared(width: int, repeats: int) -> dict[str, Any]:
    rounds = [{work: measured(work, width) for work in _WORK} for _ in range(repeats)]
    seconds = {work: statistics.median(one[work]["seconds"] for one in rounds) for work in _WORK}
    return {
        "width": width,
        "seconds": seconds,
        "ratio_to_svdvals": seconds["ours"] / seconds["one svdvals"],
        "ratio_to_naive": seconds["ours"] / seconds["naive"],
        "mib": {work: max(one[work]["mib"] for one in rounds) for work in _WORK},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"V = {ROWS:,}: CPU seconds of our whole set, of one float64 svdvals, of the naive sequence; MiB beyond W")
    print(
        f"{'ours':>32} {'svdvals':>9} {'naive':>9} {'ours/svdvals':>14} {'ours/naive':>12} {'MiB ours':>20} {'svd':>8}"
    )
    found = []
    for width in given.widths:
        row = compared(width, given.repeats)
        found.append(row)
        ours, svd, naive = (row["seconds"][work] for work in _WORK)
        print(
            f"d = {width:5} {ours:22.2f} {svd:9.2f} {naive:9.2f} {row['ratio_to_svdvals']:14.2f} "
            f"{row['ratio_to_naive']:12.2f} {row['mib']['ours']:20.0f} {row['mib']['one svdvals']:8.0f}",
            flush=True,
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
