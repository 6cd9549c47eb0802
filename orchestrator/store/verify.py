"""Read every file of a store and say what is damaged, what is missing, and what belongs to nothing.

store -> [verify] -> cli.py
in    a store's folder
out   Findings
not   mending: each finding says what a person does, or that nothing needs doing
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.schema import TABLES
from orchestrator.store.checkpoints import fetch_checkpoint
from orchestrator.store.copies import corpus_folders, fetch_corpus
from orchestrator.store.files import make_copy, remove_copy
from orchestrator.store.inbox import UNREADABLE, list_units, read_unit
from orchestrator.store.layout import StoreLayout
from orchestrator.store.registry import REMOVED
from orchestrator.store.tables import StoredTable, check_data_file, distinct_keys, read_rows
from trainers.checkpoint import CURVE, MANIFEST, STATE, TOKENIZER, WEIGHTS, read_manifest
from trainers.errors import EnvironmentFault, GeosweepError
from trainers.tokens import verify as verify_corpus


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was read, and what is wrong with it.

    checked   kind of thing -> how many were read and found whole
    damaged   a line each: rows or files that are lost or wrong
    orphans   a line each: what nothing refers to; harmless
    """

    checked: dict[str, int] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)

    def check(self, kind: str, read: Callable[[], object]) -> None:
        """Count what can be read, note what cannot."""
        try:
            read()
        except GeosweepError as error:
            self.damaged.append(str(error).splitlines()[0])
        else:
            self.checked[kind] = self.checked.get(kind, 0) + 1


def verify(layout: StoreLayout) -> Findings:
    """Every unit and data file against its checksums, every checkpoint and corpus against its manifest and its row.

    Of a store on S3 every object is read anew: what this machine has of it says nothing.
    """
    if not layout.files.remote:
        return _verify(layout)
    with TemporaryDirectory(dir=layout.root / "temporary") as folder:
        findings = _verify(StoreLayout(make_copy(layout.url, Path(folder))))
    findings.damaged = [line.replace(folder, layout.url) for line in findings.damaged]
    return findings


def _verify(layout: StoreLayout) -> Findings:
    findings = Findings()
    for table in TABLES:
        _verify_table(layout, table, findings)
    _verify_checkpoints(layout, findings)
    for folder in corpus_folders(layout.root):
        findings.check("corpora", partial(_verify_corpus, layout, folder))
    aside = layout.files.below(layout.root / "conflicts")
    findings.damaged += [f"{path}: a unit with another result than the stored one, kept aside" for path in aside]
    return findings


def _verify_table(layout: StoreLayout, table: str, findings: Findings) -> None:
    stored = StoredTable(layout, table)
    try:
        stored.load()
    except EnvironmentFault as fault:
        findings.damaged.append(str(fault))
        return
    for path in list_units(layout, table):
        findings.check("units in inboxes", partial(read_unit, layout.files, path, stored.spec))
    for path, rows in stored.rows.items():
        findings.check("data files of tables", partial(_read_pages, layout, path, rows))
    if not any(line.startswith(str(stored.folder)) for line in findings.damaged):
        findings.check("tables without a doubled or lost unit", partial(_compare_keys, stored))


def _read_pages(layout: StoreLayout, path: Path, rows: int) -> None:
    check_data_file(layout.files, path)
    try:
        with pq.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            found = sum(batch.num_rows for batch in file.iter_batches())
    except UNREADABLE as error:
        raise EnvironmentFault("corrupt_file", f"{path}: damaged ({error})") from error
    if found != rows:
        raise EnvironmentFault("corrupt_file", f"{path}: {found} rows, the log says {rows}")


def _compare_keys(stored: StoredTable) -> None:
    keys = [distinct_keys(stored.storage, path) for path in stored.files]
    doubled = sum(map(len, keys)) - len(pa.chunked_array(keys, pa.string()).unique())
    if doubled:
        raise EnvironmentFault("corrupt_file", f"{stored.folder}: {doubled} units are in two data files")
    there_are = {path for path in stored.storage.children(stored.folder) if path.suffix == ".parquet"}
    for path in sorted(there_are - set(stored.files)):
        there = distinct_keys(stored.storage, path).to_pylist()
        if alone := len(set(there) - stored.have(there)):
            what = f"{path}: {alone} units that no log names; geosweep store compact folds them"
            raise EnvironmentFault("corrupt_file", what)


def _verify_checkpoints(layout: StoreLayout, findings: Findings) -> None:
    rows = {row["path"]: row["checkpoint"] for row in read_rows(layout, "checkpoints", ["path", "checkpoint"])}
    removed = {row["detail"] for row in read_rows(layout, "events", ["kind", "detail"]) if row["kind"] == REMOVED}
    files = layout.files.below(layout.root / "checkpoints")
    folders = {str(path.parent.relative_to(layout.root)) for path in files if path.name == MANIFEST}
    for path in sorted(folders & rows.keys()):
        findings.check("checkpoints", partial(_verify_folder, layout, path, rows[path], removed))
    lost = sorted(rows.keys() - folders - removed)
    findings.damaged += [f"{path}: in table checkpoints, but not there" for path in lost]
    rescues = sorted(folders - rows.keys())
    findings.orphans += [f"{path}: not in table checkpoints, so for a segment's next attempt" for path in rescues]
    named = {str(path.parent.relative_to(layout.root)) for path in files}
    findings.orphans += [f"{path}: a checkpoint folder without manifest" for path in sorted(named - folders)]


def _verify_corpus(layout: StoreLayout, folder: Path) -> None:
    verify_corpus(fetch_corpus(layout.root, folder.name))
    if layout.files.remote:
        remove_copy(folder)


def _verify_folder(layout: StoreLayout, path: str, checkpoint: str, removed: set[str]) -> None:
    folder = fetch_checkpoint(layout, layout.root / path, (WEIGHTS, STATE, CURVE, TOKENIZER))
    _compare_files(folder, path, checkpoint, removed)
    if layout.files.remote:
        remove_copy(folder)


def _compare_files(folder: Path, path: str, checkpoint: str, removed: set[str]) -> None:
    manifest = read_manifest(folder)
    if manifest.checkpoint != checkpoint:
        raise EnvironmentFault("corrupt_file", f"{folder}: checkpoint {manifest.checkpoint}, its row says {checkpoint}")
    for name, expected in manifest.files.items():
        file = folder / name
        if not file.exists() and f"{path}/{name}" in removed:
            continue
        if not file.exists():
            raise EnvironmentFault("corrupt_file", f"{file}: the file is missing")
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != expected.sha256:
            raise EnvironmentFault("corrupt_file", f"{file}: sha256 is {found}, the manifest says {expected.sha256}")
        _check_crc(file)


def _check_crc(file: Path) -> None:
    try:
        with pq.ParquetFile(file, memory_map=True, page_checksum_verification=True) as content:
            for group in range(content.num_row_groups):
                content.read_row_group(group)
    except UNREADABLE as error:
        raise EnvironmentFault("corrupt_file", f"{file}: damaged ({error})") from error
