"""Measure how fast this machine trains, for the bill of later plans.

a prepared corpus, a scale -> [bench] -> speeds (store) -> machines -> cost
in    the store, which holds the corpus and takes the measurement
out   one row of the table `speeds`: tokens/s by the median step
not   comparing devices; the report of it is the plan's
"""

from __future__ import annotations

import platform
import re
import statistics
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from orchestrator.corpora import corpus_facts
from orchestrator.presets import CorpusFacts, assumed_corpus, fill
from orchestrator.spec import Base
from orchestrator.store.copies import fetch_corpus
from orchestrator.store.inbox import publish
from orchestrator.store.layout import open_existing
from trainers.config import Recipe
from trainers.errors import InputError
from trainers.scales import flops_per_token

WARMUP_STEPS, MOST_STEPS = 2, 1000


def measure(root: Path, base: Base, *, threads: int, micro_batch: int | None, seconds: float) -> Mapping[str, Any]:
    """Train a model for some seconds, throw it away, and store how fast it went.

    base      family, scale, context, batch_size, precision and corpus; the rest does not move the speed
    seconds   of timed steps, at least three
    returns   the stored row of `speeds`
    raises    InputError if the corpus is not prepared in the store
    """
    layout = open_existing(root)
    recipe = _recipe(base, corpus_facts(root))
    device, kind = _this_device()
    steps_s = _timed_steps(recipe, fetch_corpus(root, recipe.data.corpus), kind, threads, micro_batch, seconds)
    row = {
        "speed": f"{recipe.model.scale}-{uuid.uuid4().hex[:12]}",
        "time": datetime.now(UTC),
        "device": device,
        "kind": kind,
        "family": recipe.model.family,
        "scale": recipe.model.scale,
        "context": recipe.model.context,
        "batch_size": recipe.batch_size,
        "micro_batch": micro_batch,
        "vocab_rows": recipe.model.vocab_rows,
        "precision": recipe.precision,
        "threads": threads,
        "steps": len(steps_s),
        "tokens_per_s": recipe.tokens_per_step / statistics.median(steps_s),
        "flops_per_token": flops_per_token(recipe.model),
        "code_revision": _code_revision(threads, kind),
        "host": platform.node(),
    }
    publish(layout, "speeds", [row])
    return row


def _recipe(base: Base, corpora: Mapping[str, CorpusFacts]) -> Recipe:
    """A recipe on a prepared corpus, with the vocabulary of the published scales; tiny ones take the corpus's."""
    name = base.corpus or "builtin"
    if name not in corpora:
        raise InputError(f"corpus '{name}' is not prepared, nothing was measured", (), f"geosweep data prepare {name}")
    facts, assumed = corpora[name], assumed_corpus(name)
    vocab_size = facts.vocab_size if (base.scale or "tiny").startswith("tiny") else assumed.vocab_size
    corpus = CorpusFacts(name=name, digest=facts.digest, vocab_size=max(vocab_size, facts.vocab_size), tokens=None)
    return fill(base, {name: corpus}).recipe


def _timed_steps(
    recipe: Recipe, corpus: Path, kind: str, threads: int, micro_batch: int | None, seconds: float
) -> list[float]:
    """Seconds of each step after the first few."""
    from trainers.loop import Execution, Training

    training = Training.fresh(recipe, corpus, Execution(device=kind, threads=threads, micro_batch=micro_batch))
    steps_s: list[float] = []
    until = time.monotonic() + seconds
    while len(steps_s) < WARMUP_STEPS + 3 or (time.monotonic() < until and len(steps_s) < MOST_STEPS):
        target = training.tokens + recipe.tokens_per_step
        training.train_to(target, lambda: False, lambda r: steps_s.append(recipe.tokens_per_step / r.tokens_per_s))
    return steps_s[WARMUP_STEPS:]


def _this_device() -> tuple[str, str]:
    """Name for people, and torch's kind."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name().removeprefix("NVIDIA "), "cuda"
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return (found[1].strip() if found else platform.processor() or platform.machine()), "cpu"


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text(errors="replace") if file.exists() else ""


def _code_revision(threads: int, kind: str) -> str:
    from trainers.checkpoint import circumstances

    return circumstances(device=kind, threads=threads, micro_batch=None, compiled=False).code_revision
