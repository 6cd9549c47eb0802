"""Fold the inbox into Delta tables, keep these tables few-filed and sorted, and leave a plain Parquet copy of each.

store/inbox.py -> [committer] -> tables/, export/ -> store/tables.py -> query
in    units that writers have put down
out   the same rows in Delta tables that any reader of Delta opens; folded units leave the inbox
not   changing a row; a store without a committer is whole, only slower to ask

Any number of committers may be alive, and any of them may be killed at any instant:
- A data file is on the disk before the log names it, and its log entry before a unit leaves the inbox.
- A commit is the log's next version after the one whose unit keys the committer knows, or it fails. So two committers
  never fold one unit twice, and after a lost race the loser looks again.
- A file that no log names is removed only when each of its units is somewhere else; otherwise its rows are folded. So
  stores that were merged by copying files, or whose log was lost, lose no row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from orchestrator.schema import TABLES, UNIT_KEY
from orchestrator.store.durable import storage_faults
from orchestrator.store.files import Files
from orchestrator.store.inbox import UnitGone, differences, parquet_options, read_unit
from orchestrator.store.layout import StoreLayout
from orchestrator.store.leases import Lease
from orchestrator.store.tables import (
    DataFileGone,
    StoredTable,
    check_data_file,
    distinct_keys,
    fetch_data_file,
    read_data_file,
    reason,
)
from trainers.errors import EnvironmentFault

FOLD_UNITS = 500  # units of one commit
FOLD_BYTES = 64 * 2**20  # of their files
FOLD_EVERY_S = 30.0  # fewer units than FOLD_UNITS wait this long
BEAT_S = 2.0
BEAT_S_REMOTE = 10.0  # a look at S3 is a request a table
ROW_GROUP = 131_072
SORT_MEMORY = "512MiB"  # a larger table is sorted on the disk
UNNAMED_S = 3600.0  # a reader may still read a replaced file for this long
TRANSACTION = "ingest"
_NOTHING_AFTER_A_COMMIT = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class Committer:
    """Folds and compacts one store. One thread at a time.

    problems  what could not be folded, file -> message; a person has to look, everything else goes on
    """

    def __init__(self, layout: StoreLayout) -> None:
        """raises EnvironmentFault when a table's log is damaged beyond its newest entry"""
        self.problems: dict[Path, str] = {}
        self._layout = layout
        self._tables: dict[str, StoredTable] = {}
        self._folded_at: dict[str, float] = {}
        self._duplicates: set[Path] = set()  # unnamed files whose units are all stored elsewhere
        for table in TABLES:
            settle(layout.files, layout.table(table))
            self._tables[table] = StoredTable(layout, table)

    def step(self) -> None:
        """Fold and compact what is due."""
        for table, stored in self._tables.items():
            stored.refresh()
            waited = time.monotonic() - self._folded_at.setdefault(table, time.monotonic())
            if len(stored.waiting) >= FOLD_UNITS or (stored.waiting and waited >= FOLD_EVERY_S):
                self.fold(table)
                self._folded_at[table] = time.monotonic()
            if _is_due([stored.rows[path] for path in stored.files]):
                self.compact(table)

    def finish(self) -> None:
        """Fold what is left, then compact what is due."""
        for table, stored in self._tables.items():
            self.fold(table)
            if _is_due([stored.rows[path] for path in stored.files]):
                self.compact(table)

    def everything(self) -> int:
        """Fold every unit and compact every table; returns the number of units."""
        folded = 0
        for table in self._tables:
            folded += self.fold(table)
            self.compact(table)
        return folded

    def fold(self, table: str) -> int:
        """Put the units of a table's inbox into its Delta table, then out of the inbox; returns how many.

        raises  EnvironmentFault (storage_error) when the disk is full or read-only: every unit is where it was
        """
        stored = self._tables[table]
        folded = 0
        while True:
            self._look(stored)
            if not self._drop_folded(stored):
                continue
            units = self._next_units(stored)
            if not units:
                return folded
            rows = pa.concat_tables([_with_key(path.stem, unit) for path, unit in units.items()])
            if self._append(stored, rows):
                self._remove(units)
                folded += len(units)

    def compact(self, table: str) -> None:
        """Make one sorted data file of a Delta table, drop what it replaces, and renew the exported copy.

        raises  EnvironmentFault: (corrupt_file) names a damaged data file, (storage_error) when the disk is full; the
                table is then as it was
        """
        stored = self._tables[table]
        self._look(stored)
        self._adopt_unnamed(stored)
        while len(stored.files) > 1:
            replaced = [_remove_action(stored, path) for path in stored.files]
            if self._commit(stored, self._write(stored, _sorted_rows(self._layout, stored)), replaced):
                self._remove_unnamed(stored)
                break
            stored.refresh()
        if stored.version >= 0:
            stored.refresh()
            _checkpoint_log(stored)
            self._export(stored)

    def load(self, table: str, rows: pa.Table) -> None:
        """Add many rows at once, past the inbox: for a store that is made from another source.

        rows  of the table's folded schema; their units are in the store nowhere yet
        """
        stored = self._tables[table]
        _create(stored)
        stored.refresh()
        while not self._append(stored, rows):
            stored.refresh()

    def _look(self, stored: StoredTable) -> None:
        """Refresh, and make the Delta table where something goes into it; what is committed next rests on this look."""
        stored.refresh()
        if stored.version < 0 and (stored.waiting or _data_files(stored)):
            _create(stored)
            stored.refresh()

    def _append(self, stored: StoredTable, rows: pa.Table) -> bool:
        """Whether rows that are not in the table at the version that `stored` knows were added to it."""
        rows = rows.sort_by([(name, "ascending") for name in stored.spec.order])
        return self._commit(stored, self._write(stored, rows.to_batches()), [])

    def _commit(self, stored: StoredTable, added: AddAction, removed: Sequence[RemoveAction]) -> bool:
        """Whether this became the version after the one that `stored` knows; if not, the new file goes."""
        entry = stored.folder / "_delta_log" / f"{stored.version + 1:020d}.json"
        delta = stored.delta()
        fence = Transaction(TRANSACTION, (delta.transaction_version(TRANSACTION) or 0) + 1)
        try:
            delta.create_write_transaction(
                [added, *removed],
                "append",
                stored.spec.folded_schema,
                commit_properties=CommitProperties(max_commit_retries=0, app_transactions=[fence]),
                post_commithook_properties=_NOTHING_AFTER_A_COMMIT,
            )
        except (DeltaError, OSError) as error:
            if not stored.storage.exists(entry):
                what = f"{entry}: not written ({reason(error)}); every row is where it was"
                raise EnvironmentFault("storage_error", what, "free space or get the permission") from error
            if added.path.encode() not in stored.storage.read(entry):  # another committer was faster
                stored.storage.remove(stored.folder / added.path)
                return False
        stored.storage.sync(entry)
        return True

    def _write(self, stored: StoredTable, batches: Iterable[pa.RecordBatch]) -> AddAction:
        """A new data file, on the disk and named after its content; no log names it yet."""
        temporary = self._layout.temporary()
        schema = stored.spec.folded_schema
        rows = 0
        with storage_faults(stored.folder, "every row is where it was"):
            try:
                with pq.ParquetWriter(temporary, schema, **parquet_options(schema)) as writer:
                    for batch in batches:
                        writer.write_table(pa.Table.from_batches([batch], schema), row_group_size=ROW_GROUP)
                        rows += batch.num_rows
                with temporary.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                # The second part: what another committer writes may be equal, and only one of the two is named.
                final = stored.folder / f"{digest}-{uuid.uuid4().hex[:8]}.parquet"
                size = temporary.stat().st_size
                stored.storage.place(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)
        return AddAction(final.name, size, {}, int(time.time() * 1000), True, json.dumps({"numRecords": rows}))

    def _next_units(self, stored: StoredTable) -> dict[Path, pa.Table]:
        units: dict[Path, pa.Table] = {}
        size = 0
        for path in stored.unfolded:
            if len(units) == FOLD_UNITS or size > FOLD_BYTES:
                break
            if path in self.problems:
                continue
            try:
                units[path] = read_unit(stored.storage, path, stored.spec)
            except UnitGone:  # another committer folded it
                continue
            except EnvironmentFault as fault:
                self.problems[path] = str(fault)
                continue
            size += units[path].nbytes
        return units

    def _drop_folded(self, stored: StoredTable) -> bool:
        """Units of the inbox that are in the Delta table: equal ones go, others are kept aside and named.

        returns  False if the Delta table was compacted under it: what is unfolded has to be looked at anew
        """
        unfolded = set(stored.unfolded)
        again = [path for path in stored.waiting if path not in unfolded]
        if not again:
            return True
        try:
            there = stored.folded_units([path.stem for path in again])
        except DataFileGone:
            if not stored.was_compacted():
                raise
            return False
        for path in again:
            with contextlib.suppress(UnitGone):
                if lines := differences(
                    stored.spec, stored=there[path.stem], given=read_unit(stored.storage, path, stored.spec)
                ):
                    self._keep_aside(path, stored, lines)
                else:
                    self._remove([path])
        return True

    def _keep_aside(self, path: Path, stored: StoredTable, lines: Sequence[str]) -> None:
        folder = self._layout.conflicts(stored.spec.name)
        aside = folder / f"{path.stem}-{uuid.uuid4().hex[:8]}.parquet"
        stored.storage.publish(aside, stored.storage.read(path))
        stored.storage.remove(path)
        headline = (
            f"{aside}: this unit is in {stored.folder} with another result; that one counts, this one is kept aside"
        )
        self.problems[aside] = "\n".join([headline, *(f"  {line}" for line in lines)])

    def _remove(self, units: Iterable[Path]) -> None:
        for path in units:
            self._layout.files.remove(path)

    def _adopt_unnamed(self, stored: StoredTable) -> None:
        """Fold the rows that only a data file without a log entry has."""
        for path in sorted(_data_files(stored) - set(stored.files) - self._duplicates):
            try:
                keys = distinct_keys(stored.storage, path).to_pylist()
                if missing := sorted(set(keys) - stored.have(keys)):
                    rows = read_data_file(stored.storage, path, stored.spec, None, missing)
                    if not self._append(stored, rows):
                        continue
                    stored.refresh()
                self._duplicates.add(path)
            except DataFileGone:  # another committer removed it
                continue
            except EnvironmentFault as fault:
                self.problems[path] = str(fault)

    def _remove_unnamed(self, stored: StoredTable) -> None:
        """Remove data files without a log entry whose rows are elsewhere, after an hour.

        Only after a commit of our own: a committer that slept before it named such a file is behind it, so it fails.
        """
        stored.refresh()
        for path in self._duplicates & _data_files(stored) - set(stored.files):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - stored.storage.facts(path).modified > UNNAMED_S:
                    stored.storage.remove(path)

    def _export(self, stored: StoredTable) -> None:
        """A copy, not a link: whoever changes it does not change the store."""
        if not stored.files:
            return
        temporary, final = self._layout.temporary(), self._layout.export(stored.spec.name)
        with storage_faults(final, "the older copy stays"):
            try:
                fetch_data_file(stored.storage, stored.files[0])
                shutil.copyfile(stored.files[0], temporary)
                stored.storage.replace_with(temporary, final)
            finally:
                temporary.unlink(missing_ok=True)


