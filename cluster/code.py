"""Our own packages as folders that a cluster is sent, so that its workers run the code of whoever asked.

this installation -> [code] -> connect, submit
Ray names what it is sent by content, so a cluster that has this very code is sent nothing.
not   what the code depends on: torch, transformers and the rest must be installed on the cluster
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = ("trainers", "evaluators", "cluster", "orchestrator", "sweeps")
_ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def own_code() -> Iterator[list[Path]]:
    """Copies of the packages without compiled files, whose bytes would differ from machine to machine."""
    with tempfile.TemporaryDirectory(prefix="geosweep-code-") as folder:
        copies = [Path(folder) / name for name in PACKAGES]
        for name, copy in zip(PACKAGES, copies, strict=True):
            shutil.copytree(_ROOT / name, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        yield copies
