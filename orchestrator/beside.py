"""A process beside our own, for what takes long and can be asked and answered in one go.

report, store/units.py -> [beside] -> a module of ours that answers one question (`serve`) -> back
in    the module's name, the question, any pickle
out   its answer, when it is asked for
Not multiprocessing: its children import the command line first, and its pools wait for each child to tidy up.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class Beside:
    """One run of a module, which begins to import at once; it ends with the `with`, whether it has answered or not."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the command, which ends this one
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._thread = ThreadPoolExecutor(1)  # a pipe holds little, so somebody has to stand at it
        self._reply: Future[tuple[bytes, bytes]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        if self._reply is None:
            self._process.communicate()
        self._thread.shutdown()

    def ask(self, question: object) -> None:
        self._reply = self._thread.submit(self._process.communicate, pickle.dumps(question))

    def answer(self) -> Any:
        """Waits for it. raises RuntimeError if the process ended without one; what it said is on stderr"""
        assert self._reply is not None
        reply, _ = self._reply.result()
        if self._process.returncode != 0:
            raise RuntimeError(f"{self._module} ended with {self._process.returncode} and no answer")
        return pickle.loads(reply)


def serve(function: Callable[[Any], object]) -> None:
    """Answer the question on stdin, and end at once."""
    pipe, sys.stdout = sys.stdout.buffer, sys.stderr  # whatever a library prints is no answer
    pickle.dump(function(pickle.load(sys.stdin.buffer)), pipe)
    pipe.flush()
    os._exit(0)
