"""Put bytes on the disk so that they are whole or absent, whatever is killed.

every module of store -> [durable] -> the file system
in    bytes, their final path, a temporary path on the same file system
out   the file, synced, under its final name; never half of it, never over another
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainers.errors import EnvironmentFault

_NEXT_STEPS = {
    errno.ENOSPC: "free space on this file system, then give the same command again",
    errno.EDQUOT: "free space or have the quota raised, then give the same command again",
    errno.EROFS: "mount it for writing, or choose another folder with --store",
    errno.EACCES: "get the permission, or choose another folder with --store",
    errno.EPERM: "get the permission, or choose another folder with --store",
    errno.ENOENT: "give the same command again; if it stays so, part of the store was removed: restore it from a copy",
    errno.EIO: "check the disk, then give the same command again",
}
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)


@contextmanager
def storage_faults(path: Path, consequence: str) -> Iterator[None]:
    """Turn what the file system refuses into an EnvironmentFault of kind storage_error.

    path         what the body reads or writes
    consequence  what did not happen, for the message: "nothing was written"
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NEXT_STEPS:
            raise
        what = f"{path}: {os.strerror(error.errno)}; {consequence}"
        raise EnvironmentFault("storage_error", what, _NEXT_STEPS[error.errno]) from error


def is_full(fault: EnvironmentFault) -> bool:
    """Whether it was for want of space: then waiting helps, and nothing else is wrong."""
    return isinstance(fault.__cause__, OSError) and fault.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)


def write_new(final: Path, data: bytes, temporary: Path) -> bool:
    """Publish a file without overwriting: it appears whole and is on the disk when this returns.

    temporary  a path that does not exist yet, on the same file system, outside every scanned folder
    returns    False when `final` was there already; then nothing has changed
    raises     EnvironmentFault (storage_error) when the disk is full, read-only or refuses hard links
    """
    with storage_faults(final, "nothing was written"):
        try:
            with temporary.open("xb") as file:
                file.write(data)
            return publish_file(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)


def publish_file(temporary: Path, final: Path) -> bool:
    """Give a finished file its final name without overwriting; both it and its name are then on the disk.

    returns  False when `final` was there already; the temporary name goes in any case
    """
    with storage_faults(final, "nothing was written"):
        try:
            sync_file(temporary)
            created = _link(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)
        # Also when it was there: whoever linked it may have died before this line.
        sync_folder(final.parent)
    return created


def replace_file(temporary: Path, final: Path) -> None:
    """Give a finished file its final name in place of an older one: a reader finds the old or the new, whole."""
    with storage_faults(final, "the older file stays"):
        try:
            sync_file(temporary)
            temporary.replace(final)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(final.parent)


def make_folder(folder: Path) -> None:
    """Make a folder whose parent exists, and make its name durable; one that is there is left alone."""
    with storage_faults(folder, "the folder was not made"):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file survive a power cut."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(temporary: Path, final: Path) -> bool:
    """Hard link: the one local operation that publishes a whole file and never overwrites."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        what = f"{final.parent}: this file system has no hard links, so nothing can be published safely"
        raise EnvironmentFault("storage_error", what, "put the store on ext4, xfs, btrfs, tmpfs or NFS") from error
    return True
