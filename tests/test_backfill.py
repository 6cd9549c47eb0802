"""Evaluations without training: what fails three times is recorded, what is asked for later reaches everywhere."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_attempt import BASE, only_leg, planned, train
from test_cli import geosweep

from evaluators.config import GeometrySettings
from orchestrator.backfill import Request, evaluate_sweep
from orchestrator.evals import Ledger, OwedEvaluation, metric_rows
from orchestrator.query import Store
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout
from orchestrator.store.sweeps import ask, asked_evaluations
from trainers.errors import InputError

LATER = """
- {evaluator: loss, suite: builtin, tokens_per_domain: 512}
- {evaluator: hidden, suite: builtin, sequence_tokens: 64}
"""


def trained_store(root: Path, **changes: Any) -> StoreLayout:
    """One trial with checkpoints at 0, 4096 and 8192 tokens that asks for geometry at each; nothing is evaluated."""
    train(root, only_leg(root, planned(root, base=BASE, **changes)))
    return StoreLayout(root)


def rows(layout: StoreLayout, sql: str) -> list[dict[str, Any]]:
    with Store(layout.root) as store:
        return store.sql(sql).rows()


def states(layout: StoreLayout) -> dict[tuple[str, int], str]:
    found = rows(layout, "select evaluator, tokens, state from evaluations")
    return {(row["evaluator"], row["tokens"]): row["state"] for row in found}


def evaluate(layout: StoreLayout, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return geosweep("eval", "small", *arguments, "--store", layout.root)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_what_fails_three_times_is_recorded_and_what_is_asked_for_later_reaches_every_checkpoint(
    store_root: Path, tmp_path: Path
) -> None:
    layout = trained_store(store_root)
    (path,) = rows(layout, "select path from checkpoints where tokens = 4096")
    weights = layout.root / path["path"] / "weights.parquet"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    done = evaluate(layout)
    assert done.returncode == 1
    assert "2 evaluations made, 1 could not be done" in done.stdout
    assert states(layout) == {("geometry", 0): "done", ("geometry", 4096): "failed", ("geometry", 8192): "done"}
    (failure,) = rows(layout, "select reason, tries from failures")
    assert failure["tries"] == 3
    assert str(weights) in failure["reason"]
    assert rows(layout, "select state, evaluations_failed as n from cells") == [{"state": "complete", "n": 1}]

    weights.write_bytes(whole)
    assert "0 evaluations made" in evaluate(layout).stdout, "a recorded failure is no longer owed"
    entries = tmp_path / "evaluations.yaml"
    entries.write_text(LATER)
    retried = evaluate(layout, "--evaluators", "geometry", "--file", entries, "--retry-failed")
    assert retried.returncode == 1, retried.stdout + retried.stderr
    assert "4 evaluations made, 3 could not" in retried.stdout, "the failed one, the losses; no states of 64 tokens"
    ends = {"geometry": "done", "loss": "done", "hidden": "failed"}
    assert states(layout) == {(e, t): state for e, state in ends.items() for t in (0, 4096, 8192)}
    impossible = rows(layout, "select reason, tries from failures where evaluator = 'hidden'")
    assert [row["tries"] for row in impossible] == [1, 1, 1], "what the caller got wrong is not tried again"
    assert all("sequence_tokens: 64, the model reads 32 at most" in row["reason"] for row in impossible)
    assert len(rows(layout, "select * from failures")) == 4, "what is stored stays"
    assert all(row["effective_rank"] and row["loss_python"] for row in rows(layout, "select * from results"))
    assert "complete already" in geosweep("resume", "small", "--store", layout.root).stdout


def values(owed: OwedEvaluation, rank: float) -> Any:
    value = {"metric": "effective_rank", "version": owed.evaluation.version, "value": rank, "unit": "directions"}
    more = {"dataset": None, "split": None, "layer": None, "n": 1, "convention": {}}
    return metric_rows(owed, {"values": [{**value, **more}], "wall_s": 0.0})


def test_new_version_of_an_evaluator_owes_its_own_evaluations_and_old_values_stay(store_root: Path) -> None:
    layout = trained_store(store_root)
    revision = rows(layout, "select revision from latest")[0]["revision"]
    first = asked_evaluations(layout, "small", revision)
    committed = {evaluation.segment for evaluation in first}
    for owed in Ledger(layout, first).owed(committed):
        publish(layout, "metrics", values(owed, 1.0))
    assert Ledger(layout, first).owed(committed) == []

    second = [replace(evaluation, version=2) for evaluation in first]
    other = [replace(e, settings=GeometrySettings(top_k=3), settings_digest="top3") for e in first]
    ledger = Ledger(layout, [*first, *second])
    owed = ledger.owed(committed)
    assert [item.evaluation.version for item in owed] == [2, 2, 2]
    assert len(Ledger(layout, [*first, *other]).owed(committed)) == 3
    ask(layout, "small", revision, second[:1])
    publish(layout, "metrics", values(owed[0], 2.0))
    found = rows(layout, "select evaluator_version as v, count(*) as n from metrics group by 1 order by 1")
    assert found == [{"v": 1, "n": 3}, {"v": 2, "n": 1}]


class NoScreen:
    """A screen that nothing reaches: these requests start no session."""

    def __enter__(self) -> NoScreen:
        raise AssertionError("no session was expected")

    def __exit__(self, *_: object) -> None: ...
    def leg(self, *_: object) -> None: ...
    def counts(self, *_: object) -> None: ...
    def say(self, line: str) -> None: ...


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(evaluators=("geometri",)), "no evaluator 'geometri'; nearest is 'geometry'"),
        (Request(evaluators=("loss",), suite="pile"), "'pile' for evaluator 'loss'"),
        (Request(file=Path("nowhere.yaml")), "nowhere.yaml: cannot be read"),
    ],
    ids=["name", "suite", "file"],
)
def test_request_that_cannot_be_met_is_refused_before_anything_is_asked(
    store_root: Path, request_: Request, says: str
) -> None:
    layout = trained_store(store_root, evaluations=[])
    with pytest.raises(InputError) as caught:
        evaluate_sweep(store_root, "small", request_, NoScreen())
    assert says in str(caught.value)
    assert rows(layout, "select * from asked") == []


def test_sweep_that_is_not_in_the_store_is_named_with_its_nearest(store_root: Path) -> None:
    trained_store(store_root)
    with pytest.raises(InputError, match="no sweep 'smal'; nearest is 'small'"):
        evaluate_sweep(store_root, "smal", Request(), NoScreen())


def test_faulty_entries_of_a_file_are_all_named(store_root: Path, tmp_path: Path) -> None:
    trained_store(store_root)
    entries = tmp_path / "bad.yaml"
    entries.write_text(json.dumps([{"evaluator": "geometry", "topk": 3}, {"evaluator": "los"}]))
    with pytest.raises(InputError) as caught:
        evaluate_sweep(store_root, "small", Request(file=entries), NoScreen())
    assert len(caught.value.problems) == 2
