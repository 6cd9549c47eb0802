"""What a session adds to the training itself, beside the same grid in plain Ray Tune, and its driver's memory.

    python -m benchmarks.overhead [--trials 108] [--slots 2] [--repeats 1] [--planned 1000] [--store DIR]

Each trial trains a tiny model for about one second; the budget is set by a measurement at the start. The ideal is the
time spent inside training steps, divided by the slots: it is taken from the recorded steps, so that a machine
that others use too makes both sides slower alike. Wall time is that of a whole process, from its start to its end:
imports, Ray, planning, checkpoints, the store. Plain Tune trains the same recipes with the same loop, reports the loss
once a trial and keeps nothing. The driver's memory is the largest resident size of the driver alone, its workers aside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.measure import store_with_builtin
from orchestrator.corpora import corpus_facts
from orchestrator.plan import load_plan
from orchestrator.query import Store
from trainers.loop import Execution, Training

_BASE = {"preset": "tiny", "scale": "tiny-32", "context": 32, "batch_size": 8, "repeat": True}
_STEP = 256  # tokens

_PLAIN_TUNE = """
import json, sys, time
from pathlib import Path
import ray
from ray import tune
from orchestrator.corpora import corpus_facts
from orchestrator.plan import load_plan

store, text, slots, out = Path(sys.argv[1]), Path(sys.argv[2]).read_text(), int(sys.argv[3]), Path(sys.argv[4])
recipes = {t.id: t.recipe.model_dump_json() for t in load_plan(text, "grid", corpus_facts(store))[1].trials}

def train(config):
    from trainers.config import Recipe
    from trainers.loop import Execution, Training
    recipe = Recipe.model_validate_json(recipes[config["trial"]])
    training = Training.fresh(recipe, store / "corpora" / "builtin", Execution(threads=1))
    records = []
    training.train_to(recipe.token_budget, lambda: False, records.append)
    tune.report({"loss": records[-1].loss, "inside_s": sum(recipe.tokens_per_step / r.tokens_per_s for r in records)})

ray.init(num_cpus=slots, include_dashboard=False, log_to_driver=False)
found = tune.Tuner(train, param_space={"trial": tune.grid_search(list(recipes))}).fit()
out.write_text(json.dumps(sum(result.metrics["inside_s"] for result in found)))
"""


def grid(trials: int, tokens: int) -> str:
    """A sweep file of so many trials that share nothing but their fresh weights."""
    decays = [round(0.01 + 0.001 * number, 4) for number in range(trials)]
    return yaml.safe_dump(
        {
            "name": "overhead",
            "question": "what does a session add to the training?",
            "base": {**_BASE, "token_budget": tokens},
            "grids": [{"name": "decay", "axes": {"weight_decay": decays}}],
            "checkpoints": {"at_fractions": [1]},
            "evaluations": [{"evaluator": "geometry", "at": "last"}],
            "execution": {"evaluators": 1},
        }
    )


def tokens_of_seconds(store: Path, seconds: float) -> int:
    """How many tokens the grid's model trains in so many seconds on one core here and now."""
    recipe = load_plan(grid(1, _STEP * 10**5), "grid", corpus_facts(store))[1].trials[0].recipe
    training = Training.fresh(recipe, store / "corpora" / "builtin", Execution(threads=1))
    training.train_to(_STEP * 20, lambda: False, lambda _: None)  # warm
    until, before = time.perf_counter() + 3.0, training.tokens
    training.train_to(recipe.token_budget, lambda: time.perf_counter() > until, lambda _: None)
    return max(1, round((training.tokens - before) / 3.0 * seconds / _STEP)) * _STEP


def time_session(store: Path, file: Path, slots: int) -> dict[str, float]:
    """Wall and ideal seconds of our own session, on as many cores as there are slots."""
    began = time.perf_counter()
    _run([sys.executable, "-m", "orchestrator", "run", str(file), "--store", str(store)], slots)
    wall = time.perf_counter() - began
    with Store(store) as opened:
        (row,) = opened.sql(f"select sum({_STEP} / tokens_per_s) as inside from curves").rows()
    return {"wall_s": wall, "ideal_s": row["inside"] / slots}


def time_plain_tune(store: Path, file: Path, slots: int, scratch: Path) -> dict[str, float]:
    """The same of plain Tune."""
    out = scratch / "inside.json"
    began = time.perf_counter()
    _run([sys.executable, "-c", _PLAIN_TUNE, str(store), str(file), str(slots), str(out)], slots)
    return {"wall_s": time.perf_counter() - began, "ideal_s": json.loads(out.read_text()) / slots}


def driver_memory_mib(store: Path, file: Path) -> float:
    """The largest resident size of a session's driver until its sweep is done, in MiB."""
    command = [sys.executable, "-m", "orchestrator", "run", str(file), "--store", str(store)]
    process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment())
    largest = 0
    while process.poll() is None:
        try:
            largest = max(largest, process.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    if process.wait() != 0:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    return largest / 2**20


def _run(command: list[str], slots: int) -> None:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:slots]))
    done = subprocess.run(["taskset", "-c", cores, *command], capture_output=True, text=True, env=_environment())
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ...: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def new_store(folder: Path, corpus: Path) -> Path:
    (folder / "corpora").mkdir(parents=True)
    (folder / "corpora" / "builtin").symlink_to(corpus)
    return folder


def say(name: str, runs: Sequence[Mapping[str, float]]) -> None:
    wall, ideal = (statistics.median(run[key] for run in runs) for key in ("wall_s", "ideal_s"))
    print(f"{name:>10}: {wall:7.1f} s, ideal {ideal:7.1f} s, ratio {wall / ideal:.2f}", flush=True)


def measure(given: argparse.Namespace, scratch: Path) -> Mapping[str, Any]:
    """All figures, each printed as soon as it is there."""
    first = store_with_builtin(given.store, scratch / "first")
    corpus, file = (first / "corpora" / "builtin").resolve(), scratch / "grid.yaml"
    tokens = tokens_of_seconds(first, 1.0)
    print(f"{given.trials} trials of {tokens:,} tokens, {given.slots} slots, {given.repeats} repeats", flush=True)
    memory = {}
    for planned in (10, given.planned):
        file.write_text(grid(planned, _STEP * 4))
        memory[planned] = driver_memory_mib(new_store(scratch / f"memory-{planned}", corpus), file)
        print(f"driver of {planned:,} planned trials: {memory[planned]:,.0f} MiB", flush=True)
    file.write_text(grid(given.trials, tokens))
    ours, plain = [], []
    for repeat in range(given.repeats):  # interleaved
        store = new_store(scratch / f"store-{repeat}", corpus)
        ours.append(time_session(store, file, given.slots))
        say("session", ours)
        plain.append(time_plain_tune(store, file, given.slots, scratch))
        say("plain Tune", plain)
    return {"tokens_a_trial": tokens, "session": ours, "plain_tune": plain, "driver_mib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=108)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--planned", type=int, default=1000)
    parser.add_argument("--store", type=Path, help="a store with the corpus 'builtin'; default: one is made")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geosweep-overhead-") as folder:
        found = measure(given, Path(folder))
    if given.json:
        given.json.write_text(json.dumps({"load": os.getloadavg(), **vars(given), **found}, indent=2, default=str))


if __name__ == "__main__":
    main()
