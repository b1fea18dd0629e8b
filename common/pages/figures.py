"""The building blocks of plots: palette, traces, axes and layouts, in Plotly's JSON.

Labels are plain text. `figure_json` escapes them all, since Plotly reads some tags in them.
"""

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from offbeat.common.records.rows import StepRow

Trace = dict[str, Any]
"""One series of a figure, with Plotly's keys."""
Layout = dict[str, Any]
"""Axes, legend and margins of a figure, with Plotly's keys."""

# The colors of the light page; DARK_COLORS replaces them on the dark one.
INK, MUTED, GRID, CARD = "#1d2127", "#6b7280", "#ebe8e1", "#ffffff"
BLUE, ORANGE, GREEN, RED, PURPLE, GOLD, GRAY = "#2563c9", "#d9670b", "#2a8556", "#c8323a", "#7347b8", "#b98a12", "#a7adb6"
PALE_BLUE, PALE_ORANGE, PALE_RED, FAINT = "#c3d6f5", "#f7d3b3", "#f1c6c8", "#d7dade"
DARK_COLORS = {
    INK: "#e8e6e1",
    MUTED: "#9aa1ac",
    GRID: "#2c3036",
    CARD: "#1c1f24",
    BLUE: "#6ea8ff",
    ORANGE: "#ff9d52",
    GREEN: "#5cc48d",
    RED: "#ff7b80",
    PURPLE: "#b592f0",
    GOLD: "#e0b848",
    GRAY: "#79808b",
    PALE_BLUE: "#2b4468",
    PALE_ORANGE: "#5f4027",
    PALE_RED: "#5c3033",
    FAINT: "#3a3f47",
}

MAX_POINTS = 1000
"""Length of the longest series drawn point by point. A longer one is drawn in this many buckets, to keep the page small."""

ACTOR_COLORS = (BLUE, ORANGE, GREEN, PURPLE, GOLD, RED, GRAY)


_TEMPLATES = ("hovertemplate", "texttemplate")
"""Keys whose values are templates of ours, with tags and places for values."""


class Plot(NamedTuple):
    """One figure of a page, with its heading."""

    title: str
    caption: str
    """One sentence on how to read the figure."""
    traces: list[Trace]
    layout: Layout
    missing: str
    """Text in place of a figure without traces, whose rows are missing."""
    is_wide: bool = False
    """True for a figure as wide as the page."""


def series(
    rows: Sequence[StepRow], name: str, how: Callable[[list[float]], float] = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Return policy versions and values of the steps that have this metric; `how` reduces each bucket of a long series."""
    pairs = [(row.policy_version, value) for row in rows if (value := row.number(name)) is not None]
    return bucket([version for version, _ in pairs]), bucket([value for _, value in pairs], how)


def bucket(values: Sequence[float], how: Callable[[list[float]], float] = statistics.fmean) -> list[float]:
    """Return at most `MAX_POINTS` values, reducing neighbors of a longer series by `how`; no value is left out."""
    if len(values) <= MAX_POINTS:
        return list(values)
    edges = [len(values) * index // MAX_POINTS for index in range(MAX_POINTS + 1)]
    return [how(list(values[edges[i] : edges[i + 1]])) for i in range(MAX_POINTS)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over about `window` values around each. A mean of past values alone would lag behind the curve."""
    half = window // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def line_trace(
    xs: Sequence[float], ys: Sequence[float], name: str, color: str, look: Mapping[str, Any] = {}, *, mode: str | None = None
) -> Trace:
    """Return a line, with markers where it has few points unless `mode` says otherwise; `look` replaces keys of the line."""
    # A line through one point is invisible.
    mode = mode or ("lines" if len(xs) > 12 else "lines+markers")
    points = scatter_trace(zip(xs, ys, strict=True), name, mode)
    return points | {"line": {"color": color, "width": 2, **look}, "hovertemplate": "%{y:.3~g}"}


def scatter_trace(points: Iterable[tuple[Any, Any]], name: str, mode: str) -> Trace:
    """Return points, each by its place and its height; `mode` is Plotly's: `markers`, `lines`, or both."""
    pairs = list(points)
    return {"type": "scatter", "mode": mode, "name": name, "x": [x for x, _ in pairs], "y": [y for _, y in pairs]}


def bar_trace(bars: Iterable[tuple[Any, float]], name: str, color: str, hover: str) -> Trace:
    """Return bars, each by its place and its height; `hover` is the template of their labels."""
    pairs = list(bars)
    xs, ys = [place for place, _ in pairs], [height for _, height in pairs]
    return {"type": "bar", "name": name, "x": xs, "y": ys, "marker": {"color": color}, "hovertemplate": hover}


def band_traces(xs: Sequence[float], lower: Sequence[float], upper: Sequence[float], name: str, color: str) -> list[Trace]:
    """Return the area between two lines, as one entry of the legend; with an empty `name`, without an entry."""
    edges = [line_trace(xs, ys, label, color, {"width": 0}, mode="lines") for ys, label in ((lower, ""), (upper, name))]
    for edge in edges:
        edge["hoverinfo"] = "skip"
    edges[0]["showlegend"] = False
    edges[1] |= {"fill": "tonexty", "fillcolor": color} | ({} if name else {"showlegend": False})
    return edges


