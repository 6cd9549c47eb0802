"""Read many units at once: on S3 by many threads, on a disk by a process a core.

inbox/<table>/*.parquet -> [units] -> tables, query
in    files of one table
out   the rows of each, as inbox.read_unit gives them
not   faults of another process: what a helper cannot read is read here once more, and here it is said why
A small Parquet file takes half a millisecond, in calls too short for threads: two of them wait for each other and take
longer than one. So thousands of files are shared with helpers, `python -m orchestrator.store.units TABLE`, which get
the files' names as JSON and answer in Arrow's stream format.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pyarrow as pa

from orchestrator.schema import TABLES, Table
from orchestrator.store.files import Files, LocalFiles
from orchestrator.store.inbox import read_unit

_REMOTE_READERS = 32
_UNITS_OF_A_PART = 64
UNITS_OF_A_PROCESS = 2_500  # a helper takes as long to start as 1,000 take to read
_ROWS = b"rows of each unit"


def read_units(files: Files, paths: Sequence[Path], spec: Table) -> dict[Path, pa.Table]:
    """As inbox.read_unit, many files at once; raises as it does."""
    if files.remote:
        parts = _split(paths, _UNITS_OF_A_PART)
        with ThreadPoolExecutor(_REMOTE_READERS) as pool:
            units = [unit for part in pool.map(lambda part: _read(files, part, spec), parts) for unit in part]
    else:
        units = _read_with_helpers(files, paths, spec)
    return dict(zip(paths, units, strict=True))


def join_units(units: Sequence[pa.Table]) -> tuple[pa.Table, list[pa.Table]]:
    """The rows of some units as one table, and the units as parts of its memory: alone, each takes 40 kB."""
    whole = pa.concat_tables(units).combine_chunks()
    return whole, _cut(whole, [unit.num_rows for unit in units])


def _split(paths: Sequence[Path], size: int) -> list[Sequence[Path]]:
    return [paths[at : at + size] for at in range(0, len(paths), size)]


def _cut(whole: pa.Table, rows: Sequence[int]) -> list[pa.Table]:
    return [whole.slice(end - count, count) for end, count in zip(accumulate(rows), rows, strict=True)]


def _read(files: Files, paths: Sequence[Path], spec: Table) -> list[pa.Table]:
    parts = _split(paths, _UNITS_OF_A_PART)
    return [unit for part in parts for unit in join_units([read_unit(files, path, spec) for path in part])[1]]


def _read_with_helpers(files: Files, paths: Sequence[Path], spec: Table) -> list[pa.Table]:
    processes = max(1, min(len(os.sched_getaffinity(0)), len(paths) // UNITS_OF_A_PROCESS))
    mine, *others = _split(paths, -(-len(paths) // processes)) if paths else [paths]
    with ExitStack() as running:
        helpers = [running.enter_context(_helper(share, spec)) for share in others]
        units = _read(files, mine, spec)
        for share, helper in zip(others, helpers, strict=True):
            units += helper() or _read(files, share, spec)
    return units


@contextmanager
def _helper(paths: Sequence[Path], spec: Table) -> Iterator[Callable[[], list[pa.Table] | None]]:
    """A process that reads some units; the function waits for it and returns them, or None if it could not."""
    with TemporaryFile() as asked, TemporaryFile() as answer:  # a pipe would hold it up
        asked.write(json.dumps([str(path) for path in paths]).encode())
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, spec.name],
            stdin=asked,
            stdout=answer,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

        def units() -> list[pa.Table] | None:
            return _answered(answer, spec) if process.wait() == 0 else None

        try:
            yield units
        finally:
            process.kill()
            process.wait()


def _answered(answer: IO[bytes], spec: Table) -> list[pa.Table]:
    answer.seek(0)
    found = pa.ipc.open_stream(answer).read_all().combine_chunks()
    rows = json.loads(found.schema.metadata[_ROWS])
    return _cut(pa.Table.from_arrays(found.columns, schema=spec.schema), rows)


def main() -> None:
    """What a helper does."""
    spec = TABLES[sys.argv[1]]
    paths = [Path(path) for path in json.load(sys.stdin)]
    units = _read(LocalFiles(paths[0].parent), paths, spec)
    rows = json.dumps([unit.num_rows for unit in units])
    found = pa.concat_tables(units).replace_schema_metadata({_ROWS: rows})
    with pa.ipc.new_stream(sys.stdout.buffer, found.schema) as stream:
        stream.write_table(found.combine_chunks())


if __name__ == "__main__":
    main()
