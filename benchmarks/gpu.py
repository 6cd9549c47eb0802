"""Our loop on one GPU: each scale alone, beside the same peers as train.py, and 2, 4, 8 trials that share the GPU.

    python -m benchmarks.gpu [--scales 4M 14M 60M 150M] [--steps 20] [--together 2 4 8] [--device cuda] [--json FILE]

bfloat16 autocast, 32 sequences of 2,048 tokens, V = 50,304. One process for each trial, as Ray starts them; the trials
of a shared GPU train at the same time, and their rates add up. Model FLOPs against the peak of a bfloat16 matrix
product of the same GPU. Built for one call of at most six minutes. `--device cpu --scales tiny-64` tries the script
where no GPU is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import matmul_peak, measured, store_with_builtin, write_json
from benchmarks.train import LOOPS, recipe_of
from trainers.scales import flops_per_token

SHAPES = {"cuda": (32, 2_048, 50_304), "cpu": (4, 128, 50_304)}  # as in train.py


def together(trials: int, *arguments: object, folder: Path) -> list[dict[str, Any]]:
    """So many processes of our loop at the same time."""
    with ThreadPoolExecutor(trials) as pool:
        started = [pool.submit(measured, LOOPS["ours"], *arguments, threads=1, folder=folder) for _ in range(trials)]
        return [one.result() for one in started]


def of_scale(scale: str, corpus: Path, folder: Path, given: argparse.Namespace, peak: float) -> dict[str, Any]:
    recipe = recipe_of(scale, corpus, SHAPES[given.device], "bfloat16")
    path = folder / "recipe.json"
    path.write_text(recipe.model_dump_json())
    arguments = (path, corpus, given.steps, 1, given.device)
    alone = {name: measured(module, *arguments, threads=1, folder=folder) for name, module in LOOPS.items()}
    shared = {trials: together(trials, *arguments, folder=folder) for trials in given.together}
    flops = flops_per_token(recipe.model)
    row = {
        "scale": scale,
        "alone": {name: one["tokens_per_s"] for name, one in alone.items()},
        "mib": {name: one["mib"] for name, one in alone.items()},
        "of_peak": alone["ours"]["tokens_per_s"] * flops / peak,
        "together": {trials: sum(one["tokens_per_s"] for one in ones) for trials, ones in shared.items()},
    }
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    ours = row["alone"]["ours"]
    print(f"\n{row['scale']}: {ours:,.0f} tokens/s, {row['of_peak']:.2f} of the peak, {row['mib']['ours']:,.0f} MiB")
    for name in LOOPS:
        if name != "ours":
            rate = row["alone"][name]
            print(f"  {name:8} {rate:>12,.0f} tokens/s {row['mib'][name]:>8,.0f} MiB; ours {ours / rate:.2f} times")
    for trials, rate in row["together"].items():
        print(f"  {trials} trials {rate:>12,.0f} tokens/s together, {rate / ours:.2f} times one", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", nargs="+", default=["4M", "14M", "60M", "150M"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--together", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--device", choices=SHAPES, default="cuda")
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geosweep-gpu-") as name:
        folder = Path(name)
        store = store_with_builtin(given.store, folder / "store")
        corpus = store.resolve() / "corpora" / "builtin"
        peak = statistics.median(matmul_peak(1, device=given.device) for _ in range(3))
        print(f"peak of a matrix product: {peak / 1e12:.2f} TFLOP/s")
        write_json(given.json, [of_scale(scale, corpus, folder, given, peak) for scale in given.scales])


if __name__ == "__main__":
    main()
