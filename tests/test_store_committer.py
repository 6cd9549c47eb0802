from __future__ import annotations

import hashlib
import os
import shutil
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pandas as pd
import polars as pl
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from store_rows import curve_rows, metric_row, row
from test_attempt import planned

from orchestrator.query import Store
from orchestrator.schema import TABLES
from orchestrator.store import committer as committers
from orchestrator.store.committer import Committer, committing, only_committer
from orchestrator.store.inbox import StoreConflict, list_units, publish
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.leases import SILENCE_S, Lease
from orchestrator.store.sweeps import current_revision
from orchestrator.store.tables import StoredTable, publish_once, read_rows
from trainers.errors import EnvironmentFault


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return create_or_open(tmp_path / "store")


def put(layout: StoreLayout, *checkpoints: str, value: float = 1.0) -> None:
    for checkpoint in checkpoints:
        publish(layout, "metrics", [metric_row(checkpoint, f"m{i}", value + i) for i in range(3)])


def values(layout: StoreLayout) -> list[tuple[str, str, float]]:
    with Store(layout.root) as store:
        rows = store.sql("select checkpoint, metric, value from metrics order by all").rows()
    return [(r["checkpoint"], r["metric"], r["value"]) for r in rows]


def expected(*checkpoints: str, value: float = 1.0) -> list[tuple[str, str, float]]:
    return [(checkpoint, f"m{i}", value + i) for checkpoint in sorted(checkpoints) for i in range(3)]


def data_files(layout: StoreLayout) -> list[Path]:
    return sorted(layout.table("metrics").glob("*.parquet"))


# folding


@pytest.mark.parametrize("table", TABLES)
def test_folded_rows_of_each_table_are_what_was_published_and_leave_the_inbox(layout: StoreLayout, table: str) -> None:
    with Store(layout.root) as store:
        publish(layout, table, [row(table)])
        store.refresh()
        before = store.table(table).rows()
        assert Committer(layout).fold(table) == 1
        assert list_units(layout, table) == []
        store.refresh()
        assert store.table(table).rows() == before
        assert store.table(table).arrow().column_names == list(TABLES[table].names)


def test_a_reader_opened_before_a_fold_sees_the_same_rows_after_it_and_both_kinds_together(layout: StoreLayout) -> None:
    put(layout, "c1", "c2")
    with Store(layout.root) as store:
        Committer(layout).fold("metrics")
        put(layout, "c3")
        assert len(store.table("metrics")) == 6
        store.refresh()
        assert len(store.table("metrics")) == 9


def test_curves_of_a_reader_that_is_overtaken_by_a_fold_are_whole(layout: StoreLayout) -> None:
    publish(layout, "curves", curve_rows("a", 1, range(50), 0.5))
    with Store(layout.root) as store:
        Committer(layout).fold("curves")
        assert len(store.table("curves")) == 50


def test_compaction_leaves_one_sorted_file_and_an_export_and_no_row_changes(layout: StoreLayout) -> None:
    committer = Committer(layout)
    for name in ("c3", "c1", "c2"):
        put(layout, name)
        committer.fold("metrics")
    before = values(layout)
    with Store(layout.root) as overtaken:
        committer.compact("metrics")
        files = StoredTable(layout, "metrics")
        files.refresh()
        assert len(files.files) == 1
        assert len(overtaken.table("metrics")) == 9
    assert values(layout) == before == expected("c1", "c2", "c3")
    exported = pq.read_table(layout.export("metrics"))
    assert exported["checkpoint"].to_pylist() == sorted(exported["checkpoint"].to_pylist())
    assert exported.schema.equals(TABLES["metrics"].folded_schema)


