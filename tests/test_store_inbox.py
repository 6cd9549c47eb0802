from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from store_rows import NOON, curve_rows, metric_row, row

from orchestrator.query import Store
from orchestrator.schema import METRICS, TABLES
from orchestrator.store.inbox import StoreConflict, key_of, list_units, publish, read_unit
from orchestrator.store.layout import StoreLayout, create_or_open, open_existing
from trainers.errors import EnvironmentFault, InputError


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return create_or_open(tmp_path / "store")


def everything_in(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


# layout


def test_store_is_made_once_and_opened_again_with_the_same_marker(tmp_path: Path) -> None:
    marker = create_or_open(tmp_path / "deep" / "store").marker.read_bytes()
    assert create_or_open(tmp_path / "deep" / "store").marker.read_bytes() == marker
    assert open_existing(tmp_path / "deep" / "store").marker.read_bytes() == marker


def test_open_where_there_is_no_store_names_the_folder_and_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no store at .*nowhere.*\n.*geosweep run SWEEP"):
        open_existing(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_store_of_a_newer_format_is_refused_by_reader_and_writer(layout: StoreLayout) -> None:
    layout.marker.write_text('{"format": 2, "created": "later", "product": "9", "shards": 7}')
    for way in (open_existing, create_or_open):
        with pytest.raises(InputError, match=r"has format 2, this geosweep reads 1\nupgrade geosweep"):
            way(layout.root)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "1"}', b'{"format": 1}', b"\xff\xfe"])
def test_damaged_marker_is_named(layout: StoreLayout, content: bytes) -> None:
    layout.marker.write_bytes(content)
    with pytest.raises(EnvironmentFault, match=r"geosweep\.json: not the marker of a store") as caught:
        open_existing(layout.root)
    assert caught.value.kind == "corrupt_file"


def test_store_is_not_made_in_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear to somebody")
    with pytest.raises(InputError, match=r"not empty and is not a store\n  it holds thesis\.tex"):
        create_or_open(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc", "a/b", ".hidden", "a\0b", "a b", "é", "x" * 161, "a\n"]
)
def test_names_that_could_leave_the_store_are_refused(layout: StoreLayout, name: str) -> None:
    ways: list[Any] = [layout.corpus, layout.lease, lambda n: layout.checkpoint(n, 0), lambda n: layout.sweep("s", n)]
    for way in ways:
        with pytest.raises(InputError, match="cannot name a"):
            way(name)


def test_paths_are_those_of_the_documented_layout(layout: StoreLayout) -> None:
    relative = [
        layout.checkpoint("olmo-0123456789ab", 250_000),
        layout.sweep("demo", "abc"),
        layout.plan("demo", "abc"),
        layout.corpus("builtin"),
        layout.inbox("metrics"),
        layout.lease("committer"),
    ]
    assert [str(path.relative_to(layout.root)) for path in relative] == [
        "checkpoints/olmo-0123456789ab/250000",
        "sweeps/demo/abc.yaml",
        "sweeps/demo/abc.json",
        "corpora/builtin",
        "inbox/metrics",
        "leases/committer.json",
    ]


def test_leftovers_go_after_a_day_and_not_before(layout: StoreLayout) -> None:
    old, old_folder, fresh = layout.temporary(), layout.temporary(), layout.temporary()
    old.write_bytes(b"half")
    (old_folder / "inner").mkdir(parents=True)
    fresh.write_bytes(b"half")
    two_days_ago = time.time() - 2 * 86_400
    for path in (old, old_folder):
        os.utime(path, (two_days_ago, two_days_ago))
    create_or_open(layout.root)
    assert list((layout.root / "temporary").iterdir()) == [fresh]


def test_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(EnvironmentFault, match=r"this file system has no hard links") as caught:
        create_or_open(tmp_path / "store")
    assert list((tmp_path / "store" / "temporary").iterdir()) == []
    assert caught.value.kind == "storage_error"


# publishing


@pytest.mark.parametrize("table", TABLES)
def test_unit_of_each_table_reads_back_as_written(layout: StoreLayout, table: str) -> None:
    given = row(table)
    path = publish(layout, table, [given])
    assert path.parent == layout.inbox(table)
    assert read_unit(layout.files, path, TABLES[table]).to_pylist() == [given]
    assert read_unit(layout.files, path, TABLES[table]).schema.equals(TABLES[table].schema, check_metadata=True)


def test_file_name_is_the_key_of_the_unit(layout: StoreLayout) -> None:
    path = publish(layout, "metrics", [metric_row("c1", "rank", 2.0), metric_row("c1", "isotropy", 0.5)])
    assert path.stem == key_of(METRICS, ["c1", "geometry", "s1", 1])
    assert path.stem.startswith("c1-")
    first, second = (publish(layout, "curves", curve_rows("a", 1, steps, 0.5)) for steps in (range(5), range(5, 9)))
    assert first != second


def test_rows_of_numpy_values_and_arrow_tables_are_stored_as_python_values_are(layout: StoreLayout) -> None:
    plain = metric_row("c1", "rank", 2.0, tokens=64)
    path = publish(layout, "metrics", [plain | {"value": np.float64(2.0), "tokens": np.int64(64)}])
    assert publish(layout, "metrics", pa.Table.from_pylist([plain], schema=METRICS.schema)) == path


def test_same_unit_again_changes_nothing_even_in_another_order_and_on_another_host(layout: StoreLayout) -> None:
    rows = [metric_row("c1", "rank", 2.0), metric_row("c1", "loss", float("nan"))]
    path = publish(layout, "metrics", rows)
    before = everything_in(layout.root)
    elsewhere = [r | {"host": "other", "wall_s": 9.0, "time": NOON.replace(year=2027)} for r in reversed(rows)]
    assert publish(layout, "metrics", elsewhere) == path
    assert everything_in(layout.root) == before


def test_other_result_under_the_same_key_is_an_error_that_names_file_column_and_values(layout: StoreLayout) -> None:
    path = publish(layout, "metrics", [metric_row("c1", "rank", 2.0, n=5)])
    before = everything_in(layout.root)
    with pytest.raises(StoreConflict) as caught:
        publish(layout, "metrics", [metric_row("c1", "rank", 2.5, n=6)])
    assert caught.value.stored == path
    assert caught.value.differences == (
        "value: 2.0 stored, 2.5 given (1 rows differ)",
        "n: 5 stored, 6 given (1 rows differ)",
    )
    assert str(path) in str(caught.value)
    assert everything_in(layout.root) == before


def test_unit_with_more_rows_than_stored_is_a_conflict(layout: StoreLayout) -> None:
    publish(layout, "metrics", [metric_row("c1", "rank", 2.0)])
    with pytest.raises(StoreConflict, match="rows: 1 stored, 2 given"):
        publish(layout, "metrics", [metric_row("c1", "rank", 2.0), metric_row("c1", "loss", 2.0)])


def test_failed_segment_may_commit_later(layout: StoreLayout) -> None:
    failed = row("segments", segment="a", state="failed", reason="out of memory")
    assert publish(layout, "segments", [failed]) == publish(layout, "segments", [failed | {"attempt": 2}])
    publish(layout, "segments", [row("segments", segment="a", state="committed")])
    assert len(list_units(layout, "segments")) == 2


GOOD = metric_row("c1", "rank", 2.0)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "a unit without rows"),
        ([GOOD | {"vaule": 1.0}], "vaule: no such column; nearest is 'value'"),
        ([{k: v for k, v in GOOD.items() if k != "tokens"}], "tokens: this column is missing"),
        ([GOOD | {"tokens": None}], "tokens: is null in 1 of 1 rows"),
        ([GOOD | {"checkpoint": None}], "checkpoint: is null in 1 of 1 rows"),
        ([GOOD | {"tokens": 1.0}], "tokens: 1.0 is given, int64 is needed"),
        ([GOOD | {"tokens": True}], "tokens: True is given, int64 is needed"),
        ([GOOD | {"tokens": 2**70}], "tokens: "),
        ([GOOD | {"metric": "\ud800"}], "metric: "),
        ([GOOD | {"value": "2"}], "value: '2' is given, double is needed"),
        ([GOOD | {"metric": 3}], "metric: 3 is given, string is needed"),
        ([GOOD | {"time": NOON.replace(tzinfo=None)}], "a time with time zone is needed"),
        ([GOOD, GOOD], "2 rows have 1 different keys"),
        ([GOOD, GOOD | {"checkpoint": "c2"}], "all rows of one unit have the same value; given 'c1' and 'c2'"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_stored(layout: StoreLayout, rows: Any, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        publish(layout, "metrics", rows)
    assert problem in str(caught.value)
    assert list_units(layout, "metrics") == []


def test_all_problems_of_a_unit_are_told_at_once(layout: StoreLayout) -> None:
    with pytest.raises(InputError, match="metrics: 2 problems, nothing was stored"):
        publish(layout, "metrics", [GOOD | {"value": "2", "tokens": 0.5}])


def test_arrow_table_of_another_type_is_refused(layout: StoreLayout) -> None:
    table = pa.Table.from_pylist([GOOD], schema=METRICS.schema)
    narrow = table.set_column(table.column_names.index("tokens"), "tokens", table["tokens"].cast(pa.int32()))
    with pytest.raises(InputError, match="tokens: type is int32, int64 is needed"):
        publish(layout, "metrics", narrow)


def test_unknown_table_is_refused_with_the_nearest_name(layout: StoreLayout) -> None:
    with pytest.raises(InputError, match="'metric' is not a table of the store; nearest is 'metrics'"):
        publish(layout, "metric", [GOOD])


# broken files


class RunsCode(pa.ExtensionType):
    """An Arrow type that runs code when it is read, as Ray's pickled objects do."""

    ran = False

    def __init__(self) -> None:
        super().__init__(pa.string(), "test.runs_code")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> RunsCode:
        cls.ran = True
        return cls()


@pytest.fixture
def stored(layout: StoreLayout) -> Path:
    return publish(layout, "metrics", [metric_row("c1", f"m{i}", float(i)) for i in range(40)])


def assert_named(layout: StoreLayout, path: Path, problem: str, kind: str = "corrupt_file") -> None:
    for read in (lambda: read_unit(layout.files, path, METRICS), lambda: Store(layout.root)):
        with pytest.raises(EnvironmentFault, match=problem) as caught:
            read()
        assert caught.value.kind == kind
        assert caught.value.what.startswith(f"{path}: ")
        assert caught.value.next_step


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_truncated_file_is_named(layout: StoreLayout, stored: Path, share: float) -> None:
    data = stored.read_bytes()
    stored.write_bytes(data[: int(share * len(data))])
    assert_named(layout, stored, "not a whole Parquet file")


def test_flipped_bit_in_the_values_is_named(layout: StoreLayout, stored: Path) -> None:
    data = bytearray(stored.read_bytes())
    columns = pq.read_metadata(stored).row_group(0)
    value = columns.column(METRICS.names.index("value"))
    data[value.data_page_offset + value.total_compressed_size - 3] ^= 1
    stored.write_bytes(data)
    assert_named(layout, stored, "damaged")


def test_any_flipped_bit_is_named_or_changes_nothing(layout: StoreLayout, stored: Path) -> None:
    data, rows = stored.read_bytes(), read_unit(layout.files, stored, METRICS)
    draw = random.Random(3)
    named = 0
    for bit in draw.sample(range(8 * len(data)), 400):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        stored.write_bytes(flipped)
        try:
            assert read_unit(layout.files, stored, METRICS).equals(rows)
        except EnvironmentFault:
            named += 1
    assert named > 200  # the others hit statistics and descriptions in the footer


def test_file_of_a_newer_format_says_upgrade(layout: StoreLayout, stored: Path) -> None:
    table = pq.read_table(stored)
    newer = table.replace_schema_metadata({"geosweep_format": "2", "geosweep_table": "metrics"})
    pq.write_table(newer, stored)
    assert_named(layout, stored, "written in format 2, this geosweep reads 1", kind="newer_format")


def test_foreign_files_are_named(layout: StoreLayout, stored: Path) -> None:
    table = pq.read_table(stored)
    pq.write_table(table.replace_schema_metadata(None), stored)
    assert_named(layout, stored, "not one of ours, or not of table metrics")
    pq.write_table(table.append_column("more", table["value"]), stored)
    assert_named(layout, stored, "its columns are not those of table metrics")
    pq.write_table(table.set_column(table.column_names.index("n"), "n", table["n"].cast("int32")), stored)
    assert_named(layout, stored, "its columns are not those of table metrics")


def test_file_under_a_name_that_is_not_its_key_is_named(layout: StoreLayout, stored: Path) -> None:
    copy = stored.with_name("copy.parquet")
    copy.write_bytes(stored.read_bytes())
    assert_named(layout, copy, "its name is not the key of its rows")


def test_extension_type_in_a_file_is_refused_before_its_code_runs(layout: StoreLayout, stored: Path) -> None:
    table = pq.read_table(stored)
    pa.register_extension_type(RunsCode())
    try:
        crafted = pa.ExtensionArray.from_storage(RunsCode(), table["convention"].combine_chunks())
        place = table.column_names.index("convention")
        pq.write_table(table.set_column(place, "convention", crafted), stored)
        RunsCode.ran = False
        assert_named(layout, stored, "Arrow extension type")
        assert not RunsCode.ran
        pq.read_schema(stored)
        assert RunsCode.ran, "the crafted file would have run code"
    finally:
        pa.unregister_extension_type("test.runs_code")


# faults of the machine


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "geosweep-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    return folder / "filler"


def test_full_disk_is_named_leaves_nothing_half_and_the_same_call_works_with_space(small_disk: Path) -> None:
    layout = create_or_open(small_disk / "store")
    first = publish(layout, "metrics", [metric_row("c1", "rank", 2.0)])
    filler = fill(small_disk)
    with pytest.raises(EnvironmentFault, match=r"No space left on device; nothing was written\nfree space") as caught:
        publish(layout, "metrics", [metric_row("c2", "rank", 3.0)])
    assert caught.value.kind == "storage_error"
    assert list_units(layout, "metrics") == [first]
    assert list((layout.root / "temporary").iterdir()) == []
    filler.unlink()
    publish(layout, "metrics", [metric_row("c2", "rank", 3.0)])
    with Store(layout.root) as store:
        assert store.sql("select checkpoint, value from metrics order by 1").rows() == [
            {"checkpoint": "c1", "value": 2.0},
            {"checkpoint": "c2", "value": 3.0},
        ]


def test_read_only_disk_is_named_for_writers_and_answers_readers(small_disk: Path) -> None:
    layout = create_or_open(small_disk / "store")
    publish(layout, "metrics", [metric_row("c1", "rank", 2.0)])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(EnvironmentFault, match="Read-only file system; nothing was written"):
        publish(layout, "metrics", [metric_row("c2", "rank", 2.0)])
    with pytest.raises(EnvironmentFault, match="Read-only file system"):
        create_or_open(layout.root)
    with Store(layout.root) as store:
        assert len(store.table("metrics")) == 1
