"""Corpora between a store and this machine: found, fetched, put into the store.

prepare -> [copies] -> corpora/<name>/ -> plan, training, evaluations
in    the folder of a corpus; its manifest names it whole, and is read first and written last
out   the same folder, with every file on this machine; for a store on a disk nothing is done
"""

from __future__ import annotations

from pathlib import Path

from orchestrator.store.files import Files, S3Files, files_of, new_temporary, remove_copy
from trainers.errors import EnvironmentFault

MANIFEST = "manifest.json"


def corpus_folders(root: Path) -> list[Path]:
    """The folder of each corpus that is prepared in the store at `root`, by name; of its files only the manifest."""
    files = files_of(root)
    folder = root / "corpora"
    if not files.remote:
        return sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    there = [path for path in files.below(folder) if path.name == MANIFEST]
    for manifest in there:
        renew_manifest(files, manifest)
    return sorted(manifest.parent for manifest in there)


def fetch_corpus(root: Path, name: str) -> Path:
    """The folder of a corpus with every file of it on this machine; once for all processes that need it."""
    files = files_of(root)
    folder = root / "corpora" / name
    if files.remote and files.exists(folder / MANIFEST):
        renew_manifest(files, folder / MANIFEST)
        for path in files.children(folder):
            files.fetch(path)
    return folder


def fetch_tokenizer(root: Path, name: str) -> None:
    """Have manifest and tokenizer of a corpus here, without its tokens."""
    files = files_of(root)
    if files.remote:
        renew_manifest(files, root / "corpora" / name / MANIFEST)
        files.fetch(root / "corpora" / name / "tokenizer.json")


def put_corpus(root: Path, name: str) -> None:
    """Store a corpus that was prepared in its folder here, unless it is there."""
    files = files_of(root)
    folder = root / "corpora" / name
    manifest = folder / MANIFEST
    if not isinstance(files, S3Files) or (files.exists(manifest) and files.read(manifest) == manifest.read_bytes()):
        return
    for path in sorted(folder.iterdir()):
        if path.is_file() and path != manifest and not path.name.startswith("."):
            files.upload(path, path)
    files.replace(manifest, manifest.read_bytes())


def renew_manifest(files: Files, manifest: Path) -> None:
    """Have the newest manifest of a folder here; what is here of another content is forgotten.

    raises  EnvironmentFault (corrupt_file) when it is gone
    """
    try:
        newest = files.read(manifest)
    except FileNotFoundError as error:
        raise EnvironmentFault("corrupt_file", f"{files.name(manifest)}: the file is missing") from error
    if manifest.exists() and manifest.read_bytes() == newest:
        return
    remove_copy(manifest.parent)
    manifest.parent.mkdir(parents=True, exist_ok=True)
    temporary = new_temporary(files.root)
    temporary.write_bytes(newest)
    temporary.replace(manifest)
