"""What it costs to know which evaluations are owed: the first look at the store, and a poll of a session.

    python -m benchmarks.ledger [--counts 1000 10000 100000] [--repeats 5] [--json FILE]

So many evaluations are asked for, two of each checkpoint; of every second checkpoint they are in the store. The first
look asks about all of them. A poll comes five times a second, so it may cost only what is new: nothing, or the two
evaluations of one more checkpoint. Median CPU seconds of the driver; nothing is evaluated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from evaluators.config import GeometrySettings
from orchestrator.evals import Ledger
from orchestrator.plan import Evaluation
from orchestrator.schema import BOOL, CHECKPOINTS, METRICS, STRING, TIME, UNIT_KEY, Table
from orchestrator.store.committer import Committer
from orchestrator.store.inbox import key_of
from orchestrator.store.layout import StoreLayout, create_or_open
from trainers.checkpoint import MANIFEST

EVALUATORS = ("geometry", "loss")
SETTINGS = GeometrySettings()


def evaluations(count: int) -> Iterator[Evaluation]:
    """Asked of count / 2 segments, called 0, 1, ...; a segment's checkpoint has the digest of its name."""
    for number in range(count // len(EVALUATORS)):
        for evaluator in EVALUATORS:
            named: dict[str, Any] = {"evaluator": evaluator, "version": 1, "settings_digest": "s"}
            yield Evaluation(segment=str(number), tokens=1, settings=SETTINGS, **named)


def fill(layout: StoreLayout, asked: list[Evaluation]) -> None:
    """Rows of every checkpoint, folders of those that owe something, one value of each evaluation that is done."""
    segments = list(dict.fromkeys(evaluation.segment for evaluation in asked))
    committer = Committer(layout)
    made = [{"checkpoint": s, "segment": s, "unit_key": key_of(CHECKPOINTS, (s, s))} for s in segments]
    committer.load("checkpoints", table(CHECKPOINTS, made))
    done = [e for e in asked if int(e.segment) % 2]
    values = [{"checkpoint": e.segment, "segment": e.segment, "unit_key": key_of(METRICS, identity(e))} for e in done]
    committer.load("metrics", table(METRICS, values))
    for segment in segments:
        if int(segment) % 2 == 0:
            folder = layout.checkpoint(segment, 1)
            folder.mkdir(parents=True)
            (folder / MANIFEST).touch()


def identity(evaluation: Evaluation) -> tuple[str, str, str, int]:
    return (evaluation.segment, evaluation.evaluator, evaluation.settings_digest, evaluation.version)


def table(spec: Table, given: list[dict[str, Any]]) -> pa.Table:
    """Rows of a folded table; what is not given holds one value."""
    fill_in: dict[Any, Any] = {STRING: "any", BOOL: False, TIME: datetime(2026, 1, 1, tzinfo=UTC)}
    plain = {column.name: fill_in.get(column.type, 0) for column in spec.columns}
    assert UNIT_KEY.name in given[0]
    return pa.Table.from_pylist([{**plain, **row} for row in given], schema=spec.folded_schema)


def cpu_seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def measured(root: Path, count: int, repeats: int) -> dict[str, float]:
    """CPU seconds of the first look, of a poll that finds nothing new, and of one that finds one checkpoint new."""
    layout, asked = create_or_open(root), list(evaluations(count))
    fill(layout, asked)
    segments = list(dict.fromkeys(evaluation.segment for evaluation in asked))
    later, committed = segments[: 2 * repeats], set(segments[2 * repeats :])
    ledger = Ledger(layout, asked)
    first = cpu_seconds(lambda: ledger.owed(committed))
    nothing = statistics.median(cpu_seconds(lambda: ledger.news(committed)) for _ in range(repeats))
    one = []
    for segment in later:
        committed.add(segment)
        one.append(cpu_seconds(lambda: ledger.news(committed)))
    everything = statistics.median(cpu_seconds(lambda: ledger.owed(committed)) for _ in range(repeats))
    return {"first look": first, "nothing new": nothing, "one new": statistics.median(one), "all again": everything}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print("CPU ms; 'all again' is what each poll would cost if it asked about everything")
    found = []
    for count in given.counts:
        with tempfile.TemporaryDirectory(prefix="geosweep-ledger-") as folder:
            row = measured(Path(folder) / "store", count, given.repeats)
        found.append({"evaluations": count, "seconds": row})
        print(
            f"{count:>9,} evaluations: " + ", ".join(f"{what} {s * 1000:,.2f}" for what, s in row.items()), flush=True
        )
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
