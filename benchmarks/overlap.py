"""What evaluations beside the training cost it: tokens/s with and without an evaluator on another core.

    python -m benchmarks.overlap [--seconds 60] [--slice 2] [--store DIR]

One process trains the demo's largest model on one core; another evaluates a checkpoint of it again and again (geometry
and six losses, as the actors of a session do, with their niceness) on another core. The evaluator is stopped and
continued from slice to slice, so both rates come from the same minutes of the machine. Needs two cores. Where others
work on the machine too, the wall clock also counts what the evaluator pushes aside; the CPU clock does not.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import store_with_builtin
from evaluators.actors import NICENESS
from orchestrator.corpora import corpus_facts
from orchestrator.plan import load_plan
from orchestrator.spec import find_sweep, read_text
from trainers.config import Recipe
from trainers.loop import Execution, Training

_EVALUATE_FOREVER = """
import os, sys
from pathlib import Path
os.nice(int(sys.argv[3]))
import torch
torch.set_num_threads(1)
from evaluators.config import GeometrySettings, LossSettings
from evaluators.evaluate import evaluate
print("ready", flush=True)
while True:
    for settings in (GeometrySettings(), LossSettings(suite="builtin")):
        evaluate(Path(sys.argv[1]), settings, corpora=Path(sys.argv[2]))
"""


def largest_recipe(store: Path) -> Recipe:
    """The demo's last cell, with so many tokens that it does not end here."""
    path = find_sweep("demo")
    _, plan = load_plan(read_text(path), str(path), corpus_facts(store))
    recipe = plan.trials[-1].recipe
    data = recipe.data.model_copy(update={"repeat": True})
    return recipe.model_copy(update={"token_budget": recipe.tokens_per_step * 10**6, "data": data})


def start_evaluator(checkpoint: Path, corpora: Path, core: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _EVALUATE_FOREVER, str(checkpoint), str(corpora), str(NICENESS)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.sched_setaffinity(process.pid, {core})
    assert process.stdout is not None
    process.stdout.readline()
    return process


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Tokens a second of one slice: by the wall clock, and by the CPU time that the training got."""

    wall: float
    cpu: float


def rate_of_slice(training: Training, seconds: float) -> Rate:
    """The rate of about so many seconds of training."""
    started, cpu, before = time.perf_counter(), time.process_time(), training.tokens
    training.train_to(training.recipe.token_budget, lambda: time.perf_counter() - started > seconds, lambda _: None)
    tokens = training.tokens - before
    return Rate(wall=tokens / (time.perf_counter() - started), cpu=tokens / (time.process_time() - cpu))


def compare(store: Path, scratch: Path, seconds: float, slice_s: float) -> tuple[list[Rate], list[Rate]]:
    """Rates of the slices without the evaluator, and of those with it."""
    trainer_core, evaluator_core = sorted(os.sched_getaffinity(0))[:2]
    recipe = largest_recipe(store)
    training = Training.fresh(recipe, store / "corpora" / recipe.data.corpus, Execution(threads=1))
    training.save(scratch / "checkpoint", segment="overlap", history="overlap", curve=())
    evaluator = start_evaluator(scratch / "checkpoint", store / "corpora", evaluator_core)
    os.sched_setaffinity(0, {trainer_core})
    alone: list[Rate] = []
    beside: list[Rate] = []
    try:
        rate_of_slice(training, slice_s)  # warm
        for number in range(max(2, round(seconds / slice_s))):
            running = number % 2 == 1
            evaluator.send_signal(signal.SIGCONT if running else signal.SIGSTOP)
            (beside if running else alone).append(rate_of_slice(training, slice_s))
    finally:
        evaluator.kill()
        evaluator.communicate()
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--slice", type=float, default=2.0)
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    given = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed")
    with tempfile.TemporaryDirectory(prefix="geosweep-overlap-") as folder:
        scratch = Path(folder)
        store = store_with_builtin(given.store, scratch / "store")
        alone, beside = compare(store, scratch, given.seconds, given.slice)
    load = os.getloadavg()[0]
    print(f"medians of {len(alone)} slices alone, {len(beside)} beside an evaluator; load average {load:.1f}")
    for clock in ("wall", "cpu"):
        pairs = [(getattr(a, clock), getattr(b, clock)) for a, b in zip(alone, beside, strict=False)]
        without, with_one = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)  # of neighbours in time: others' load is much the same
        print(f"tokens/s by {clock:>4} clock: {without:>9,.0f} alone {with_one:>9,.0f} beside, ratio {ratio:.3f}")


if __name__ == "__main__":
    main()
