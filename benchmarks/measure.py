"""What the benchmarks share: interleaved processes, medians, ratios with their spread, the machine's peak."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orchestrator.corpora import prepare_corpus
from trainers.tokens import default_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Median of the ratios of paired rounds, and the lowest and the highest of them."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Round by round, since a machine that others use drifts from one round to the next."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(median=statistics.median(each), low=min(each), high=max(each))


def measured(module: str, *arguments: object, threads: int, folder: Path) -> dict[str, Any]:
    """Start `python -m module arguments` alone in a process and return the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    if done.returncode:
        sys.exit(f"{module} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def interleaved(
    modules: Mapping[str, str], *arguments: object, repeats: int, threads: int, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Each module once a round, so that all see the same minutes of the machine."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in modules}
    for _ in range(repeats):
        for name, module in modules.items():
            found[name].append(measured(module, *arguments, threads=threads, folder=folder))
    return found


def matmul_peak(threads: int, *, device: str = "cpu", repeats: int = 9) -> float:
    """FLOP/s of a square matrix product, the median of some: what the machine gives at most.

    float32 of 2,048 rows on the CPU, bfloat16 of 8,192 on a GPU
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size, dtype = (2048, torch.float32) if device == "cpu" else (8192, torch.bfloat16)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        (left @ right)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * size**3 / statistics.median(seconds)


def store_with_builtin(given: Path | None, new: Path) -> Path:
    """The store that was given, or a new one with the corpus 'builtin'."""
    if given is not None:
        return given
    prepare_corpus("builtin", new, None, default_settings("builtin"), again=False, say=print)
    return new


def write_json(path: Path | None, content: object) -> None:
    if path:
        path.write_text(json.dumps(content, indent=1, default=asdict))
