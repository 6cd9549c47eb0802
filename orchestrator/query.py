"""Answer SQL about a store, read-only.

store/tables.py, views.py -> [query] -> cli.py, report, notebooks, the driver's "what is left"
in    a store's folder; one SELECT
out   Answer: the rows as Arrow, pandas, Polars or plain Python; write_result prints them
not   writing to a store, reading any other file, Ray, torch
"""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TextIO

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import schema
from orchestrator.store.copies import corpus_folders
from orchestrator.store.durable import storage_faults
from orchestrator.store.files import Files, folder_of
from orchestrator.store.inbox import UnitGone, read_unit
from orchestrator.store.layout import StoreLayout, open_existing
from orchestrator.store.tables import DataFileGone, StoredTable, check_data_file, fetch_data_file
from orchestrator.store.units import join_units, read_units
from orchestrator.views import (
    REPEATED_QUERIES,
    RESULT_COLUMNS_QUERY,
    STATE_VIEWS,
    TABLE_VIEWS,
    ResultColumn,
    curves_view,
    name_result_columns,
    results_views,
    segments_view,
)
from trainers.errors import EnvironmentFault, InputError, nearest

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl

Format = Literal["table", "csv", "json", "parquet"]

_MEMORY = "1GiB"
_THREADS = len(os.sched_getaffinity(0))
_BATCH = 131_072  # rows of a batch that is written to a file
_READ_ONLY = "a query is one SELECT over the tables of the store; save its answer with --format and --out"
_SCHEMA_HELP = "tables and columns: geosweep query --schema"
_MISSING_COLUMN = re.compile(r'olumn (?:named )?"([^"]+)"')
_WORD = re.compile(r"\w+")
_WIDE = {"result_columns", "results", "final"}
_DEFINITIONS = {**STATE_VIEWS, **dict.fromkeys(_WIDE, f"{RESULT_COLUMNS_QUERY} trials trial_checkpoints")}
_ONE_PER_KEY = {"segments": segments_view, "curves": curves_view}
_MISSING_TABLE = re.compile(r"Table with name (\S+) does not exist")


class Answer:
    """The rows of one query, in the form that the caller likes."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __repr__(self) -> str:
        return f"Answer({len(self)} rows: {', '.join(self._rows.column_names)})"

    def arrow(self) -> pa.Table:
        return self._rows

    def rows(self) -> list[dict[str, Any]]:
        """One dictionary per row."""
        return list(self._rows.to_pylist())

    def pandas(self) -> pd.DataFrame:
        frame: pd.DataFrame = self._rows.to_pandas()
        return frame

    def polars(self) -> pl.DataFrame:
        import polars as pl

        frame = pl.from_arrow(self._rows)
        assert isinstance(frame, pl.DataFrame)
        return frame


class _UnfoldedCurves:
    """Curves in the inbox, read from the files anew for each query: the one inbox that may be larger than memory."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.paths: tuple[Path, ...] = ()
        self._fault: EnvironmentFault | None = None

    def __arrow_c_schema__(self) -> object:
        return schema.CURVES.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        reader = pa.RecordBatchReader.from_batches(schema.CURVES.schema, self._batches())
        return reader.__arrow_c_stream__(requested_schema)

    def take_fault(self) -> EnvironmentFault | None:
        """What broke the last query, if a file did: DuckDB passes on an error's text, not the error."""
        fault, self._fault = self._fault, None
        return fault

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for path in self.paths:
            try:
                yield from read_unit(self._files, path, schema.CURVES).to_batches()
            except EnvironmentFault as fault:
                self._fault = fault
                raise


