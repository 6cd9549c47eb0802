"""What a store asks of the storage it lies on: a folder of this machine, or a prefix of an S3 bucket.

durable -> [files] -> layout -> every module of store
in    paths below the store's folder
out   Files: publish without overwriting, replace, read, list, remove; the same promises on both kinds
not   what the files mean; changing one in place, which nothing here can

A store on S3 has a folder on each machine too: its *copy*. A path below it names the object of the same name in the
bucket, and `fetch` puts an immutable object there, so that all who read a file (DuckDB, Parquet, torch) have a file.
What is in a copy counts for nothing: it may be removed at any time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import quote

from orchestrator.store.durable import (
    make_folder,
    publish_file,
    replace_file,
    storage_faults,
    sync_file,
    sync_folder,
    write_new,
)
from trainers.errors import EnvironmentFault, InputError

if TYPE_CHECKING:
    from obstore.auth.boto3 import Boto3CredentialProvider
    from obstore.store import S3Store

S3 = "s3://"
_URL = ".s3-url"  # the file that makes a folder the copy of a store on S3
_AGAIN = "check the network and AWS_ENDPOINT_URL, then give the same command again"
_ALLOW = "allow s3:ListBucket, GetObject, PutObject and DeleteObject on this prefix to these credentials"
_SET_CREDENTIALS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; a store never keeps them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of one stored file. bytes: its size; modified: seconds since 1970, by the storage's own clock."""

    bytes: int
    modified: float


class Files(Protocol):
    """The storage of one store; every path is below `root`. All raise EnvironmentFault (storage_error).

    root     the store's folder on this machine
    remote   whether the files lie elsewhere, so that a look at them costs a request
    """

    root: Path
    remote: bool

    def name(self, path: Path) -> str:
        """The path as people and other programs know it: s3://bucket/... for an object."""

    def publish(self, final: Path, content: bytes) -> bool:
        """Put a whole file there, for good; False when one is there already, and then nothing has changed."""

    def place(self, finished: Path, final: Path) -> None:
        """Move a finished local file to a name that is its own: nothing else was or ever will be there."""

    def replace(self, final: Path, content: bytes) -> None:
        """Put a whole file there in place of an older one: a reader finds the old or the new."""

    def replace_with(self, finished: Path, final: Path) -> None:
        """As replace, with the content of a local file, which goes."""

    def read(self, path: Path) -> bytes:
        """The newest content. raises FileNotFoundError too"""

    def fetch(self, path: Path) -> Path:
        """The path itself, which is then a whole local file; for files that never change. raises FileNotFoundError"""

    def exists(self, path: Path) -> bool:
        """Whether there is a file."""

    def facts(self, path: Path) -> Facts:
        """Its size and age. raises FileNotFoundError"""

    def children(self, folder: Path) -> list[Path]:
        """The files directly in a folder, by name; none where there is no folder. Unfinished ones never show."""

    def below(self, folder: Path) -> list[Path]:
        """The files anywhere below a folder, by name."""

    def names(self, folder: Path) -> list[str]:
        """What is directly in a folder, files and folders; nothing where there is none."""

    def remove(self, path: Path) -> None:
        """Remove a file, or what is there of it."""

    def sync(self, path: Path) -> None:
        """Make durable what another library wrote there."""

    @property
    def options(self) -> Mapping[str, str] | None:
        """What delta-rs, which looks for no profile, has to be told beside `name`: to be passed on, never kept."""


class LocalFiles:
    """A folder on a POSIX file system with hard links."""

    remote = False
    options: Mapping[str, str] | None = None

    def __init__(self, root: Path) -> None:
        self.root = root

    def name(self, path: Path) -> str:
        return str(path)

    def publish(self, final: Path, content: bytes) -> bool:
        self._make_parents(final)
        return write_new(final, content, new_temporary(self.root))

    def place(self, finished: Path, final: Path) -> None:
        self._make_parents(final)
        publish_file(finished, final)

    def replace(self, final: Path, content: bytes) -> None:
        temporary = new_temporary(self.root)
        with storage_faults(final, "the older file stays"):
            temporary.write_bytes(content)
        self.replace_with(temporary, final)

    def replace_with(self, finished: Path, final: Path) -> None:
        self._make_parents(final)
        replace_file(finished, final)

    def read(self, path: Path) -> bytes:
        with _missing_as_it_is(), storage_faults(path, "it was not read"):
            return path.read_bytes()

    def fetch(self, path: Path) -> Path:
        if not path.exists():
            raise FileNotFoundError(path)
        return path

    def exists(self, path: Path) -> bool:
        return path.exists()

    def facts(self, path: Path) -> Facts:
        with _missing_as_it_is(), storage_faults(path, "it was not looked at"):
            status = path.stat()
        return Facts(bytes=status.st_size, modified=status.st_mtime)

    def children(self, folder: Path) -> list[Path]:
        with storage_faults(folder, "it was not read"):
            if not folder.exists():
                return []
            with os.scandir(folder) as entries:
                names = sorted(entry.name for entry in entries if entry.is_file())  # text sorts faster than paths
            return [folder / name for name in names]

    def below(self, folder: Path) -> list[Path]:
        with storage_faults(folder, "it was not read"):
            return sorted(path for path in folder.rglob("*") if path.is_file())

    def names(self, folder: Path) -> list[str]:
        with storage_faults(folder, "it was not read"):
            return [path.name for path in folder.iterdir()] if folder.exists() else []

    def remove(self, path: Path) -> None:
        with storage_faults(path, "it was not removed"):
            path.unlink(missing_ok=True)

    def sync(self, path: Path) -> None:
        with storage_faults(path, "it is not safe from a power cut"):
            sync_file(path)
            sync_folder(path.parent)

    def _make_parents(self, final: Path) -> None:
        missing = [folder for folder in final.parents if folder.is_relative_to(self.root) and not folder.exists()]
        for folder in reversed(missing):
            make_folder(folder)


