"""How long `geosweep status` and `trial` take on a large sweep: 1,000 trials with 100 checkpoints each.

    python -m benchmarks.status [--trials N] [--checkpoints N] [--unfolded N] [--repeats N] [--json FILE]

The store is made by the product's own writers: a real sweep file and plan, submitted; the rows of 100,000 checkpoints
and 200,000 evaluations go through the committer, the last units lie unfolded in the inboxes, as beside a session. Each
command is timed from its start to its end in a process of its own, the commands interleaved; the median counts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from orchestrator.plan import Evaluation, load_plan
from orchestrator.schema import BOOL, DOUBLE, INT, STRING, TABLES
from orchestrator.sharing import Segment
from orchestrator.store.committer import Committer
from orchestrator.store.inbox import key_of, publish
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.sweeps import submit

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
VALUES = {"geometry": 20, "loss": 12}  # metric values of one evaluation
LIMIT_S = 2.0
PART = 20_000  # units of one commit


def sweep_file(trials: int, checkpoints: int) -> str:
    step = 32 * 2048
    return yaml.safe_dump(
        {
            "name": "large",
            "question": "how long does an answer take?",
            "base": {"preset": "ladder", "scale": "14M", "batch_size": 32, "token_budget": checkpoints * step}
            | {"schedule": {"shape": "cosine", "warmup_tokens": 0}},
            "grids": [{"name": "seeds", "axes": {"seed": list(range(trials))}}],
            "checkpoints": {"every_tokens": step},
            "evaluations": [{"evaluator": "geometry"}, {"evaluator": "loss", "suite": "builtin"}],
        }
    )


def make_store(root: Path, trials: int, checkpoints: int, unfolded: int) -> StoreLayout:
    """A store where everything is done but the last trial. unfolded: units that lie in the inbox of each table"""
    text = sweep_file(trials, checkpoints)
    _, plan = load_plan(text, "large.yaml", {})
    layout = create_or_open(root)
    submit(layout, text, plan)
    committer = Committer(layout)
    for table in ("trials", "chains", "asked", "events"):
        committer.fold(table)
    last = set(plan.trials[-1].chain)
    done = [segment for segment in plan.segments if segment.id not in last]
    evaluated = [e for e in plan.evaluations if e.segment not in last]
    _load(committer, "checkpoints", done, checkpoint_rows)
    _load(committer, "segments", done, segment_rows)
    _load(committer, "metrics", evaluated[:-unfolded] if unfolded else evaluated, metric_rows)
    for evaluation in evaluated[-unfolded:] if unfolded else ():
        publish(layout, "metrics", metric_rows([evaluation]).drop_columns(["unit_key"]).to_pylist())
    return layout


def _load(committer: Committer, table: str, units: Sequence[Any], rows: Any) -> None:
    for part in range(0, len(units), PART):
        committer.load(table, rows(units[part : part + PART]))
    committer.compact(table)


def checkpoint_of(segment: str) -> str:
    return hashlib.sha256(segment.encode()).hexdigest()


def checkpoint_rows(segments: Sequence[Segment]) -> pa.Table:
    names = [checkpoint_of(segment.id) for segment in segments]
    keys = [key_of(TABLES["checkpoints"], [name, segment.id]) for name, segment in zip(names, segments, strict=True)]
    tokens = [segment.to_tokens for segment in segments]
    return bulk("checkpoints", keys, checkpoint=names, segment=[s.id for s in segments], tokens=tokens)


def segment_rows(segments: Sequence[Segment]) -> pa.Table:
    ids = [segment.id for segment in segments]
    keys = [key_of(TABLES["segments"], [id, "committed", None]) for id in ids]
    ends = {"from_tokens": [s.from_tokens for s in segments], "to_tokens": [s.to_tokens for s in segments]}
    return bulk("segments", keys, segment=ids, state=["committed"] * len(ids), **ends)


def metric_rows(evaluations: Sequence[Evaluation]) -> pa.Table:
    spec = TABLES["metrics"]
    counts = np.array([VALUES[e.evaluator] for e in evaluations])
    of = pa.array(np.repeat(np.arange(len(evaluations)), counts))
    number = np.concatenate([np.arange(count) for count in counts])
    names = [checkpoint_of(e.segment) for e in evaluations]
    keys = [
        key_of(spec, [name, e.evaluator, e.settings_digest, e.version])
        for name, e in zip(names, evaluations, strict=True)
    ]
    per_evaluation = {
        "checkpoint": names,
        "segment": [e.segment for e in evaluations],
        "tokens": [e.tokens for e in evaluations],
        "evaluator": [e.evaluator for e in evaluations],
        "settings_digest": [e.settings_digest for e in evaluations],
        "evaluator_version": [e.version for e in evaluations],
    }
    repeated = {name: pa.array(values).take(of) for name, values in per_evaluation.items()}
    metrics = pa.array([f"metric_{k}" for k in range(max(VALUES.values()))]).take(pa.array(number))
    value = pa.array(np.random.default_rng(0).normal(size=len(number)))
    return bulk("metrics", pa.array(keys).take(of), **repeated, metric=metrics, value=value)


def bulk(table: str, keys: Any, **given: Any) -> pa.Table:
    """Rows of a folded table; a column that is not given holds one value."""
    spec = TABLES[table]
    plain = {STRING: "any", INT: 0, DOUBLE: 0.5, BOOL: False}
    constant = {c.name: None if c.nullable else plain.get(c.type, NOON) for c in spec.columns}
    columns = {
        c.name: given.get(c.name, pa.repeat(pa.scalar(constant[c.name], c.type), len(keys))) for c in spec.columns
    }
    return pa.table({**columns, "unit_key": keys}, schema=spec.folded_schema)


# --- measuring ------------------------------------------------------------------------------------------------------


def timed(arguments: Sequence[str]) -> dict[str, float]:
    """Wall and CPU seconds of one command, from its start to its end."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "orchestrator", *arguments], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"wall_s": wall, "cpu_s": cpu}


def measure(stores: dict[str, Path], trial: str, repeats: int) -> dict[str, dict[str, float]]:
    commands = {
        f"{command[0]}, {name}": [*command, "--store", str(root)]
        for name, root in stores.items()
        for command in (["status", "large"], ["trial", trial])
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            found[name].append(timed(command))
    return {
        name: {key: statistics.median(one[key] for one in all_) for key in ("wall_s", "cpu_s")}
        for name, all_ in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--checkpoints", type=int, default=100)
    parser.add_argument(
        "--unfolded", type=int, default=500, help="units in the second store's inbox: as many as one fold"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="geosweep-bench-") as folder:
        stores = {"folded": Path(folder, "folded"), f"{given.unfolded:,} unfolded": Path(folder, "unfolded")}
        for root, unfolded in zip(stores.values(), (0, given.unfolded), strict=True):
            make_store(root, given.trials, given.checkpoints, unfolded)
        _, plan = load_plan(sweep_file(given.trials, given.checkpoints), "large.yaml", {})
        found = measure(stores, plan.trials[0].id, given.repeats)
    print(f"{given.trials:,} trials x {given.checkpoints:,} checkpoints; load {os.getloadavg()[0]:.1f}")
    for name, numbers in found.items():
        limit = f"   limit {LIMIT_S:g} s" * name.startswith("status")
        print(f"{name:<28} {numbers['wall_s']:6.2f} s, {numbers['cpu_s']:6.2f} s CPU{limit}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
