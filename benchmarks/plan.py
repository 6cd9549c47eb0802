"""How planning grows: seconds and memory for 100 to 10,000 trials, and the exponent of the growth.

    python -m benchmarks.plan [--json FILE]

Each size is planned in a process of its own, several times, the sizes interleaved; the median counts. The grid is a
factorial of seeds, weight decays, batch sizes and five WSD budgets, with six checkpoints and two evaluators each. The
last line times `geosweep plan study-text --json` from its start: 108 cells.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZES = (100, 316, 1000, 3162, 10_000)
REPEATS = 3
BASE = {
    "preset": "ladder",
    "scale": "14M",
    "context": 2048,
    "schedule": {"shape": "wsd", "warmup_tokens": 2**22, "decay_fraction": 0.1},
}
BUDGETS = [2**26, 2**27, 2**28, 2**29, 2**30]

_ONE_PLAN = """
import json, resource, sys, time
from orchestrator.plan import make_plan
from orchestrator.spec import SweepSpec
spec = SweepSpec.model_validate_json(sys.stdin.read())
started = time.perf_counter()
plan, problems = make_plan(spec, {})
seconds = time.perf_counter() - started
assert plan is not None, problems
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"trials": len(plan.trials), "segments": len(plan.segments), "seconds": seconds, "mib": peak}))
"""


def sweep_of(trials: int) -> dict[str, Any]:
    """A sweep of about so many trials: 5 weight decays x 4 batch sizes x 5 budgets x as many seeds as it takes."""
    axes = {
        "seed": list(range(max(1, round(trials / 100)))),
        "weight_decay": [0.01, 0.05, 0.1, 0.2, 0.5],
        "batch_size": [32, 64, 128, 256],
        "token_budget": BUDGETS,
    }
    return {
        "name": "benchmark",
        "question": "how does planning grow?",
        "base": BASE,
        "grids": [{"name": "factorial", "axes": axes}],
        "checkpoints": {"at_fractions": [0, 0.1, 0.25, 0.5, 0.75, 1]},
        "evaluations": [{"evaluator": "geometry"}, {"evaluator": "loss", "suite": "builtin"}],
    }


def run(command: list[str], text: str = "") -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GEOSWEEP_STORE": "no-store"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True, env=environment)
    return done.stdout


def measure() -> list[dict[str, Any]]:
    """One row a size: the median of its repeats."""
    samples: dict[int, list[dict[str, Any]]] = {size: [] for size in SIZES}
    for _ in range(REPEATS):
        for size in SIZES:
            samples[size].append(json.loads(run([sys.executable, "-c", _ONE_PLAN], json.dumps(sweep_of(size)))))
    return [
        {**rows[0], "seconds": statistics.median(r["seconds"] for r in rows), "mib": max(r["mib"] for r in rows)}
        for rows in samples.values()
    ]


def exponent(rows: list[dict[str, Any]]) -> float:
    """Slope of log seconds over log trials: 1 is linear, n log n about 1.15 over this range."""
    line = statistics.linear_regression([math.log(r["trials"]) for r in rows], [math.log(r["seconds"]) for r in rows])
    return line.slope


_TIMED = (
    "import subprocess, sys, time; t = time.perf_counter(); subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)"
)


def start_to_end_s() -> tuple[float, float]:
    """Wall and CPU seconds of `geosweep plan study-text --json` with the start of the process; the best of five."""
    code = (
        f"{_TIMED}; w = time.perf_counter() - t; import resource; u = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(w, u.ru_utime + u.ru_stime)"
    )
    command = [sys.executable, "-c", code, sys.executable, "-m", "orchestrator", "plan", "study-text", "--json"]
    samples = [tuple(map(float, run(command).split())) for _ in range(5)]
    return min(wall for wall, _ in samples), min(cpu for _, cpu in samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    given = parser.parse_args()
    rows = measure()
    wall, cpu = start_to_end_s()
    for row in rows:
        print(
            f"{row['trials']:>6,} trials {row['segments']:>7,} segments {row['seconds']:8.3f} s {row['mib']:5.0f} MiB"
        )
    print(f"growth: trials^{exponent(rows):.2f}")
    print(f"geosweep plan study-text --json, start to end: {wall:.2f} s, of which CPU {cpu:.2f} s")
    if given.json:
        given.json.write_text(
            json.dumps({"rows": rows, "exponent": exponent(rows), "start_to_end_s": wall, "cpu_s": cpu})
        )


if __name__ == "__main__":
    main()
