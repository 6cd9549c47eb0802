"""Draw a study: what a figure is, and the ones whose marks are cells or checkpoints.

store -> query -> study -> [figures] -> page, bundle
in    Study; for curves over tokens also the store
out   Figure: rows, the SQL that gives the same values, Vega-Lite panels, a caption with its n
not   HTML, files
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import altair as alt
import pandas as pd

from orchestrator.query import Store
from orchestrator.report import style
from orchestrator.study import Kind, Study

MOST_PANELS = 12
Panel: TypeAlias = alt.Chart | alt.LayerChart | alt.FacetChart


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a report.

    key       its name in files and on the command line
    caption   what is seen, ending with the number of things that it is seen in
    sql       gives the stored values that `rows` are made of
    rows      the data of all panels
    panels    Vega-Lite charts, each as wide as its place; () when there is nothing to draw
    columns   panels side by side on a wide page
    missing   why nothing is drawn
    least_px  width below which a panel scrolls sideways instead of shrinking; 0 for none
    """

    key: str
    title: str
    caption: str
    sql: str
    rows: Sequence[dict[str, Any]] = ()
    panels: tuple[Panel, ...] = ()
    columns: int = 1
    missing: str = ""
    least_px: int = 0


def absent(key: str, title: str, why: str, sql: str = "") -> Figure:
    return Figure(key=key, title=title, caption="", sql=sql, missing=why)


