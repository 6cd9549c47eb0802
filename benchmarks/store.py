"""Measure the store: acknowledgements beside straight Delta, queries over millions of rows, growth.

    python -m benchmarks.store [--quick] [--folder DIR] [acknowledgements] [queries]

Each line is one measurement with its limit, where it has one. The machine's load moves the seconds, so the ratios and
the exponent are what to compare between machines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing as mp
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake
from deltalake.exceptions import DeltaError

from orchestrator.schema import BOOL, DOUBLE, INT, STRING, STRINGS, TABLES, Table
from orchestrator.store.committer import Committer, committing
from orchestrator.store.inbox import conform, encode, publish, unit_key
from orchestrator.store.layout import StoreLayout, create_or_open

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
ROWS_PER_UNIT = 20
METRICS_PER_CHECKPOINT = 50
CHECKPOINTS_PER_TRIAL = 50
STEPS_PER_SEGMENT = 100

QUERIES = {
    "latest value of one metric per trial": """
        select c.trial, arg_max(m.value, m.tokens) as value from metrics m join chains c using (segment)
        where m.metric = 'metric_3' group by c.trial""",
    "one trial's curve": """
        select step, loss from curves where segment in (select segment from chains where trial = 'trial-7')
        order by step""",
    "two metrics at the last checkpoint": """
        select c.trial, a.value as a, b.value as b
        from trials t join chains c using (sweep, revision, trial)
        join metrics a using (segment) join metrics b using (segment)
        where c.to_tokens = t.token_budget and a.metric = 'metric_3' and b.metric = 'metric_4'""",
}


def say(what: str, found: str, limit: str = "") -> None:
    print(f"{what:<58} {found:>22}" + f"   limit {limit}" * bool(limit), flush=True)


# --- acknowledgements ------------------------------------------------------------------------------------------------


def unit(writer: int, number: int) -> pa.Table:
    """The rows of one evaluation."""
    rows = [
        _row("metrics", checkpoint=f"c{writer}-{number}", metric=f"m{i}", value=i / 7) for i in range(ROWS_PER_UNIT)
    ]
    return pa.Table.from_pylist(rows, schema=TABLES["metrics"].schema)


def put_down(root: str, writer: int, seconds: float, ready: Any, go: Any, told: Any) -> None:
    layout = StoreLayout(Path(root))
    _repeat(lambda number: publish(layout, "metrics", unit(writer, number)), seconds, ready, go, told)


def append_to_delta(root: str, writer: int, seconds: float, ready: Any, go: Any, told: Any) -> None:
    def append(number: int) -> None:
        while True:
            try:
                return write_deltalake(root, unit(writer, number), mode="append")
            except DeltaError:  # other writers were faster too often
                continue

    _repeat(append, seconds, ready, go, told)


def _repeat(step: Callable[[int], object], seconds: float, ready: Any, go: Any, told: Any) -> None:
    step(0)  # what is loaded with the first one is not measured
    ready.release()
    go.wait()
    until = time.monotonic() + seconds
    took: list[float] = []
    while (began := time.monotonic()) < until:
        step(len(took) + 1)
        took.append(time.monotonic() - began)
    told.put(took)


def acknowledgements(folder: Path, quick: bool) -> None:
    seconds = 8.0 if quick else 20.0
    for writers in (1, 4, 16):
        layout = create_or_open(folder / f"store-{writers}")
        with committing(layout, print):
            ours = _measure(put_down, str(layout.root), writers, seconds)
        _report(f"inbox, {writers} writers, a committer beside them", ours, seconds)
        theirs = _measure(append_to_delta, str(folder / f"delta-{writers}"), writers, seconds)
        _report(f"straight Delta, {writers} writers", theirs, seconds)
        ratio = len(ours) / max(1, len(theirs))
        say(f"ratio at {writers} writers", f"{ratio:.1f}", ">= 10" if writers == 16 else "")


def _measure(body: Callable[..., None], root: str, writers: int, seconds: float) -> list[float]:
    context = mp.get_context("spawn")
    ready, go, told = context.Semaphore(0), context.Event(), context.Queue()
    processes = [context.Process(target=body, args=(root, i, seconds, ready, go, told)) for i in range(writers)]
    for process in processes:
        process.start()
    for _ in processes:
        ready.acquire()
    go.set()
    took = [t for _ in processes for t in told.get()]
    for process in processes:
        process.join()
    return took


def _report(what: str, took: list[float], seconds: float) -> None:
    p99 = statistics.quantiles(took, n=100)[98] if len(took) > 1 else math.nan
    say(what, f"{len(took) / seconds:.1f}/s, p99 {p99:.2f} s")


# --- queries ---------------------------------------------------------------------------------------------------------


def queries(folder: Path, quick: bool) -> None:
    sizes = (20_000, 200_000) if quick else (100_000, 1_000_000, 5_000_000)
    unfolded = 1_000 if quick else 20_000
    warm: dict[int, dict[str, float]] = {}
    for size in sizes:
        layout = create_or_open(folder / f"rows-{size}")
        generate(layout, checkpoints=size // METRICS_PER_CHECKPOINT)
        warm[size] = _ask(layout, f"{size:,} metric rows", ("1 s", "2 s"))
    for what in QUERIES:
        small, large = warm[sizes[0]][what], warm[sizes[-1]][what]
        exponent = math.log(large / small) / math.log(sizes[-1] / sizes[0])
        say(f"growth of '{what}'", f"exponent {exponent:.2f}", "<= 1")
    add_unfolded(layout, unfolded)
    _ask(layout, f"with {unfolded:,} unfolded units", ("", "15 s"))
    began = time.monotonic()
    Committer(layout).everything()
    say("fold and compact all of it", f"{time.monotonic() - began:.1f} s")
    _ask(layout, "after that", ("1 s", "2 s"))


def _ask(layout: StoreLayout, what: str, limits: tuple[str, str]) -> dict[str, float]:
    """Each query in a process of its own: opening and first answer with cold files, then the best of three."""
    found = {}
    for name, text in QUERIES.items():
        _forget_pages(layout.root)
        command = [sys.executable, "-m", "benchmarks.store", "--ask", text, "--folder", str(layout.root)]
        answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        say(f"{what}: {name}, cold", f"{answer['cold']:.2f} s ({answer['cpu']:.1f} s CPU)", limits[1])
        say(f"{what}: {name}, warm", f"{answer['warm']:.3f} s", limits[0])
        say(f"{what}: {name}, memory", f"{answer['memory'] / 2**20:.2f} GiB", "1 GiB")
        found[name] = answer["warm"]
    return found


def ask(root: Path, text: str) -> None:
    from orchestrator.query import Store

    began, cpu = time.monotonic(), time.process_time()
    with Store(root) as store:
        rows = len(store.sql(text))
        cold, cpu = time.monotonic() - began, time.process_time() - cpu
        warm = []
        for _ in range(3):
            began = time.monotonic()
            store.sql(text)
            warm.append(time.monotonic() - began)
    # Not getrusage: after a fork and exec it still counts the memory of the process that generated the rows.
    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"cold": cold, "cpu": cpu, "warm": min(warm), "rows": rows, "memory": memory}))


def _forget_pages(root: Path) -> None:
    for path in root.rglob("*.parquet"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# --- rows ------------------------------------------------------------------------------------------------------------


def generate(layout: StoreLayout, checkpoints: int) -> None:
    """A study of trials with 50 checkpoints of 50 metrics and 100 steps each, folded, in one data file per table."""
    committer = Committer(layout)
    trials = checkpoints // CHECKPOINTS_PER_TRIAL
    budget = CHECKPOINTS_PER_TRIAL * 10**6
    publish(layout, "events", [_row("events", event="e", kind="sweep_submitted", sweep="s", detail="r")])
    named = {"sweep": "s", "revision": "r"}
    publish(layout, "trials", [_row("trials", **named, trial=f"trial-{i}", token_budget=budget) for i in range(trials)])
    chains = [
        _row("chains", **named, trial=f"trial-{i // 50}", position=i % 50, segment=_segment(i), to_tokens=_tokens(i))
        for i in range(checkpoints)
    ]
    publish(layout, "chains", chains)
    for table in ("events", "trials", "chains"):
        committer.fold(table)
    for table, rows in (("checkpoints", _checkpoints), ("metrics", _metrics), ("curves", _curves)):
        for part in range(0, checkpoints, 20_000):
            committer.load(table, rows(np.arange(part, min(part + 20_000, checkpoints))))
        committer.compact(table)


def add_unfolded(layout: StoreLayout, units: int) -> None:
    """Units as writers put them down, without the wait for the disk."""
    spec = TABLES["metrics"]
    for i in range(units):
        rows = [
            _row("metrics", checkpoint=f"new-{i}", segment=_segment(i), metric=f"metric_{k}", value=0.5) for k in (3, 4)
        ]
        table = conform(spec, rows)
        (layout.inbox("metrics") / f"{unit_key(spec, table)}.parquet").write_bytes(encode(table))


def _segment(i: int) -> str:
    return f"olmo-{hashlib.md5(str(i).encode()).hexdigest()[:12]}"


def _tokens(i: int) -> int:
    return (i % CHECKPOINTS_PER_TRIAL + 1) * 10**6


def _row(table: str, **given: Any) -> dict[str, Any]:
    any_value: dict[pa.DataType, Any] = {STRING: "any", INT: 0, DOUBLE: 0.5, BOOL: True, STRINGS: ["grid"]}
    return {c.name: None if c.nullable else any_value.get(c.type, NOON) for c in TABLES[table].columns} | given


def _bulk(spec: Table, rows: int, **given: Any) -> pa.Table:
    """Rows of a folded table; a column that is not given holds one value."""
    plain = _row(spec.name)
    columns = {c.name: given.get(c.name, pa.repeat(pa.scalar(plain[c.name], c.type), rows)) for c in spec.columns}
    return pa.table({**columns, "unit_key": given["unit_key"]}, schema=spec.folded_schema)


def _named(values: list[str], index: Any) -> pa.Array:
    return pa.array(values).take(pa.array(index))


def _checkpoints(ids: Any) -> pa.Table:
    names = [hashlib.sha256(str(i).encode()).hexdigest() for i in ids]
    segments = pa.array([_segment(i) for i in ids])
    tokens = pa.array([_tokens(i) for i in ids])
    return _bulk(
        TABLES["checkpoints"], len(ids), checkpoint=pa.array(names), segment=segments, tokens=tokens, unit_key=segments
    )


def _metrics(ids: Any) -> pa.Table:
    names = [hashlib.sha256(str(i).encode()).hexdigest() for i in ids]
    of = np.repeat(np.arange(len(ids)), METRICS_PER_CHECKPOINT)
    metric = np.tile(np.arange(METRICS_PER_CHECKPOINT), len(ids))
    half = METRICS_PER_CHECKPOINT // 2
    keys = [f"{name[:60]}-{name[a : a + 24]}" for name in names for a in (0, 30)]  # two evaluations a checkpoint
    return _bulk(
        TABLES["metrics"],
        len(of),
        checkpoint=_named(names, of),
        segment=_named([_segment(i) for i in ids], of),
        tokens=pa.array([_tokens(i) for i in ids]).take(pa.array(of)),
        evaluator=_named(["geometry", "loss"], metric // half),
        metric=_named([f"metric_{k}" for k in range(METRICS_PER_CHECKPOINT)], metric),
        value=pa.array(np.random.default_rng(int(ids[0])).normal(size=len(of))),
        unit_key=_named(keys, 2 * of + metric // half),
    )


def _curves(ids: Any) -> pa.Table:
    of = np.repeat(np.arange(len(ids)), STEPS_PER_SEGMENT)
    step = np.tile(np.arange(STEPS_PER_SEGMENT), len(ids)) + (ids % CHECKPOINTS_PER_TRIAL)[of] * STEPS_PER_SEGMENT
    loss = np.random.default_rng(int(ids[0])).normal(3.0, 0.1, size=len(of))
    segments = [_segment(i) for i in ids]
    return _bulk(
        TABLES["curves"],
        len(of),
        segment=_named(segments, of),
        step=pa.array(step),
        tokens=pa.array(step * 10_000),
        loss=pa.array(loss),
        unit_key=_named(segments, of),
    )


def _parts() -> Iterator[tuple[str, Callable[[Path, bool], None]]]:
    yield "acknowledgements", acknowledgements
    yield "queries", queries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"default: all of {', '.join(name for name, _ in _parts())}")
    parser.add_argument("--quick", action="store_true", help="small sizes, a minute in all")
    parser.add_argument("--folder", type=Path, help="where to measure; default: a temporary folder")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        return ask(given.folder, given.ask)
    folder = Path(tempfile.mkdtemp(prefix="geosweep-bench-", dir=given.folder))
    try:
        for name, part in _parts():
            if not given.parts or name in given.parts:
                part(folder, given.quick)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
