"""A disk that is full in the middle of each kind of writing: it is named, nothing is lost, with space it goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_rows import metric_row
from test_attempt import only_leg, planned, stored, train

from orchestrator import tune
from orchestrator.legs import Leg
from orchestrator.query import Store
from orchestrator.store.committer import Committer
from orchestrator.store.durable import is_full
from orchestrator.store.inbox import list_units, publish
from orchestrator.store.layout import StoreLayout, create_or_open
from orchestrator.store.verify import verify
from trainers.errors import EnvironmentFault


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "geosweep-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # a corpus may still be mapped


@pytest.fixture
def small(tmp_path: Path) -> Iterator[StoreLayout]:
    """A store on a file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, "2m"):
        yield create_or_open(folder / "store")


def put(layout: StoreLayout, *names: str) -> None:
    for name in names:
        publish(layout, "metrics", [metric_row(name, f"m{i}", float(i)) for i in range(10)])


def fill(layout: StoreLayout, leave: int) -> Path:
    """Fill the disk but for `leave` bytes."""
    filler = layout.root.parent / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    os.truncate(filler, max(0, filler.stat().st_size - leave))
    return filler


def trial_config(layout: StoreLayout, leg: Leg) -> dict[str, Any]:
    machine = {"cpus": 1, "gpus": 0, "micro_batch": None, "rescue_seconds": 600.0, "compress_checkpoints": False}
    return {"leg": leg.to_json(), "store": str(layout.root), "sweep": "small", **machine}


def count(layout: StoreLayout) -> int:
    with Store(layout.root) as store:
        (row,) = store.sql("select count(*) as n, count(distinct (checkpoint, metric)) as units from metrics").rows()
    assert row["n"] == row["units"]
    return int(row["n"])


@pytest.mark.parametrize("leave", [0, 4096, 8192, 12288, 16384, 20480, 24576, 32768])
def test_fold_on_a_full_disk_is_named_and_goes_on_with_space(small: StoreLayout, leave: int) -> None:
    put(small, "c0")
    Committer(small).fold("metrics")
    put(small, "c1", "c2", "c3")
    filler = fill(small, leave)
    with contextlib.suppress(EnvironmentFault):  # with most of the space it works
        Committer(small).fold("metrics")
    assert count(small) == 40
    filler.unlink()
    Committer(small).fold("metrics")
    assert (count(small), list_units(small, "metrics")) == (40, [])
    assert verify(small).damaged == []


@pytest.mark.parametrize("leave", [0, 4096, 8192, 16384, 32768, 65536])
def test_compaction_on_a_full_disk_is_named_and_goes_on_with_space(small: StoreLayout, leave: int) -> None:
    committer = Committer(small)
    for name in ("c0", "c1", "c2"):
        put(small, name)
        committer.fold("metrics")
    filler = fill(small, leave)
    with contextlib.suppress(EnvironmentFault):
        Committer(small).compact("metrics")
    assert count(small) == 30
    filler.unlink()
    Committer(small).compact("metrics")
    assert count(small) == 30
    assert small.export("metrics").exists()
    assert verify(small).damaged == []


def test_a_fold_without_any_space_says_so(small: StoreLayout) -> None:
    put(small, "c0")
    fill(small, 0)
    with pytest.raises(EnvironmentFault, match="No space left on device") as caught:
        Committer(small).fold("metrics")
    assert caught.value.kind == "storage_error"
    with pytest.raises(EnvironmentFault) as caught:
        put(small, "c1")
    assert is_full(caught.value)


def test_a_committer_of_a_read_only_store_says_so_and_readers_are_answered(small: StoreLayout) -> None:
    put(small, "c0")
    Committer(small).fold("metrics")
    put(small, "c1")
    disk = str(small.root.parent)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    for act in (lambda: Committer(small).fold("metrics"), lambda: Committer(small).compact("metrics")):
        with pytest.raises(EnvironmentFault, match="Read-only file system") as caught:
            act()
        assert caught.value.kind == "storage_error"
    assert count(small) == 20
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    Committer(small).everything()
    assert (count(small), list_units(small, "metrics")) == (20, [])


def test_who_may_only_read_is_told_so_and_is_answered(small: StoreLayout) -> None:
    put(small, "c0")
    Committer(small).fold("metrics")
    put(small, "c1")
    in_sight = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are for root alone
    store = StoreLayout(Path(shutil.copytree(small.root, in_sight / "store")))
    in_sight.chmod(0o755)
    try:
        os.seteuid(65534)
        try:
            for act in (lambda: put(store, "c2"), lambda: Committer(store).fold("metrics")):
                with pytest.raises(EnvironmentFault, match=r"[Pp]ermission denied") as caught:
                    act()
                assert caught.value.kind == "storage_error"
            assert count(store) == 20
        finally:
            os.seteuid(0)
        put(store, "c2")
        assert count(store) == 30
    finally:
        shutil.rmtree(in_sight)


def test_a_trial_waits_for_space_and_then_gives_the_checkpoints_of_an_undisturbed_one(
    store_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "PAUSE_SECONDS", 0.0)
    train(store_root, only_leg(store_root, planned(store_root)))
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, "4m"):
        layout = create_or_open(folder / "store")
        shutil.copytree(store_root / "corpora", layout.root / "corpora", dirs_exist_ok=True)
        leg = only_leg(layout.root, planned(layout.root))
        filler = fill(layout, leave=0)
        trial = tune.LegTrainable(trial_config(layout, leg))
        assert [trial.step()["state"] for _ in range(3)] == ["paused"] * 3
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        states = [trial.step()["state"]]
        while states[-1] == "training":
            states.append(trial.step()["state"])
        assert states[-1] == "committed"
        assert stored(layout.root) == stored(store_root)
