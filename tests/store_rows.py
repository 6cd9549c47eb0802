"""Rows for tests of the store: what a test does not name has a value that does not matter to it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from orchestrator.schema import BOOL, DOUBLE, INT, STRING, STRINGS, TABLES, TIME

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
_ANY = {STRING: "any", INT: 0, DOUBLE: 0.5, BOOL: False, TIME: NOON, STRINGS: ["grid"]}


def row(table: str, **given: Any) -> dict[str, Any]:
    """A whole row of a table."""
    spec = TABLES[table]
    assert set(given) <= set(spec.names), set(given) - set(spec.names)
    plain = {c.name: None if c.nullable else _ANY[c.type] for c in spec.columns}
    return plain | ({"asked": True} if table == "chains" else {}) | given


def metric_row(checkpoint: str, metric: str, value: float | None, **given: Any) -> dict[str, Any]:
    """A row of one evaluation: evaluator geometry with settings 's1', version 1, unless given."""
    evaluation = {"evaluator": "geometry", "settings_digest": "s1", "evaluator_version": 1}
    return row("metrics", checkpoint=checkpoint, metric=metric, value=value, **(evaluation | given))


def curve_rows(segment: str, attempt: int, steps: range, loss: float) -> list[dict[str, Any]]:
    return [row("curves", segment=segment, attempt=attempt, step=step, tokens=16 * step, loss=loss) for step in steps]
