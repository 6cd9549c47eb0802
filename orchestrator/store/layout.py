"""Know where everything in a store lies, make a store, open one.

run, query -> [layout] -> store/inbox.py, checkpoints, corpora
in    the store's folder
out   StoreLayout: paths; geosweep.json says which format the store has
not   what is in the files
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from orchestrator.schema import FORMAT_VERSION, TABLES
from orchestrator.store.durable import make_folder, storage_faults
from orchestrator.store.files import Files, LocalFiles, files_of, new_temporary
from trainers.errors import EnvironmentFault, InputError, nearest

_FOLDERS = ("sweeps", "corpora", "checkpoints", "inbox", "tables", "export", "leases", "live", "temporary")
_LATER_FOLDERS = ("conflicts", "track")  # made by the fold and by trackers
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,159}")
_LEFTOVER_AGE_S = 86_400


class StoreMarker(BaseModel):
    """geosweep.json: the file that makes a folder a store."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    format: int
    created: str
    product: str


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """The paths of one store, below its folder on this machine; `files` reads and writes what they name."""

    root: Path

    @property
    def files(self) -> Files:
        return files_of(self.root)

    @property
    def url(self) -> str:
        """The store as any machine opens it (files.folder_of): its folder, or s3://bucket/prefix."""
        return self.files.name(self.root)

    @property
    def marker(self) -> Path:
        return self.root / "geosweep.json"

    def inbox(self, table: str) -> Path:
        if table not in TABLES:
            raise InputError(f"'{table}' is not a table of the store{nearest(table, TABLES)}")
        return self.root / "inbox" / table

    def table(self, table: str) -> Path:
        """The Delta table that the inbox of a table is folded into."""
        return self.root / "tables" / self.inbox(table).name

    def export(self, table: str) -> Path:
        """One Parquet file of all rows, as of the last compaction."""
        return self.root / "export" / f"{self.inbox(table).name}.parquet"

    def conflicts(self, table: str) -> Path:
        """Units that were put down under the key of a folded one, with another result."""
        return self.root / "conflicts" / self.inbox(table).name

    def checkpoint(self, segment: str, tokens: int) -> Path:
        """The folder of the checkpoint that `segment` leaves at `tokens` tokens."""
        if tokens < 0:
            raise InputError(f"a checkpoint at {tokens} tokens: tokens are 0 or more")
        return self.root / "checkpoints" / safe_name(segment, "segment") / str(tokens)

    def corpus(self, name: str) -> Path:
        return self.root / "corpora" / safe_name(name, "corpus")

    def sweep(self, name: str, revision: str) -> Path:
        """The submitted sweep file, unchanged."""
        return self.root / "sweeps" / safe_name(name, "sweep") / f"{safe_name(revision, 'revision')}.yaml"

    def plan(self, name: str, revision: str) -> Path:
        """The filled plan of a submitted sweep file."""
        return self.sweep(name, revision).with_name(f"{revision}.json")

    def lease(self, what: str) -> Path:
        return self.root / "leases" / f"{safe_name(what, 'lease')}.json"

    def claims(self, what: str) -> Path:
        """The folder of the fencing numbers that were given for `what`."""
        return self.root / "leases" / safe_name(what, "lease")

    def live(self, sweep: str) -> Path:
        """What the session of a sweep does now; there while one is at work, or was killed."""
        return self.root / "live" / f"{safe_name(sweep, 'sweep')}.json"

    def tracker(self, name: str) -> Path:
        """Where a tracker puts its files, if it has no place of its own."""
        return self.root / "track" / safe_name(name, "tracker")

    def temporary(self) -> Path:
        """A path that nobody else uses, on this machine's part of the store, in a folder that no reader scans."""
        return new_temporary(self.root)


def stop_file(layout: StoreLayout, sweep: str) -> Path:
    """While this file exists, the attempts of a sweep save their state and end, and so does its driver."""
    return layout.lease(f"{sweep}.stop")


def safe_name(name: str, what: str) -> str:
    """The name itself, if it is one plain path component that cannot leave the store; else InputError."""
    if not _SAFE_NAME.fullmatch(name):
        rule = "1 to 160 of A-Z a-z 0-9 . _ = + -, the first a letter or digit"
        raise InputError(f"{name!r} cannot name a {what} in a store", [f"allowed: {rule}"])
    return name


