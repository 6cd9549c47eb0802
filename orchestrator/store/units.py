"""Read many units at once: on S3 by many threads, on a disk by a process a core.

inbox/<table>/*.parquet -> [units] -> tables, query
in    files of one table
out   the rows of each, as inbox.read_unit gives them
not   faults of another process: what a helper cannot read is read here once more, and here it is said why
A small Parquet file takes half a millisecond, in calls too short for threads: two of them wait for each other and take
longer than one. So thousands of files are shared with helpers, which are this module too (beside.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from orchestrator.beside import Beside, serve
from orchestrator.schema import TABLES, Table
from orchestrator.store.files import Files, LocalFiles
from orchestrator.store.inbox import read_unit
from trainers.errors import EnvironmentFault

_REMOTE_READERS = 32
_UNITS_OF_A_PART = 64
UNITS_OF_A_PROCESS = 2_500  # a helper takes as long to start as 1,000 take to read


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
        helpers = [running.enter_context(Beside(__name__)) for _ in others]
        for share, helper in zip(others, helpers, strict=True):
            helper.ask((spec.name, share))
        units = _read(files, mine, spec)
        for share, helper in zip(others, helpers, strict=True):
            units += _answered(helper) or _read(files, share, spec)
    return units


def _answered(helper: Beside) -> list[pa.Table] | None:
    """The units of a helper's share; None if it could not read them, or was killed."""
    try:
        answer = helper.answer()
    except RuntimeError:
        return None
    return None if answer is None else _cut(*answer)


def read_share(question: tuple[str, Sequence[Path]]) -> tuple[pa.Table, list[int]] | None:
    """What a helper answers: the rows of these units of a table, and how many each has; None at any fault."""
    table, paths = question
    try:
        units = _read(LocalFiles(paths[0].parent), paths, TABLES[table])
    except EnvironmentFault:
        return None
    return join_units(units)[0], [unit.num_rows for unit in units]


if __name__ == "__main__":
    serve(read_share)
