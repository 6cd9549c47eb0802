from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from test_attempt import only_leg, planned, train

from orchestrator.query import Store
from orchestrator.status import page, read_status, watch
from trainers.errors import InputError


def printed(root: Path, width: int) -> str:
    with Store(root) as store:
        out = StringIO()
        Console(file=out, width=width).print(page(read_status(store, None)))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 160])
def test_a_sweep_is_shown_with_the_state_of_each_cell_and_how_to_continue(store_root: Path, width: int) -> None:
    plan = planned(store_root, grids=[{"name": "two", "axes": {"seed": [0, 1]}}])
    train(store_root, only_leg(store_root, plan))
    text = printed(store_root, width)
    assert "small" in text
    assert "2 cells: 1 evaluating, 1 waiting; 6 evaluations owed" in text.replace("\n", " ")
    assert "8,192" in text
    assert "0/3" in text
    assert "continue: geosweep resume small" in text


def test_an_empty_store_says_how_to_start(store_root: Path) -> None:
    assert "start one: geosweep run SWEEP" in printed(store_root, 120)


def test_watching_off_a_terminal_prints_the_page_once(store_root: Path) -> None:
    planned(store_root)
    out = StringIO()
    with Store(store_root) as store:
        watch(store, "small", Console(file=out, width=120))
        with pytest.raises(InputError, match="no sweep 'smal'; nearest is 'small'"):
            read_status(store, "smal")
    assert out.getvalue().count("1 waiting") == 1
