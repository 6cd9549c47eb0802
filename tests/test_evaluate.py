"""One checkpoint through evaluate and the command line: values, what is read, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from recipes import tiny_recipe

from evaluators.__main__ import main
from evaluators.config import EVALUATOR_VERSIONS, GeometrySettings, LossSettings
from evaluators.evaluate import EVALUATORS, evaluate
from evaluators.metrics import METRICS
from trainers.checkpoint import circumstances, read_tensor, write_checkpoint
from trainers.config import Data, Recipe
from trainers.errors import EnvironmentFault, InputError
from trainers.model import build_model
from trainers.tokens import read_manifest

LOSS = LossSettings(suite="builtin", tokens_per_domain=512)
DOMAINS = ["docs", "python", "maths", "cpp", "language", "licences"]


def recipe_for(corpus: Path, *, tied: bool = False) -> Recipe:
    recipe = tiny_recipe(tied=tied)
    data = Data(corpus="builtin", digest=read_manifest(corpus).digest, repeat=False)
    return recipe.model_copy(update={"data": data})


def save(target: Path, recipe: Recipe, weights: dict[str, torch.Tensor]) -> Path:
    write_checkpoint(
        target,
        weights=weights,
        state={"step": torch.zeros(1)},
        curve=(),
        recipe=recipe,
        segment="trial",
        history="none",
        tokens=0,
        steps=0,
        made=circumstances(device="cpu", threads=1, micro_batch=None, compiled=False),
    )
    return target


def fresh_weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in build_model(recipe.model, 0).named_parameters()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    recipe = recipe_for(corpus)
    return save(tmp_path_factory.mktemp("trial") / "0", recipe, fresh_weights(recipe))


def test_every_evaluator_has_a_version_and_every_version_an_evaluator() -> None:
    assert set(EVALUATORS) == set(EVALUATOR_VERSIONS)


def test_geometry_of_a_checkpoint_is_that_of_its_unembedding_without_padding(checkpoint: Path, corpus: Path) -> None:
    values = {v.metric: v for v in evaluate(checkpoint, GeometrySettings(), corpora=corpus.parent)}
    weight = read_tensor(checkpoint, "lm_head.weight").double().numpy()
    assert weight.shape == (512, 32)
    for name, rows in (("effective_rank", 500), ("effective_rank_padded", 512)):
        s = np.linalg.svd(weight[:rows], compute_uv=False)
        p = s / s.sum()
        assert values[name].value == pytest.approx(np.exp(-(p * np.log(p)).sum()), rel=1e-10)
        assert values[name].n == rows
    assert values["effective_rank"].convention == {
        "matrix": "unembedding",
        "tensor": "lm_head.weight",
        "tied": False,
        "dtype": "float32",
        "padding_rows": "removed",
    }


def test_geometry_reads_no_other_tensor(checkpoint: Path, corpus: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    whole = (damaged / "weights.parquet").read_bytes()
    other = read_tensor(checkpoint, "model.embed_tokens.weight").numpy().tobytes()
    at = whole.index(other) + len(other) // 2
    (damaged / "weights.parquet").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(EnvironmentFault, match=r"weights\.parquet"):
        evaluate(damaged, LOSS, corpora=corpus.parent)
    found = evaluate(damaged, GeometrySettings(), corpora=corpus.parent)
    assert found == evaluate(checkpoint, GeometrySettings(), corpora=corpus.parent)


def test_tied_checkpoint_is_measured_on_its_embedding(tmp_path: Path, corpus: Path) -> None:
    recipe = recipe_for(corpus, tied=True)
    folder = save(tmp_path / "tied", recipe, fresh_weights(recipe))
    values = evaluate(folder, GeometrySettings(), corpora=corpus.parent)
    assert {(v.convention["tensor"], v.convention["tied"]) for v in values} == {("model.embed_tokens.weight", True)}
    losses = evaluate(folder, LOSS, corpora=corpus.parent)
    assert len(losses) == 2 * len(DOMAINS)


def test_fresh_model_loses_about_the_log_of_its_vocabulary_in_every_domain(checkpoint: Path, corpus: Path) -> None:
    values = evaluate(checkpoint, LOSS, corpora=corpus.parent)
    losses = {v.dataset: v for v in values if v.metric == "loss"}
    assert list(losses) == DOMAINS
    for domain, value in losses.items():
        assert value.value == pytest.approx(np.log(512), rel=0.05)
        assert value.convention["in_distribution"] is (domain == "docs")
    assert evaluate(checkpoint, LOSS, corpora=corpus.parent) == values


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_checkpoint_with_weights_that_are_not_finite_is_refused_by_name(
    tmp_path: Path, corpus: Path, bad: float
) -> None:
    recipe = recipe_for(corpus)
    weights = fresh_weights(recipe)
    weights["lm_head.weight"][7, 3] = bad
    folder = save(tmp_path / "bad", recipe, weights)
    with pytest.raises(InputError, match=r"bad: lm_head.weight: non_finite: 1 of 512 rows") as caught:
        evaluate(folder, GeometrySettings(), corpora=corpus.parent)
    assert caught.value.problems == ("rows 7",)
    with pytest.raises(InputError, match="bad: non_finite: 1 tensors hold nan or inf") as caught:
        evaluate(folder, LOSS, corpora=corpus.parent)
    assert caught.value.problems == ("lm_head.weight",)


def test_folder_that_is_no_checkpoint_is_refused(tmp_path: Path, corpus: Path) -> None:
    for settings in (GeometrySettings(), LOSS):
        with pytest.raises(InputError, match="not a checkpoint"):
            evaluate(tmp_path, settings, corpora=corpus.parent)


# ---- command line ----------------------------------------------------------------------------------------------------


def test_command_prints_geometry_and_losses_as_a_table(
    checkpoint: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert main([str(checkpoint), "--corpora", str(corpus.parent), "--tokens-per-domain", "512"]) == 0
    printed = capsys.readouterr().out
    for name in METRICS:
        of_w = f"hidden_{name}" in METRICS or name.endswith("_padded")
        if of_w or name in ("loss", "bits_per_byte"):
            assert f" {name} " in printed
    for domain in DOMAINS:
        assert f" {domain} " in printed


def test_command_prints_every_field_as_json(checkpoint: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint), "--corpora", str(corpus.parent), "--evaluator", "geometry", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    rank = next(value for value in values if value["metric"] == "effective_rank")
    assert (rank["version"], rank["unit"], rank["convention"]["tensor"]) == (1, "directions", "lm_head.weight")


def test_command_without_the_corpus_measures_geometry_and_says_so(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(checkpoint), "--corpora", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "effective_rank" in captured.out
    assert "bits_per_byte" not in captured.out
    assert "no losses: no corpus 'builtin'" in captured.err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--suite", "pile"], "no corpus 'pile'"),
        (["--tokens-per-domain", "0"], "tokens_per_domain: Input should be greater than 0, given 0"),
        (["--tokens-per-domain", "33"], "33 is not a whole number of contexts of 32"),
        (["--threads", "0"], "--threads 0"),
    ],
    ids=["suite", "zero", "context", "threads"],
)
def test_command_with_bad_input_prints_a_message_and_exits_with_2(
    checkpoint: Path, corpus: Path, capsys: pytest.CaptureFixture[str], more: list[str], says: str
) -> None:
    assert main([str(checkpoint), "--corpora", str(corpus.parent), *more]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""


def test_command_on_a_corrupt_checkpoint_exits_with_3(
    checkpoint: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut"
    shutil.copytree(checkpoint, cut)
    (cut / "weights.parquet").write_bytes((cut / "weights.parquet").read_bytes()[:-100])
    assert main([str(cut), "--corpora", str(corpus.parent)]) == 3
    assert "weights.parquet" in capsys.readouterr().err
