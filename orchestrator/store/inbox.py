"""Put each finished unit of work down as one immutable Parquet file whose name is its key.

trial, evaluator, driver -> [inbox] -> views.py -> query
in    rows of one unit: one evaluation, one segment's end, one submitted sweep, one piece of a curve
out   inbox/<table>/<key>.parquet, synced; that the file is there is the acknowledgement
not   changing or removing a file (the committer does, once its rows are in the Delta table); the same unit again
      changes nothing, other content under its key is an error
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from orchestrator.schema import BOOL, DOUBLE, FORMAT_VERSION, INT, STRING, STRINGS, TABLES, TIME, Column, Table
from orchestrator.store.files import Files
from orchestrator.store.layout import StoreLayout
from trainers.errors import EnvironmentFault, GeosweepError, InputError, nearest

Rows: TypeAlias = pa.Table | Sequence[Mapping[str, Any]]

RESTORE = "restore it from a copy of the store, or move it out of the store and run the sweep again: it is made again"
UNREADABLE = (
    pa.ArrowException,
    OSError,
    ValueError,
)  # what pyarrow raises on damaged bytes; bad UTF-8 is a ValueError
_ACCEPTED: Mapping[pa.DataType, type | tuple[type, ...]] = {  # besides bool and datetime
    STRING: str,
    INT: numbers.Integral,  # numpy's integers and floats are registered as these
    DOUBLE: numbers.Real,
    BOOL: np.bool_,
    TIME: (),
    STRINGS: (list, tuple),
}
# A small unit fills a disk block in any case; plain, and without what nobody asks of it, it is read in half the time.
_SMALL_BYTES = 64 * 2**10
_SMALL = {
    "compression": "none",
    "use_dictionary": False,
    "write_page_checksum": True,
    "write_statistics": False,
    "store_schema": False,  # Parquet's own types say the same, and Arrow's fill three quarters of the file
}
_ENCODINGS = {INT: "DELTA_BINARY_PACKED", DOUBLE: "BYTE_STREAM_SPLIT"}


class StoreConflict(GeosweepError):
    """A unit is stored already, with another result; the stored one stays.

    stored       the existing file
    differences  one line per column that differs, with the first two values that do
    """

    def __init__(self, stored: Path, differences: Sequence[str]) -> None:
        super().__init__(stored, tuple(differences))
        self.stored = stored
        self.differences = tuple(differences)

    def __str__(self) -> str:
        headline = f"{self.stored}: this unit is stored with another result; that one stays, the new one is dropped"
        return "\n".join([headline, *(f"  {line}" for line in self.differences)])


class UnitGone(EnvironmentFault):
    """The file of a unit was there and no longer is: its rows were folded into the Delta table meanwhile."""


def publish(layout: StoreLayout, table: str, rows: Rows) -> Path:
    """Store one finished unit; nothing stored is ever changed.

    rows     all rows of the unit: every column of the table named, null where it is allowed; a mapping's values may be
             plain Python or numpy; times carry a time zone
    returns  the file; when the same unit is there with the same result (circumstances aside), that file
    raises   InputError that lists all that does not fit the table; StoreConflict when the unit is there with another
             result; EnvironmentFault when the disk is full, read-only, or the file that is there cannot be read
    A unit that is in the Delta table already is taken again; the fold compares, and drops it or keeps it aside.
    """
    spec = _spec(table)
    unit = conform(spec, rows)
    final = layout.inbox(table) / f"{unit_key(spec, unit)}.parquet"
    data = encode(unit)
    while not layout.files.publish(final, data):
        try:
            found = differences(spec, stored=read_unit(layout.files, final, spec), given=unit)
        except UnitGone:  # folded just now: put it down again, the fold compares
            continue
        if found:
            raise StoreConflict(final, found)
        break
    return final


def unit_key(spec: Table, unit: pa.Table) -> str:
    """The key of a unit: its file name without ending.

    unit  rows that agree in the unit columns, at least one
    """
    identity = [unit.column(name)[0].as_py() for name in spec.unit]
    if spec.pieces_by:
        ends = pc.min_max(unit.column(spec.pieces_by)).as_py()
        identity += [ends["min"], ends["max"]]
    return key_of(spec, identity)


def key_of(spec: Table, identity: Sequence[str | int | None]) -> str:
    """The key of the unit with this identity: a readable part and 24 hex digits of the identity's hash.

    identity  the values of the unit columns in their order; then, for pieces, the first and last value of pieces_by
    """
    assert len(identity) == len(spec.unit) + (2 if spec.pieces_by else 0), (spec.name, identity)
    digest = hashlib.sha256(json.dumps(list(identity), separators=(",", ":")).encode()).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9._=+-]+", "_", str(identity[0])).lstrip("._=+-")[:60] or "unit"
    return f"{readable}-{digest[:24]}"


def conform(spec: Table, rows: Rows) -> pa.Table:
    """The rows as a table of the stored schema, sorted by key; InputError with every problem otherwise."""
    if len(rows) == 0:
        raise InputError(f"{spec.name}: a unit without rows, nothing was stored")
    columns, problems = _columns_of_table(spec, rows) if isinstance(rows, pa.Table) else _columns_of_rows(spec, rows)
    if not problems:
        unit = pa.Table.from_arrays(columns, schema=spec.schema)
        problems = _null_problems(spec, unit) + _key_problems(spec, unit)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise InputError(f"{spec.name}: {count}, nothing was stored", problems, "all columns: geosweep query --schema")
    return unit.sort_by([(name, "ascending") for name in spec.key]) if unit.num_rows > 1 else unit


def encode(unit: pa.Table) -> bytes:
    """A unit as Parquet; no checksum covers the row count, so it is written twice."""
    sink = pa.BufferOutputStream()
    options = _SMALL if unit.nbytes <= _SMALL_BYTES else parquet_options(unit.schema)
    with pq.ParquetWriter(sink, unit.schema, **options) as writer:
        writer.write_table(unit)
        writer.add_key_value_metadata({**unit.schema.metadata, "geosweep_rows": str(unit.num_rows)})
    return bytes(sink.getvalue())


def parquet_options(schema: pa.Schema) -> dict[str, Any]:
    """How the rows of every table are written: small, and with a checksum on every page."""
    return {
        "compression": "zstd",
        "use_dictionary": [field.name for field in schema if field.type == STRING],
        "column_encoding": {field.name: _ENCODINGS[field.type] for field in schema if field.type in _ENCODINGS},
        "write_page_checksum": True,
    }


def list_units(layout: StoreLayout, table: str) -> list[Path]:
    """The files that a table consists of, by name."""
    return [path for path in layout.files.children(layout.inbox(table)) if path.suffix == ".parquet"]


def read_unit(files: Files, path: Path, spec: Table) -> pa.Table:
    """All rows of one file, every page checked against its checksum.

    raises  EnvironmentFault (corrupt_file) for a file that is damaged or not one of ours, (newer_format) for one that a
            newer geosweep wrote; each names the file; UnitGone when there is none
    """
    try:
        data = files.read(path)
    except FileNotFoundError as error:
        raise UnitGone("corrupt_file", f"{path}: the file is missing", RESTORE) from error
    refuse_extension_types(path, io.BytesIO(data))
    file = pq.ParquetReader()  # what a ParquetFile is made of: its other parts cost a third of reading a small unit
    try:
        file.open(pa.BufferReader(data), page_checksum_verification=True)
    except UNREADABLE as error:
        raise EnvironmentFault("corrupt_file", f"{path}: not a whole Parquet file ({error})", RESTORE) from error
    notes = file.metadata.metadata or {}
    _check_origin(path, spec, notes)
    try:
        unit = file.read_all(use_threads=False)
    except UNREADABLE as error:
        raise EnvironmentFault("corrupt_file", f"{path}: damaged ({error})", RESTORE) from error
    if not unit.schema.equals(spec.schema):
        raise EnvironmentFault("corrupt_file", f"{path}: its columns are not those of table {spec.name}", RESTORE)
    if str(unit.num_rows).encode() != notes.get(b"geosweep_rows"):
        raise EnvironmentFault("corrupt_file", f"{path}: damaged (its row count)", RESTORE)
    if not unit.num_rows or path.stem != unit_key(spec, unit):
        raise EnvironmentFault("corrupt_file", f"{path}: its name is not the key of its rows", RESTORE)
    return pa.Table.from_arrays(unit.columns, schema=spec.schema)  # with what the columns mean


def _spec(table: str) -> Table:
    if table not in TABLES:
        raise InputError(f"'{table}' is not a table of the store{nearest(table, TABLES)}")
    return TABLES[table]


def _columns_of_table(spec: Table, rows: pa.Table) -> tuple[list[Any], list[str]]:
    problems = _name_problems(spec, rows.column_names)
    if problems:
        return [], problems
    wrong = [c for c in spec.columns if rows.schema.field(c.name).type != c.type]
    problems = [f"{c.name}: type is {rows.schema.field(c.name).type}, {c.type} is needed" for c in wrong]
    return [rows.column(c.name) for c in spec.columns], problems


def _columns_of_rows(spec: Table, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
    problems = sorted({problem for row in rows for problem in _name_problems(spec, row)})
    if problems:
        return [], problems
    columns = []
    for column in spec.columns:
        values = [row[column.name] for row in rows]
        wrong = next((value for value in values if not _fits(value, column.type)), None)
        if wrong is not None:
            problems.append(f"{column.name}: {wrong!r} is given, {_wanted(column)} is needed")
            continue
        try:
            columns.append(pa.array(values, type=column.type))
        except (pa.ArrowException, ValueError, OverflowError) as error:  # 2**70, a lone surrogate, a list of numbers
            problems.append(f"{column.name}: {error}")
    return columns, problems


def _fits(value: Any, type_: pa.DataType) -> bool:
    """Whether a value is of the type as it stands: an int is a double too, a bool is no number; nulls come later."""
    if isinstance(value, datetime):
        return bool(type_ == TIME) and value.tzinfo is not None
    if isinstance(value, bool):
        return bool(type_ == BOOL)
    return value is None or isinstance(value, _ACCEPTED[type_])


def _wanted(column: Column) -> str:
    return "a time with time zone" if pa.types.is_timestamp(column.type) else str(column.type)


def _name_problems(spec: Table, names: Iterable[str]) -> list[str]:
    given, known = set(names), set(spec.names)
    unknown = [f"{name}: no such column{nearest(name, known)}" for name in sorted(given - known)]
    return unknown + [f"{name}: this column is missing" for name in sorted(known - given)]


def _null_problems(spec: Table, unit: pa.Table) -> list[str]:
    return [
        f"{c.name}: is null in {unit.column(c.name).null_count} of {unit.num_rows} rows"
        for c in spec.columns
        if not c.nullable and unit.column(c.name).null_count
    ]


def _key_problems(spec: Table, unit: pa.Table) -> list[str]:
    problems = []
    for name in spec.unit:
        values = unit.column(name).unique().to_pylist()
        if len(values) > 1:
            problems.append(f"{name}: all rows of one unit have the same value; given {values[0]!r} and {values[1]!r}")
    distinct = unit.group_by(list(spec.key)).aggregate([]).num_rows if unit.num_rows > 1 else 1
    if distinct < unit.num_rows:
        problems.append(f"{unit.num_rows} rows have {distinct} different keys ({', '.join(spec.key)})")
    return problems


def differences(spec: Table, *, stored: pa.Table, given: pa.Table) -> list[str]:
    """How two results of one unit differ, a line per column; both sorted by key, circumstances aside."""
    if stored.num_rows != given.num_rows:
        return [f"rows: {stored.num_rows} stored, {given.num_rows} given"]
    lines = []
    for column in spec.columns:
        pairs = zip(stored.column(column.name).to_pylist(), given.column(column.name).to_pylist(), strict=True)
        unlike = [(old, new) for old, new in pairs if old != new and not (old != old and new != new)]  # nan is nan
        if unlike and not column.circumstance:
            lines.append(f"{column.name}: {unlike[0][0]!r} stored, {unlike[0][1]!r} given ({len(unlike)} rows differ)")
    return lines


def _check_origin(path: Path, spec: Table, notes: Mapping[bytes, bytes]) -> None:
    """EnvironmentFault that names the file unless publish wrote it."""
    written = notes.get(b"geosweep_format", b"").decode(errors="replace")
    if written.isdigit() and int(written) > FORMAT_VERSION:
        what = f"{path}: written in format {written}, this geosweep reads {FORMAT_VERSION}"
        raise EnvironmentFault("newer_format", what, "upgrade geosweep: pip install --upgrade geosweep")
    if written != str(FORMAT_VERSION) or notes.get(b"geosweep_table", b"") != spec.name.encode():
        raise EnvironmentFault("corrupt_file", f"{path}: not one of ours, or not of table {spec.name}", RESTORE)


def refuse_extension_types(path: Path, file: BinaryIO) -> None:
    """Raise EnvironmentFault (corrupt_file) for a file with Arrow extension types, before pyarrow opens it."""
    if any(mark in _raw_footer(file) for mark in _EXTENSION_MARKS):
        what = f"{path}: not one of ours: it has a column of an Arrow extension type"
        raise EnvironmentFault("corrupt_file", what, RESTORE)


def _raw_footer(file: BinaryIO) -> bytes:
    """The bytes that Parquet keeps its schema in; of a damaged file, some bytes."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    length = int.from_bytes(file.read(4), "little")
    file.seek(max(0, size - 8 - length))
    footer = file.read(length)
    file.seek(0)
    return footer


def _in_base64(text: bytes) -> tuple[bytes, ...]:
    """How base64 shows a text inside a longer one: three ways, by where the text begins."""
    shown = []
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + text).rstrip(b"=")
        whole = len(encoded) - (1 if (before + len(text)) % 3 else 0)  # the last digit also holds what follows
        shown.append(encoded[(before * 8 + 5) // 6 : whole])
    return tuple(shown)


# pyarrow makes the stored Arrow types as soon as it opens a file, and an extension type may then run code of its own
# (Ray's unpickles). So their mark is looked for in the raw footer, where Arrow's schema is kept as base64.
_EXTENSION_MARKS = _in_base64(b"ARROW:extension")