def test_a_replaced_file_is_removed_after_an_hour_and_a_reader_of_it_looks_again(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = Committer(layout)
    for name in ("c1", "c2"):
        put(layout, name)
        committer.fold("metrics")
    with Store(layout.root) as store:
        committer.compact("metrics")
        assert len(data_files(layout)) == 3
        monkeypatch.setattr(committers, "UNNAMED_S", -1.0)
        put(layout, "c3")
        committer.fold("metrics")
        committer.compact("metrics")  # sees what the last one replaced
        assert len(data_files(layout)) <= 3
        put(layout, "c4")
        committer.fold("metrics")
        committer.compact("metrics")
        assert len(store.table("metrics")) == 12


def test_the_same_unit_again_after_its_fold_is_dropped(layout: StoreLayout) -> None:
    committer = Committer(layout)
    put(layout, "c1")
    committer.fold("metrics")
    put(layout, "c1")
    assert values(layout) == expected("c1")
    committer.fold("metrics")
    assert list_units(layout, "metrics") == []
    assert values(layout) == expected("c1")
    assert committer.problems == {}


def test_a_unit_that_may_be_folded_is_put_down_once_and_compared(layout: StoreLayout) -> None:
    cells = [row("trials", trial=f"t{i}", peak_lr=0.1) for i in range(3)]
    for _ in range(2):
        publish_once(layout, "trials", cells)
        Committer(layout).fold("trials")
        assert list_units(layout, "trials") == []
    with pytest.raises(StoreConflict, match=r"peak_lr: 0\.1 stored, 0\.2 given \(3 rows differ\)"):
        publish_once(layout, "trials", [cell | {"peak_lr": 0.2} for cell in cells])
    assert list_units(layout, "trials") == []


def test_another_result_under_a_folded_key_is_kept_aside_and_named(layout: StoreLayout) -> None:
    committer = Committer(layout)
    put(layout, "c1")
    committer.fold("metrics")
    put(layout, "c1", value=5.0)
    assert values(layout) == expected("c1")
    committer.fold("metrics")
    assert values(layout) == expected("c1")
    (aside,) = layout.conflicts("metrics").iterdir()
    (message,) = committer.problems.values()
    assert str(aside) in message
    assert "value: 1.0 stored, 5.0 given (3 rows differ)" in message


def test_a_damaged_unit_stays_and_is_named_and_the_others_are_folded(layout: StoreLayout) -> None:
    put(layout, "c1", "c2")
    damaged = list_units(layout, "metrics")[0]
    damaged.write_bytes(damaged.read_bytes()[:-20])
    committer = Committer(layout)
    assert committer.fold("metrics") == 1
    assert list_units(layout, "metrics") == [damaged]
    assert list(committer.problems) == [damaged]


# several committers


def test_a_committer_that_is_behind_never_folds_a_unit_twice(layout: StoreLayout) -> None:
    first, second = Committer(layout), Committer(layout)
    for turn in range(6):
        put(layout, f"c{turn}")
        copies = {path: path.read_bytes() for path in list_units(layout, "metrics")}
        first.fold("metrics")
        for path, content in copies.items():  # as if the first had been killed before it removed them
            path.write_bytes(content)
        second.fold("metrics")
        first, second = second, first
    assert values(layout) == expected(*(f"c{turn}" for turn in range(6)))
    assert list_units(layout, "metrics") == []


def test_a_commit_made_on_an_older_version_fails_and_leaves_no_file(layout: StoreLayout) -> None:
    put(layout, "c1")
    committer = Committer(layout)
    committer.fold("metrics")
    behind = StoredTable(layout, "metrics")
    behind.refresh()
    put(layout, "c2")
    committer.fold("metrics")
    before = data_files(layout)
    rows = pq.read_table(before[0])
    assert committer._commit(behind, committer._write(behind, rows.to_batches()), []) is False
    assert data_files(layout) == before


def test_two_committers_at_once_fold_each_unit_once(layout: StoreLayout) -> None:
    names = [f"c{i:02d}" for i in range(40)]
    put(layout, *names)

    def work() -> None:
        mine = Committer(layout)
        for _ in range(3):
            mine.fold("metrics")
            mine.compact("metrics")

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values(layout) == expected(*names)


def test_a_lease_is_taken_over_when_its_holder_is_silent_whatever_the_wall_clock_says(layout: StoreLayout) -> None:
    now = [0.0]
    first, second = (Lease(layout, "committer", clock=lambda: now[0]) for _ in range(2))
    assert first.hold()
    assert not second.hold()
    now[0] += SILENCE_S - 1
    assert first.hold()
    assert not second.hold()
    now[0] += SILENCE_S - 1
    assert not second.hold(), "the first has beaten since"
    now[0] += 2
    assert second.hold()
    assert not first.hold()
    second.release()
    assert first.hold()


def test_a_lease_of_a_dead_process_on_this_machine_is_free_at_once(layout: StoreLayout) -> None:
    if (pid := os.fork()) == 0:
        Lease(layout, "committer").seize()
        os._exit(0)
    os.waitpid(pid, 0)
    assert Lease(layout, "committer").hold()


def test_a_torn_lease_is_free(layout: StoreLayout) -> None:
    layout.lease("committer").write_text('{"owner": ')
    assert Lease(layout, "committer").hold()


def test_a_session_folds_the_rest_at_its_end(layout: StoreLayout) -> None:
    put(layout, "c1")
    said: list[str] = []
    with committing(layout, said.append):
        put(layout, "c2")
    assert (list_units(layout, "metrics"), said) == ([], [])
    assert values(layout) == expected("c1", "c2")
    assert not layout.lease("committer").exists()


# power cuts, lost and merged files


def test_a_torn_newest_log_entry_is_removed_and_its_units_are_folded_again(layout: StoreLayout) -> None:
    put(layout, "c1")
    Committer(layout).fold("metrics")
    put(layout, "c2")
    units = {path: path.read_bytes() for path in list_units(layout, "metrics")}
    Committer(layout).fold("metrics")
    newest = max(layout.table("metrics").glob("_delta_log/*.json"))
    newest.write_bytes(newest.read_bytes()[:40])
    for path, content in units.items():  # they leave the inbox only after the entry is on the disk
        path.write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"_delta_log: cannot be read .*\n.*geosweep store compact"):
        values(layout)
    with only_committer(layout) as committer:
        committer.fold("metrics")
    assert values(layout) == expected("c1", "c2")


