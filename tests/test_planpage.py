from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_attempt import begin, never
from test_spec import sweep_file

from orchestrator.bench import measure
from orchestrator.legs import LegQueue
from orchestrator.planpage import as_json, show
from orchestrator.preview import Preview, preview, refuse_above_limits, refuse_warnings
from orchestrator.spec import SHIPPED, Base
from orchestrator.store.layout import StoreLayout
from orchestrator.store.sweeps import submit
from trainers.errors import InputError

BASE = {"preset": "tiny", "scale": "tiny-32", "context": 32, "token_budget": 4096, "batch_size": 8}


def look(root: Path, **changes: Any) -> Preview:
    return preview(sweep_file(**{"base": BASE, **changes}), "small.yaml", root)


def page(seen: Preview, width: int = 100) -> str:
    printed = io.StringIO()
    show(seen, Console(width=width, file=printed, color_system=None), "geosweep run small")
    return printed.getvalue()


def finish(root: Path, **changes: Any) -> None:
    """Submit a sweep and train all of it."""
    text = sweep_file(**{"base": BASE, **changes})
    seen = preview(text, "small.yaml", root)
    submit(StoreLayout(root), text, seen.plan)
    queue = LegQueue(seen.standing.left)
    while (leg := queue.take()) is not None:
        assert begin(root, leg).advance(60.0, never).state == "committed"
        queue.committed(leg)


@pytest.mark.parametrize("width", [80, 160])
@pytest.mark.parametrize("name", ["smoke", "study-text", "study-wsd", "saturation"])
def test_the_page_fits_the_terminal_and_ends_with_how_to_start(name: str, width: int, tmp_path: Path) -> None:
    path = SHIPPED / f"{name}.yaml"
    text = page(preview(path.read_text(), path.name, tmp_path / "none"), width)
    tables = text[: text.index("corpus '")]
    assert max(len(line.rstrip()) for line in tables.splitlines()[2:]) <= width
    assert text.rstrip().splitlines()[-1] == "start it: geosweep run small"
    for section in ("varies", "recipe", "trials", "design", "bill", "hours"):
        assert f"\n{section}\n" in text


def test_the_page_says_what_is_asked_shared_and_assumed(tmp_path: Path) -> None:
    path = SHIPPED / "study-wsd.yaml"
    text = page(preview(path.read_text(), path.name, tmp_path / "none"), 160)
    assert "420 cells, 330 unique trials" in text
    assert "16.37T asked, 7.86T to train: sharing saves 52.0%" in text
    assert "assumed: 15% of its data sheet's 312 TFLOP/s" in text
    assert "[C] 0.01, 0.1, 0.5 in text and table" in text


def test_json_has_the_keys_that_programs_rely_on(tmp_path: Path) -> None:
    seen = as_json(look(tmp_path / "none"))
    assert json.loads(json.dumps(seen)) == seen
    assert set(seen) >= {
        "sweep", "revision", "trials", "unique_trials", "cells", "segments", "shared_segments", "tokens_asked",
        "tokens_trained", "flops", "gpu_hours", "checkpoint_bytes", "evaluations", "stored", "changed", "lint",
    }  # fmt: skip
    assert set(seen["checkpoint_bytes"]) == {"kept", "peak"}
    assert set(seen["gpu_hours"]["A100"]) == {"hours", "left", "kind", "measured", "source"}
    assert {frozenset(finding) for finding in seen["lint"]} == {frozenset({"code", "severity", "text", "remedy"})}
    assert seen["changed"] is None


def test_after_the_training_only_evaluations_are_left_and_an_edit_names_its_field(store_root: Path) -> None:
    finish(store_root)
    same = look(store_root)
    assert same.standing.left == ()
    assert same.bill.tokens_left == 0
    assert same.changes is not None
    assert same.changes.nothing
    assert "(0 left)" in page(same)
    edited = look(store_root, base={**BASE, "clip": 0.5})
    assert edited.bill.tokens_left == edited.bill.tokens_trained
    assert "optimizer.clip: 1 -> 0.5 in 2 cells, 2 of them to be trained" in page(edited)
    assert as_json(edited)["changed"]["fields"][0]["field"] == "optimizer.clip"


def test_another_sweep_that_needs_the_same_segments_finds_them_in_the_store(store_root: Path) -> None:
    finish(store_root)
    other = look(store_root, name="other", grids=[{"name": "d", "axes": {"weight_decay": [0.1, 0.3]}}])
    assert as_json(other)["stored"]["segments"] == 3  # fresh weights, and both segments of weight decay 0.1
    assert other.bill.tokens_left == 4096
    assert other.changes is None


def test_a_plan_above_its_limits_says_so_on_the_page_and_is_refused(tmp_path: Path) -> None:
    seen = look(tmp_path / "none", limits={"max_bytes": "1kB", "max_gpu_hours": 1e-12})
    assert "above its limits: limits.max_bytes" in page(seen)
    assert "nothing of this sweep will start" in page(seen)
    with pytest.raises(InputError, match="the plan is above its limits, nothing was started") as caught:
        refuse_above_limits(seen, "small.yaml")
    assert len(caught.value.problems) == 2


def test_strict_refuses_warnings_and_not_notes(tmp_path: Path) -> None:
    seen = look(tmp_path / "none")
    with pytest.raises(InputError, match="1 problem, refused because of --strict") as caught:
        refuse_warnings(seen.findings, "small.yaml")
    assert "one-seed" in caught.value.problems[0]
    assert "remedy: add an axis" in caught.value.problems[0]
    seeds = {"weight_decay": [0.01, 0.1], "seed": [0, 1]}
    grids = [{"name": "a", "axes": seeds}, {"name": "b", "axes": {"seed": [0, 1]}}]
    noted = look(tmp_path / "none", grids=grids)
    assert [finding.severity for finding in noted.findings] == ["note"]
    refuse_warnings(noted.findings, "small.yaml")


def test_a_measured_speed_is_in_the_next_bill(store_root: Path) -> None:
    base = Base.model_validate({**BASE, "repeat": True, "token_budget": 256 * 1000})
    row = measure(store_root, base, threads=1, micro_batch=None, seconds=0.05)
    first = look(store_root).bill.hours[0]
    assert first.device == row["device"]
    assert first.measured
    bill = look(store_root).bill
    assert first.hours == pytest.approx(bill.tokens_trained / row["tokens_per_s"] / 3600)


def test_measuring_without_a_corpus_says_how_to_prepare_one(store_root: Path) -> None:
    with pytest.raises(InputError, match="corpus 'pile' is not prepared, nothing was measured"):
        measure(store_root, Base(preset="tiny", corpus="pile"), threads=1, micro_batch=None, seconds=0.05)
