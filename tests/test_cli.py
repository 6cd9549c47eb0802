from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import geosweep
from test_spec import sweep_file


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(sweep_file())
    return path


@pytest.mark.parametrize(
    "arguments", [("check", "SWEEP"), ("plan", "SWEEP"), ("status",), ("query", "select 1"), ("query", "--help")]
)
def test_asking_loads_neither_torch_nor_ray(store_root: Path, small: Path, arguments: tuple[str, ...]) -> None:
    given = [str(small) if argument == "SWEEP" else argument for argument in arguments]
    given += [] if "--help" in arguments else ["--store", str(store_root)]
    code = (
        "import sys; from orchestrator.cli import app\n"
        f"app({given!r}, standalone_mode=False)\n"
        "heavy = {'torch', 'ray', 'transformers', 'datasets'} & {name.split('.')[0] for name in sys.modules}\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_sweep_file_with_five_mistakes_gets_five_messages_and_starts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    text = sweep_file(
        base={"preset": "tiny", "contxt": 32, "token_budget": 8192, "weight_decay": "3e-x"},
        grids=[{"name": "g", "axes": {"scale": ["tiny-65"], "batch_size": [0]}}],
        evaluations=[{"evaluator": "geometri"}],
    )
    path.write_text(text)
    done = geosweep("run", path, "--store", tmp_path / "store")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == f"{path}: 5 problems, nothing was planned"
    assert len(done.stderr.splitlines()) == 7
    assert not (tmp_path / "store").exists()


def test_a_missing_corpus_is_named_with_the_command_that_makes_it(tmp_path: Path, small: Path) -> None:
    done = geosweep("run", small, "--store", tmp_path / "store")
    assert done.returncode == 2
    assert "'builtin' for training" in done.stderr
    assert "geosweep data prepare" in done.stderr


def test_a_corrupt_shard_is_named_before_anything_starts(store_root: Path, small: Path) -> None:
    shard = min((store_root / "corpora" / "builtin").glob("docs-train*.npy"))
    content = bytearray(shard.read_bytes())
    content[-7] ^= 1
    shard.write_bytes(content)
    done = geosweep("run", small, "--store", store_root)
    assert done.returncode == 3
    assert str(shard) in done.stderr
    assert "geosweep data prepare" in done.stderr
    assert not list((store_root / "inbox" / "trials").iterdir())


def test_a_store_of_a_newer_format_is_refused(store_root: Path, small: Path) -> None:
    marker = store_root / "geosweep.json"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 99}))
    for command in (["run", small], ["status"], ["query", "select 1"]):
        done = geosweep(*command, "--store", store_root)
        assert done.returncode == 2
        assert "format 99" in done.stderr
        assert "upgrade geosweep" in done.stderr


def test_a_sweep_that_the_store_does_not_have_is_answered_with_the_nearest_name(store_root: Path) -> None:
    for command in (["status", "dem"], ["resume", "dem"]):
        done = geosweep(*command, "--store", store_root)
        assert done.returncode == 2
        assert "no sweep 'dem'" in done.stderr


def test_a_sweep_above_its_limits_is_refused_before_anything_starts(store_root: Path, tmp_path: Path) -> None:
    path = tmp_path / "dear.yaml"
    path.write_text(sweep_file(limits={"max_bytes": "1MB"}))
    assert geosweep("plan", path, "--store", store_root).returncode == 0
    done = geosweep("run", path, "--store", store_root)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{path}: 1 problem, the plan is above its limits, nothing was started")
    assert not list((store_root / "inbox" / "trials").iterdir())


def test_a_design_with_warnings_is_valid_and_strict_refuses_it(store_root: Path, small: Path) -> None:
    for command in ("check", "plan"):
        done = geosweep(command, small, "--store", store_root)
        assert done.returncode == 0
        assert "one-seed" in done.stdout
        strict = geosweep(command, small, "--store", store_root, "--strict")
        assert strict.returncode == 2
        assert "one-seed" in strict.stderr


def test_no_share_plans_each_trial_alone(store_root: Path) -> None:
    shared, alone = (
        json.loads(geosweep("plan", "smoke", "--store", store_root, "--json", *flag).stdout)
        for flag in ([], ["--no-share"])
    )
    assert shared["tokens_trained"] == 9216
    assert alone["tokens_trained"] == alone["tokens_asked"] == shared["tokens_asked"] == 12_288
    assert alone["shared_segments"] == 0


def test_plan_as_json_holds_each_trial_with_its_filled_recipe_and_the_sources(store_root: Path, small: Path) -> None:
    done = geosweep("plan", small, "--store", store_root, "--json")
    plan = json.loads(done.stdout)
    assert plan["unique_trials"] == 2
    assert plan["tokens_asked"] == plan["tokens_trained"] == 16_384
    assert {name: counts["asked"] for name, counts in plan["evaluations"].items()} == {"geometry": 5}
    trial = plan["trials"][0]
    assert trial["recipe"]["optimizer"]["beta2"] == 0.95
    assert trial["sources"]["beta2"] == "OLMo and Pythia alike"


def test_one_trial_without_ray_from_the_file_that_plan_prints(store_root: Path, small: Path, tmp_path: Path) -> None:
    printed = geosweep("plan", small, "--store", store_root, "--recipe", "tiny-64-b8-wd0.01")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "trial.yaml").write_text(printed.stdout)
    trained = subprocess.run(
        [sys.executable, "-m", "trainers", tmp_path / "trial.yaml", "--out", tmp_path / "trial"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert sorted(int(path.name) for path in (tmp_path / "trial").iterdir() if path.is_dir()) == [0, 4096, 8192]
    evaluated = subprocess.run(
        [sys.executable, "-m", "evaluators", tmp_path / "trial" / "8192", "--corpora", store_root / "corpora"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr
    assert "effective_rank" in evaluated.stdout
    assert "bits_per_byte" in evaluated.stdout


def test_query_answers_in_every_format_and_refuses_to_write(store_root: Path, tmp_path: Path) -> None:
    assert geosweep("query", "select 1 as one", "--format", "csv", "--store", store_root).stdout == "one\n1\n"
    assert json.loads(geosweep("query", "select 1 as one", "--format", "json", "--store", store_root).stdout) == [
        {"one": 1}
    ]
    refused = geosweep("query", f"copy (select 1) to '{tmp_path}/x.csv'", "--store", store_root)
    assert refused.returncode == 2
    assert not (tmp_path / "x.csv").exists()


def test_questions_in_a_file_are_answered_one_after_the_other(store_root: Path, tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("-- How many?\nselect 1 as n;\n\n-- And now?\n-- (really)\nselect 2 as m;\n")
    done = geosweep("query", "--file", tmp_path / "q.sql", "--store", store_root)
    assert done.returncode == 0, done.stderr
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    assert lines[0] == "How many?"
    assert "And now? (really)" in lines