def test_a_torn_sum_of_the_log_is_removed_and_the_entries_are_read(layout: StoreLayout) -> None:
    committer = Committer(layout)
    for name in ("c1", "c2"):
        put(layout, name)
        committer.fold("metrics")
    committer.compact("metrics")
    (summed,) = layout.table("metrics").glob("_delta_log/*.checkpoint*.parquet")
    summed.write_bytes(summed.read_bytes()[:100])
    Committer(layout)
    assert values(layout) == expected("c1", "c2")


def test_rows_whose_log_entry_is_lost_come_back_with_the_next_compaction(layout: StoreLayout) -> None:
    committer = Committer(layout)
    for name in ("c1", "c2", "c3"):
        put(layout, name)
        committer.fold("metrics")
    max(layout.table("metrics").glob("_delta_log/*.json")).unlink()
    assert values(layout) == expected("c1", "c2")
    with only_committer(layout) as another:
        another.compact("metrics")
    assert values(layout) == expected("c1", "c2", "c3")


def test_two_stores_merged_by_copying_files_lose_no_row_and_double_none(layout: StoreLayout, tmp_path: Path) -> None:
    other = create_or_open(tmp_path / "other")
    for at, names in ((layout, ("both", "c1", "c2")), (other, ("both", "d1", "d2", "d3"))):
        for name in names:
            put(at, name)
            Committer(at).fold("metrics")
    put(other, "d4")
    shutil.copytree(other.root, layout.root, dirs_exist_ok=True)  # the other's log lies over ours
    with only_committer(layout) as committer:
        committer.fold("metrics")
        committer.compact("metrics")
    assert values(layout) == expected("both", "c1", "c2", "d1", "d2", "d3", "d4")


