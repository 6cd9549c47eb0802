from __future__ import annotations

import subprocess
import sys

import pytest

from orchestrator.schema import FORMAT_VERSION, TABLES, VIEWS, describe

EVERY = {**TABLES, **VIEWS}


@pytest.mark.parametrize("name", EVERY)
def test_table_names_its_columns_once_and_its_key_among_them(name: str) -> None:
    table = EVERY[name]
    assert table.name == name
    assert len(set(table.names)) == len(table.names)
    assert set(table.key) <= set(table.names)
    assert set(table.unit) <= set(table.names)


def test_rows_of_one_file_agree_in_its_unit_so_two_files_of_a_table_never_hold_one_key() -> None:
    may_hold_a_key_twice = {name for name, table in TABLES.items() if not set(table.unit) <= set(table.key)}
    assert may_hold_a_key_twice == {"curves"}


def test_arrow_schema_carries_format_table_unit_and_meaning() -> None:
    schema = TABLES["curves"].schema
    assert schema.metadata == {b"geosweep_format": str(FORMAT_VERSION).encode(), b"geosweep_table": b"curves"}
    assert schema.field("loss").metadata == {b"unit": b"nats/token", b"meaning": b"mean training loss of the step"}


def test_describe_has_one_row_with_a_meaning_for_each_column_of_tables_and_views() -> None:
    rows = describe()
    assert len(rows) == sum(len(table.columns) for table in EVERY.values())
    assert all(row["meaning"] and row["type"] for row in rows)
    assert {
        "table": "trials",
        "column": "peak_lr",
        "type": "double",
        "unit": "",
        "meaning": "highest learning rate",
    } in (rows)


def test_query_code_loads_neither_ray_nor_torch_nor_transformers() -> None:
    heavy = "{'ray', 'torch', 'transformers', 'pandas', 'polars', 'rich'}"
    code = f"import sys, orchestrator.query, orchestrator.store.inbox; print(sorted({heavy} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
