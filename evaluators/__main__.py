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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from evaluators.compare import unembedding_similarity
from evaluators.config import (
    EVALUATOR_SETTINGS,
    EVALUATOR_VERSIONS,
    EvaluatorSettings,
    FinetuneSettings,
    entry_from,
    settings_from,
)
from evaluators.evaluate import evaluate, fine_tune_checkpoint
from evaluators.metrics import MetricValue
from trainers.checkpoint import read_manifest
from trainers.errors import GeosweepError, InputError


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        _set_threads(given.threads)
        asked = _settings(given)
        values = _kept(given, asked) if given.keep else [v for settings in asked for v in _evaluated(given, settings)]
        if given.against:
            values = [*values, *unembedding_similarity(given.checkpoint, given.against)]
    except GeosweepError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if given.json:
        print(json.dumps([asdict(value) for value in values], indent=1))
    else:
        Console().print(_table(str(given.checkpoint), values))
    return 0


def _evaluated(given: argparse.Namespace, settings: EvaluatorSettings) -> list[MetricValue]:
    return evaluate(given.checkpoint, settings, corpora=given.corpora, device=given.device)


def _kept(given: argparse.Namespace, asked: Sequence[EvaluatorSettings]) -> Sequence[MetricValue]:
    """The values of one fine-tuning, whose weights are written."""
    from evaluators.hub import refuse_existing, save_model, tokenizer_of  # loads transformers: for this use alone

    if len(asked) != 1 or not isinstance(asked[0], FinetuneSettings):
        raise InputError("--keep: needs one --settings of evaluator finetune, nothing was evaluated")
    refuse_existing(given.keep)
    outcome = fine_tune_checkpoint(given.checkpoint, asked[0], given.corpora, given.device)
    save_model(outcome.network, tokenizer_of(given.checkpoint, given.corpora), given.keep)
    return outcome.values


def _parser() -> argparse.ArgumentParser:
    store = Path(os.environ.get("GEOSWEEP_STORE", "geosweep-store"))
    parser = argparse.ArgumentParser(prog="python -m evaluators", description="Evaluate one checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("--evaluator", action="append", choices=sorted(EVALUATOR_VERSIONS), help="may be repeated")
    parser.add_argument(
        "--corpora", type=Path, default=store / "corpora", help="prepared corpora (default: %(default)s)"
    )
    parser.add_argument("--suite", help="suite of the losses (default: the corpus that the checkpoint was trained on)")
    entry = "an evaluation as in a sweep file: '{evaluator: finetune, ...}'"
    parser.add_argument("--settings", action="append", metavar="YAML", help=entry)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the model of the one finetune of --settings")
    parser.add_argument("--against", type=Path, metavar="CHECKPOINT", help="also compare both unembeddings")
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
    if given.settings:
        return [settings_from(entry_from(text, "--settings")) for text in given.settings]
    recipe = read_manifest(given.checkpoint).recipe
    suite = given.suite or (recipe.data.corpus if recipe else None)
    asked = given.evaluator or ["geometry", "loss"]
    if not given.evaluator and not given.suite and not (suite and (given.corpora / suite).exists()):
        unknown = f"no corpus '{suite}' in {given.corpora}; say where with --corpora"
        print(f"no losses: {unknown if suite else 'an imported model needs --suite'}", file=sys.stderr)
        asked = ["geometry"]
    chosen = {"suite": suite, "tokens_per_domain": given.tokens_per_domain}
    return [settings_from({"evaluator": name, **_those_of(name, chosen)}) for name in asked]


def _those_of(evaluator: str, chosen: Mapping[str, object]) -> dict[str, object]:
    """What was chosen, of the fields that the evaluator has."""
    fields = EVALUATOR_SETTINGS[evaluator].model_fields
    return {name: value for name, value in chosen.items() if value is not None and name in fields}


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