def test_a_flipped_bit_in_a_data_file_is_named_by_query_and_compaction(layout: StoreLayout) -> None:
    committer = Committer(layout)
    for name in ("c1", "c2"):
        put(layout, name)
        committer.fold("metrics")
    damaged = data_files(layout)[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    for use in (lambda: values(layout), lambda: Committer(layout).compact("metrics")):
        with pytest.raises(EnvironmentFault, match=f"{damaged}: damaged"):
            use()


def test_a_missing_data_file_is_named(layout: StoreLayout) -> None:
    put(layout, "c1")
    Committer(layout).fold("metrics")
    (lost,) = data_files(layout)
    lost.unlink()
    for use in (lambda: values(layout), lambda: read_rows(layout, "metrics", ["value"])):
        with pytest.raises(EnvironmentFault, match=f"{lost}: the file is missing"):
            use()


# what others see


def test_a_store_opens_in_plain_duckdb_polars_and_pandas(layout: StoreLayout) -> None:
    committer = Committer(layout)
    for name in ("c1", "c2", "c3"):
        put(layout, name)
        committer.fold("metrics")
    committer.compact("metrics")
    put(layout, "c4")
    committer.fold("metrics")
    table, exported = str(layout.table("metrics")), str(layout.export("metrics"))
    assert duckdb.sql(f"select count(*), sum(value) from '{exported}'").fetchall() == [(9, 18.0)]
    assert pd.read_parquet(exported)["value"].sum() == 18.0
    assert DeltaTable(table).to_pandas()["value"].sum() == 24.0
    assert pl.scan_delta(table).select(pl.col("value").sum()).collect().item() == 24.0


def test_whoever_changes_an_export_does_not_change_the_store(layout: StoreLayout) -> None:
    put(layout, "c1")
    committer = Committer(layout)
    committer.fold("metrics")
    committer.compact("metrics")
    layout.export("metrics").write_bytes(b"mine")
    assert values(layout) == expected("c1")


def test_queries_reach_no_file_but_the_tables_of_the_store(layout: StoreLayout) -> None:
    put(layout, "c1")
    Committer(layout).fold("metrics")
    with Store(layout.root) as store:
        for path in ("/etc/passwd", f"{layout.root}/tables/../geosweep.json", f"{layout.root}/export/metrics.parquet"):
            with pytest.raises(Exception, match="refused"):
                store.sql(f"select * from read_text('{path}')")
        with pytest.raises(Exception, match="refused"):
            store.sql(f"copy (select 1) to '{layout.root}/tables/x.parquet'")


def test_a_data_file_with_an_extension_type_is_refused_before_it_is_opened(layout: StoreLayout) -> None:
    put(layout, "c1")
    committer = Committer(layout)
    committer.fold("metrics")
    (mine,) = data_files(layout)
    table = pq.read_table(mine)
    crafted = table.schema.field("convention").with_metadata({"ARROW:extension:name": "ray.data.arrow_pickled_object"})
    place = table.column_names.index("convention")
    bad = layout.root / "temporary" / "bad.parquet"
    pq.write_table(table.set_column(place, crafted, table["convention"]), bad)
    bad.rename(layout.table("metrics") / f"{hashlib.sha256(bad.read_bytes()).hexdigest()}-0.parquet")
    committer.compact("metrics")
    (message,) = committer.problems.values()
    assert "Arrow extension type" in message
    assert values(layout) == expected("c1")


def test_a_revision_submitted_after_the_clock_was_set_back_is_the_current_one(store_root: Path) -> None:
    layout = StoreLayout(store_root)
    ahead = datetime.now(UTC) + timedelta(hours=1)
    publish(layout, "events", [row("events", kind="sweep_submitted", sweep="small", detail="old", time=ahead)])
    plan = planned(store_root)
    assert current_revision(layout, "small") == plan.revision
    with Store(store_root) as store:
        assert store.sql("select revision from latest").rows() == [{"revision": plan.revision}]
