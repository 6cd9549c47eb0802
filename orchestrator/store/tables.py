"""Follow one table: the data files of its Delta table, and the units in its inbox that are not in them yet.

store/inbox.py, store/committer.py -> [tables] -> query, registry, evals, the committer itself
in    inbox/<table>/*.parquet, tables/<table>/
out   together, every acknowledged row exactly once
not   changing anything
A unit is put into the Delta table before it leaves the inbox. So the inbox is listed first and the log read second:
what is folded in between is seen in both, and `unit_key` tells.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from orchestrator.schema import TABLES, UNIT_KEY, Table
from orchestrator.store.durable import storage_faults
from orchestrator.store.files import Files
from orchestrator.store.inbox import (
    RESTORE,
    UNREADABLE,
    Rows,
    StoreConflict,
    UnitGone,
    conform,
    differences,
    list_units,
    publish,
    refuse_extension_types,
    unit_key,
)
from orchestrator.store.layout import StoreLayout
from orchestrator.store.units import read_units
from trainers.errors import EnvironmentFault

Keys: TypeAlias = Any  # a pyarrow array of unit keys

_DECORATION = re.compile(r"\x1b\[[0-9;]*m|↳")
REPLACED_S = 3600.0
LOADS_PER_OPENING = 25  # a DeltaTable grows slower with each commit that it takes in


class StoredTable:
    """One table of a store as of the last `refresh`.

    files     data files of the Delta table, in no order
    version   of the Delta table; -1 while there is none
    waiting   every file in the inbox
    unfolded  those whose unit is not in the Delta table
    storage   where the files lie
    """

    def __init__(self, layout: StoreLayout, table: str) -> None:
        self.spec: Table = TABLES[table]
        self.folder = layout.table(table)
        self.files: tuple[Path, ...] = ()
        self.rows: dict[Path, int] = {}
        self.version = -1
        self.waiting: tuple[Path, ...] = ()
        self.unfolded: tuple[Path, ...] = ()
        self.storage = layout.files
        self._layout = layout
        self._loads = 0
        self._delta: DeltaTable | None = None
        self._options: Mapping[str, str] | None = None  # credentials may run out
        self._keys: dict[Path, Keys] = {}

    def refresh(self) -> None:
        """Look again. raises EnvironmentFault (corrupt_file) that names a log or data file that cannot be read"""
        self.waiting = tuple(list_units(self._layout, self.spec.name))  # before the log
        self.load()
        folded = self._folded([path.stem for path in self.waiting])
        self.unfolded = tuple(path for path in self.waiting if path.stem not in folded)

    def have(self, keys: Sequence[str]) -> set[str]:
        """Which of these units are stored, folded or not."""
        waiting = self._waiting(keys)
        missing = [key for key in keys if key not in waiting]
        if missing:
            self.load()
        return waiting | self._folded(missing)

    def folded_units(self, keys: Collection[str]) -> dict[str, pa.Table]:
        """The rows of those of these units that are in the Delta table at `version`, sorted by key as in the inbox."""
        wanted = _array_of(sorted(keys))
        files = [path for path in self.files if pc.any(pc.is_in(wanted, value_set=self._keys_of(path))).as_py()]
        rows = [read_data_file(self.storage, path, self.spec, None, wanted) for path in files]
        found: dict[str, pa.Table] = {}
        for part in rows:
            for key in part[UNIT_KEY.name].unique().to_pylist():
                unit = part.filter(pc.field(UNIT_KEY.name) == key).drop_columns([UNIT_KEY.name])
                found[key] = unit.sort_by([(name, "ascending") for name in self.spec.key])
        return found

    def reading(self, read: Callable[[], Any]) -> Any:
        """What `read` returns; refreshed and called again while files leave between listing and reading."""
        while True:
            self.refresh()
            try:
                return read()
            except UnitGone:
                continue
            except DataFileGone:
                if not self.was_compacted():
                    raise

    def delta(self) -> DeltaTable:
        """The Delta table at `version`; there is one."""
        assert self._delta is not None
        return self._delta

    def load(self) -> None:
        """Read the log only: `files`, `rows` and `version` are then the newest. raises as refresh"""
        try:
            where, options = self.storage.name(self.folder), self.storage.options
            if self._delta is None or self._loads >= LOADS_PER_OPENING or options != self._options:
                if not DeltaTable.is_deltatable(where, options):
                    return
                self._delta, self._loads = DeltaTable(where, storage_options=options), 0
                self._options = options
            else:
                self._delta.update_incremental()
            if self._delta.version() == self.version:
                return
            actions = pa.RecordBatchReader.from_stream(self._delta.get_add_actions())  # pa.table would load pandas
            found = actions.read_all().select(["path", "num_records"]).to_pylist()
        except (DeltaError, OSError, ValueError) as error:
            what = f"{self.folder / '_delta_log'}: cannot be read ({reason(error)})"
            raise EnvironmentFault("corrupt_file", what, "mend it: geosweep store compact") from error
        self._loads += 1
        self.rows = {self.folder / add["path"]: add["num_records"] for add in found}
        self.files = tuple(self.rows)
        self.version = self._delta.version()
        self._keys = {path: keys for path, keys in self._keys.items() if path in self.rows}
        if self.storage.remote:
            self._forget_replaced()

    def _forget_replaced(self) -> None:
        """Remove this machine's copies of data files that were compacted away an hour ago: nobody reads them now."""
        for path in self.folder.glob("*.parquet"):
            with suppress(FileNotFoundError):
                if path not in self.rows and time.time() - path.stat().st_mtime > REPLACED_S:
                    path.unlink()

    def _waiting(self, keys: Sequence[str]) -> set[str]:
        """Which of these units are in the inbox. On S3 one listing is cheaper than a look at each."""
        if self.storage.remote:
            return {path.stem for path in list_units(self._layout, self.spec.name)} & set(keys)
        inbox = self._layout.inbox(self.spec.name)
        return {key for key in keys if self.storage.exists(inbox / f"{key}.parquet")}

    def _folded(self, keys: Collection[str]) -> set[str]:
        if not keys:
            return set()
        wanted = _array_of(sorted(keys))
        while True:
            try:
                there = [pc.filter(wanted, pc.is_in(wanted, value_set=self._keys_of(path))) for path in self.files]
            except DataFileGone:
                if not self.was_compacted():
                    raise
                continue
            return {key for keys_of_file in there for key in keys_of_file.to_pylist()}

    def was_compacted(self) -> bool:
        """Load the log again, since a data file is missing; False if it is the same: then somebody removed the file."""
        version = self.version
        self.load()
        return self.version != version

    def _keys_of(self, path: Path) -> Keys:
        if path not in self._keys:
            self._keys[path] = distinct_keys(self.storage, path)
        return self._keys[path]