@contextmanager
def committing(layout: StoreLayout, say: Callable[[str], None]) -> Iterator[None]:
    """Fold beside the body, in a thread, as long as no other committer holds the lease; the rest at its end.

    say  told each problem once; called from the thread
    """
    stopping = threading.Event()
    crashes: list[str] = []
    thread = threading.Thread(target=_work, args=(layout, say, stopping, crashes), name="committer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
    if crashes:
        raise RuntimeError(f"the committer ended with an exception; nothing is lost:\n{crashes[0]}")


@contextmanager
def only_committer(layout: StoreLayout) -> Iterator[Committer]:
    """A committer for one command; one that works beside a session stands back meanwhile."""
    lease = Lease(layout, "committer")
    lease.seize()
    try:
        yield Committer(layout)
    finally:
        lease.release()


def settle(files: Files, folder: Path) -> None:
    """Make sure that the newest log entry of a Delta table is whole and on the disk; a torn one is removed.

    After a power cut the newest entry may be empty. Its units are then still in the inbox, since they leave it only
    after the entry is on the disk; and where a person cut the entry, its data file is adopted at the next compaction.
    """
    there = files.children(folder / "_delta_log")
    entries = [path for path in there if path.suffix == ".json" and path.stem.isdigit()]
    if not entries:
        return
    with contextlib.suppress(FileNotFoundError):  # another committer has just removed it
        if _is_whole(files.read(entries[-1])):
            files.sync(entries[-1])
        else:
            files.remove(entries[-1])
    _drop_torn_checkpoint(files, there)


def _work(layout: StoreLayout, say: Callable[[str], None], stopping: threading.Event, crashes: list[str]) -> None:
    lease = Lease(layout, "committer")
    committer: Committer | None = None
    said: set[str] = set()
    ending = False
    while not ending:
        ending = stopping.wait(BEAT_S_REMOTE if layout.files.remote else BEAT_S)
        try:
            if lease.hold():
                committer = committer or Committer(layout)
                committer.finish() if ending else committer.step()
            messages = [*committer.problems.values()] if committer else []
        except EnvironmentFault as fault:
            messages = [f"the store was not folded, this goes on by itself: {fault}"]
        except Exception:  # noqa: BLE001  a thread's exception would be lost: `committing` raises it
            crashes.append(traceback.format_exc())
            break
        for message in messages:
            if message not in said:
                said.add(message)
                say(message)
    lease.release()


def _is_due(rows: Sequence[int]) -> bool:
    """Whether a table with data files of so many rows is to be compacted: its small files hold a quarter of it."""
    return len(rows) >= 500 or (len(rows) >= 8 and 4 * (sum(rows) - max(rows)) >= max(rows))


def _with_key(key: str, unit: pa.Table) -> pa.Table:
    repeated = pa.repeat(pa.scalar(key, pa.string()), unit.num_rows)
    return unit.append_column(UNIT_KEY, repeated)


def _sorted_rows(layout: StoreLayout, stored: StoredTable) -> Iterator[pa.RecordBatch]:
    """All rows of a Delta table in order, with little memory."""
    for path in stored.files:
        check_data_file(stored.storage, path)
    scratch = layout.temporary()
    settings: dict[str, str | bool | int | float | list[str]] = {
        "memory_limit": SORT_MEMORY,
        "temp_directory": str(scratch),
        "preserve_insertion_order": False,
    }
    try:
        with duckdb.connect(":memory:", config=settings) as database:
            database.execute("set TimeZone = 'UTC'")
            names = ", ".join(stored.spec.folded_schema.names)
            text = f"select {names} from read_parquet(?) order by {', '.join(stored.spec.order)}"
            relation = database.sql(text, params=[[str(path) for path in stored.files]])
            for batch in relation.to_arrow_reader(ROW_GROUP):
                yield from pa.Table.from_batches([batch]).cast(stored.spec.folded_schema).to_batches()
    except duckdb.Error as error:
        what = f"{stored.folder}: not compacted ({reason(error)}); the table is as it was"
        raise EnvironmentFault("storage_error", what, "free space in the store's folder") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _create(stored: StoredTable) -> None:
    """An empty Delta table; one that is there, or that another committer makes at the same time, is as good."""
    where, options = stored.storage.name(stored.folder), stored.storage.options
    if DeltaTable.is_deltatable(where, options):
        return
    spec = stored.spec
    try:
        DeltaTable.create(
            where,
            spec.folded_schema,
            name=spec.name,
            description=spec.meaning,
            storage_options=options,
            commit_properties=CommitProperties(max_commit_retries=0),
        )
    except (DeltaError, OSError) as error:
        if not DeltaTable.is_deltatable(where, options):
            what = f"{where}: no table was made ({reason(error)})"
            raise EnvironmentFault("storage_error", what, "free space or get the permission") from error
    settle(stored.storage, stored.folder)


def _remove_action(stored: StoredTable, path: Path) -> RemoveAction:
    return RemoveAction(path.name, False, int(time.time() * 1000), stored.storage.facts(path).bytes, {})


def _data_files(stored: StoredTable) -> set[Path]:
    """Those in the table's folder, named by its log or not."""
    return {path for path in stored.storage.children(stored.folder) if path.suffix == ".parquet"}


def _checkpoint_log(stored: StoredTable) -> None:
    """Sum the log up, so that opening stays quick; entries that nobody needs go after the table's own retention."""
    log = stored.folder / "_delta_log"
    try:
        stored.delta().create_checkpoint()
        there = stored.storage.children(log)
        summed = [path for path in there if path.name.startswith(f"{stored.version:020d}.checkpoint")]
        last = log / "_last_checkpoint"
        if not summed or last not in there:  # for want of space; delta-rs does not say so
            return
        for path in (*summed, last):
            stored.storage.sync(path)
        stored.delta().cleanup_metadata()
    except (DeltaError, OSError) as error:
        what = f"{log}: not summed up ({reason(error)}); the table is whole"
        raise EnvironmentFault("storage_error", what, "free space or get the permission") from error


def _is_whole(entry: bytes) -> bool:
    try:
        return bool([json.loads(line) for line in entry.decode().splitlines()])
    except ValueError:
        return False


def _drop_torn_checkpoint(files: Files, log: Sequence[Path]) -> None:
    """The sum of a log is a short cut: a torn one goes, the entries themselves are still there."""
    last = next((path for path in log if path.name == "_last_checkpoint"), None)
    sums = [path for path in log if ".checkpoint" in path.name]
    if last is None:
        return
    try:
        version = json.loads(files.read(last))["version"]
        for path in sums:
            if path.name.startswith(f"{version:020d}."):
                pq.read_metadata(pa.BufferReader(files.read(path)))
    except (ValueError, KeyError, TypeError, OSError, pa.ArrowException):
        for path in (last, *sums):
            files.remove(path)
