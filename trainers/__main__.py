"""`python -m trainers trial.yaml --out DIR`: one trial from one file, in one process, without Ray, sweep or store.

trial.yaml -> [loop] -> DIR/<tokens>/, one checkpoint folder each
The file has three fields: `corpus` (folder of a prepared corpus), `checkpoints` (token counts), `recipe` (every field
of config.Recipe). The same command again goes on from the newest checkpoint. Exit code 2: something given is wrong;
3: the machine or a file failed; 4: the loss diverged; 130: stopped by a signal, with the state saved.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import yaml
from pydantic import ValidationError

from trainers.checkpoint import CurveRecord, read_curve, read_manifest
from trainers.config import Count, Frozen, Recipe
from trainers.errors import GeosweepError, InputError
from trainers.loop import Execution, Training

SEGMENT = "trial"
LINE_EVERY_S = 3.0


class Trial(Frozen):
    """The file. corpus: a folder, relative to the file; checkpoints: token counts, each a whole number of steps."""

    corpus: Path
    checkpoints: tuple[Count, ...]
    recipe: Recipe


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        trial = _read_trial(given.trial)
        with _stop_signals() as should_stop:
            return _train(trial, given.out, Execution(device=given.device, threads=given.threads), should_stop)
    except GeosweepError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainers", description="Train one trial.")
    parser.add_argument("trial", type=Path, help="YAML file with corpus, checkpoints and recipe")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of torch (default: all)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    return parser


def _read_trial(path: Path) -> Trial:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        trial = Trial.model_validate_json(json.dumps(content))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, TypeError) as error:
        raise InputError(f"{path}: not YAML of plain values: {error}") from error
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise InputError(f"{path}: {len(problems)} problems, nothing was trained", problems) from error
    step, budget = trial.recipe.tokens_per_step, trial.recipe.token_budget
    odd = [tokens for tokens in trial.checkpoints if tokens % step or tokens > budget]
    if odd or not trial.checkpoints:
        raise InputError(
            f"{path}: checkpoints {odd or 'are missing'}, nothing was trained",
            [f"allowed: multiples of a step of {step:,} tokens, up to token_budget {budget:,}"],
        )
    return trial.model_copy(update={"corpus": path.parent / trial.corpus})


def _train(trial: Trial, out: Path, execution: Execution, should_stop: Callable[[], bool]) -> int:
    """The trial from where `out` stands to its last checkpoint; returns the exit code."""
    history = hashlib.sha256(trial.recipe.model_dump_json().encode()).hexdigest()
    training, curve = _open(trial, out, execution)
    progress = _Progress(trial.recipe.token_budget)

    def keep(record: CurveRecord) -> None:
        curve.append(record)
        progress.show(record)

    for tokens in sorted(set(trial.checkpoints)):
        if tokens < training.tokens or (out / str(tokens)).exists():
            continue
        ending = training.train_to(tokens, should_stop, keep)
        if ending.kind == "diverged":
            print(f"diverged after {ending.tokens:,} tokens: {ending.reason}; nothing of this segment was saved")
            return 4
        training.save(out / str(training.tokens), segment=SEGMENT, history=history, curve=curve)
        if ending.kind == "stopped":
            print(f"stopped at {training.tokens:,} tokens, state saved; the same command again goes on from there")
            return 130
        print(f"checkpoint {out / str(tokens)}", flush=True)
        curve.clear()
    last = out / str(max(trial.checkpoints))
    print(f"done: {training.tokens:,} tokens\nevaluate it: python -m evaluators {last}")
    return 0


def _open(trial: Trial, out: Path, execution: Execution) -> tuple[Training, list[CurveRecord]]:
    """Fresh weights, or the newest checkpoint of `out`; with the curve since the last checkpoint that was asked for."""
    saved = [int(folder.name) for folder in out.glob("[0-9]*") if (folder / "manifest.json").exists()]
    if not saved:
        return Training.fresh(trial.recipe, trial.corpus, execution), []
    newest = out / str(max(saved))
    if read_manifest(newest).recipe != trial.recipe:
        raise InputError(
            f"{newest}: of another recipe, nothing was trained", next_step="choose another folder with --out"
        )
    print(f"going on from {newest}")
    training = Training.resume(newest, trial.recipe, trial.corpus, execution)
    return training, [] if max(saved) in trial.checkpoints else list(read_curve(newest))


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM came since; a second one ends the process at once."""
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """A line every few seconds."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._next = time.monotonic() + LINE_EVERY_S

    def show(self, record: CurveRecord) -> None:
        if time.monotonic() < self._next and record.tokens < self._budget:
            return
        self._next = time.monotonic() + LINE_EVERY_S
        print(
            f"{record.tokens:>13,} of {self._budget:,} tokens  loss {record.loss:.4f}  lr {record.lr:.2e}  "
            f"{record.tokens_per_s:,.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
