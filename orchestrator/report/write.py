"""Write a sweep's report: the page, or single figures as images.

store -> [write] -> page -> report.html, *.png, *.pdf, *.svg
in    a store, the name of a sweep in it
out   files
The statistics of the page are made by a process beside, and so is its script, once on a machine. An image needs
neither.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.beside import Beside
from orchestrator.report.vega import kept_script
from orchestrator.store.durable import storage_faults
from trainers.errors import InputError

if TYPE_CHECKING:
    from orchestrator.report.page import ImageFormat

_OF_A_METRIC = (
    *("sweep", "checkpoint", "evaluator", "evaluator_version", "settings_digest"),
    *("metric", "dataset", "split", "layer", "value", "unit", "convention"),
)


def write_report(
    root: Path, sweep: str, form: Literal["html"] | ImageFormat, figure: str | None, target: Path | None
) -> list[Path]:
    """Write the page, or figures as images; returns the files.

    root     the store
    figure   one figure by its key; None: all that can be drawn
    target   the file; for several figures their folder; default: report.html, or the figures' keys in this folder
    raises   InputError for an unknown sweep or figure; EnvironmentFault when a file cannot be written
    """
    if form != "html":
        content = _images(root, sweep, form, figure, target)
    elif figure is None:
        content = {target or Path("report.html"): report_page(root, sweep).encode()}
    else:
        raise InputError("html is the whole page", (), "for one figure add --format png, pdf or svg")
    for path, data in content.items():
        with storage_faults(path, "it was not written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return list(content)


def report_page(root: Path, sweep: str) -> str:
    """The report as one HTML document. raises InputError with the nearest name if the store has no such sweep"""
    with ExitStack() as running:
        numbers = running.enter_context(Beside("orchestrator.report.numbers"))

        from orchestrator.query import Store
        from orchestrator.study import questions, read_study

        with Store(root) as store:
            store.keep("current_metrics", _OF_A_METRIC)
            study = read_study(store, root, sweep)
            numbers.ask((study.cells, questions(study)))

            from orchestrator.report import page  # charts: half a second that the statistics need not wait for

            script = kept_script(page.VEGA_LITE)
            if script is None:
                scripts = running.enter_context(Beside("orchestrator.report.vega"))
                scripts.ask(page.VEGA_LITE)
            report = page.report_of(store, root, study, numbers.answer)
        return page.page_of(report, scripts.answer() if script is None else script)


def _images(root: Path, sweep: str, form: ImageFormat, figure: str | None, target: Path | None) -> dict[Path, bytes]:
    from orchestrator.query import Store
    from orchestrator.report.page import find_figure, image, make_report

    with Store(root) as store:
        report = make_report(store, root, sweep)
    if figure is not None:
        return {target or Path(f"{figure}.{form}"): image(find_figure(report, figure), form)}
    drawn = [one for one in report.figures if not one.missing]
    return {(target or Path()) / f"{one.key}.{form}": image(one, form) for one in drawn}
