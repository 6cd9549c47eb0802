"""One driver a store, whatever machine it is on, and fencing numbers for what comes back late."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator import driving
from orchestrator.driving import Driver, ask_to_stop, only_driver
from orchestrator.store.fences import claim, is_newest, newest
from orchestrator.store.layout import StoreLayout, create_or_open, stop_file
from orchestrator.store.leases import Lease
from trainers.errors import EnvironmentFault, InputError


@pytest.fixture
def layout(tmp_path: Path) -> StoreLayout:
    return create_or_open(tmp_path / "store")


def as_if_elsewhere(layout: StoreLayout) -> None:
    """Let the lease look as if its holder were on another machine."""
    path = layout.lease(driving.WHAT)
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "machine": "another", "host": "far"}))


def test_many_who_claim_at_once_get_different_numbers_and_the_highest_counts(layout: StoreLayout) -> None:
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(lambda _: claim(layout, "segment"), range(40)))
    assert len(set(numbers)) == 40
    assert newest(layout, "segment") == max(numbers)
    assert [number for number in numbers if is_newest(layout, "segment", number)] == [max(numbers)]


def test_numbers_of_different_things_are_counted_apart(layout: StoreLayout) -> None:
    assert (newest(layout, "a"), claim(layout, "a"), claim(layout, "a"), claim(layout, "b")) == (0, 1, 2, 1)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "", ".."])
def test_a_number_cannot_be_claimed_outside_the_store(layout: StoreLayout, name: str) -> None:
    with pytest.raises(InputError):
        claim(layout, name)


def test_a_second_driver_is_refused_by_name_while_the_first_lives(layout: StoreLayout) -> None:
    with only_driver(layout, "run first"):
        beating = threading.Event()

        def beat() -> None:  # the first one's heart, faster than a test can wait for
            while not beating.wait(0.05):
                lease.seize()
                as_if_elsewhere(layout)

        lease = Lease(layout, driving.WHAT, doing="run first")
        heart = threading.Thread(target=beat)
        heart.start()
        try:
            with (
                pytest.raises(EnvironmentFault) as caught,
                only_driver(layout, "two"),
            ):
                pytest.fail("two drivers")
        finally:
            beating.set()
            heart.join()
    assert caught.value.kind == "store_busy"
    assert "`geosweep run first`" in str(caught.value)
    assert "on far" in str(caught.value)
    assert "`geosweep run first`" in str(caught.value)
    assert "on far" in str(caught.value)


def test_a_driver_that_died_on_this_machine_is_replaced_at_once(layout: StoreLayout) -> None:
    if (pid := os.fork()) == 0:
        Driver(layout, Lease(layout, driving.WHAT, doing="run dead"))
        os._exit(0)
    os.waitpid(pid, 0)
    said: list[str] = []
    with only_driver(layout, "run next", said.append) as driver:
        assert driver.is_current()
    assert said == []


def test_a_driver_that_died_elsewhere_is_replaced_after_its_silence(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.store.leases.SILENCE_S", 0.2)
    Driver(layout, Lease(layout, driving.WHAT, doing="run dead"))
    as_if_elsewhere(layout)
    said: list[str] = []
    with only_driver(layout, "run next", said.append) as driver:
        assert driver.is_current()
    assert len(said) == 1
    assert "geosweep run dead" in said[0]


def test_a_driver_that_comes_back_after_another_took_over_finds_itself_superseded(
    layout: StoreLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driving, "BEAT_S", 0.01)
    late = Driver(layout, Lease(layout, driving.WHAT, doing="run late"))
    newer = Driver(layout, Lease(layout, driving.WHAT, doing="run newer"))
    late.start()
    assert late.superseded.wait(20)
    assert newer.is_current()
    assert "newer" in layout.lease(driving.WHAT).read_text(), "the late one does not beat any more"


def test_of_two_drivers_that_begin_at_once_one_goes_on(layout: StoreLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "BEAT_S", 0.02)
    both = threading.Barrier(2)
    outcomes: list[str] = []

    def drive(name: str) -> None:
        both.wait()
        try:
            with only_driver(layout, name) as driver:
                outcomes.append("superseded" if driver.superseded.wait(2.0) else "drives")
        except EnvironmentFault as fault:
            outcomes.append(fault.kind)

    threads = [threading.Thread(target=drive, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) in (["drives", "store_busy"], ["drives", "superseded"])


def test_a_stop_is_asked_of_whoever_works_on_that_sweep_only(layout: StoreLayout) -> None:
    with pytest.raises(InputError, match="nothing works on this store"):
        ask_to_stop(layout, "demo", 0.0, print)
    with only_driver(layout, "run demo"):
        with pytest.raises(InputError, match="not on 'other'"):
            ask_to_stop(layout, "other", 0.0, print)
        assert not ask_to_stop(layout, "demo", 0.0, print)
        assert stop_file(layout, "demo").exists()
