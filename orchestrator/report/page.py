"""Put a study's figures and tables into one HTML page, or single figures into files.

store -> query -> study -> statistics -> figures, tables -> [page] -> report.html, *.png, *.pdf
in    an opened store; the name of a sweep in it
out   a page that asks nothing of the network: scripts, styles and data are in it
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import altair as alt
import jinja2
from altair.utils.schemapi import debug_mode

from orchestrator.query import Store
from orchestrator.report import effects, figures, matrices, style, tables
from orchestrator.report.figures import Figure
from orchestrator.report.matrices import NAMES_PX, SLANT_PX
from orchestrator.statistics import Association, Findings
from orchestrator.study import Study, findings, read_study
from trainers.errors import InputError, nearest

HERE = Path(__file__).parent
ImageFormat = Literal["png", "pdf", "svg"]
PANEL_WIDTH = 420
VEGA_LITE = ".".join(alt.VEGALITE_VERSION.split(".")[:2])


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """A table with its title; folded: behind a click; empty: what to say when it has no rows."""

    title: str
    content: tables.Table
    folded: bool = False
    empty: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One heading of the page; cells and states only where the grid of cells is shown."""

    key: str
    title: str
    lede: str
    figures: Sequence[Figure] = ()
    tables: Sequence[TablePart] = ()
    cells: Sequence[Mapping[Any, Any]] = ()
    states: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A study with all that is said of it."""

    study: Study
    found: Findings
    sections: tuple[Section, ...]

    @property
    def figures(self) -> tuple[Figure, ...]:
        return tuple(figure for section in self.sections for figure in section.figures)


def make_report(store: Store, root: Path, sweep: str) -> Report:
    """All figures and tables of a sweep; what has no data yet says so.

    raises  InputError with the nearest name if the store has no such sweep
    """
    study = read_study(store, root, sweep)
    return report_of(store, root, study, lambda: findings(study))


def page_of(report: Report, script: str) -> str:
    """The report as one HTML document. script: vega.vega_script for VEGA_LITE"""
    study, found = report.study, report.found
    drawn = [figure for figure in report.figures if not figure.missing]
    specs = {
        f"{figure.key}-{place}": _panel_spec(figure, panel)
        for figure in drawn
        for place, panel in enumerate(figure.panels)
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.j2").render(
        study=study,
        sections=report.sections,
        answer=_answer(study, _main(study, found)),
        tiles=_tiles(study, found),
        warnings=found.warnings,
        version=_version(),
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        js=(HERE / "page.js").read_text(encoding="utf-8"),
        bundle=script.replace("</script", "<\\/script"),
        data=_json({figure.key: figure.rows for figure in drawn}),
        panels=_json(specs),
        config=_json(style.CONFIG),
    )


def find_figure(report: Report, key: str) -> Figure:
    """A figure by its key; InputError with the nearest key, or with the reason why it cannot be drawn."""
    by_key = {figure.key: figure for figure in report.figures}
    if key not in by_key:
        raise InputError(f"the report has no figure '{key}'{nearest(key, by_key)}")
    if by_key[key].missing:
        raise InputError(f"figure '{key}' cannot be drawn: {by_key[key].missing}")
    return by_key[key]


def image(figure: Figure, form: ImageFormat) -> bytes:
    """A figure as a file: its panels side by side as on a wide page."""
    return converted(vector(figure), form)


def vector(figure: Figure) -> str:
    """A figure as SVG."""
    import vl_convert

    parts = [panel.properties(width=max(PANEL_WIDTH, figure.least_px - NAMES_PX - SLANT_PX)) for panel in figure.panels]
    chart = alt.concat(*parts, columns=figure.columns, title=figure.title)
    # Only the first panel has a legend; shared scales would merge it with the missing ones of the others.
    chart = chart.resolve_scale(color="independent", shape="independent")
    spec = chart.to_dict(validate=False)
    spec |= {"config": dict(style.CONFIG), "datasets": spec.get("datasets", {}) | {figure.key: list(figure.rows)}}
    return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE))


def converted(svg: str, form: ImageFormat) -> bytes:
    """An SVG in the form of a file."""
    import vl_convert

    if form == "svg":
        return svg.encode()
    return bytes(vl_convert.svg_to_pdf(svg) if form == "pdf" else vl_convert.svg_to_png(svg, scale=2))


# --- sections -------------------------------------------------------------------------------------------------------


def report_of(store: Store, root: Path, study: Study, find: Callable[[], Findings]) -> Report:
    """All sections of a study; `find` is called when everything is done that does without its findings."""
    with debug_mode(False):  # no validation of every part while it is built: the tests validate the whole specs
        rank = _rank_section(study)
        later = _later_sections(store, study)
        provenance = Section(
            key="provenance",
            title="Where the numbers come from",
            lede="What made the checkpoints and the metrics behind this page.",
            tables=(TablePart(title="Provenance", content=tables.provenance(store, study)),),
        )
        losses = figures.other_losses(study)
        alignment = matrices.alignment_figure(study)
        about_cells = _about_cells(study, root)
        found = find()
        others = Section(
            key="other-losses",
            title="Other texts",
            lede="Which tells the loss on other texts: the loss in distribution, or a geometry metric?",
            figures=(losses, matrices.predictor_figure(study, found.associations)),
        )
        associations = _association_section(study, found, alignment)
        sections = (rank, associations, others, *later, _cells_section(study, found, about_cells), provenance)
    return Report(study=study, found=found, sections=sections)


def _later_sections(store: Store, study: Study) -> tuple[Section, ...]:
    return (
        Section(
            key="recipe",
            title="What the recipe does",
            lede="Each axis alone: only cells that agree in everything else are compared, seeds averaged.",
            figures=tuple(effects.effects(study)),
        ),
        Section(
            key="training",
            title="While training",
            lede="Whether the rank falls late in training, and whether the loss turns with it.",
            figures=(figures.saturation(study, store),),
        ),
        Section(
            key="afterwards",
            title="After pre-training",
            lede="What the last checkpoint is worth when it is tuned on another text, or stored in fewer bits.",
            figures=(
                figures.downstream(study, "fine-tuning", "Fine-tuning: loss on the target", "finetune"),
                figures.downstream(study, "forgetting", "Forgetting: loss on the old text", "forgetting"),
                figures.downstream(study, "quantisation", "Quantisation", "quantize"),
            ),
        ),
    )


def _rank_section(study: Study) -> Section:
    examples = effects.counterexample_figure(study)
    named = [] if examples.missing else [_examples_table(study)]
    return Section(
        key="rank",
        title="Rank and loss",
        lede="Whether models with a higher effective rank have a lower loss, and which ones contradict it.",
        figures=(figures.rank_and_loss(study), examples),
        tables=named,
    )


def _examples_table(study: Study) -> TablePart:
    content = tables.examples(study, effects.counterexamples(study))
    return TablePart(title="Counter-examples by name", content=content, empty="none in this sweep")


def _association_section(study: Study, found: Findings, alignment: Figure) -> Section:
    matrix = matrices.correlation_figures(study, found.associations)
    every = TablePart(
        title="All associations with their intervals",
        content=tables.all_associations(study, found.associations),
        folded=True,
    )
    return Section(
        key="associations",
        title="Associations",
        lede="Every geometry metric against every outcome: as it is, with size, tokens and recipe held, and as what it "
        "adds to a cross-validated prediction. Folds and intervals keep the cells of one recipe together.",
        figures=(*matrix, alignment),
        tables=(every,) if found.associations else (),
    )


def _about_cells(study: Study, root: Path) -> tuple[TablePart, ...]:
    return (
        TablePart(title="Missing or diverged", content=tables.unfinished_cells(study), empty="none"),
        TablePart(title="Evaluations", content=tables.evaluations(study)),
        TablePart(title="Lint of the design", content=tables.design(root, study), empty="nothing to complain of"),
    )


def _cells_section(study: Study, found: Findings, about: tuple[TablePart, ...]) -> Section:
    order = {state: place for place, state in enumerate(tables.STATES)}
    cells = sorted(study.cells[["trial", "state"]].to_dict("records"), key=lambda cell: order.get(cell["state"], 9))
    return Section(
        key="cells",
        title="Cells and design",
        lede="Nothing is left out in silence: each square is one cell that the sweep asks for.",
        cells=cells,
        states={state: found.counts.states[state] for state in order if state in found.counts.states},
        tables=about,
    )


# --- the page -------------------------------------------------------------------------------------------------------


def _panel_spec(figure: Figure, panel: Any) -> dict[str, Any]:
    spec: dict[str, Any] = panel.to_dict(validate=False)
    spec.pop("config", None)  # one for all panels, in the page's script
    shown = {"autosize": {"type": "fit-x", "contains": "padding"}}
    slanted = {"padding": {"left": 5, "top": 5, "right": SLANT_PX, "bottom": 5}} if figure.least_px else {}
    return spec | shown | slanted | {"usermeta": {"rows": figure.key}}


def _json(value: object) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False, default=_plain, separators=(",", ":")).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    return value.item()  # a number of numpy


def _main(study: Study, found: Findings) -> Association | None:
    wanted = (study.main_rank, study.main_loss)
    return next((one for one in found.associations if (one.predictor, one.outcome) == wanted), None)


def _answer(study: Study, main: Association | None) -> str:
    """The main association in a sentence; empty when there is none."""
    if main is None or main.raw.value is None:
        return ""
    rank, loss = (style.label(study, name, unit=False) for name in (main.predictor, main.outcome))
    parts = [f"Over {main.n} trials of {main.recipes} recipes, {rank} and {loss} have a rank correlation of"]
    parts.append(f"{tables.estimate_text(main.raw)}.")
    if main.partial.value is not None:
        parts.append(f"With size, tokens and recipe held it is {tables.estimate_text(main.partial)}.")
    if main.increment.value is not None and main.baseline_r2 is not None:
        parts.append(
            f"Added to size, compute and tokens (R² {main.baseline_r2:.3f}), the rank changes the cross-validated R² "
            f"by {tables.estimate_text(main.increment)}."
        )
    return " ".join(parts)


def _tiles(study: Study, found: Findings) -> list[dict[str, str]]:
    counts, main = found.counts, _main(study, found)
    complete = counts.states.get("complete", 0)
    others = ", ".join(f"{n} {state}" for state, n in counts.states.items() if state != "complete")
    tiles = [
        {"value": f"{complete}/{counts.asked}", "name": "cells complete", "detail": others or "none missing"},
        {
            "value": str(found.recipes),
            "name": "unique recipes",
            "detail": f"{study.cells['scale'].nunique()} sizes, {len(study.axes)} axes",
        },
    ]
    for form, name in (("raw", "rank and loss, raw"), ("partial", "recipe held"), ("increment", "added R²")):
        estimate = getattr(main, form) if main else None
        if estimate is not None and estimate.value is not None:
            text = tables.estimate_text(estimate)
            value, _, interval = text.partition(" ")
            tiles.append({"value": value, "name": name, "detail": f"95 % {interval}" if interval else ""})
    return tiles


def _version() -> str:
    try:
        return importlib.metadata.version("geosweep")
    except importlib.metadata.PackageNotFoundError:  # used from a source tree
        return "(source tree)"