def create_or_open(root: Path) -> StoreLayout:
    """Open the store in `root` for writing; make it where there is none.

    Removes temporary files that a dead writer left more than a day ago.
    raises  InputError for a folder that holds something else, or a store of a newer format;
            EnvironmentFault (storage_error) for a full, read-only or link-less file system
    """
    layout = StoreLayout(root.resolve())
    files = layout.files
    is_new = not files.exists(layout.marker)
    if is_new:
        _refuse_foreign_folder(layout)
    if isinstance(files, LocalFiles):
        _make_folders(layout)
    if is_new:
        files.publish(layout.marker, _new_marker())
    _read_marker(layout)
    _try_writing(layout)
    _remove_leftovers(layout.root / "temporary")
    return layout


def open_existing(root: Path) -> StoreLayout:
    """Open the store in `root` for reading; changes nothing on the disk.

    raises  InputError when there is none, or its format is newer; EnvironmentFault (corrupt_file) for a bad marker
    """
    layout = StoreLayout(root.resolve())
    if not layout.files.exists(layout.marker):
        headline = f"no store at {layout.url} (it has no geosweep.json)"
        raise InputError(
            headline, next_step="make one with `geosweep run SWEEP`, or say where it is with --store FOLDER"
        )
    _read_marker(layout)
    return layout


def _make_folders(layout: StoreLayout) -> None:
    with storage_faults(layout.root, "no store was made"):
        layout.root.mkdir(parents=True, exist_ok=True)
    for folder in _FOLDERS:
        make_folder(layout.root / folder)
    for table in TABLES:
        make_folder(layout.inbox(table))


def _refuse_foreign_folder(layout: StoreLayout) -> None:
    """A store is made in a new or empty folder; our own subfolders may be there from a creation that was cut short."""
    root = layout.root
    if root.exists() and not root.is_dir():
        raise InputError(f"{root} is a file, a store is a folder")
    foreign = sorted(set(layout.files.names(root)) - {*_FOLDERS, *_LATER_FOLDERS})
    if foreign:
        raise InputError(
            f"{layout.url} is not empty and is not a store",
            [f"it holds {', '.join(foreign[:5])}{', ...' if len(foreign) > 5 else ''}"],
            "choose a new or empty folder with --store FOLDER",
        )


def _new_marker() -> bytes:
    try:
        product = importlib.metadata.version("geosweep")
    except importlib.metadata.PackageNotFoundError:  # used from a source tree
        product = "unknown"
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return StoreMarker(format=FORMAT_VERSION, created=created, product=product).model_dump_json(indent=2).encode()


def _read_marker(layout: StoreLayout) -> StoreMarker:
    data = layout.files.read(layout.marker)
    try:
        content = json.loads(data)
        found = content.get("format") if isinstance(content, dict) else None
        if isinstance(found, int) and found > FORMAT_VERSION:
            raise InputError(
                f"store {layout.url} has format {found}, this geosweep reads {FORMAT_VERSION}",
                next_step="upgrade geosweep: pip install --upgrade geosweep",
            )
        return StoreMarker.model_validate(content)
    except ValueError as error:  # no UTF-8, no JSON, or not this model
        marker = layout.files.name(layout.marker)
        what = f"{marker}: not the marker of a store ({len(data)} bytes); the store was not opened"
        raise EnvironmentFault("corrupt_file", what, "restore this file from a copy of the store") from error


def _try_writing(layout: StoreLayout) -> None:
    """Find out now, not after hours of training, that of two who publish under one name one is told that he lost."""
    probe = layout.temporary()
    with ThreadPoolExecutor(2) as pool:
        racing = list(pool.map(partial(layout.files.publish, probe), (b"one", b"other")))
    late = layout.files.publish(probe, b"late")
    layout.files.remove(probe)
    if late or racing.count(True) != 1:
        what = f"{layout.url}: two writers put one name there and both were told that they were first"
        raise EnvironmentFault("storage_error", what, "use a storage with conditional writes (If-None-Match)")


def _remove_leftovers(folder: Path) -> None:
    oldest = time.time() - _LEFTOVER_AGE_S
    with storage_faults(folder, "leftover temporary files were not removed"):
        for leftover in folder.iterdir():
            try:
                old = leftover.lstat().st_mtime < oldest
            except FileNotFoundError:  # its writer has just published it
                continue
            if old and leftover.is_dir():
                shutil.rmtree(leftover)
            elif old:
                leftover.unlink(missing_ok=True)
