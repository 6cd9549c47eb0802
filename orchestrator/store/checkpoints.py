"""Checkpoint folders between a store and this machine: put, found, fetched, removed.

attempt -> [checkpoints] -> checkpoints/<segment>/<tokens>/ -> the next segment, evaluators, registry
in    a checkpoint folder that was written beside the store, whole
out   the folder in the store: its manifest is put last and never over another
not   what is in the files (trainers/checkpoint.py)

On S3 each file has the head of its sha256 in its name: two attempts that write the same checkpoint at once, on machines
that differ in a bit, do not write into each other's files, and whose manifest is there first is the checkpoint.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from pathlib import Path

from orchestrator.store.copies import fetch_tokenizer, renew_manifest
from orchestrator.store.durable import storage_faults
from orchestrator.store.files import S3Files, remove_copy
from orchestrator.store.layout import StoreLayout
from trainers.checkpoint import (
    MANIFEST,
    STATE,
    TOKENIZER,
    WEIGHTS,
    CheckpointManifest,
    other_checkpoint,
    read_manifest,
)
from trainers.errors import EnvironmentFault

_ROOM = 0.15  # below this free part of the disk, copies of checkpoints that nobody has used for an hour go
_IDLE_S = 3600.0
_LEFTOVER_AGE_S = 86_400.0


def put_checkpoint(
    layout: StoreLayout, folder: Path, write: Callable[[Path], CheckpointManifest]
) -> CheckpointManifest:
    """Store a checkpoint under `folder`, whole and durable when this returns; the same one again changes nothing.

    write   writes it as the folder that it is given, whole (write_checkpoint)
    raises  InputError when another checkpoint is there; EnvironmentFault where the storage is at fault
    """
    files = layout.files
    if not isinstance(files, S3Files):
        return write(folder)
    written = layout.temporary()
    try:
        manifest = write(written)
        for name, record in manifest.files.items():
            files.upload(written / name, folder / _object_name(name, record.sha256))
        if not files.publish(folder / MANIFEST, (written / MANIFEST).read_bytes()):
            there = read_manifest(fetch_checkpoint(layout, folder, ()))
            if there.checkpoint != manifest.checkpoint:
                raise other_checkpoint(files.name(folder), there, manifest)
            return there
        with storage_faults(folder, "it is not in this machine's copy"):
            remove_copy(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            written.rename(folder)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return manifest


def fetch_checkpoint(layout: StoreLayout, folder: Path, names: Collection[str]) -> Path:
    """The folder, with its manifest and those of these files that it has on this machine.

    raises  EnvironmentFault (corrupt_file) when there is no such checkpoint in a store on S3
    """
    files = layout.files
    if not isinstance(files, S3Files):
        return folder
    renew_manifest(files, folder / MANIFEST)
    (folder / MANIFEST).touch()  # when it was used last
    for name, record in read_manifest(folder).files.items():
        if name in names and not (folder / name).exists():
            _make_room(layout.root)
            _fetch(files, folder, name, record.sha256)
    return folder


def named_checkpoint(root: Path, path: Path) -> Path:
    """The folder of a checkpoint that a person names, with its weights and what reads them on this machine.

    path  a folder, or the path of a checkpoint in the store at `root`, as table checkpoints has it
    """
    if path.is_dir():
        return path
    layout = StoreLayout(root)
    folder = fetch_checkpoint(layout, root / path, (WEIGHTS, TOKENIZER))
    recipe = read_manifest(folder).recipe
    if recipe is not None:
        fetch_tokenizer(root, recipe.data.corpus)
    return folder


def has_checkpoint(layout: StoreLayout, folder: Path) -> bool:
    """Whether the folder is in the store."""
    return layout.files.exists(folder / MANIFEST)


def has_state(layout: StoreLayout, folder: Path) -> bool:
    """Whether training can go on from it: its optimizer state was not dropped."""
    if layout.files.remote:
        return has_checkpoint(layout, folder) and any(map(_is_state, layout.files.children(folder)))
    return (folder / STATE).exists()


def with_state(layout: StoreLayout, folders: Collection[Path]) -> set[Path]:
    """Those of these checkpoints that training can go on from; one look at the whole store where looks are slow."""
    if layout.files.remote:
        return {path.parent for path in layout.files.below(layout.root / "checkpoints") if _is_state(path)} & {*folders}
    return {folder for folder in folders if has_state(layout, folder)}


def checkpoints_of(layout: StoreLayout, segment: str) -> list[int]:
    """At how many tokens checkpoints of a segment are in the store: its last and its rescues."""
    folder = layout.checkpoint(segment, 0).parent
    if layout.files.remote:
        manifests = [path for path in layout.files.below(folder) if path.name == MANIFEST]
    else:
        manifests = list(folder.glob(f"*/{MANIFEST}"))
    return sorted(int(path.parent.name) for path in manifests if path.parent.name.isdigit())


def remove_checkpoint(layout: StoreLayout, folder: Path) -> None:
    """Remove a checkpoint: it is there whole, or not."""
    if layout.files.remote:
        layout.files.remove(folder / MANIFEST)
        for path in layout.files.children(folder):
            layout.files.remove(path)
        remove_copy(folder)
    elif folder.exists():
        aside = layout.temporary()  # a folder half removed would be neither there nor free
        with storage_faults(folder, "it was not removed"):
            folder.rename(aside)
            shutil.rmtree(aside)


def remove_state(layout: StoreLayout, folder: Path) -> None:
    """Remove the optimizer state of a checkpoint that stays."""
    for path in layout.files.children(folder):
        if _is_state(path):
            layout.files.remove(path)
    layout.files.remove(folder / STATE)


def remove_leftovers(layout: StoreLayout) -> int:
    """Remove what attempts that died a day ago had put into checkpoint folders on S3; returns how many objects.

    On a disk there are none: what is unfinished lies in temporary/, and goes when the store is opened.
    """
    if not layout.files.remote:
        return 0
    folders: dict[Path, list[Path]] = {}
    for path in layout.files.below(layout.root / "checkpoints"):
        folders.setdefault(path.parent, []).append(path)
    removed = 0
    for folder, paths in folders.items():
        named = {MANIFEST}
        if folder / MANIFEST in paths:
            files = read_manifest(fetch_checkpoint(layout, folder, ())).files
            named |= {_object_name(name, record.sha256) for name, record in files.items()}
        for path in paths:
            if path.name not in named and time.time() - layout.files.facts(path).modified > _LEFTOVER_AGE_S:
                layout.files.remove(path)
                removed += 1
    return removed


def stored_bytes(layout: StoreLayout, folder: Path, *, state_only: bool) -> int:
    """What a checkpoint, or its state alone, takes in the store."""
    paths = [path for path in layout.files.children(folder) if _is_state(path) or not state_only]
    return sum(layout.files.facts(path).bytes for path in paths)


def _is_state(path: Path) -> bool:
    return path.name == STATE or (path.name.startswith("state-") and path.suffix == ".parquet")


def _object_name(name: str, sha256: str) -> str:
    stem, _, ending = name.partition(".")
    return f"{stem}-{sha256[:16]}.{ending}"


def _fetch(files: S3Files, folder: Path, name: str, sha256: str) -> None:
    try:
        files.download(folder / _object_name(name, sha256), folder / name)
    except FileNotFoundError as error:
        if name != STATE:  # a state may have been dropped
            what = f"{files.name(folder / name)}: the file is missing"
            raise EnvironmentFault("corrupt_file", what, "restore it from a copy, or remove the checkpoint") from error


def _make_room(root: Path) -> None:
    """Forget the copies of checkpoints that were used longest ago, while the disk is nearly full."""
    used = {path: path.stat().st_mtime for path in root.glob(f"checkpoints/*/*/{MANIFEST}")}
    for manifest in sorted(used, key=lambda path: used[path]):
        disk = shutil.disk_usage(root)
        if disk.free > _ROOM * disk.total or time.time() - used[manifest] < _IDLE_S:
            return
        remove_copy(manifest.parent)
