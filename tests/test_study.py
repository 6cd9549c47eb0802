"""What the study of a sweep is, as it is read from a store; and the commands that answer with it."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from command import geosweep
from rich.console import Console
from study_store import DOMAINS, make_study_store

from orchestrator import status
from orchestrator.bundle import TABLES, write_bundle
from orchestrator.query import Store
from orchestrator.report import tables
from orchestrator.statistics import recipe_keys
from orchestrator.study import Study, as_json, findings, read_study, relative_learning_rates
from trainers.errors import InputError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "store"
    make_study_store(folder, checkpoints=2, diverged=(7,))
    return folder


@pytest.fixture(scope="module")
def study(root: Path) -> Study:
    with Store(root) as store:
        return read_study(store, root, "study")


def test_every_cell_of_the_sweep_is_a_row_with_its_state_and_last_metrics(root: Path, study: Study) -> None:
    with Store(root) as store:
        asked = store.sql("select count(*) as n from trials where sweep = 'study'").rows()[0]["n"]
        final = store.sql("select trial, effective_rank from final").pandas().set_index("trial")["effective_rank"]
    cells = study.cells.set_index("trial")
    assert len(cells) == asked
    assert (cells["state"] == "diverged").sum() == 1
    assert cells["effective_rank"].isna().sum() == 1
    pd.testing.assert_series_equal(cells["effective_rank"].dropna().sort_index(), final.sort_index())


def test_axes_measures_and_the_losses_in_distribution_are_known(study: Study) -> None:
    varied = {
        "scale",
        "batch_size",
        "weight_decay",
        "token_budget",
        "final_lr_fraction",
        "relative_lr",
    }
    assert varied <= set(study.axes)
    assert "seed" not in study.axes
    assert study.main_rank == "effective_rank"
    assert study.main_loss == "loss_docs"
    assert study.token_losses == ("loss_docs", *(f"loss_{name}" for name in sorted(DOMAINS[1:])))
    assert "effective_rank_share" in study.predictors
    assert "bits_per_byte_python" in study.outcomes


def test_a_recipe_is_the_same_at_every_size_although_each_size_has_its_own_learning_rate(study: Study) -> None:
    factorial = study.cells[["recipe" in grids for grids in study.cells["grids"]]]
    rates = factorial.groupby("scale")["peak_lr"].first()
    assert rates.nunique() == 3
    assert (recipe_keys(factorial, study.axes).value_counts() == 3).all()


def test_the_relative_learning_rate_is_the_multiple_of_the_usual_one() -> None:
    cells = pd.DataFrame({"family": "olmo", "scale": ["4M"] * 4 + ["8M"] * 3})
    cells["peak_lr"] = [0.01, 0.01, 0.1, 0.001, 0.03, 0.03, 0.3]
    assert relative_learning_rates(cells).tolist() == [1, 1, 10, 0.1, 1, 1, 10]


def test_an_unknown_sweep_is_refused_with_the_nearest_name(root: Path) -> None:
    with Store(root) as store, pytest.raises(InputError, match="no sweep 'studdy'; nearest is 'study'"):
        read_study(store, root, "studdy")


def test_findings_of_a_store_are_the_rank_correlations_of_its_final_rows(root: Path, study: Study) -> None:
    with Store(root) as store:
        final = store.sql("select effective_rank, loss_docs from final").pandas()
    found = findings(study)
    (one,) = [a for a in found.associations if (a.predictor, a.outcome) == ("effective_rank", "loss_docs")]
    expected = np.corrcoef(final["effective_rank"].rank(), final["loss_docs"].rank())[0, 1]
    assert one.n == len(final)
    assert one.raw.value == pytest.approx(expected, abs=1e-9)
    assert found.counts.states["diverged"] == 1


# --- commands -------------------------------------------------------------------------------------------------------


def test_stats_answers_programs_in_json_and_people_in_a_table(root: Path) -> None:
    done = geosweep("stats", "study", "--json", "--store", root)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["counts"]["states"]["diverged"] == 1
    assert {"raw", "partial", "increment", "beyond_recipe", "mixed", "n", "recipes"} <= answer["associations"][0].keys()
    shown = geosweep("stats", "study", "--store", root)
    assert shown.returncode == 0, shown.stderr
    assert "effective rank of W" in shown.stdout


@pytest.mark.parametrize("command", ["stats", "report", "bundle"])
def test_a_misspelt_sweep_gets_the_nearest_name_and_no_traceback(root: Path, command: str, tmp_path: Path) -> None:
    done = geosweep(command, "studdy", "--store", root, cwd=tmp_path)
    assert done.returncode == 2
    assert "nearest is 'study'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("finished", "diverged"), [(0, ()), (1, ()), (3, (0, 1, 2))])
def test_statistics_bundle_and_status_of_a_sweep_with_little_say_what_is_missing(
    tmp_path: Path, finished: int, diverged: tuple[int, ...]
) -> None:
    root, out = tmp_path / "store", Console(file=io.StringIO(), width=160)
    make_study_store(root, scales=("4M",), batches=(32,), checkpoints=2, finished=finished, diverged=diverged)
    with Store(root) as store:
        study = read_study(store, root, "study")
        found = findings(study)
        tables.show(study, found, out)
        answer = json.loads(json.dumps(as_json(study, found), allow_nan=False))
        write_bundle(store, root, "study", tmp_path / "bundle.zip")
        (sweep,) = status.read_status(store, "study")
        status.show([sweep], out)
    assert answer["counts"]["asked"] == sum(sweep.states.values())
    assert answer["counts"]["states"].get("diverged", 0) == len(diverged) == sweep.states.get("diverged", 0)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert f"{len(diverged)} segments diverged, which is a result: the loss is nan" in text or not diverged
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        assert b"## Not in this bundle" in archive.read("study/README.md")
        missing = list(csv.DictReader(io.StringIO(archive.read("study/tables/missing_cells.csv").decode())))
    assert len(missing) == answer["counts"]["asked"] - sweep.states.get("complete", 0)


def test_the_bundle_holds_tables_figures_sweep_file_and_digests_and_is_the_same_each_time(
    tmp_path: Path,
) -> None:
    root = tmp_path / "store"
    make_study_store(root, scales=("4M",), batches=(32,), checkpoints=2, finished=3, diverged=(3,))
    with Store(root) as store:
        write_bundle(store, root, "study", tmp_path / "a.zip")
        write_bundle(store, root, "study", tmp_path / "b.zip")
        asked = store.sql("select trial, state from cells where state <> 'complete' order by trial").rows()
        trials = store.sql("select count(*) as n from trials").rows()[0]["n"]
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        files = {name.removeprefix("study/"): archive.read(name) for name in archive.namelist()}
    assert {f"tables/{name}.{form}" for name in TABLES for form in ("parquet", "csv")} <= files.keys()
    for line in files["SHA256SUMS"].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(files[name]).hexdigest() == digest
    missing = list(csv.DictReader(io.StringIO(files["tables/missing_cells.csv"].decode())))
    assert [(row["trial"], row["state"]) for row in missing] == [(row["trial"], row["state"]) for row in asked]
    assert pq.read_table(io.BytesIO(files["tables/trials.parquet"])).num_rows == trials
    assert files["figures/rank-and-loss.png"].startswith(b"\x89PNG")
    assert files["figures/rank-and-loss.svg"].startswith(b"<svg")
    assert files["sweep.yaml"].startswith(b"name: study")
    assert b"geosweep report study --figure rank-and-loss" in files["README.md"]
