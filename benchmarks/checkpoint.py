"""Measure checkpoint files beside safetensors and torch.save: CPU seconds, one tensor alone, memory, flipped bits.

    python -m benchmarks.checkpoint [--parameters 20 75] [--repeats 3] [--folder DIR] [--json FILE]

The same tensors (weights, and two moments each) are written and read by each library in turn, and the turns are
repeated; a line is the median of CPU seconds over all threads. Files are in the page cache: what is measured is the
work, not the disk.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from orchestrator.plan import load_plan
from orchestrator.presets import CorpusFacts
from orchestrator.spec import find_sweep, read_text
from trainers.checkpoint import (
    CheckpointManifest,
    circumstances,
    read_state,
    read_tensor,
    read_weights,
    verify_checkpoint,
    write_checkpoint,
)
from trainers.config import Recipe
from trainers.errors import EnvironmentFault

Tensors = Mapping[str, Tensor]
HIDDEN = {20: 256, 75: 512}  # millions of parameters -> hidden size, with W and the embedding of 32,000 rows
LIMITS_S_PER_GB = {"save": 3.8 / 0.921, "load": 2.4 / 0.921}  # STORE.md's table, of a prototype on another machine
FLIPS = 60


def shapes(millions: int) -> dict[str, tuple[int, ...]]:
    """Shapes as of a language model of about so many parameters: W, the embedding, and blocks."""
    D = HIDDEN[millions]
    body = {f"model.layers.{i}.{name}": (4 * D, D) for i in range(12) for name in ("mlp.up", "mlp.down")}
    named = {"lm_head.weight": (32_000, D), "model.embed_tokens.weight": (32_000, D), **body}
    left = millions * 10**6 - sum(rows * columns for rows, columns in named.values())
    return named | {f"model.layers.{i}.attention": (D, D) for i in range(max(1, left // D**2))}


def tensors(millions: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes(millions).items()}
    state = {f"{name}/{moment}": tensor * 0.1 for name, tensor in weights.items() for moment in ("exp_avg", "sq")}
    return weights, state


def ours(folder: Path, weights: Tensors, state: Tensors, *, compress: bool = False) -> CheckpointManifest:
    return write_checkpoint(
        folder,
        weights=weights,
        state=state,
        curve=(),
        recipe=recipe(),
        segment="benchmark",
        history="benchmark",
        tokens=0,
        steps=0,
        made=circumstances(device="cpu", threads=1, micro_batch=None, compiled=False),
        compress=compress,
    )


def libraries(weights: Tensors, state: Tensors) -> dict[str, tuple[Callable[[Path], object], ...]]:
    """Name -> save all, load all, load W; each of a folder."""

    def save_safetensors(folder: Path) -> None:
        folder.mkdir()
        save_file({**weights, **state}, folder / "all.safetensors")

    def load_safetensors(folder: Path) -> None:
        for tensor in load_file(folder / "all.safetensors").values():
            tensor.clone()

    def w_of_safetensors(folder: Path) -> Tensor:
        with safe_open(folder / "all.safetensors", "pt") as file:
            return file.get_tensor("lm_head.weight").clone()

    def save_torch(folder: Path) -> None:
        folder.mkdir()
        torch.save({**weights, **state}, folder / "all.pt")

    def load_torch(folder: Path) -> object:
        return torch.load(folder / "all.pt", weights_only=True)

    def load_ours(folder: Path) -> None:
        read_weights(folder)
        read_state(folder)

    def w_of_ours(folder: Path) -> Tensor:
        return read_tensor(folder, "lm_head.weight")

    return {
        "geosweep": (partial(ours, weights=weights, state=state), load_ours, w_of_ours),
        "geosweep, packed": (partial(ours, weights=weights, state=state, compress=True), load_ours, w_of_ours),
        "safetensors (cloned)": (save_safetensors, load_safetensors, w_of_safetensors),
        "torch.save": (save_torch, load_torch, load_torch),
    }


def compare(millions: int, repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    weights, state = tensors(millions)
    gigabytes = sum(tensor.nbytes for tensor in (*weights.values(), *state.values())) / 1e9
    candidates = libraries(weights, state)
    took: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": [], "W alone": []} for name in candidates}
    sizes: dict[str, float] = {}
    for _ in range(repeats):
        for name, (save, *reads) in candidates.items():
            place = folder / "checkpoint"
            took[name]["save"].append(cpu_seconds(partial(save, place)))
            for what, read in zip(("load", "W alone"), reads, strict=True):
                took[name][what].append(cpu_seconds(partial(read, place)))
            sizes[name] = sum(file.stat().st_size for file in place.iterdir()) / 1e9 / gigabytes
            shutil.rmtree(place)
    print(f"\n{millions}M parameters and AdamW's moments, {gigabytes:.3f} GB; CPU s/GB (W alone: CPU s), medians")
    found = {}
    for name, times in took.items():
        medians = {what: statistics.median(values) for what, values in times.items()}
        found[name] = {
            "save": medians["save"] / gigabytes,
            "load": medians["load"] / gigabytes,
            "W alone": medians["W alone"],
            "size": sizes[name],
        }
        print(f"  {name:<22}" + "".join(f"{what:>10} {value:6.3f}" for what, value in found[name].items()))
    for what, limit in LIMITS_S_PER_GB.items():
        print(f"  {what}: {found['geosweep'][what]:.2f} CPU s/GB, limit {limit:.2f}")
    return found


def cpu_seconds(action: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_SELF)
    action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def flips(folder: Path) -> int:
    """How many of 60 single-bit flips, anywhere in weights and state, are named as damage of their file."""
    weights, state = tensors(20)
    ours(folder / "checkpoint", weights, state)
    draw = random.Random(0)
    named = 0
    for _ in range(FLIPS):
        path = folder / "checkpoint" / draw.choice(["weights.parquet", "state.parquet"])
        place, bit = draw.randrange(path.stat().st_size), 1 << draw.randrange(8)
        flip(path, place, bit)
        try:
            verify_checkpoint(folder / "checkpoint")
        except EnvironmentFault as fault:
            named += str(path) in str(fault)
        flip(path, place, bit)
    shutil.rmtree(folder / "checkpoint")
    return named


def flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ bit]))


def peak_of_the_writer(millions: int, folder: Path) -> float:
    """Megabytes that writing takes beside the tensors, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--write-once", str(millions), "--folder", str(folder)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write_once(millions: int, folder: Path) -> None:
    weights, state = tensors(millions)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        warm_up(Path(name))
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status_mb("VmRSS")
        ours(Path(name) / "second", weights, state)
        print(_status_mb("VmHWM") - before)