class _Source:
    """Where the rows of one table come from: data files that DuckDB reads itself, and units of the inbox in memory."""

    def __init__(self, layout: StoreLayout, table: str) -> None:
        self.stored = StoredTable(layout, table)
        self.units: dict[Path, pa.Table] = {}
        self.checked: set[Path] = set()
        self._seen: tuple[int, tuple[Path, ...]] | None = None

    def take_in(self) -> bool:
        """Look again; whether anything changed. Files never change, so only new ones are read."""

        def read() -> dict[Path, pa.Table]:
            for path in self.stored.files:
                fetch_data_file(self.stored.storage, path)
            if self.stored.spec is schema.CURVES:
                return {}
            new = [path for path in self.stored.unfolded if path not in self.units]
            found = read_units(self.stored.storage, new, self.stored.spec)
            return {path: found[path] if path in found else self.units[path] for path in self.stored.unfolded}

        self.units = self.stored.reading(read)
        before, self._seen = self._seen, (self.stored.version, self.stored.unfolded)
        return before != self._seen

    def check(self) -> None:
        """Compare each data file with its name, once. raises EnvironmentFault that names a damaged file"""
        for path in self.stored.files:
            if path not in self.checked:
                check_data_file(self.stored.storage, path)
                self.checked.add(path)

    def view(self) -> str:
        spec = self.stored.spec
        text = f"select * from unfolded_{spec.name}"
        if self.stored.files:
            listed = ", ".join(_quoted(path) for path in sorted(self.stored.files))
            text = f"select {', '.join(spec.names)} from read_parquet([{listed}]) union all {text}"
        return text

    def unfolded(self) -> pa.Table:
        """The rows of all units in one piece: thousands of pieces are slow to scan."""
        if not self.units:
            return pa.Table.from_batches([], self.stored.spec.schema)  # its own empty_table would load pandas
        whole, parts = join_units(list(self.units.values()))
        self.units = dict(zip(self.units, parts, strict=True))
        return whole


