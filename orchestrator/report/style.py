"""How every figure of a report looks: names, colours, fonts, axes.

study -> [style] -> figures, matrices, effects -> page
Sizes have an order, so they get one: viridis, whose lightness rises evenly, also for colour-blind eyes and in grey.
Kinds get Okabe and Ito's colours and a shape beside. Correlations run from blue over white to orange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from orchestrator.identity import short_count
from orchestrator.statistics import SIZE
from orchestrator.study import RELATIVE_LR, Study

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe & Ito 2008
INK, SOFT, FAINT = "#1f2933", "#52606d", "#9aa5b1"
HEIGHT = 250
TOKENS_AXIS = alt.Axis(labelExpr="replace(format(datum.value, '~s'), 'G', 'B')", labelSeparation=14)

CONFIG: Mapping[str, Any] = {
    "font": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "gridColor": "#e9edf1",
        "domainColor": "#c3ccd5",
        "tickColor": "#c3ccd5",
        "labelColor": "#3e4c59",
        "titleColor": INK,
        "titleFontWeight": 500,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "labelOverlap": "greedy",
    },
    "axisQuantitative": {"tickCount": 5, "labelSeparation": 6},
    "legend": {"labelColor": INK, "titleColor": INK, "titleFontWeight": 600, "orient": "bottom"}
    | {"symbolSize": 80, "symbolOpacity": 1},
    "title": {"color": INK, "fontSize": 13, "fontWeight": 600, "anchor": "start", "offset": 8},
}

_AXIS_LABELS: Mapping[str, str] = {
    "batch_size": "batch size (sequences)",
    "weight_decay": "weight decay",
    RELATIVE_LR: "learning rate (multiple of the usual one)",
    "final_lr_fraction": "last learning rate (share of the peak)",
    "token_budget": "token budget",
    "attention": "attention layout",
    "tied": "tied embeddings",
}


def label(study: Study, name: str, *, unit: bool = True) -> str:
    """A metric column in words: "effective rank (directions)", "loss on python (nats/token)"."""
    measure = study.measures[name]
    words = measure.metric.replace("_", " ")
    if measure.kind == "geometry" and measure.dataset is None:
        words += " of W"
    where = f" on {measure.dataset}" if measure.dataset else ""
    return f"{words}{where} ({measure.unit})" if unit and measure.unit != "1" else f"{words}{where}"


def panel_title(study: Study, name: str, before: str = "") -> alt.TitleParams:
    """A metric as the title of a panel, its unit below: both fit a phone. before: "change of" """
    unit = study.measures[name].unit
    words = f"{before} {label(study, name, unit=False)}".strip()
    return titled(words, "" if unit == "1" else unit)


def titled(words: str, below: str) -> alt.TitleParams:
    """A panel's title in two lines."""
    return alt.TitleParams(text=words, subtitle=below, subtitleColor=SOFT, subtitleFontSize=11)


def axis_label(name: str) -> str:
    return _AXIS_LABELS.get(name, name.replace("_", " "))


def level_text(name: str, value: object) -> str:
    """One level of an axis as a person writes it: 8B tokens, 0.1, parallel."""
    if name == "token_budget":
        return token_text(int(value))  # type: ignore[call-overload]
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def token_text(tokens: int) -> str:
    """8B, 250k; three digits where the count is not round: 33.6M."""
    exact = short_count(tokens)
    if len(exact) <= 5:
        return exact
    factor, letter = next((f, word) for f, word in ((10**9, "B"), (10**6, "M"), (10**3, "k"), (1, "")) if tokens >= f)
    return f"{tokens / factor:.3g}{letter}"


def sizes_in_order(cells: pd.DataFrame) -> list[str]:
    """The model scales, smallest first."""
    return list(dict.fromkeys(cells.sort_values([SIZE, "scale"])["scale"]))


def size_colour(study: Study, *, legend: bool = True) -> alt.Color:
    """Colour by model scale, light for small and dark for large; a size has the same colour in every figure."""
    sizes = sizes_in_order(study.cells)
    places = [0.5] if len(sizes) == 1 else [place / (len(sizes) - 1) for place in range(len(sizes))]
    return alt.Color(
        "scale:N",
        sort=sizes,
        scale=alt.Scale(domain=sizes, range=[_viridis(0.85 * (1 - place)) for place in places]),
        legend=alt.Legend(title="size", columns=3) if legend else None,
    )


# viridis at 0, 1/8, ..., 1 (matplotlib, CC0)
_VIRIDIS = ("440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725")


def _viridis(place: float) -> str:
    """The colour at 0 to 1, mixed from the two known ones beside it."""
    below = min(int(place * 8), 7)
    share = place * 8 - below
    pairs = [(int(_VIRIDIS[below][i : i + 2], 16), int(_VIRIDIS[below + 1][i : i + 2], 16)) for i in (0, 2, 4)]
    return "#" + "".join(f"{round(low + share * (high - low)):02x}" for low, high in pairs)


def tooltips(names: Sequence[str], titles: Mapping[str, str]) -> list[alt.Tooltip]:
    """One tooltip line per field; numbers to four digits."""
    return [
        alt.Tooltip(field=name, type="nominal", title=titles.get(name, name))
        if name in ("trial", "scale", "level", "layout", "predictor", "outcome", "budget")
        else alt.Tooltip(field=name, type="quantitative", format=".4~g", title=titles.get(name, name))
        for name in names
    ]
