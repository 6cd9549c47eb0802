"""How fast batches are read, against what a trainer needs: 1 to 8 readers, and positions up to 10^11.

    python -m benchmarks.loader [--seconds 2] [--readers 1 2 4 8] [--need 1000000] [--store DIR] [--json FILE]

Readers are processes of their own; each reads batches of 32 x 2,048 tokens of the built-in corpus, in the order of
its own seed, at positions scattered up to the 10^11th sequence (later passes over the same text). The second part times
the keyed permutation alone for a corpus of 10^5 to 10^11 sequences: there is no table, so nothing grows with them.
`need` is what one fast accelerator trains of the smallest scale, tokens a second.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.measure import store_with_builtin, write_json
from trainers.batches import TrainingSequences, permuted
from trainers.tokens import read_manifest

BATCH, CONTEXT = 32, 2_048
FARTHEST = 10**11


def read_for(corpus: Path, seed: int, seconds: float) -> float:
    """Tokens a second of one reader."""
    sequences = TrainingSequences(corpus, read_manifest(corpus), context=CONTEXT, seed=seed, repeat=True)
    positions = np.random.default_rng(seed).integers(0, FARTHEST, 10**4).tolist()
    sequences.read(0, BATCH)
    started, batches = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        sequences.read(positions[batches % len(positions)], BATCH)
        batches += 1
    return batches * BATCH * CONTEXT / (time.perf_counter() - started)


def readers_together(corpus: Path, readers: int, seconds: float) -> float:
    """Tokens a second of all of them."""
    command = [sys.executable, "-m", "benchmarks.loader", "--one", str(corpus), "--seconds", str(seconds), "--seed"]
    started = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in range(readers)]
    return sum(float(process.communicate()[0]) for process in started)


def permutation_rate(sequences: int, repeats: int = 20) -> float:
    """Positions a second for a batch of positions anywhere in a corpus of so many sequences."""
    positions = np.random.default_rng(0).integers(0, sequences, BATCH)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        permuted(positions, sequences, b"key")
        seconds.append(time.perf_counter() - started)
    return BATCH / statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--need", type=float, default=1e6)
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(read_for(given.one, given.seed, given.seconds))
        return
    with tempfile.TemporaryDirectory(prefix="geosweep-loader-") as folder:
        store = store_with_builtin(given.store, Path(folder) / "store")
        corpus = store.resolve() / "corpora" / "builtin"
        rates = {readers: readers_together(corpus, readers, given.seconds) for readers in given.readers}
    for readers, rate in rates.items():
        print(f"{readers} readers: {rate:>13,.0f} tokens/s, {rate / given.need:6.1f} times the need of one trial")
    orders = {sequences: permutation_rate(sequences) for sequences in (10**5, 10**7, 10**9, FARTHEST)}
    for sequences, rate in orders.items():
        print(f"order of {sequences:>15,} sequences: {rate * CONTEXT:>13,.0f} tokens/s")
    write_json(given.json, {"readers": rates, "order": orders})


if __name__ == "__main__":
    main()
