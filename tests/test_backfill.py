"""Evaluations without training: what fails three times is recorded, what is asked for later reaches everywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command import geosweep, geosweep_process
from small_corpus import SMALL
from test_attempt import BASE, only_leg, planned, train
from test_evaluate import save
from test_suites import texts

from evaluators.config import GeometrySettings
from orchestrator.backfill import Request, evaluate_sweep
from orchestrator.evals import Ledger, OwedEvaluation, metric_rows
from orchestrator.query import Store
from orchestrator.store.inbox import publish
from orchestrator.store.layout import StoreLayout
from orchestrator.store.sweeps import ask, asked_evaluations
from trainers.checkpoint import read_manifest, read_weights
from trainers.corpus import SOURCE_TEXT, SUITES
from trainers.errors import InputError
from trainers.tokens import TrainedTokenizer, prepare

LATER = [
    {"evaluator": "loss", "suite": "builtin", "tokens_per_domain": 512},
    {"evaluator": "hidden", "suite": "builtin", "sequence_tokens": 64},
    {"evaluator": "loss", "suite": "emptied"},
    {"evaluator": "loss", "suite": "foreign", "tokens_per_domain": 512},
    {"evaluator": "loss", "suite": "few", "tokens_per_domain": None},
    {"evaluator": "hidden", "suite": "few", "domain": "pile-10k/lonely", "sequences": 2},
]


def add_faulty_corpora(root: Path) -> None:
    """emptied: nothing held out; foreign: another tokenizer; few: a suite, one of whose domains is one document."""
    corpora = root / "corpora"
    shutil.copytree(corpora / "builtin", corpora / "emptied")
    manifest = json.loads((corpora / "emptied" / "manifest.json").read_text())
    manifest["splits"] = [split for split in manifest["splits"] if split["split"] == "train"]
    (corpora / "emptied" / "manifest.json").write_text(json.dumps(manifest))

    source = root.parent / "few" / "texts.jsonl"
    source.parent.mkdir()
    many = [{"text": text, "domain": "many"} for text in texts(1, 40)]
    lonely = [{"text": text, "domain": "lonely"} for text in texts(2, 1, words=600)]
    source.write_text("\n".join(map(json.dumps, [*many, *lonely])))
    half = SOURCE_TEXT.model_copy(update={"heldout_percent": 50})
    tokenizer = TrainedTokenizer(vocab_size=300, sample_bytes=200_000)
    foreign = SMALL.model_copy(update={"text": half, "tokenizer": tokenizer})
    prepare(str(source), corpora / "foreign", settings=foreign)
    suite = SUITES["pile-10k"].model_copy(update={"repository": str(source.parent), "domain_path": ("domain",)})
    ours = {"text": suite, "tokenizer": str(corpora / "builtin" / "tokenizer.json")}
    prepare("pile-10k", corpora / "few", settings=SMALL.model_copy(update=ours))


def spoil(folder: Path) -> None:
    """The same checkpoint with one weight that is nan."""
    manifest, weights = read_manifest(folder), read_weights(folder)
    assert manifest.recipe is not None
    shutil.rmtree(folder)
    save(folder, manifest.recipe, {**weights, manifest.unembedding: weights[manifest.unembedding].fill_(torch.nan)})


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
    return geosweep_process("eval", "small", "--actors", "1", *arguments, "--store", layout.root)


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_what_cannot_be_evaluated_is_a_row_that_says_which_and_why_and_the_rest_is_evaluated(
    store_root: Path, tmp_path: Path
) -> None:
    layout = trained_store(store_root)
    add_faulty_corpora(store_root)
    folders = {row["tokens"]: layout.root / row["path"] for row in rows(layout, "select tokens, path from checkpoints")}
    spoil(folders[4096])
    cut = folders[8192] / "weights.parquet"
    cut.write_bytes(cut.read_bytes()[:-100])
    entries = tmp_path / "evaluations.yaml"
    entries.write_text(json.dumps(LATER))
    done = evaluate(layout, "--evaluators", "geometry", "--file", entries)
    assert done.returncode == 1, done.stdout + done.stderr

    found = rows(
        layout,
        """select e.evaluator, e.tokens, e.settings, e.state, f.reason, f.tries from evaluations e
           left join failures f using (checkpoint, evaluator, settings_digest, evaluator_version)""",
    )
    by = {(r["evaluator"], json.loads(r["settings"]).get("suite"), r["tokens"]): r for r in found}
    whole = {("geometry", None, 0), ("loss", "builtin", 0), ("loss", "few", 0)}
    assert {key for key, row in by.items() if row["state"] == "done"} == whole
    assert all(row["state"] == "failed" for key, row in by.items() if key not in whole)
    for key, says in {
        ("geometry", None, 4096): f"{folders[4096]}: lm_head.weight: non_finite: 512 of 512 rows hold nan or inf",
        ("loss", "builtin", 4096): f"{folders[4096]}: non_finite: 1 tensors hold nan or inf",
        ("geometry", None, 8192): str(cut),
        ("loss", "builtin", 8192): str(cut),
        ("hidden", "builtin", 0): "sequence_tokens: 64, the model reads 32 at most",
        ("loss", "emptied", 0): "suite 'emptied': no evaluation set",
        ("loss", "foreign", 0): "suite 'foreign' is cut by another tokenizer than the checkpoint was trained with",
        ("hidden", "few", 0): "domain 'pile-10k/lonely': its heldout split is one document",
    }.items():
        assert says in by[key]["reason"], key
        assert by[key]["tries"] == (3 if key[2] == 8192 else 1), "what the caller got wrong is not tried again"
    numbers = rows(layout, "select distinct evaluator, tokens from metrics where value is not null")
    assert {(row["evaluator"], row["tokens"]) for row in numbers} == {("geometry", 0), ("loss", 0)}
    (lonely,) = rows(layout, "select value, convention from metrics where metric = 'loss' and dataset like '%lonely'")
    assert lonely["value"] is None
    assert json.loads(lonely["convention"])["undefined"] == "domain 'pile-10k/lonely' has one held-out document"
    assert f"{len(whole)} evaluations made, {len(by) - len(whole)} could not be done" in done.stdout

    again = evaluate(layout)
    assert "0 evaluations made" in again.stdout, "a recorded failure is no longer owed"
    revision = rows(layout, "select revision from latest")[0]["revision"]
    retried = Ledger(layout, asked_evaluations(layout, "small", revision), retry_failed=True)
    committed = {row["segment"] for row in rows(layout, "select segment from checkpoints")}
    assert len(retried.owed(committed)) == len(by) - len(whole)
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


def test_nothing_new_is_asked_of_a_checkpoint_that_was_not_kept(store_root: Path) -> None:
    layout = trained_store(store_root, evaluations=[])
    for row in rows(layout, "select path from checkpoints"):
        shutil.rmtree(layout.root / row["path"])
    end = evaluate_sweep(store_root, "small", Request(evaluators=("geometry",)), NoScreen())
    assert (end.evaluated, end.complete) == (0, True)
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
