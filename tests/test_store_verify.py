from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from store_rows import metric_row, row
from typer.testing import CliRunner

from orchestrator.cli import app
from orchestrator.query import Store, export
from orchestrator.schema import TABLES, VIEWS
from orchestrator.store.committer import Committer
from orchestrator.store.inbox import list_units, publish
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.verify import verify
from trainers.errors import InputError


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    layout = create_or_open(tmp_path / "store")
    committer = Committer(layout)
    for name in ("c1", "c2"):
        publish(layout, "metrics", [metric_row(name, f"m{i}", float(i)) for i in range(200)])
        committer.fold("metrics")
    publish(layout, "metrics", [metric_row("c3", "rank", 2.0)])
    return layout


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def test_a_whole_store_has_no_findings(layout: StoreLayout) -> None:
    findings = verify(layout)
    assert findings.checked == {
        "units in inboxes": 1,
        "data files of tables": 2,
        "tables without a doubled or lost unit": len(TABLES),
    }
    assert (findings.damaged, findings.orphans) == ([], [])


def test_each_damaged_unit_and_data_file_is_named_and_the_exit_code_says_so(layout: StoreLayout) -> None:
    (unit,) = list_units(layout, "metrics")
    data = min(layout.table("metrics").glob("*.parquet"))
    unit.write_bytes(unit.read_bytes()[:-9])
    flip(data)
    findings = verify(layout)
    assert [line.split(": ")[0] for line in findings.damaged] == [str(unit), str(data)]
    answer = CliRunner().invoke(app, ["store", "verify", "--store", str(layout.root)])
    assert answer.exit_code == 3
    assert f"damaged: {data}" in answer.output


def test_units_that_no_log_names_are_told_until_compaction_folds_them(layout: StoreLayout) -> None:
    max(layout.table("metrics").glob("_delta_log/*.json")).unlink()
    assert "1 units that no log names; geosweep store compact folds them" in verify(layout).damaged[0]
    answer = CliRunner().invoke(app, ["store", "compact", "--store", str(layout.root)])
    assert answer.exit_code == 0, answer.output
    assert verify(layout).damaged == []
    assert pq.read_table(layout.export("metrics")).num_rows == 401


def test_a_registered_checkpoint_that_is_lost_is_damage_and_one_given_up_is_not(layout: StoreLayout) -> None:
    path = "checkpoints/a/100"
    publish(layout, "checkpoints", [row("checkpoints", checkpoint="k", segment="a", tokens=100, path=path)])
    assert verify(layout).damaged == [f"{path}: in table checkpoints, but not there"]
    publish(layout, "events", [row("events", kind="checkpoint_removed", detail=path)])
    assert verify(layout).damaged == []


def test_a_folder_without_manifest_belongs_to_nothing(layout: StoreLayout) -> None:
    layout.checkpoint("a", 100).mkdir(parents=True)
    (layout.checkpoint("a", 100) / "weights.parquet").touch()
    assert verify(layout).orphans == ["checkpoints/a/100: a checkpoint folder without manifest"]


def test_export_writes_each_table_and_view_and_changes_nothing_in_the_store(
    layout: StoreLayout, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()}
    with Store(layout.root) as store:
        rows = export(store, tmp_path / "out")
    assert set(rows) == TABLES.keys() | VIEWS.keys()
    assert rows["metrics"] == pq.read_table(tmp_path / "out" / "metrics.parquet").num_rows == 401
    assert {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()} == before
    with Store(layout.root) as store, pytest.raises(InputError, match="is not an empty folder"):
        export(store, tmp_path / "out")
