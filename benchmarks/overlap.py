"""What a trial pays for its checkpoints, and for the evaluations beside it.

    python -m benchmarks.overlap [--seconds 60] [--slice 2] [--repeats 5] [--store DIR]

Checkpoints: the demo's shortest trial of its smallest model, by an attempt that commits each checkpoint into a store
as a session's do (a copy of the state, written, synced and registered by a thread), against the bare loop over the
same steps. All on one core, so that the thread takes its time from the training; wall seconds, interleaved.

Evaluations: one process trains the demo's largest model on one core; another evaluates a checkpoint of it again and
again (geometry and six losses, as the actors of a session do, with their niceness) on another core. The evaluator is
stopped and continued from slice to slice, so both rates come from the same minutes of the machine. Needs two cores.
Where others work on the machine too, the wall clock also counts what the evaluator pushes aside; the CPU clock does
not.
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

from benchmarks.measure import ratio, store_with_builtin
from evaluators.actors import NICENESS
from orchestrator.attempt import Attempt
from orchestrator.corpora import corpus_facts
from orchestrator.legs import LegQueue
from orchestrator.plan import Plan, load_plan
from orchestrator.spec import find_sweep, read_text
from orchestrator.standing import read_standing
from orchestrator.store.layout import create_or_open
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


def demo_alone(store: Path) -> Plan:
    """The demo's plan with nothing shared: each trial is one chain of segments."""
    path = find_sweep("demo")
    return load_plan(read_text(path), str(path), corpus_facts(store), share=False)[1]


def seconds_of_an_attempt(store: Path, plan: Plan, root: Path) -> float:
    """Train the plan's first trial with its checkpoints, into a new store."""
    layout = create_or_open(root)
    layout.corpus("builtin").symlink_to(store.resolve() / "corpora" / "builtin")
    first = set(plan.trials[0].chain)
    leg = LegQueue([segment for segment in read_standing(layout, plan).left if segment.id in first]).take()
    assert leg is not None
    started = time.perf_counter()
    ended = Attempt(layout, "demo", leg, Execution(threads=1), rescue_s=3600).advance(3600, lambda: False)
    assert ended.state == "committed", ended
    return time.perf_counter() - started


def seconds_of_the_loop(store: Path, recipe: Recipe) -> float:
    """Train the same steps and keep nothing."""
    started = time.perf_counter()
    training = Training.fresh(recipe, store / "corpora" / recipe.data.corpus, Execution(threads=1))
    training.train_to(recipe.token_budget, lambda: False, lambda _: None)
    return time.perf_counter() - started


def largest_recipe(store: Path) -> Recipe:
    """The demo's last cell, with so many tokens that it does not end here."""
    recipe = demo_alone(store).trials[-1].recipe
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


def compare_checkpoints(store: Path, scratch: Path, repeats: int) -> list[tuple[float, float]]:
    """Seconds of a trial with its checkpoints and without, all on one core; the first round warms up."""
    everything = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everything)})
    plan = demo_alone(store)
    recipe = plan.trials[0].recipe
    rounds = [
        (seconds_of_an_attempt(store, plan, scratch / f"trial-{number}"), seconds_of_the_loop(store, recipe))
        for number in range(repeats + 1)
    ]
    os.sched_setaffinity(0, everything)
    return rounds[1:]


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
    parser.add_argument("--repeats", type=int, default=5, help="rounds of a trial with and without its checkpoints")
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    given = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed")
    with tempfile.TemporaryDirectory(prefix="geosweep-overlap-") as folder:
        scratch = Path(folder)
        store = store_with_builtin(given.store, scratch / "store")
        pairs_of_trials = compare_checkpoints(store, scratch, given.repeats)
        alone, beside = compare(store, scratch, given.seconds, given.slice)
    saved, bare = zip(*pairs_of_trials, strict=True)
    print(
        f"a trial of {statistics.median(saved):.1f} s with its checkpoints, {statistics.median(bare):.1f} s without: "
        f"ratio {ratio(saved, bare)} over {len(saved)} rounds"
    )
    load = os.getloadavg()[0]
    print(f"medians of {len(alone)} slices alone, {len(beside)} beside an evaluator; load average {load:.1f}")
    for clock in ("wall", "cpu"):
        pairs = [(getattr(a, clock), getattr(b, clock)) for a, b in zip(alone, beside, strict=False)]
        without, with_one = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        slowed = statistics.median(b / a for a, b in pairs)  # of neighbours in time: others' load is much the same
        print(f"tokens/s by {clock:>4} clock: {without:>9,.0f} alone {with_one:>9,.0f} beside, ratio {slowed:.3f}")


if __name__ == "__main__":
    main()
