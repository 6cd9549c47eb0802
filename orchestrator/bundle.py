"""Pack what a paper needs of one sweep into one zip file: tables, figures, sweep file, digests, how to make them again.

store -> query -> study -> report -> [bundle] -> bundle.zip
in    an opened store; the name of a sweep in it
out   a zip file; the same store and the same packages give the same bytes
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.query import Store, write_result
from orchestrator.report.page import VEGA_LITE, Report, converted, make_report, page_of, vector
from orchestrator.report.vega import vega_script
from orchestrator.store.durable import storage_faults
from orchestrator.store.layout import open_existing
from orchestrator.store.sweeps import stored_sweep
from orchestrator.study import as_json

_CURRENT = "in (select segment from chains join latest using (sweep, revision) where sweep = $sweep)"
TABLES: Mapping[str, str] = {
    "results": "select * from results where sweep = $sweep order by trial, tokens",
    "final": "select * from final where sweep = $sweep order by trial",
    "cells": "select * from cells where sweep = $sweep order by trial",
    "missing_cells": "select * from cells where sweep = $sweep and state <> 'complete' order by trial",
    "trials": "select t.* from trials t join latest using (sweep, revision) where t.sweep = $sweep order by trial",
    "metrics": "select * from current_metrics where sweep = $sweep order by all",
    "columns": "select * from result_columns order by name",
    "evaluations": "select * from evaluations where sweep = $sweep order by all",
    "checkpoints": f"select * from checkpoints where segment {_CURRENT} order by segment, tokens",
    "curves": f"select * from curves where segment {_CURRENT} order by segment, step",
}
_MIDNIGHT = (1980, 1, 1, 0, 0, 0)  # the earliest time a zip file can say: no clock in the bytes


def write_bundle(store: Store, root: Path, sweep: str, target: Path) -> int:
    """Write the bundle; returns how many files it holds.

    raises  InputError with the nearest name if the store has no such sweep; EnvironmentFault when it cannot be written
    """
    report = make_report(store, root, sweep)
    files = dict(_files(store, root, report))
    files["SHA256SUMS"] = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()
    ).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(f"{sweep}/{name}", _MIDNIGHT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)
    with storage_faults(target, "the bundle was not written"):
        target.write_bytes(buffer.getvalue())
    return len(files)


def _files(store: Store, root: Path, report: Report) -> Iterator[tuple[str, bytes]]:
    study = report.study
    yield "README.md", readme(report).encode()
    yield "report.html", page_of(report, vega_script(VEGA_LITE)).encode()
    yield "statistics.json", (json.dumps(as_json(study, report.found), indent=1) + "\n").encode()
    yield "sweep.yaml", stored_sweep(open_existing(root), study.sweep).read_bytes()
    for name, text in TABLES.items():
        rows = store.sql(text, {"sweep": study.sweep} if "$sweep" in text else None).arrow()
        yield f"tables/{name}.parquet", _parquet(rows)
        yield f"tables/{name}.csv", _csv(rows)
    for figure in report.figures:
        if not figure.missing:
            yield f"figures/{figure.key}.sql", (figure.sql + ";\n").encode()
            # No PDF: its writer orders objects by chance, so its digest would never be the same twice.
            svg = vector(figure)
            yield f"figures/{figure.key}.svg", svg.encode()
            yield f"figures/{figure.key}.png", converted(svg, "png")


def _parquet(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(rows, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _csv(rows: pa.Table) -> bytes:
    text = io.StringIO()
    write_result(rows, "csv", text)
    return text.getvalue().encode()


def readme(report: Report) -> str:
    """What lies in the bundle, what is missing from the study, and the command that makes each figure again."""
    study, counts = report.study, report.found.counts
    states = ", ".join(f"{n} {state}" for state, n in counts.states.items())
    made = [figure for figure in report.figures if not figure.missing]
    absent = [f"- {figure.title}: {figure.missing}" for figure in report.figures if figure.missing]
    lines = [
        f"# {study.sweep}",
        "",
        study.question,
        "",
        f"Revision {study.revision}; {counts.asked} cells: {states}. {report.found.recipes} unique recipes.",
        "",
        *(f"- {warning}" for warning in report.found.warnings),
        "",
        "`report.html` opens without a network. `tables/` holds every table as Parquet and CSV: `columns` says what "
        "each metric column is, `missing_cells` what is not finished and why, `checkpoints` the digests. `sweep.yaml` "
        "is the file as it was submitted. `SHA256SUMS` is over all files.",
        "",
        "## Make it again, with the store",
        "",
        "    export GEOSWEEP_STORE=FOLDER",
        f"    geosweep report {study.sweep} -o report.html",
        f"    geosweep stats {study.sweep} --json > statistics.json",
        "",
        "## Each figure, and its numbers",
        "",
    ]
    for figure in made:
        lines += [
            f"### {figure.title}",
            "",
            figure.caption,
            "",
            f"    geosweep report {study.sweep} --figure {figure.key} --format pdf -o {figure.key}.pdf",
            f"    geosweep query --file figures/{figure.key}.sql",
            "",
        ]
    return "\n".join([*lines, *(["## Not in this bundle", "", *absent] if absent else [])]) + "\n"
