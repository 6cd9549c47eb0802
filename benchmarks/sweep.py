"""The demo's grid from the command to the last number, beside a plain Ray Tune script over transformers' Trainer.

    python -m benchmarks.sweep [--repeats 1] [--store DIR] [--json FILE]

Three ways, one after the other in each round, on the same prepared corpus: `geosweep run` of the demo's grid (trials
share what they have in common), the same with `--no-share`, and benchmarks/peers/tune_sweep.py: the same recipes,
checkpoints, geometry and losses, evaluated in the loop. The demo's fine-tuning and quantisation are left out: the
script has no code for them. Wall time counts from the command to its end. The final losses of all are compared; where
a trial is unstable at its highest learning rate, rounding grows: tiny-64-b16-wd0.1-262144 ends up to 1e-2 nats apart,
and our own loop moves it by 6e-3 when it cuts the batch in two.
Needs `pip install accelerate` for the Trainer; about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.measure import ratio, store_with_builtin, write_json
from orchestrator.corpora import corpus_facts
from orchestrator.plan import Plan, load_plan
from orchestrator.query import Store
from orchestrator.spec import find_sweep, read_text


def write_cells(plan: Plan, path: Path) -> None:
    """Recipe and token counts of the checkpoints of every trial, for the peer."""
    ends = {segment.id: segment.to_tokens for segment in plan.segments}
    cells = [
        {"recipe": trial.recipe.model_dump(mode="json"), "checkpoints": [ends[one] for one in trial.checkpoints]}
        for trial in plan.trials
    ]
    path.write_text(json.dumps(cells))


def timed(command: Sequence[str], environment: dict[str, str]) -> float:
    """Wall seconds; ends the benchmark if the command fails."""
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return time.perf_counter() - started


def grid_of_the_demo(path: Path) -> str:
    """The demo's sweep file with the evaluations that the script has code for."""
    demo = yaml.safe_load(read_text(find_sweep("demo")))
    demo["evaluations"] = [one for one in demo["evaluations"] if one["evaluator"] in ("geometry", "loss")]
    path.write_text(yaml.safe_dump(demo, sort_keys=False))
    return path.read_text()


def ours(file: Path, corpus: Path, folder: Path, *options: str) -> tuple[float, dict[str, float]]:
    """Seconds of a session in a new store, and the loss on `docs` of every trial at its end."""
    shutil.copytree(corpus, folder / "corpora" / "builtin")
    command = [sys.executable, "-m", "orchestrator", "run", str(file), "--store", str(folder), *options]
    seconds = timed(command, {})
    with Store(folder) as store:
        rows = store.sql("select trial, loss_docs from final").rows()
    return seconds, {row["trial"]: row["loss_docs"] for row in rows}


def peer(cells: Path, corpus: Path, folder: Path) -> tuple[float, list[float]]:
    """Seconds of the script, and the loss on `docs` of every cell at its end, in the order of the cells."""
    command = [sys.executable, "-m", "benchmarks.peers.tune_sweep", str(cells), str(corpus), str(folder)]
    seconds = timed(command, {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"})
    losses: dict[str, float] = json.loads((folder / "losses.json").read_text())
    return seconds, [losses[str(number)] for number in range(len(losses))]


def round_of(plan: Plan, file: Path, cells: Path, corpus: Path, folder: Path) -> dict[str, Any]:
    shared, losses = ours(file, corpus, folder / "shared")
    print(f"geosweep: {shared:.1f} s", flush=True)
    alone, _ = ours(file, corpus, folder / "alone", "--no-share")
    print(f"geosweep, nothing shared: {alone:.1f} s", flush=True)
    theirs, their_losses = peer(cells, corpus, folder / "peer")
    print(f"Ray Tune + Trainer: {theirs:.1f} s", flush=True)
    apart = [abs(losses[trial.id] - other) for trial, other in zip(plan.trials, their_losses, strict=True)]
    return {"shared": shared, "alone": alone, "peer": theirs, "loss_differences": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geosweep-sweep-") as name:
        folder = Path(name)
        store = store_with_builtin(given.store, folder / "store")
        file = folder / "demo.yaml"
        _, plan = load_plan(grid_of_the_demo(file), str(file), corpus_facts(store))
        write_cells(plan, folder / "cells.json")
        corpus = store.resolve() / "corpora" / "builtin"
        rounds = [
            round_of(plan, file, folder / "cells.json", corpus, folder / str(number)) for number in range(given.repeats)
        ]
    wall = {way: [one[way] for one in rounds] for way in ("shared", "alone", "peer")}
    for way, label in (("peer", "Ray Tune + Trainer"), ("alone", "geosweep, nothing shared"), ("shared", "geosweep")):
        line = f"{label:26} {statistics.median(wall[way]):8.1f} s"
        print(line if way == "peer" else f"{line}   {ratio(wall['peer'], wall[way])} times sooner than the script")
    print(f"sharing alone: {ratio(wall['alone'], wall['shared'])} times")
    apart = [difference for one in rounds for difference in one["loss_differences"]]
    print(f"final losses differ by {statistics.median(apart):.1e} nats in the median, {max(apart):.1e} at most")
    write_json(given.json, rounds)


if __name__ == "__main__":
    main()
