"""Documents: what is read, in which order, in which split."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainers.corpus import (
    BUILTIN_TEXT,
    SOURCE_TEXT,
    BuiltinText,
    docstrings,
    read_documents,
    split_of,
    without_licence_header,
)
from trainers.errors import InputError

SMALL_TEXT = BuiltinText(
    domains=tuple(domain.model_copy(update={"max_bytes": 150_000}) for domain in BUILTIN_TEXT.domains),
    min_characters=200,
    max_characters=50_000,
)


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ast_docstrings(source: str) -> list[str]:
    """Independent: the docstrings as Python's own parser finds them, in the order of the file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    found = [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]
    return [text for _, text in sorted(found)]


def triple_quoted(source: str) -> list[str]:
    """ast's docstrings without those in single quotes, which are too short to be documents."""
    return [text for text in ast_docstrings(source) if len(text) >= 200]


def test_docstrings_of_the_standard_library_when_compared_with_ast_then_equal():
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[::4]
    checked = 0
    for path in modules:
        source = path.read_text(encoding="utf-8")
        assert [text for text in docstrings(source) if len(text) >= 200] == triple_quoted(source), path.name
        checked += len(triple_quoted(source))
    assert checked > 100


def test_docstrings_when_a_string_is_not_a_docstring_then_left_out():
    source = '''
def first():  # a comment with a quote: "
    r"""Raw \\d,
        indented."""
    call("""
    an argument""")
    x = {"""a key""": 1}
    """a string after a statement"""

class Second:
    """One \\u00e9, "quoted" text."""  # noqa
'''
    assert list(docstrings(source)) == ["Raw \\d,\nindented.", 'One é, "quoted" text.']


@pytest.mark.parametrize(
    ("suffix", "source", "left"),
    [
        (".py", "#!/usr/bin/python\n# Copyright 2020 A. B.\nimport os\n", "import os\n"),
        (".py", "# What this module does.\nimport os\n", "# What this module does.\nimport os\n"),
        (".h", "// What this does.\n\n// Licensed to X\n#pragma once\n", "// What this does.\n#pragma once\n"),
        (".h", "/* Copyright (c) X.\n * All rights reserved. */\n#pragma once\n", "\n#pragma once\n"),
    ],
)
def test_licence_header_when_a_file_has_one_then_only_it_is_dropped(suffix, source, left):
    assert without_licence_header(source, suffix) == left


def test_split_of_when_given_many_hashes_then_the_share_is_the_percentage_and_grows_with_it():
    hashes = [i.to_bytes(8, "big") + bytes(24) for i in range(0, 2**64, 2**64 // 10_000)]
    for percent in (1, 5, 33, 50):
        heldout = {h for h in hashes if split_of(h, percent) == "heldout"}
        assert len(heldout) / len(hashes) == pytest.approx(percent / 100, abs=1e-3)
        assert all(split_of(h, percent + 1) == "heldout" for h in heldout)


@pytest.fixture(scope="module")
def builtin():
    return list(read_documents("builtin", SMALL_TEXT))


def test_builtin_when_read_again_from_another_folder_then_the_same_documents_in_the_same_order(
    builtin, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert list(read_documents("builtin", SMALL_TEXT)) == builtin


def test_builtin_when_read_then_each_domain_has_both_splits_and_about_its_bytes(builtin):
    for domain in SMALL_TEXT.domains:
        documents = [document for document in builtin if document.domain == domain.name]
        assert {document.split for document in documents} == {"train", "heldout"}, domain.name
        assert {document.role for document in documents} == {domain.role}
        without_last = sum(len(document.text.encode()) for document in documents[:-1])
        assert without_last < domain.max_bytes
    assert {domain.name for domain in SMALL_TEXT.domains if domain.role == "mix"} == {"docs"}


def test_builtin_when_read_then_no_text_twice_and_none_of_our_own(builtin):
    texts = [document.text for document in builtin]
    assert len(set(texts)) == len(texts)
    assert not [document.source for document in builtin if document.source.startswith("geosweep")]


def test_builtin_when_read_then_no_licence_boilerplate_outside_the_licences(builtin):
    others = [document for document in builtin if document.domain != "licences"]
    assert not [document.source for document in others if "Permission is hereby granted" in document.text]
    docs = [document for document in builtin if document.domain == "docs"]
    assert not [document.source for document in docs if "Licensed under the Apache" in document.text]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_file_source_when_it_has_a_domain_column_then_one_document_a_row_in_order(tmp_path, suffix):
    rows = [{"body": f"text {i}", "part": "AB"[i % 2]} for i in range(50)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    settings = SOURCE_TEXT.model_copy(update={"text_column": "body", "domain_column": "part"})
    documents = list(read_documents(str(path), settings))
    assert [(document.text, document.domain) for document in documents] == [(r["body"], r["part"]) for r in rows]
    assert {document.role for document in documents} == {"mix"}


def test_file_source_when_a_folder_of_text_then_each_file_is_one_document(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"file {i}\n\nsecond paragraph\n")
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    documents = list(read_documents(str(tmp_path), SOURCE_TEXT))
    assert [document.text for document in documents] == [f"file {i}\n\nsecond paragraph\n" for i in range(3)]
    assert {document.domain for document in documents} == {tmp_path.name}


def test_file_source_when_texts_repeat_or_are_empty_then_they_are_dropped(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": t} for t in ("one", "two", "one", "", None, " \n", "three")])
    assert [document.text for document in read_documents(str(path), SOURCE_TEXT)] == ["one", "two", "three"]


def test_file_source_when_max_bytes_is_reached_then_reading_stops(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i:010d}"} for i in range(100)])
    settings = SOURCE_TEXT.model_copy(update={"max_bytes": 45})
    assert len(list(read_documents(str(path), settings))) == 5


def test_file_source_when_it_does_not_exist_then_input_error_names_it_and_what_to_give(tmp_path):
    with pytest.raises(InputError, match=r"no_such_file: no such file or folder\ngive a file"):
        list(read_documents(str(tmp_path / "no_such_file"), SOURCE_TEXT))


def test_file_source_when_a_folder_has_no_text_then_input_error_lists_the_suffixes(tmp_path):
    with pytest.raises(InputError, match=r"\.jsonl"):
        list(read_documents(str(tmp_path), SOURCE_TEXT))


def test_file_source_when_a_column_is_unknown_then_input_error_names_the_nearest(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"texts": "a", "n": 1}])
    with pytest.raises(InputError, match="no column 'text'; nearest is 'texts'"):
        list(read_documents(str(path), SOURCE_TEXT))
    with pytest.raises(InputError, match="'n' holds int, text is needed"):
        list(read_documents(str(path), SOURCE_TEXT.model_copy(update={"text_column": "n"})))


def test_file_source_when_json_is_broken_then_input_error_names_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(InputError, match=r"a\.jsonl: not readable as json"):
        list(read_documents(str(path), SOURCE_TEXT))


def test_hub_source_when_the_hub_is_not_reachable_then_input_error_names_dataset_and_remedy(tmp_path):
    code = (
        "from trainers.corpus import *\nfrom trainers.errors import InputError\n"
        "try: list(read_documents('hf:someone/something', SOURCE_TEXT))\n"
        "except InputError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "hf:someone/something: dataset 'someone/something'" in done.stdout
    assert "give local files instead" in done.stdout