class S3Files:
    """A prefix of a bucket. A put that is refused because of its own first try, whose answer was lost, counts."""

    remote = True

    def __init__(self, root: Path, url: str) -> None:
        self.root, self._url = root, url
        self._bucket, self._prefix = _bucket_and_prefix(url)
        self._credentials = _find_credentials(url)
        self._store = _connect(self._bucket, self._prefix, self._credentials)

    @property
    def options(self) -> Mapping[str, str] | None:
        now = self._credentials()
        found = {
            "aws_access_key_id": now["access_key_id"],
            "aws_secret_access_key": now["secret_access_key"],
            "aws_session_token": now.get("token"),
            "aws_region": self._credentials.config.get("region"),
            "allow_http": "true" if _is_plain_http() else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def name(self, path: Path) -> str:
        return f"{self._url}/{self._key(path)}" if path != self.root else self._url

    def publish(self, final: Path, content: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._faults(final, "nothing was written"), _bucket_is_there():
            try:
                obstore.put(self._store, self._key(final), content, mode="create")
            except AlreadyExistsError:
                with contextlib.suppress(FileNotFoundError):
                    return self.read(final) == content
                return False
        return True

    def place(self, finished: Path, final: Path) -> None:
        self.upload(finished, final)
        self._keep(finished, final)

    def replace(self, final: Path, content: bytes) -> None:
        import obstore

        with self._faults(final, "the older file stays"), _bucket_is_there():
            obstore.put(self._store, self._key(final), content)

    def replace_with(self, finished: Path, final: Path) -> None:
        self.upload(finished, final)
        finished.unlink()

    def read(self, path: Path) -> bytes:
        import obstore

        with self._faults(path, "it was not read"):
            return bytes(obstore.get(self._store, self._key(path)).bytes())

    def fetch(self, path: Path) -> Path:
        if not path.exists():
            self.download(path, path)
        return path

    def download(self, path: Path, target: Path) -> None:
        """The content as a whole local file at `target`. raises FileNotFoundError"""
        import obstore

        temporary = new_temporary(self.root)
        try:
            with self._faults(path, "it was not fetched"), storage_faults(path, "it was not fetched"):
                found = obstore.get(self._store, self._key(path))
                with temporary.open("xb") as file:
                    for part in found.stream(min_chunk_size=4 * 2**20):
                        file.write(part)
            self._keep(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def exists(self, path: Path) -> bool:
        try:
            self.facts(path)
        except FileNotFoundError:
            return False
        return True

    def facts(self, path: Path) -> Facts:
        import obstore

        with self._faults(path, "it was not looked at"):
            found = obstore.head(self._store, self._key(path))
        return Facts(bytes=found["size"], modified=found["last_modified"].timestamp())

    def children(self, folder: Path) -> list[Path]:
        import obstore

        with self._faults(folder, "it was not read"):
            found = obstore.list_with_delimiter(self._store, self._key(folder))["objects"]
        return sorted(self.root / item["path"] for item in found)

    def below(self, folder: Path) -> list[Path]:
        import obstore

        with self._faults(folder, "it was not read"):
            found = [item for part in obstore.list(self._store, self._key(folder)) for item in part]
        return sorted(self.root / item["path"] for item in found)

    def names(self, folder: Path) -> list[str]:
        import obstore

        with self._faults(folder, "it was not read"):
            found = obstore.list_with_delimiter(self._store, self._key(folder))
        paths = [*(item["path"] for item in found["objects"]), *found["common_prefixes"]]
        return [Path(path).name for path in paths]

    def remove(self, path: Path) -> None:
        import obstore

        with self._faults(path, "it was not removed"), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, self._key(path))
        path.unlink(missing_ok=True)

    def sync(self, path: Path) -> None:
        """An object is durable when its put returns."""

    def upload(self, finished: Path, final: Path) -> None:
        """Put the content of a local file there, whatever was there before."""
        import obstore

        with self._faults(final, "nothing was written"), _bucket_is_there():
            obstore.put(self._store, self._key(final), finished)

    def _keep(self, finished: Path, final: Path) -> None:
        with storage_faults(final, "it is not in this machine's copy"):
            final.parent.mkdir(parents=True, exist_ok=True)
            finished.replace(final)

    def _key(self, path: Path) -> str:
        return "" if path == self.root else path.relative_to(self.root).as_posix()

    @contextmanager
    def _faults(self, path: Path, consequence: str) -> Iterator[None]:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError) as error:
            what = f"{self.name(path)}: permission denied; {consequence}"
            raise EnvironmentFault("storage_error", what, _ALLOW) from error
        except BaseError as error:
            said = str(error).partition("\n")[0]
            raise EnvironmentFault("storage_error", f"{self.name(path)}: {said}; {consequence}", _AGAIN) from error


def folder_of(store: str) -> Path:
    """The folder of a store on this machine: the store itself, or for s3://bucket/prefix its copy, made where missing.

    The copy lies in $GEOSWEEP_CACHE, else in $XDG_CACHE_HOME/geosweep, else in ~/.cache/geosweep.
    raises  InputError for a URL that names no bucket or is of another kind than s3
    """
    if "://" not in store:
        return Path(store)
    bucket, prefix = _bucket_and_prefix(store)
    name = f"{bucket}/{prefix}".rstrip("/")
    return make_copy(S3 + name, cache_folder() / quote(name, safe=""))


def make_copy(url: str, folder: Path) -> Path:
    """Make a folder the copy of a store on S3, with nothing in it yet."""
    with storage_faults(folder, "the store was not opened"):
        (folder / "temporary").mkdir(parents=True, exist_ok=True)
        (folder / "leases").mkdir(exist_ok=True)
        if not (folder / _URL).exists():
            temporary = new_temporary(folder)
            temporary.write_text(url)
            temporary.replace(folder / _URL)
    return folder


def files_of(root: Path) -> Files:
    """The storage of the store whose folder on this machine is `root`. raises InputError without S3 credentials"""
    url = root / _URL
    return _s3_files(root, url.read_text()) if url.exists() else LocalFiles(root)


def new_temporary(root: Path) -> Path:
    """A path that nobody else uses, on the file system of `root`, in a folder that no reader scans."""
    return root / "temporary" / f"{os.getpid()}-{uuid.uuid4().hex}.part"


@cache
def _s3_files(root: Path, url: str) -> S3Files:
    return S3Files(root, url)


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    rest = url.removeprefix(S3)
    bucket, _, prefix = rest.partition("/")
    parts = [part for part in prefix.split("/") if part]
    if rest == url or not bucket or ".." in parts or "." in parts:
        raise InputError(f"--store {url}: a store is a folder, or s3://BUCKET/PREFIX")
    return bucket, "/".join(parts)


def cache_folder() -> Path:
    """Where this machine keeps what it can make or fetch again; may be removed at any time."""
    if chosen := os.environ.get("GEOSWEEP_CACHE"):
        return Path(chosen).resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve() / "geosweep"


def _is_plain_http() -> bool:
    return os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")


def _find_credentials(url: str) -> Boto3CredentialProvider:
    """As boto3 finds them: environment, profile, the machine's role; asked again before they run out."""
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError as error:
        raise InputError(f"{url}: there are no AWS credentials", (), _SET_CREDENTIALS) from error


def _connect(bucket: str, prefix: str, credentials: Boto3CredentialProvider) -> S3Store:
    from obstore.store import S3Store

    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options={"allow_http": _is_plain_http()},
        retry_config={"max_retries": 5},
        credential_provider=credentials,
    )


@contextmanager
def _bucket_is_there() -> Iterator[None]:
    """A put that finds nothing has found no bucket."""
    from obstore.exceptions import GenericError

    try:
        yield
    except FileNotFoundError as error:
        raise GenericError("there is no such bucket") from error


@contextmanager
def _missing_as_it_is() -> Iterator[None]:
    try:
        yield
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, FileNotFoundError):
            raise fault.__cause__ from None
        raise


def remove_copy(folder: Path) -> None:
    """Forget a folder of a copy, so that it is fetched again."""
    shutil.rmtree(folder, ignore_errors=True)