class Store:
    """The tables and views of one store, as they were at the last `refresh` (or the opening).

    One thread at a time. Nothing that is asked can change the store or read another file.
    """

    def __init__(self, root: Path | str) -> None:
        """Open the store in folder `root`, or at "s3://bucket/prefix".

        raises  InputError when there is no store or its format is newer; EnvironmentFault that names the file when
                one cannot be read: no file is ever skipped
        """
        self._layout = open_existing(folder_of(root) if isinstance(root, str) else root)
        self._sources = {name: _Source(self._layout, name) for name in schema.TABLES}
        self._curves = _UnfoldedCurves(self._layout.files)
        self._columns: list[ResultColumn] | None = None  # found when first asked for
        self._kept: set[str] = set()  # views that stand for rows that were computed
        self._cleared: set[str] = set()  # tables whose view knows which segments have several attempts
        self._corpora_are_read = False
        self._database = _connect(self._layout.root / "tables")
        self._database.register("unfolded_curves", self._curves)
        self.refresh()
        self._create(TABLE_VIEWS)
        self._create(STATE_VIEWS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    @property
    def layout(self) -> StoreLayout:
        return self._layout

    def refresh(self) -> bool:
        """Take in what was stored since; whether there was something."""
        self._forget()
        changed = [source for source in self._sources.values() if source.take_in()]
        for source in changed:
            self._register(source)
        self._curves.paths = self._sources["curves"].stored.unfolded
        self._corpora_are_read = False
        if changed:
            self._columns = None
            self._cleared.clear()
        return bool(changed)

    def sql(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None = None) -> Answer:
        """Answer one SELECT.

        params  values for `?` (a sequence) or `$name` (a mapping)
        raises  InputError when it is not one SELECT, reads or writes a file, or DuckDB cannot do it;
                EnvironmentFault when a stored file turns out to be damaged
        """
        while True:
            try:
                return self._answer(text, params)
            except DataFileGone:
                if not self.refresh():
                    raise
            except duckdb.Error as error:
                fault = self._curves.take_fault()
                left = isinstance(fault, UnitGone) or (fault is None and isinstance(error, duckdb.IOException))
                # When a file has left, the committer has folded or compacted meanwhile.
                if not (left and self.refresh()):
                    raise fault or self._refusal(error) from error

    def keep(self, view: str, columns: Sequence[str]) -> None:
        """Answer one state view now, and use these rows until the next `refresh`: several questions cost it once.

        columns   what the questions are about; meanwhile the view has no others
        """
        while True:
            try:
                self._prepare(view)
                self._database.execute(
                    f"create or replace temp table kept_{view} as select {', '.join(columns)} from {view}"
                )
                break
            except (duckdb.IOException, DataFileGone):
                if not self.refresh():
                    raise
        self._create({view: f"select * from kept_{view}"})
        self._kept.add(view)

    def _forget(self) -> None:
        for view in self._kept:
            self._create({view: STATE_VIEWS[view]})
            self._database.execute(f"drop table kept_{view}")
        self._kept.clear()

    def table(self, name: str) -> Answer:
        """All rows of one table or view."""
        if name not in self.tables():
            raise InputError(f"'{name}' is not a table of the store{nearest(name, self.tables())}", (), _SCHEMA_HELP)
        return self.sql(f"select * from {name}")

    def save(self, name: str, path: Path) -> int:
        """Write one table or view as Parquet, however large; returns the number of rows."""
        self._prepare(name)
        rows = 0
        reader = self._database.sql(f"select * from {name}").to_arrow_reader(_BATCH)
        with (
            storage_faults(path, "the export is not complete"),
            pq.ParquetWriter(path, reader.schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for batch in reader:
                writer.write_batch(batch)
                rows += batch.num_rows
        return rows

    def results(self, sweep: str | None = None) -> Answer:
        """One row per trial and checkpoint, one column per metric; of one sweep or of all."""
        if sweep is None:
            return self.sql("select * from results order by sweep, trial, tokens")
        sweeps = [row["sweep"] for row in self.sql("select sweep from latest").rows()]
        if sweep not in sweeps:
            raise InputError(f"the store {self._layout.url} has no sweep '{sweep}'{nearest(sweep, sweeps)}")
        return self.sql("select * from results where sweep = $sweep order by trial, tokens", {"sweep": sweep})

    def tables(self) -> tuple[str, ...]:
        """The names that a query can use."""
        return (*schema.TABLES, *schema.VIEWS)

    def describe(self) -> list[dict[str, str]]:
        """schema.describe, and the metric columns that this store's results and final have."""
        rows = schema.describe()
        for view in ("results", "final"):
            rows += [
                {"table": view, "column": c.name, "type": "double", "unit": c.unit, "meaning": _meaning(c)}
                for c in self._find_columns()
            ]
        return rows

    def _register(self, source: _Source) -> None:
        name = source.stored.spec.name
        if name != "curves":
            self._database.register(f"unfolded_{name}", source.unfolded())
        while True:
            try:
                return self._create({f"stored_{name}": source.view()})
            except duckdb.IOException:
                source.take_in()  # a data file was compacted away just now; if not, this names it

    def _answer(self, text: str, params: Sequence[Any] | Mapping[str, Any] | None) -> Answer:
        self._prepare(text)
        relation = self._database.sql(_one_select(text, self._database), params=params)
        return Answer(_sums_as_int64(relation.to_arrow_table()))

    def _prepare(self, text: str) -> None:
        """Check the data files that a query may read, and make the metric columns if it may use them."""
        used = _tables_of(text)
        if "corpora" in used and not self._corpora_are_read:
            self._database.register("corpora", _corpora(self._layout.root))
            self._corpora_are_read = True
        for table in used & schema.TABLES.keys():
            self._sources[table].check()
        for table in used & REPEATED_QUERIES.keys() - self._cleared:
            repeated = [segment for (segment,) in self._database.sql(REPEATED_QUERIES[table]).fetchall()]
            self._create({table: _ONE_PER_KEY[table](repeated)})
            self._cleared.add(table)
        if used & _WIDE:
            self._find_columns()

    def _find_columns(self) -> list[ResultColumn]:
        if self._columns is None:
            found = self._database.sql(RESULT_COLUMNS_QUERY).to_arrow_table().to_pylist()
            self._columns = name_result_columns(found)
            self._create(results_views(self._columns))
        return self._columns

    def _create(self, views: Mapping[str, str]) -> None:
        for name, text in views.items():
            self._database.execute(f"create or replace view {name} as {text}")

    def _refusal(self, error: Exception) -> InputError:
        """DuckDB's message without its suggestions from system tables, and the nearest name of ours."""
        if isinstance(error, duckdb.PermissionException):
            return InputError(
                "the query was refused: it reads or writes a file", [str(error).splitlines()[0]], _READ_ONLY
            )
        if isinstance(error, duckdb.OutOfMemoryException):
            return InputError(f"the query needs more than {_MEMORY} of memory", (), "filter or aggregate more")
        lines = [line for line in str(error).splitlines() if line and not line.startswith(("Did you", "Candidate"))]
        lines[0] = lines[0].rstrip("!") + self._hint(lines[0])
        return InputError("the query was not answered", lines, _SCHEMA_HELP)

    def _hint(self, message: str) -> str:
        if table := _MISSING_TABLE.search(message):
            return nearest(table[1], self.tables())
        column = _MISSING_COLUMN.search(message)
        names = {row["column"] for row in self.describe()}
        near = difflib.get_close_matches(column[1], names, n=1) if column and column[1] not in names else []
        return f"; nearest is '{near[0]}'" if near else ""  # all the columns there are would be no hint


def export(store: Store, folder: Path) -> dict[str, int]:
    """Write every table and view as Parquet into a new or empty folder; returns name -> rows.

    raises  InputError when the folder holds something; EnvironmentFault when it cannot be written
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not an empty folder; nothing was exported", (), "name a new one")
    with storage_faults(folder, "the export is not complete"):
        folder.mkdir(parents=True, exist_ok=True)
    return {name: store.save(name, folder / f"{name}.parquet") for name in store.tables()}


def _corpora(root: Path) -> pa.Table:
    from trainers.tokens import read_manifest  # few questions are about corpora

    manifests = [read_manifest(folder) for folder in corpus_folders(root)]
    rows = [
        {
            "corpus": manifest.name,
            "digest": manifest.digest,
            **split.model_dump(include={"domain", "split", "role", "tokens", "documents", "bytes", "unigram_entropy"}),
            "bytes_per_token": split.bytes / split.tokens,
        }
        for manifest in manifests
        for split in manifest.splits
    ]
    return pa.Table.from_pylist(rows, schema=schema.VIEWS["corpora"].schema)


def _connect(readable: Path) -> duckdb.DuckDBPyConnection:
    """A DuckDB in memory that reaches no file but those in `readable`, no network, no Python variable, and stays so."""
    database = duckdb.connect(
        ":memory:",
        config={
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "python_enable_replacements": "false",
            "temp_directory": "",
            "memory_limit": _MEMORY,
            "threads": str(_THREADS),
        },
    )
    database.execute("set TimeZone = 'UTC'")
    database.execute(f"set allowed_directories = [{_quoted(readable)}]")
    database.execute("set enable_external_access = false")
    database.execute("set lock_configuration = true")
    return database


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"


def _tables_of(text: str) -> set[str]:
    """Every table and view that a query may use: each that its text names, and what their definitions name."""
    used: set[str] = set()
    left = {text}
    while left:
        words = set(_WORD.findall(left.pop().casefold()))
        new = words & (_DEFINITIONS.keys() | schema.TABLES.keys() | {"corpora"}) - used
        used |= new
        left |= {_DEFINITIONS[name] for name in new & _DEFINITIONS.keys()}
    return used


def _sums_as_int64(rows: pa.Table) -> pa.Table:
    """DuckDB sums int64 to 128 bits, which Arrow has as a decimal; a sum that fits is a count like any other."""
    for place, field in enumerate(rows.schema):
        if field.type == pa.decimal128(38, 0):
            with suppress(pa.ArrowInvalid):
                rows = rows.set_column(place, field.name, rows.column(place).cast(pa.int64()))
    return rows


def _one_select(text: str, database: duckdb.DuckDBPyConnection) -> duckdb.Statement:
    statements = database.extract_statements(text)
    if len(statements) != 1:
        raise InputError(f"the query was refused: {len(statements)} statements are given", (), _READ_ONLY)
    if statements[0].type != duckdb.StatementType.SELECT:
        kind = statements[0].type.name
        raise InputError(f"the query was refused: it is a statement of kind {kind}", (), _READ_ONLY)
    return statements[0]


def _meaning(column: ResultColumn) -> str:
    what = [f"metric {column.metric} of evaluator {column.evaluator} (settings {column.settings_digest})"]
    what += [f"dataset {column.dataset}"] if column.dataset else []
    what += [f"split {column.split}"] if column.split else []
    what += [f"layer {column.layer}"] if column.layer is not None else []
    return ", ".join(what)


def write_result(rows: pa.Table, form: Format, out: TextIO | Path, limit: int = 40) -> None:
    """Write an answer for people (table) or programs (csv, json, parquet).

    out     an open text stream, or the file to (over)write; parquet needs a file
    limit   most rows of a table; 0 shows all; csv, json and parquet always hold all
    json    one array, one object per line; nan and the infinities as the strings "NaN", "Infinity", "-Infinity"
    raises  InputError for an unknown format; EnvironmentFault when the file cannot be written
    """
    if form == "parquet":
        if not isinstance(out, Path):
            raise InputError("parquet is not for a terminal or pipe", (), "name a file with --out FILE")
        with storage_faults(out, "the answer was not saved"):
            pq.write_table(rows, out, compression="zstd", write_page_checksum=True)
        return
    writers: dict[str, Callable[[pa.Table, TextIO], None]] = {
        "table": partial(_write_table, limit=limit),
        "csv": _write_csv,
        "json": _write_json,
    }
    if form not in writers:
        raise InputError(f"'{form}' is not an output format{nearest(form, [*writers, 'parquet'])}")
    with _opened(out) as stream:
        writers[form](rows, stream)


@contextmanager
def _opened(out: TextIO | Path) -> Iterator[TextIO]:
    if not isinstance(out, Path):
        yield out
        return
    with storage_faults(out, "the answer was not saved"), out.open("w", encoding="utf-8", newline="") as stream:
        yield stream


def _write_table(rows: pa.Table, stream: TextIO, limit: int) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for field in rows.schema:
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        table.add_column(Text(_printable(field.name)), justify="right" if number else "left", no_wrap=True)
    shown = rows.slice(0, limit or None)
    for values in zip(*(column.to_pylist() for column in shown.columns), strict=True):
        table.add_row(*(Text(_cell(value)) for value in values))
    # A table is as wide as its content: a terminal wraps a long line, but no number is ever cut.
    Console(file=stream, width=100_000, soft_wrap=True).print(table)
    if shown.num_rows < rows.num_rows:
        stream.write(f"... {rows.num_rows - shown.num_rows} more rows (--limit 0 shows all)\n")


def _write_csv(rows: pa.Table, stream: TextIO) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(rows.column_names)
    for batch in rows.to_batches():
        for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            writer.writerow([value if isinstance(value, str) else _plain_text(value) for value in values])


def _write_json(rows: pa.Table, stream: TextIO) -> None:
    separator = "[\n"
    for batch in rows.to_batches():
        for row in batch.to_pylist():
            stream.write(separator + json.dumps(_json_value(row), ensure_ascii=False, allow_nan=False))
            separator = ",\n"
    stream.write("\n]\n" if rows.num_rows else "[]\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _printable(_plain_text(value))
    return text if len(text) <= 48 else text[:47] + "…"


def _plain_text(value: Any) -> str:
    """'' for null, ISO 8601 for times, JSON for lists and structs, else Python's own text."""
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat()
    return json.dumps(_json_value(value), ensure_ascii=False) if isinstance(value, list | dict) else str(value)


def _printable(text: str) -> str:
    """Stored text cannot steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value if value is None or isinstance(value, str | int | float) else _plain_text(value)


def questions(path: Path) -> list[tuple[str, str]]:
    """The SELECTs of a file, each with the comment above it as its title; they end with a semicolon at a line's end."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    found = []
    for part in re.split(r";[ \t]*(?:\n|$)", text):
        lines = [line.strip() for line in part.strip().splitlines()]
        title = " ".join(line.lstrip("- ") for line in itertools.takewhile(lambda line: line.startswith("--"), lines))
        if any(line and not line.startswith("--") for line in lines):
            found.append((title, part))
    return found
