"""Show the certificates of what was resumed in a sweep, and whether each holds.

store -> query -> [certificates] -> terminal
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from orchestrator.query import Store

PARTS = ("weights", "optimizer", "random", "sequence")


def read_certificates(store: Store, sweep: str | None) -> list[dict[str, Any]]:
    """Every row of table resumes, oldest first, of one sweep or all.

    Each with `digests_agree`: weights, optimizer, random state and position in the data are those that were saved; and
    `holds`: also, on a CPU, the replayed losses are those that were recorded, bit for bit.
    """
    rows = store.sql("select * from resumes where ? is null or sweep = ? order by time", [sweep, sweep]).rows()
    for row in rows:
        row["digests_agree"] = all(row[f"{part}_saved"] == row[f"{part}_loaded"] for part in PARTS)
        exact = row["replay_difference"] in (None, 0.0) or row["device"] != "cpu"
        row["holds"] = row["digests_agree"] and exact
    return rows


def show(certificates: Sequence[dict[str, Any]], out: Console) -> None:
    """Print a line for each state that training went on from."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("segment", "attempt", "tokens", "loaded", "replayed", "difference", "host"):
        table.add_column(name, overflow="fold", no_wrap=name != "segment")
    for row in certificates:
        replayed, difference = row["replayed_steps"], row["replay_difference"]
        differ = [part for part in PARTS if row[f"{part}_saved"] != row[f"{part}_loaded"]]
        table.add_row(
            row["segment"],
            str(row["attempt"]),
            f"{row['tokens']:,}",
            f"DIFFERS: {', '.join(differ)}" if differ else "as saved",
            f"{replayed} steps" if replayed else "no record",
            "" if difference is None else f"{difference:g}",
            row["host"],
        )
    out.print(table)
    broken = sum(not row["holds"] for row in certificates)
    out.print(f"{len(certificates)} states were trained on from; {len(certificates) - broken} certificates hold")
