"""Draw the statistics of a study: which predictor goes with which outcome, and which predictors are one thing.

study, statistics -> [matrices] -> page, bundle
in    Study and its Findings
out   Figure per table of numbers
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from orchestrator.report import style
from orchestrator.report.figures import (
    Figure,
    Panel,
    absent,
    layer_of,
    layered,
    quantisation_costs,
    records,
    zero_line,
)
from orchestrator.statistics import Association, Estimate, alignment, drop_repeated
from orchestrator.study import Study, cells_sql

CELL_PX = 52
NAMES_PX = 190
SLANT_PX = 80  # the slanted names of the last columns reach beyond the matrix
FORMS: Mapping[str, str] = {
    "raw": "Spearman, raw",
    "partial": "Spearman, partial: size, tokens and recipe held",
    "increment": "added R² over size, compute and tokens",
    "beyond_recipe": "added R² over size, compute, tokens and recipe",
}


def shown_outcomes(study: Study) -> list[str]:
    """Outcomes that say something of their own: not the bits per byte of a text whose loss is there (they are the loss
    in another unit), of quantised models only what GPTQ costs on the training text (the table has them all)."""
    losses = {study.measures[name].dataset for name in study.token_losses}
    twins = {
        name
        for name in study.of_kind("loss")
        if study.measures[name].unit == "bits/byte" and study.measures[name].dataset in losses
    }
    quantised = set(study.of_kind("quantize")) - set(quantisation_costs(study, "gptq"))
    left_out = twins | quantised | set(study.token_losses)
    return [*study.token_losses, *(name for name in study.outcomes if name not in left_out)]


def correlation_figures(study: Study, found: Sequence[Association]) -> list[Figure]:
    """One matrix per form: every geometry metric against every outcome."""
    outcomes = shown_outcomes(study)
    return [_association_matrix(study, found, form, outcomes) for form in FORMS]


def _association_matrix(study: Study, found: Sequence[Association], form: str, outcomes: Sequence[str]) -> Figure:
    key, title = f"associations-{form.replace('_', '-')}", FORMS[form]
    correlation = form in ("raw", "partial")
    wanted = [one for one in found if one.outcome in outcomes and one.predictor in study.predictors]
    rows = [_association_row(study, one, getattr(one, form), signed=correlation) for one in wanted]
    rows = [row for row in rows if row["value"] is not None]
    if not rows:
        return absent(key, title, _why_not(found), cells_sql(study.sweep))
    limit = 1.0 if correlation else max(0.05, max(row["value"] for row in rows))
    holds = "the 95 % interval holds 0" if correlation else "the 95 % interval is not above 0"
    names = [style.label(study, name, unit=False) for name in study.predictors]
    columns = [style.label(study, name, unit=False) for name in outcomes]
    n = sorted({row["n"] for row in rows})
    return Figure(
        key=key,
        title=title,
        caption=f"Faint numbers: {holds} (recipes resampled whole). n = {_span(n)} trials, "
        f"{_span(sorted({row['recipes'] for row in rows}))} recipes.",
        sql=cells_sql(study.sweep),
        rows=rows,
        panels=(_heat(key, names, columns, limit, signed=correlation),),
        least_px=NAMES_PX + CELL_PX * len(columns) + SLANT_PX,
    )


def _why_not(found: Sequence[Association]) -> str:
    notes = dict.fromkeys(note for one in found for note in one.notes)
    return "; ".join(notes) or "not evaluated in this store: needs a geometry and a loss"


def _association_row(study: Study, one: Association, estimate: Estimate, *, signed: bool = True) -> dict[str, Any]:
    """clear: the interval is above 0, or, for a number with a sign, on one side of it."""
    low, high = estimate.low, estimate.high
    clear = low is not None and high is not None and (low > 0 or (signed and high < 0))
    return {
        "predictor": style.label(study, one.predictor, unit=False),
        "outcome": style.label(study, one.outcome, unit=False),
        "value": estimate.value,
        "low": low,
        "high": high,
        "clear": clear,
        "n": one.n,
        "recipes": one.recipes,
    }


def alignment_figure(study: Study) -> Figure:
    """Rank correlation of every geometry metric with every other."""
    key, title = "alignment", "Do the geometry metrics say the same?"
    cells = drop_repeated(study.cells)
    names = [name for name in study.predictors if cells[name].nunique() > 1]
    if len(names) < 2:
        return absent(key, title, "needs two geometry metrics with values that differ", cells_sql(study.sweep))
    matrix = alignment(cells, names)
    labels = {name: style.label(study, name, unit=False) for name in names}
    rows = [
        {"predictor": labels[a], "outcome": labels[b], "value": matrix.loc[a, b], "clear": True}
        for a in names
        for b in names
    ]
    n = int(cells[names].dropna().shape[0])
    return Figure(
        key=key,
        title=title,
        caption=f"Spearman's rank correlation of each pair; 1 and -1 mean the same order of trials. n = {n} trials.",
        sql=cells_sql(study.sweep),
        rows=records(pd.DataFrame(rows)),
        panels=(_heat(key, list(labels.values()), list(labels.values())),),
        least_px=NAMES_PX + CELL_PX * len(names) + SLANT_PX,
    )


def _heat(key: str, rows: Sequence[str], columns: Sequence[str], limit: float = 1.0, *, signed: bool = True) -> Panel:
    base = layer_of(key).encode(
        x=alt.X(
            "outcome:N",
            sort=list(columns),
            title=None,
            axis=alt.Axis(orient="top", labelAngle=-40, labelLimit=190, labelOverlap=False, domain=False, ticks=False),
        ),
        y=alt.Y(
            "predictor:N",
            sort=list(rows),
            title=None,
            axis=alt.Axis(labelLimit=230, labelOverlap=False, domain=False, ticks=False),
        ),
    )
    if signed:
        scale = alt.Scale(scheme="blueorange", domain=[-limit, limit])
    else:  # below 0 the predictor only made the fit worse: no colour for that
        scale = alt.Scale(range=["#f4f4f4", style.ORANGE], domain=[0, limit], clamp=True)
    colour = alt.Color("value:Q", scale=scale, legend=None)
    fields = [
        style.tooltips(["predictor", "outcome"], {"predictor": "metric", "outcome": "with"}),
        [alt.Tooltip(f"{name}:Q", format="+.3f") for name in ("value", "low", "high")],
        style.tooltips(["n", "recipes"], {}),
    ]
    boxes = base.mark_rect(stroke="white", strokeWidth=1.5, cornerRadius=2).encode(
        color=colour, tooltip=[hint for part in fields for hint in part]
    )
    dark = f"{'abs(datum.value)' if signed else 'datum.value'} > {0.72 * limit}"
    texts = base.mark_text(fontSize=10).encode(
        text=alt.Text("value:Q", format=".2f" if signed else "+.3f"),
        color=alt.ColorValue(style.INK, condition={"test": dark, "value": "white"}),
        opacity=alt.OpacityValue(0.5, condition={"test": "datum.clear", "value": 1}),
    )
    return layered(boxes, texts, height=23 * len(rows))


# --- which predicts better ------------------------------------------------------------------------------------------


def predictor_figure(study: Study, found: Sequence[Association]) -> Figure:
    """How well the loss in distribution and the effective rank each predict every other outcome."""
    key, title = "predictors", "What predicts the other losses: the loss in distribution, or the rank?"
    main, rank = study.main_loss, study.main_rank
    outcomes = [name for name in shown_outcomes(study) if name != main]
    if main is None or rank is None or not outcomes:
        return absent(key, title, "not evaluated in this store: needs a geometry and two losses")
    wanted = [one for one in found if one.predictor in (main, rank) and one.outcome in outcomes]
    rows = list(_estimate_rows(study, wanted))
    if not rows:
        return absent(key, title, _why_not(found), cells_sql(study.sweep))
    names = [style.label(study, name, unit=False) for name in (main, rank)]
    order = [style.label(study, name, unit=False) for name in outcomes]
    n = sorted({row["n"] for row in rows})
    return Figure(
        key=key,
        title=title,
        caption="Spearman's rank correlation with its 95 % interval (recipes resampled whole); the partial one holds "
        f"size, tokens and recipe. n = {_span(n)} trials.",
        sql=cells_sql(study.sweep),
        rows=rows,
        panels=tuple(_dots(key, form, names, order) for form in ("raw", "partial")),
        columns=2,
    )


def _estimate_rows(study: Study, found: Iterable[Association]) -> Iterable[dict[str, Any]]:
    for one in found:
        for form in ("raw", "partial"):
            row = _association_row(study, one, getattr(one, form))
            if row["value"] is not None:
                yield {**row, "form": form}


def _dots(key: str, form: str, names: Sequence[str], order: Sequence[str]) -> Panel:
    base = (
        layer_of(key)
        .transform_filter(f"datum.form === '{form}'")
        .encode(
            y=alt.Y("outcome:N", sort=list(order), title=None, axis=alt.Axis(labelLimit=170, labelOverlap=False)),
            yOffset=alt.YOffset("predictor:N", sort=list(names)),
            color=alt.Color(
                "predictor:N",
                scale=alt.Scale(domain=list(names), range=[style.BLUE, style.ORANGE]),
                legend=alt.Legend(title=None, columns=1, labelLimit=300),
            ),
        )
    )
    axis = alt.X("low:Q", title=None, scale=alt.Scale(domain=[-1, 1]), axis=alt.Axis(values=[-1, -0.5, 0, 0.5, 1]))
    bars = base.mark_rule(strokeWidth=2, opacity=0.6).encode(x=axis, x2=alt.X2("high:Q"))
    hints = [alt.Tooltip(f"{name}:Q", format="+.3f") for name in ("value", "low", "high")]
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        x=alt.X("value:Q"),
        shape=alt.Shape("predictor:N", sort=list(names), legend=None),
        tooltip=[*style.tooltips(["predictor", "outcome"], {}), *hints, *style.tooltips(["n", "recipes"], {})],
    )
    zero = zero_line().mark_rule(color=style.FAINT, strokeDash=[3, 3]).encode(x=alt.XDatum(0))
    words, _, held = FORMS[form].partition(": ")
    return layered(zero, bars, dots, height=36 * len(order), title=style.titled(words, held))


def _span(values: Sequence[int]) -> str:
    return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