def final_sql(study: Study, columns: Sequence[str], needed: Sequence[str]) -> str:
    """Columns of the last checkpoints of a sweep, where the needed metrics have values."""
    names = ", ".join(dict.fromkeys(("trial", "scale", "params_no_input_embedding", "token_budget", *columns)))
    conditions = "".join(f" and {name} is not null" for name in needed)
    return f"select {names}\nfrom final where sweep = '{study.sweep}'{conditions}\norder by trial"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of plain values; null where there is none."""
    plain = frame.astype(object).where(frame.notna(), None)
    return [{str(key): value for key, value in row.items()} for row in plain.to_dict("records")]


# --- loss and rank --------------------------------------------------------------------------------------------------


def rank_and_loss(study: Study) -> Figure:
    """Loss against effective rank, coloured by size, shaped by token budget."""
    key, title = "rank-and-loss", "Loss against effective rank"
    rank, loss = study.main_rank, study.main_loss
    if rank is None or loss is None:
        return absent(key, title, "not evaluated in this store: needs a geometry and a loss")
    ranks = [name for name in (rank, f"{rank}_share") if name in study.measures]
    cells = study.cells.dropna(subset=[*ranks, loss])
    if cells.empty:
        return absent(key, title, "no cell has both values yet")
    cells = cells.assign(budget=[style.level_text("token_budget", budget) for budget in cells["token_budget"]])
    shown = ["trial", "scale", "params_no_input_embedding", "token_budget", "batch_size", "weight_decay"]
    budgets = list(dict.fromkeys(cells.sort_values("token_budget")["budget"]))
    panels = [_cell_points(study, key, x, loss, budgets, legend=x == ranks[0]) for x in ranks]
    return Figure(
        key=key,
        title=title,
        caption=f"Each mark is one trial at its last checkpoint: {style.label(study, loss)} against the effective rank "
        f"of the unembedding W{' and its share of the width' * (len(ranks) > 1)}. Colour: model size; shape: token "
        f"budget. n = {len(cells)} trials.",
        sql=final_sql(study, ["batch_size", "weight_decay", *ranks, loss], [*ranks, loss]),
        rows=records(cells[[*shown, "budget", *ranks, loss]]),
        panels=tuple(panels),
        columns=2,
    )


def _cell_points(study: Study, key: str, x: str, y: str, budgets: Sequence[str], *, legend: bool) -> Panel:
    titles = {x: style.label(study, x), y: style.label(study, y), "params_no_input_embedding": "parameters"}
    names = ["trial", "scale", "budget", "batch_size", "weight_decay", x, y]
    chart: alt.Chart = (
        chart_of(key)
        .mark_point(filled=True, size=70, opacity=0.85)
        .encode(
            x=x_of(x, titles[x]),
            y=y_of(y),
            color=style.size_colour(study, legend=legend),
            shape=alt.Shape(
                "budget:N", sort=list(budgets), legend=alt.Legend(title="tokens", columns=2) if legend else None
            ),
            tooltip=style.tooltips(names, titles),
        )
        .properties(title=style.panel_title(study, y))
    )
    return chart


def other_losses(study: Study) -> Figure:
    """The loss in distribution against every other loss."""
    key, title = "losses", "In-distribution loss against the others"
    main, others = study.main_loss, study.token_losses[1:]
    if main is None or not others:
        return absent(key, title, "not evaluated in this store: needs losses on at least two texts")
    return _against(study, key, title, main, others)


def downstream(study: Study, key: str, title: str, kind: Kind) -> Figure:
    """Outcomes of one kind against the effective rank."""
    rank = study.main_rank
    outcomes = quantisation_costs(study) if kind == "quantize" else list(study.of_kind(kind))
    if rank is None or not outcomes:
        return absent(key, title, "not evaluated in this store")
    return _against(study, key, title, rank, outcomes[:MOST_PANELS])


def quantisation_costs(study: Study, method: str = "") -> list[str]:
    """How much loss on the training text goes up in fewer bits, by one method or all: the losses themselves, and those
    on other texts, hardly tell more."""
    main = study.measures[study.main_loss].dataset if study.main_loss is not None else None
    found = [study.measures[name] for name in study.of_kind("quantize")]
    return [m.name for m in found if "increase" in m.metric and m.dataset == main and m.metric.startswith(method)]


def _against(study: Study, key: str, title: str, x: str, outcomes: Sequence[str]) -> Figure:
    cells = study.cells.dropna(subset=[x])
    long = cells.melt(id_vars=["trial", "scale", x], value_vars=list(outcomes), var_name="outcome", value_name="value")
    long = long.dropna(subset=["value"])
    if long.empty:
        return absent(key, title, "no cell has both values yet")
    drawn = [name for name in outcomes if (long["outcome"] == name).any()]
    panels = [_outcome_points(study, key, x, name, legend=name == drawn[0]) for name in drawn]
    counts = long.groupby("outcome").size()
    least, most = counts.min(), counts.max()
    n = f"n = {most} trials" if least == most else f"n = {least} to {most} trials a panel"
    return Figure(
        key=key,
        title=title,
        caption=f"Each mark is one trial at its last checkpoint, against {style.label(study, x)}. Colour: model size. "
        f"{n}.",
        sql=final_sql(study, [x, *outcomes], [x]),
        rows=records(long),
        panels=tuple(panels),
        columns=3,
    )


def _outcome_points(study: Study, key: str, x: str, outcome: str, *, legend: bool) -> alt.Chart:
    titles = {x: style.label(study, x), "value": style.label(study, outcome)}
    chart: alt.Chart = (
        chart_of(key)
        .transform_filter(f"datum.outcome === '{outcome}'")
        .mark_point(filled=True, size=45, opacity=0.85)
        .encode(
            x=x_of(x, titles[x]),
            y=y_of("value"),
            color=style.size_colour(study, legend=legend),
            tooltip=style.tooltips(["trial", "scale", x, "value"], titles),
        )
        .properties(height=190, title=style.panel_title(study, outcome))
    )
    return chart


# --- over tokens ----------------------------------------------------------------------------------------------------


def saturation(study: Study, store: Store) -> Figure:
    """Loss and effective rank over tokens, one line per trial, one pair of panels per layout of the block."""
    key, title = "saturation", "Loss and rank while training"
    rank, loss = study.main_rank, study.main_loss
    if rank is None or loss is None:
        return absent(key, title, "not evaluated in this store: needs a geometry and a loss")
    sql = (
        f"select trial, scale, family, attention, tokens, {rank}, {loss}\nfrom results where sweep = '{study.sweep}' "
        f"and tokens > 0 and ({rank} is not null or {loss} is not null)\norder by trial, tokens"
    )
    points = store.sql(sql).pandas()
    if points.empty:
        return absent(key, title, "no checkpoint has a value yet", sql)
    points["layout"] = points["family"] + ", " + points["attention"]
    layouts = sorted(points["layout"].unique())
    places = itertools.product(layouts, (loss, rank))
    panels = [_lines(study, key, metric, layout, place) for place, (layout, metric) in enumerate(places)]
    kept = points[["trial", "scale", "layout", "tokens", rank, loss]]
    return Figure(
        key=key,
        title=title,
        caption="Each line is one trial, each point a checkpoint. Saturation would be a loss that rises again while "
        "the effective rank falls. Click on a size in the legend to show it alone. "
        f"n = {kept['trial'].nunique()} trials, {len(kept)} checkpoints.",
        sql=sql,
        rows=records(kept),
        panels=tuple(panels),
        columns=2,
    )


def _lines(study: Study, key: str, metric: str, layout: str, place: int) -> Panel:
    chosen = alt.selection_point(name=f"chosen_{place}", fields=["scale"], bind="legend")
    titles = {metric: style.label(study, metric)}
    base = (
        layer_of(key)
        .transform_filter(f"datum.layout === '{layout}'")
        .encode(
            x=alt.X("tokens:Q", scale=alt.Scale(type="log", nice=False), title="tokens", axis=style.TOKENS_AXIS),
            y=y_of(metric),
            color=style.size_colour(study),
            detail=alt.Detail("trial:N"),
            opacity=alt.OpacityValue(0.06, condition={"param": chosen.name, "value": 0.75}),
        )
    )
    points = base.mark_point(filled=True, size=9).encode(
        tooltip=style.tooltips(["trial", "scale", "layout", "tokens", metric], titles)
    )
    lines, title = base.mark_line(strokeWidth=1), style.titled(titles[metric], layout)
    return layered(lines, points.add_params(chosen), height=style.HEIGHT, title=title)


# --- parts ----------------------------------------------------------------------------------------------------------


def chart_of(key: str) -> alt.Chart:
    chart: alt.Chart = alt.Chart(alt.NamedData(name=key)).properties(width="container", height=style.HEIGHT)
    return chart


def layer_of(key: str) -> alt.Chart:
    """A chart for `layered`, which gives it its size."""
    chart: alt.Chart = alt.Chart(alt.NamedData(name=key))
    return chart


def layered(*layers: alt.Chart, height: float, title: Any = alt.Undefined) -> Panel:
    """Charts in one panel. All is said at once: each method of a chart of layers copies them several times."""
    return alt.layer(*layers, width="container", height=height, title=title)


def zero_line() -> alt.Chart:
    """A chart of one mark, for a reference line."""
    chart: alt.Chart = alt.Chart(alt.InlineData(values=[{}]))
    return chart


def x_of(field: str, title: str) -> alt.X:
    return alt.X(field, type="quantitative", title=title, scale=alt.Scale(zero=False))


def y_of(field: str) -> alt.Y:
    """Without a title: the panel's title, which is never cut, says what it is."""
    return alt.Y(field, type="quantitative", title=None, scale=alt.Scale(zero=False))
