"""Our training loop beside what a user would take instead: tokens a second, memory, share of the machine's peak.

    python -m benchmarks.train [--scales 4M 14M 60M tiny-64] [--peers trainer plain] [--repeats 3] [--steps 4]
        [--threads 2] [--json FILE]

Each measurement is a process of its own; all train the same recipe from the same fresh weights on the same tokens in
the same order, in float32, and their losses are compared. Peers (benchmarks/peers): `trainer`, transformers' Trainer
with torch's fused AdamW; `plain`, the loop that one writes by hand over the Hugging Face model; `litgpt`, if asked for,
litgpt's loop with its own model and chunked loss. Needs `pip install accelerate` for the Trainer and `pip install
litgpt` for litgpt. Model FLOPs are those of the forward and backward pass, 6 a parameter and token and the attention;
recomputation would not count.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import interleaved, matmul_peak, ratio, store_with_builtin, write_json
from trainers.config import Data, Optimizer, Precision, Recipe, Schedule
from trainers.scales import flops_per_token, model_of
from trainers.tokens import read_manifest

SHAPES = {  # scale: sequences a batch, tokens a sequence, entries of the vocabulary
    "tiny-64": (16, 128, 2_048),
    "4M": (4, 512, 50_304),
    "14M": (4, 512, 50_304),
    "60M": (4, 512, 50_304),
}
LOOPS = {
    "ours": "benchmarks.peers.ours",
    "trainer": "benchmarks.peers.trainer",
    "plain": "benchmarks.peers.plain",
    "litgpt": "benchmarks.peers.litgpt_loop",
}


def recipe_of(scale: str, corpus: Path, shape: tuple[int, int, int], precision: Precision) -> Recipe:
    """shape: sequences a batch, tokens a sequence, entries of the vocabulary."""
    batch_size, context, vocabulary = shape
    return Recipe(
        model=model_of(
            "olmo", scale, context=context, vocab_size=vocabulary, attention="sequential", tied=False, init_std=0.02
        ),
        data=Data(corpus="builtin", digest=read_manifest(corpus).digest, repeat=True),
        optimizer=Optimizer(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decay_all=True, clip=1.0),
        schedule=Schedule(shape="constant", peak_lr=1e-3, warmup_tokens=0, decay_tokens=None, final_fraction=1.0),
        batch_size=batch_size,
        token_budget=batch_size * context * 10_000,  # more than any measurement trains
        seed=0,
        precision=precision,
    )


def compared(recipe: Recipe, scratch: Path, corpus: Path, given: argparse.Namespace, peak: float) -> dict[str, Any]:
    """One scale: medians of every loop, and our ratios to the others."""
    path = scratch / "recipe.json"
    path.write_text(recipe.model_dump_json())
    loops = {name: LOOPS[name] for name in ("ours", *given.peers)}
    rounds = interleaved(
        loops,
        path,
        corpus,
        given.steps,
        given.threads,
        "cpu",
        repeats=given.repeats,
        threads=given.threads,
        folder=scratch,
    )
    rates = {name: [one["tokens_per_s"] for one in ones] for name, ones in rounds.items()}
    cpu_rates = {name: [one["tokens_per_cpu_s"] for one in ones] for name, ones in rounds.items()}
    flops = flops_per_token(recipe.model)
    return {
        "scale": recipe.model.scale,
        "tokens_per_s": {name: statistics.median(rate) for name, rate in rates.items()},
        "of_peak": {name: statistics.median(rate) * flops / peak for name, rate in rates.items()},
        "mib": {name: statistics.median(one["mib"] for one in ones) for name, ones in rounds.items()},
        "largest_loss_difference": max(
            abs(ours - theirs)
            for ones in rounds.values()
            for ours, theirs in zip(rounds["ours"][0]["losses"], ones[0]["losses"], strict=True)
        ),
        "speed_ratio": {name: ratio(rates["ours"], rates[name]) for name in given.peers},
        "cpu_ratio": {name: ratio(cpu_rates["ours"], cpu_rates[name]) for name in given.peers},
    }


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['scale']}: largest difference of a step's loss {row['largest_loss_difference']:.1e} nats")
    for name in row["tokens_per_s"]:
        against = ""
        if name != "ours":
            against = f"ours {row['speed_ratio'][name]} times as fast, by CPU time {row['cpu_ratio'][name]}"
        print(
            f"  {name:8} {row['tokens_per_s'][name]:>10,.0f} tokens/s {row['of_peak'][name]:6.2f} of the peak "
            f"{row['mib'][name]:>8,.0f} MiB  {against}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", nargs="+", choices=[*LOOPS][1:], default=["trainer", "plain"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a measurement, after two to warm up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geosweep-train-") as folder:
        store = store_with_builtin(given.store, Path(folder) / "store")
        corpus = store.resolve() / "corpora" / "builtin"
        peak = matmul_peak(given.threads)
        print(f"peak of a matrix product, {given.threads} threads: {peak / 1e9:.0f} GFLOP/s; MiB beyond the imports")
        rows = []
        for scale in given.scales:
            rows.append(compared(recipe_of(scale, corpus, SHAPES[scale], "float32"), Path(folder), corpus, given, peak))
            show(rows[-1])
        write_json(given.json, rows)


if __name__ == "__main__":
    main()
