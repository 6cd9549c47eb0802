"""Many units at once: the rows of each, whoever read them, and the file that is at fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from store_rows import metric_row

from orchestrator.schema import METRICS
from orchestrator.store import units
from orchestrator.store.inbox import UnitGone, list_units, publish, read_unit
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.units import read_units
from trainers.errors import EnvironmentFault

COUNT = 9


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreLayout:
    """A store with a few units of one to three rows, and helpers that start for as few."""
    monkeypatch.setattr(units, "UNITS_OF_A_PROCESS", 4)
    monkeypatch.setattr(units.os, "sched_getaffinity", lambda _process: range(2))
    layout = create_or_open(tmp_path / "store")
    for number in range(COUNT):
        rows = [
            metric_row(checkpoint=f"c{number}", metric=f"m{k}", value=number + k / 10) for k in range(number % 3 + 1)
        ]
        publish(layout, "metrics", rows)
    return layout


def test_each_unit_is_what_reading_it_alone_gives(layout: StoreLayout) -> None:
    paths = list_units(layout, "metrics")
    found = read_units(layout.files, paths, METRICS)
    assert list(found) == paths
    for path, unit in found.items():
        alone = read_unit(layout.files, path, METRICS)
        assert unit.equals(alone)
        assert unit.schema.equals(alone.schema, check_metadata=True)
    assert read_units(layout.files, [], METRICS) == {}


def test_half_of_them_is_read_by_another_process(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[Path] = []

    def read(files: object, path: Path, spec: object) -> object:
        here.append(path)
        return read_unit(layout.files, path, METRICS)

    monkeypatch.setattr(units, "read_unit", read)
    paths = list_units(layout, "metrics")
    assert list(read_units(layout.files, paths, METRICS)) == paths
    assert here == paths[:5]


def test_a_damaged_or_missing_file_in_a_helpers_share_is_named(layout: StoreLayout) -> None:
    paths = list_units(layout, "metrics")
    whole = paths[-1].read_bytes()
    paths[-1].write_bytes(whole[:-20])
    with pytest.raises(EnvironmentFault, match=paths[-1].name):
        read_units(layout.files, paths, METRICS)
    paths[-1].unlink()
    with pytest.raises(UnitGone, match=paths[-1].name):
        read_units(layout.files, paths, METRICS)


def test_without_a_helper_they_are_read_here(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    paths = list_units(layout, "metrics")
    assert sum(unit.num_rows for unit in read_units(layout.files, paths, METRICS).values()) == 18