def publish_once(layout: StoreLayout, table: str, rows: Rows) -> None:
    """As inbox.publish, for a unit that may be in the Delta table already: then nothing is put down again.

    raises  as inbox.publish; StoreConflict also when the folded unit has another result
    """
    stored = StoredTable(layout, table)
    unit = conform(stored.spec, rows)
    key = unit_key(stored.spec, unit)

    def read() -> pa.Table | None:
        return stored.folded_units([key]).get(key)

    folded = stored.reading(read)
    if folded is None:
        publish(layout, table, unit)
    elif found := differences(stored.spec, stored=folded, given=unit):
        raise StoreConflict(stored.folder, found)


class DataFileGone(EnvironmentFault):
    """A data file of a Delta table is not there; after a compaction that is as it should be."""


def read_rows(layout: StoreLayout, table: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Every row of a table that is small enough for memory, these columns of it."""
    stored = StoredTable(layout, table)

    def read() -> list[dict[str, Any]]:
        parts = [read_data_file(layout.files, path, stored.spec, columns) for path in stored.files]
        units = read_units(layout.files, stored.unfolded, stored.spec)
        parts += [unit.select(columns) for unit in units.values()]
        return [row for part in parts for row in part.to_pylist()]

    rows: list[dict[str, Any]] = stored.reading(read)
    return rows


def read_data_file(
    files: Files, path: Path, spec: Table, columns: Sequence[str] | None = None, units: Keys | None = None
) -> pa.Table:
    """One data file of a Delta table, or these columns of it, or the rows of these units; its content is checked.

    raises  EnvironmentFault (corrupt_file) that names the file; DataFileGone when there is none
    """
    check_data_file(files, path)
    names = spec.folded_schema.names if columns is None else list(columns)
    rows = _read(path, names, units)
    if not rows.schema.equals(pa.schema([spec.folded_schema.field(name) for name in names])):
        raise EnvironmentFault("corrupt_file", f"{path}: its columns are not those of table {spec.name}", RESTORE)
    return rows


def distinct_keys(files: Files, path: Path) -> Keys:
    """Keys of the units whose rows are in a data file. raises as read_data_file"""
    check_data_file(files, path)
    groups = _read(path, [UNIT_KEY.name], dictionaries=[UNIT_KEY.name]).column(0).chunks
    return pa.chunked_array([group.dictionary for group in groups], pa.string()).unique()


def _array_of(keys: Sequence[str]) -> Keys:
    """As pa.array, which would load pandas (0.3 s) to see whether the list is one of its own."""
    encoded = [key.encode() for key in keys]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.StringArray.from_buffers(len(keys), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded)))


def check_data_file(files: Files, path: Path) -> None:
    """A data file is here, is what its name says, and safe to open with pyarrow.

    raises  EnvironmentFault (corrupt_file) that names the file; DataFileGone when there is none
    """
    fetch_data_file(files, path)
    with storage_faults(path, "the table was not read"), path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        refuse_extension_types(path, file)
    if found != path.stem.partition("-")[0]:
        raise EnvironmentFault("corrupt_file", f"{path}: damaged (its sha256 is not the one in its name)", RESTORE)


def fetch_data_file(files: Files, path: Path) -> None:
    """Have a data file on this machine. raises DataFileGone when there is none"""
    try:
        files.fetch(path)
    except FileNotFoundError as error:
        raise DataFileGone("corrupt_file", f"{path}: the file is missing", RESTORE) from error


def reason(error: Exception) -> str:
    """What delta-rs or DuckDB says, on one line and without colours."""
    return " ".join(_DECORATION.sub(" ", str(error)).split())


def _read(path: Path, columns: Sequence[str], units: Keys | None = None, dictionaries: Sequence[str] = ()) -> pa.Table:
    checked = {"memory_map": True, "page_checksum_verification": True, "read_dictionary": list(dictionaries)}
    try:
        if units is None:  # not read_table: it would load pandas
            with pq.ParquetFile(path, **checked) as file:
                return file.read(list(columns))
        return pq.read_table(path, columns=list(columns), filters=pc.field(UNIT_KEY.name).isin(units), **checked)
    except FileNotFoundError as error:
        raise DataFileGone("corrupt_file", f"{path}: the file is missing", RESTORE) from error
    except UNREADABLE as error:
        raise EnvironmentFault("corrupt_file", f"{path}: damaged ({error})", RESTORE) from error
