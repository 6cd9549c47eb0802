"""Draw what one axis does when everything else is held fixed, and the cells that contradict the simple story.

study -> [effects] -> page, bundle
in    Study
out   Figure per axis; the counter-examples by name
not   averages over unlike cells: only cells that differ in the one axis alone are compared
"""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import pandas as pd

from orchestrator.report import style
from orchestrator.report.figures import (
    Figure,
    Panel,
    absent,
    chart_of,
    final_sql,
    layer_of,
    layered,
    records,
    zero_line,
)
from orchestrator.statistics import GROUP, NOT_RECIPE
from orchestrator.study import Study

LEAST_PEERS = 6  # cells of one size (and budget) from which high and low are told apart
POOR, GOOD = "high rank, poor loss", "low rank, good loss"


def matched_sets(study: Study, axis: str, metric: str) -> pd.DataFrame:
    """Cells that differ in `axis` alone, and how far each is from the mean of its set.

    returns  trial, scale, level (of the axis), set (which cells belong together), value, change (value minus the mean
             of its set); seeds are averaged within a level
    """
    moving = {*tied_axes(study, axis), "seed"}
    rest = [name for name in study.axes if name not in moving]
    cells = study.cells.dropna(subset=[metric, axis])
    peers = cells.groupby(list(dict.fromkeys([*rest, GROUP])), dropna=False).ngroup()
    keyed = pd.DataFrame(
        {"set": peers, "level": cells[axis], "trial": cells["trial"], GROUP: cells[GROUP], metric: cells[metric]}
    )
    means = keyed.groupby(["set", "level"], as_index=False).agg(
        value=(metric, "mean"), trial=("trial", "first"), scale=(GROUP, "first")
    )
    levels = means.groupby("set")["level"].transform("nunique")
    sets = means[levels > 1].copy()
    sets["change"] = sets["value"] - sets.groupby("set")["value"].transform("mean")
    return sets


def tied_axes(study: Study, axis: str) -> list[str]:
    """The axis, and those that change with it one to one: they are one axis to this sweep."""
    levels = study.cells[axis].nunique()
    return [
        name
        for name in study.axes
        if study.cells[name].nunique() == levels == len(study.cells[[axis, name]].drop_duplicates())
    ]


def effects(study: Study) -> list[Figure]:
    """One figure per axis that the sweep varies, but for size and seed; tied axes share the figure of the first."""
    axes = [axis for axis in study.axes if axis not in NOT_RECIPE]
    firsts = dict.fromkeys(next(name for name in tied_axes(study, axis) if name in axes) for axis in axes)
    return [axis_effect(study, axis) for axis in firsts]


def axis_effect(study: Study, axis: str) -> Figure:
    """Change of rank and of loss along one axis, each matched set a thin line, the mean of each size a thick one."""
    words = " with ".join(style.axis_label(name) for name in tied_axes(study, axis))
    key, title = f"effect-{axis.replace('_', '-')}", words[:1].upper() + words[1:]
    metrics = [name for name in (study.main_rank, study.main_loss) if name is not None]
    if not metrics:
        return absent(key, title, "not evaluated in this store: needs a geometry or a loss")
    long = pd.concat([matched_sets(study, axis, metric).assign(metric=metric) for metric in metrics])
    if long.empty:
        return absent(key, title, "no two finished cells differ in this axis alone")
    long["kind"] = "set"
    rows = pd.concat([long, _means(long)], ignore_index=True)
    order = [style.level_text(axis, level) for level in sorted(rows["level"].unique())]
    rows["level"] = [style.level_text(axis, level) for level in rows["level"]]
    panels = [_effect_panel(study, key, axis, metric, order, legend=metric == metrics[0]) for metric in metrics]
    sets, cells = long["set"].nunique(), len(long) // len(metrics)
    kept = ["trial", "scale", "level", "set", "metric", "kind", "value", "change"]
    return Figure(
        key=key,
        title=title,
        caption=f"Thin: cells that differ in {words} alone, as the difference from their own mean. Thick: the "
        f"mean of each size, over sets that have every level. n = {sets} matched sets of {cells} cells.",
        sql=final_sql(study, [*_stored(study.axes), *metrics], metrics),
        rows=records(rows[kept]),
        panels=tuple(panels),
        columns=2,
    )


def _stored(axes: Sequence[str]) -> list[str]:
    """Axes as the store's columns have them: the relative learning rate is made from the peak."""
    return ["peak_lr" if name == "relative_lr" else name for name in axes]


def _means(sets: pd.DataFrame) -> pd.DataFrame:
    """Mean change of each size and level, over sets that have every level of their size: so none is shifted."""
    levels = sets.groupby(["metric", "scale"])["level"].transform("nunique")
    whole = sets[sets.groupby(["metric", "set"])["level"].transform("nunique") == levels]
    means = whole.groupby(["metric", "scale", "level"], as_index=False).agg(change=("change", "mean"))
    return means.assign(kind="mean", set="mean", trial=None, value=None)