def warm_up(folder: Path) -> None:
    """What the first checkpoint of a process loads is not the writer's."""
    small = {"lm_head.weight": torch.zeros(8, 8)}
    ours(folder / "first", small, small)
    shutil.rmtree(folder / "first")


def _status_mb(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1e3


def recipe() -> Recipe:
    """Any recipe whose W has the name that ours has: the files hold its text, their work is with the tensors."""
    facts = CorpusFacts(name="builtin", digest="none", vocab_size=8192, tokens=10**9, heldout_domains=1)
    _, plan = load_plan(read_text(find_sweep("smoke")), "smoke", {"builtin": facts})
    return plan.trials[0].recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[20, 75], choices=list(HIDDEN), metavar="MILLIONS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write-once", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.write_once:
        write_once(arguments.write_once, arguments.folder)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        began = time.monotonic()
        warm_up(folder)
        found: dict[str, object] = {
            f"{millions}M": compare(millions, arguments.repeats, folder) for millions in arguments.parameters
        }
        found["peak MB of the writer"] = peak_of_the_writer(max(arguments.parameters), folder)
        print(f"\npeak memory of the writer beside the tensors: {found['peak MB of the writer']:.0f} MB, limit 100")
        found["flips named"] = flips(folder)
        print(f"single-bit flips named: {found['flips named']} of {FLIPS}, limit {FLIPS}")
        print(f"{time.monotonic() - began:.0f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
