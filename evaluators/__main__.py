"""`python -m evaluators CHECKPOINT`: one checkpoint, a printed table, no Ray and no store.

checkpoint folder -> evaluate -> [table or JSON on stdout]
Geometry always; the losses when the corpus that the checkpoint was trained on is found among the corpora.
Exit code 2: something given is wrong; 3: the machine or a file failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from evaluators.config import EVALUATOR_SETTINGS, EVALUATOR_VERSIONS, EvaluatorSettings, settings_from
from evaluators.evaluate import evaluate
from evaluators.metrics import MetricValue
from trainers.checkpoint import read_manifest
from trainers.errors import EnvironmentFault, InputError


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        _set_threads(given.threads)
        values = [
            value
            for settings in _settings(given)
            for value in evaluate(given.checkpoint, settings, corpora=given.corpora, device=given.device)
        ]
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    except EnvironmentFault as fault:
        print(fault, file=sys.stderr)
        return 3
    if given.json:
        print(json.dumps([asdict(value) for value in values], indent=1))
    else:
        Console().print(_table(str(given.checkpoint), values))
    return 0


def _parser() -> argparse.ArgumentParser:
    store = Path(os.environ.get("GEOSWEEP_STORE", "geosweep-store"))
    parser = argparse.ArgumentParser(prog="python -m evaluators", description="Evaluate one checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("--evaluator", action="append", choices=sorted(EVALUATOR_VERSIONS), help="may be repeated")
    parser.add_argument(
        "--corpora", type=Path, default=store / "corpora", help="prepared corpora (default: %(default)s)"
    )
    parser.add_argument("--suite", help="suite of the losses (default: the corpus that the checkpoint was trained on)")
    parser.add_argument("--tokens-per-domain", type=int, help="of the losses, a whole number of contexts")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--json", action="store_true", help="all fields of every value, instead of a table")
    return parser


def _set_threads(threads: int) -> None:
    if threads < 1:
        raise InputError(f"--threads {threads}: at least 1")
    torch.set_num_threads(threads)


def _settings(given: argparse.Namespace) -> list[EvaluatorSettings]:
    """One entry per evaluator asked for; without any, geometry and the losses that can be had."""
    suite = given.suite or read_manifest(given.checkpoint).recipe.data.corpus
    asked = given.evaluator or ["geometry", "loss"]
    if not given.evaluator and not given.suite and not (given.corpora / suite).exists():
        print(f"no losses: no corpus '{suite}' in {given.corpora}; say where with --corpora", file=sys.stderr)
        asked = ["geometry"]
    of_suite: dict[str, object] = {"suite": suite}
    if given.tokens_per_domain is not None:
        of_suite["tokens_per_domain"] = given.tokens_per_domain
    has_suite = {name for name, settings in EVALUATOR_SETTINGS.items() if "suite" in settings.model_fields}
    return [settings_from({"evaluator": name, **(of_suite if name in has_suite else {})}) for name in asked]


def _table(title: str, values: Sequence[MetricValue]) -> Table:
    table = Table("metric", title=title)
    table.add_column("value", justify="right")
    for column in ("unit", "dataset"):
        table.add_column(column)
    table.add_column("n", justify="right")
    for value in values:
        shown = f"undefined: {value.convention['undefined']}" if value.value is None else f"{value.value:.6g}"
        count = "" if value.n is None else f"{value.n:,}"
        table.add_row(value.metric, shown, "" if value.unit == "1" else value.unit, value.dataset or "", count)
    return table


if __name__ == "__main__":
    raise SystemExit(main())