def _effect_panel(study: Study, key: str, axis: str, metric: str, order: Sequence[str], *, legend: bool) -> Panel:
    titles = {"change": "change", "value": style.label(study, metric), "level": style.axis_label(axis)}
    base = (
        layer_of(key)
        .transform_filter(f"datum.metric === '{metric}'")
        .encode(
            x=alt.X("level:O", sort=list(order), title=style.axis_label(axis), axis=alt.Axis(labelAngle=0)),
            y=alt.Y("change:Q", title=None),
            color=style.size_colour(study, legend=legend),
            detail=[alt.Detail("set:N"), alt.Detail("scale:N")],
        )
    )
    thin = base.transform_filter("datum.kind === 'set'")
    thick = base.transform_filter("datum.kind === 'mean'")
    hints = style.tooltips(["trial", "scale", "level", "value", "change"], titles)
    zero = zero_line().mark_rule(color=style.FAINT, strokeDash=[3, 3]).encode(y=alt.YDatum(0))
    return layered(
        zero,
        thin.mark_line(strokeWidth=0.8, opacity=0.35),
        thin.mark_point(filled=True, size=18, opacity=0.55).encode(tooltip=hints),
        thick.mark_line(strokeWidth=3, opacity=0.95),
        height=220,
        title=style.panel_title(study, metric, "change of"),
    )


# --- counter-examples -----------------------------------------------------------------------------------------------


def counterexamples(study: Study) -> pd.DataFrame:
    """Cells with a high rank and a poor loss, or a low rank and a good loss, among cells of their size and budget.

    returns  trial, scale, rank and loss with their places among the peers (0 lowest, 1 highest), peers, example:
             POOR | GOOD | None
    """
    rank, loss = study.main_rank, study.main_loss
    assert rank is not None
    assert loss is not None
    cells = study.cells.dropna(subset=[rank, loss])
    together = [GROUP, "token_budget"] if _peers(cells, [GROUP, "token_budget"]) >= LEAST_PEERS else [GROUP]
    groups = cells.groupby(together)
    places = {"rank_place": groups[rank].rank(pct=True), "loss_place": groups[loss].rank(pct=True)}
    found = cells.assign(peers=groups["trial"].transform("size"), **places)
    found = found[found["peers"] >= LEAST_PEERS]
    high = (found["rank_place"] > 2 / 3) & (found["loss_place"] > 2 / 3)
    low = (found["rank_place"] <= 1 / 3) & (found["loss_place"] <= 1 / 3)
    found["example"] = None
    found.loc[high, "example"] = POOR
    found.loc[low, "example"] = GOOD
    return found.sort_values("loss_place", ascending=False)


def _peers(cells: pd.DataFrame, together: Sequence[str]) -> float:
    return float(cells.groupby(list(together)).size().median()) if len(cells) else 0.0


def counterexample_figure(study: Study) -> Figure:
    """Where each cell stands among its peers, the counter-examples coloured."""
    key, title = "counter-examples", "Counter-examples"
    if study.main_rank is None or study.main_loss is None:
        return absent(key, title, "not evaluated in this store: needs a geometry and a loss")
    found = counterexamples(study)
    if found.empty:
        return absent(key, title, f"fewer than {LEAST_PEERS} finished cells of any size")
    shown = ["trial", "scale", "batch_size", "weight_decay", "token_budget", study.main_rank, study.main_loss]
    kept = found[[*shown, "rank_place", "loss_place", "peers", "example"]].assign(
        example=found["example"].fillna("neither")
    )
    counts = kept["example"].value_counts()
    by = "size and budget" if found["peers"].max() < len(found) / found[GROUP].nunique() else "size"
    return Figure(
        key=key,
        title=title,
        caption=f"Place of each trial among the trials of its {by}: 0 is the lowest, 1 the highest. If rank made good "
        f"models, the coloured corners would be empty: {counts.get(POOR, 0)} trials have a high rank and a poor loss, "
        f"{counts.get(GOOD, 0)} a low rank and a good loss. n = {len(kept)} trials.",
        sql=final_sql(study, shown[2:], [study.main_rank, study.main_loss]),
        rows=records(kept),
        panels=(_places(study, key),),
        columns=1,
    )


def _places(study: Study, key: str) -> alt.Chart:
    rank, loss = study.main_rank or "", study.main_loss or ""
    kinds = [POOR, GOOD, "neither"]
    titles = {rank: style.label(study, rank), loss: style.label(study, loss)}
    colours = alt.Scale(domain=kinds, range=[style.ORANGE, style.BLUE, "#c3ccd5"])
    shapes = alt.Scale(domain=kinds, range=["triangle-up", "triangle-down", "circle"])
    chart: alt.Chart = (
        chart_of(key)
        .mark_point(filled=True, size=75, opacity=0.9)
        .encode(
            x=alt.X("rank_place:Q", title="place by effective rank", scale=alt.Scale(domain=[0, 1])),
            y=alt.Y("loss_place:Q", title="place by loss", scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("example:N", scale=colours, sort=kinds, legend=alt.Legend(title=None, columns=2)),
            shape=alt.Shape("example:N", scale=shapes, sort=kinds),
            tooltip=style.tooltips(
                ["trial", "scale", "batch_size", "weight_decay", "token_budget", rank, loss], titles
            ),
        )
    )
    return chart
