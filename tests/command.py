"""The command line under test, as a person gives it."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

from orchestrator.cli import main


def geosweep(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command in this process: in one of its own it would import for longer than most answers take."""
    command = ["geosweep", *map(str, arguments)]
    printed, told = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        patch.object(sys, "argv", command),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int | None), code
    return subprocess.CompletedProcess(command, code or 0, printed.getvalue(), told.getvalue())


def geosweep_process(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: where it starts Ray, or reads the environment as it starts."""
    command = [sys.executable, "-m", "orchestrator", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