def plot_layout(
    x_title: str, y_title: str, *, x: Mapping[str, Any] | None = None, y: Mapping[str, Any] | None = None
) -> Layout:
    """Return the look that all figures share; `x` and `y` replace keys of an axis."""
    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "automargin": True,
        # Not `300n`: people read the prefix as a unit.
        "exponentformat": "power",
        "tickfont": {"color": MUTED, "size": 11},
    }
    title_font = {"color": MUTED, "size": 12}
    return {
        "height": 270,
        "margin": {"l": 44, "r": 14, "t": 14, "b": 36},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', sans-serif", "color": INK, "size": 12},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": CARD, "bordercolor": GRID, "font": {"color": INK}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.01, "yanchor": "bottom", "font": {"size": 11}},
        "xaxis": axis | {"showgrid": False, "title": {"text": x_title, "standoff": 8, "font": title_font}} | dict(x or {}),
        "yaxis": axis | {"title": {"text": y_title, "standoff": 8, "font": title_font}} | dict(y or {}),
        "shapes": [],
        "annotations": [],
    }


def step_layout(x_title: str, steps: Sequence[float], y_title: str, *, y: Mapping[str, Any] | None = None) -> Layout:
    """Return a layout over steps or policy versions. A short run's axis has ticks at whole numbers only."""
    is_short = bool(steps) and max(steps) - min(steps) <= 8
    return plot_layout(x_title, y_title, x={"dtick": 1} if is_short else None, y=y)


def lag_layout(y_title: str, *, y: Mapping[str, Any] | None = None) -> Layout:
    """Return a layout over buckets of policy lags, which are names such as `3-4`, not numbers."""
    return plot_layout("policy lag (optimizer steps)", y_title, x={"type": "category"}, y=y)


def log_layout(traces: Sequence[Trace], y_title: str, tick_format: str) -> Layout:
    """Return a layout over policy versions with a log axis: ticks at 1, 2 and 5 over few decades, else at powers of ten."""
    values = [value for trace in traces for value in trace["y"]] or [1.0]
    num_decades = math.log10(max(values)) - math.log10(min(values))
    dtick = "D2" if num_decades < 2.5 else math.ceil(num_decades / 8)
    versions = [version for trace in traces for version in trace["x"]]
    return step_layout("policy version", versions, y_title, y={"type": "log", "dtick": dtick, "tickformat": tick_format})


def add_limit(layout: Layout, value: float, label: str, *, below: bool = False) -> None:
    """Add a dashed horizontal line, with `label` at its right end, above it or below."""
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    layout["shapes"].append({"type": "line", **ends, "line": {"color": ORANGE, "width": 1.2, "dash": "dash"}})
    side = {"yanchor": "top", "yshift": -2} if below else {"yanchor": "bottom", "yshift": 2}
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": value, **side}
    look = {"borderpad": 1, "bgcolor": CARD, "showarrow": False, "font": {"color": ORANGE, "size": 10}}
    layout["annotations"].append({**place, **look, "text": label})


def figure_json(plot: Plot) -> str:
    """Return the figure as JSON for a script element, with axes that fit and labels that are no markup."""
    return safe_json(_as_text({"data": plot.traces, "layout": _with_fitted_axes(plot)}))


def safe_json(value: Any) -> str:
    """Return JSON that cannot close the script element around it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _as_text(value: Any) -> Any:
    """Return the value with all strings escaped but the templates, in which Plotly sees to that."""
    match value:
        case str():
            return html.escape(value, quote=False)
        case list() | tuple():
            return [_as_text(one) for one in value]
        case dict():
            return {key: one if key in _TEMPLATES else _as_text(one) for key, one in value.items()}
        case _:
            return value


def _with_fitted_axes(plot: Plot) -> Layout:
    """Return the layout with a range from 0 for each axis whose values are all the same.

    Plotly would put them into the middle: a lag of 0 on an axis from -1 to 1.
    """
    layout = dict(plot.layout)
    for axis, key in (("y", "yaxis"), ("y2", "yaxis2")):
        traces = [trace for trace in plot.traces if trace.get("yaxis", "y") == axis and trace.get("orientation") != "h"]
        values = [value for trace in traces for value in _heights(trace)]
        is_settled = bool({"type", "range"} & layout.get(key, {}).keys())
        # Areas on top of each other reach their sum, and begin at 0 anyway.
        if is_settled or len(set(values)) != 1 or (values[0] and "stackgroup" in traces[0]):
            continue
        layout[key] = layout[key] | {"range": sorted((0.0, values[0] * 1.25 or 1.0))}
        if not values[0] and axis == "y":
            middle = {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
            layout["annotations"] = [*layout["annotations"], middle | {"text": "all zero", "font": {"color": MUTED}}]
    return layout


def _heights(trace: Trace) -> list[float]:
    """Return the numbers that a trace reaches on its vertical axis, with the ends of its error bars."""
    heights = [value for value in trace["y"] if value is not None]
    spreads = trace.get("error_y", {}).get("array", [])
    return heights + [height + spread for height, spread in zip(heights, spreads, strict=False)]
