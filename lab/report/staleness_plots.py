"""Plots of the rollouts' staleness, the objective's clipping, and the drift at each policy lag."""

import math
from collections.abc import Sequence

from offbeat.common.pages.figures import (
    BLUE,
    GRAY,
    INK,
    ORANGE,
    PALE_BLUE,
    PALE_RED,
    RED,
    Plot,
    Trace,
    add_limit,
    band_traces,
    lag_layout,
    line_trace,
    plot_layout,
    series,
    step_layout,
)
from offbeat.lab.history import LagDrift, RunHistory

_NO_DRIFT = "No step has recorded its drift by policy lag."


def lag_histogram(history: RunHistory) -> Plot:
    """Return the number of trained groups at each policy lag."""
    counts = history.groups_by_lag
    total = sum(counts.values())
    bars = {
        "type": "bar",
        "x": list(counts),
        "y": list(counts.values()),
        "text": [f"{count / total:.0%}" if count >= total / 100 else "< 1%" for count in counts.values()],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": BLUE},
        "hovertemplate": "lag %{x}: %{y} groups<extra></extra>",
    }
    layout = plot_layout("policy lag (optimizer steps)", "groups", x={"dtick": 1 if len(counts) < 20 else None})
    layout["hovermode"] = "closest"
    return Plot(
        "Policy lag of trained groups",
        "How many optimizer steps lay between a group's oldest token and the step that trained on it, "
        "for all groups of the run.",
        [bars] if counts else [],
        layout,
        missing="No group has been trained on.",
    )


def lag_by_step(history: RunHistory) -> Plot:
    """Return the mean and the largest policy lag of each step, with the bound."""
    steps, means = series(history.steps, "lag/mean")
    _, largest = series(history.steps, "lag/max", max)
    bounded_steps, bounds = series(history.steps, "staleness/bound", max)
    top = line_trace(steps, largest, "largest", GRAY)
    top["line"] |= {"shape": "hv", "width": 1.2}
    traces = [top, line_trace(steps, means, "mean", BLUE)]
    if bounds:
        bound = line_trace(bounded_steps, bounds, "max_staleness", ORANGE)
        bound["line"] |= {"shape": "hv", "width": 1.2, "dash": "dash"}
        traces.append(bound)
    return Plot(
        "Policy lag by step",
        "Mean and largest lag among the groups of each step; the dashed line is staleness.max_staleness as it was then, "
        "which only stragglers may pass.",
        traces if means else [],
        step_layout("optimizer step", steps, "policy lag (steps)", y={"rangemode": "tozero"}),
        missing="No step has recorded its lag.",
    )


_CLIP_SIDES = (
    ("positive_above", "A > 0, above (clipped)", BLUE),
    ("negative_below", "A < 0, below (clipped)", RED),
    ("positive_below", "A > 0, below", PALE_BLUE),
    ("negative_above", "A < 0, above", PALE_RED),
)


def clip_fraction(history: RunHistory) -> Plot:
    """Return the share of completions outside the clip band, by sign of the advantage and side of the band."""
    caption = (
        "Share of completions whose sequence ratio left the clip band: the two strong colors lose their gradient, "
        "the two pale ones keep it (A < 0, above, no more than loss.dual_clip leaves, where that is set)."
    )
    traces: list[Trace] = []
    steps: list[float] = []
    for name, label, color in _CLIP_SIDES:
        steps, fractions = series(history.steps, f"clip/{name}")
        if fractions:
            area = line_trace(steps, fractions, label, color)
            area["line"]["width"] = 0.5
            traces.append(area | {"stackgroup": "fractions", "fillcolor": color, "mode": "lines"})
    noise_steps, noise = series(history.steps, "clip/noise")
    if noise:
        line = line_trace(noise_steps, noise, "of the clipped, engine noise", INK)
        line["line"]["dash"] = "dash"
        traces.append(line | {"mode": "lines"})
        caption = f"{caption[:-1]}. Strong colors above the dashed line are drift, below it what engine noise alone clips."
    y_axis = {"tickformat": ".1~%", "rangemode": "tozero"}
    layout = step_layout("optimizer step", steps, "share of completions", y=y_axis)
    layout["legend"]["traceorder"] = "normal"
    return Plot("Clip fraction", caption, traces, layout, missing="No step has recorded its clip fractions.")


def log_ratio(history: RunHistory, clip_low: float | None, clip_high: float | None) -> Plot:
    """Return the distribution of the sequence log-ratio, with the clip band."""
    steps, means = series(history.steps, "ratio/log_mean")
    _, spreads = series(history.steps, "ratio/log_std")
    spreads = spreads if len(spreads) == len(means) else [0.0] * len(means)
    lower = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    upper = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    traces = band_traces(steps, lower, upper, "± 1 std", PALE_BLUE)
    for name, label, how in (("ratio/log_min", "lowest", min), ("ratio/log_max", "highest", max)):
        extreme_steps, extremes = series(history.steps, name, how)
        extreme = line_trace(extreme_steps, extremes, label, GRAY)
        extreme["line"] |= {"width": 1}
        traces.append(extreme)
    traces.append(line_trace(steps, means, "mean", BLUE))
    layout = step_layout("optimizer step", steps, "log ratio")
    if clip_low is not None and clip_low < 1:
        add_limit(layout, math.log(1 - clip_low), "1 − clip_low", below=True)
    if clip_high is not None:
        add_limit(layout, math.log(1 + clip_high), "1 + clip_high")
    return Plot(
        "Sequence log-ratio",
        "Log of GSPO's sequence ratio: mean, one standard deviation around it (band), extremes (thin), "
        "and the clip band (dashed); drift to one side means the policies part.",
        traces if means else [],
        layout,
        missing="No step has recorded its ratios.",
    )


def log_ratio_by_lag(drift: Sequence[LagDrift]) -> Plot:
    """Return mean and spread of the sequence log-ratio at each policy lag."""
    lines = [line for line in drift if line.log_ratio_mean is not None]
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "mean ± std",
        "x": [line.bucket for line in lines],
        "y": [line.log_ratio_mean for line in lines],
        "error_y": {"type": "data", "array": [line.log_ratio_std or 0.0 for line in lines], "color": PALE_BLUE, "thickness": 6},
        "marker": {"size": 9, "color": BLUE},
        "customdata": [[line.log_ratio_std, line.count] for line in lines],
        "hovertemplate": "%{y:.3~g} ± %{customdata[0]:.3~g}, %{customdata[1]:,} completions<extra></extra>",
    }
    return Plot(
        "Log-ratio by policy lag",
        "Log of the sequence ratio between policy and anchor, before anything is masked: mean and one standard deviation over "
        "all completions of a lag. What lag 0 has is the engine's noise; what grows with the lag is drift.",
        [points] if lines else [],
        lag_layout("log ratio"),
        missing=_NO_DRIFT,
    )


def clip_by_lag(drift: Sequence[LagDrift]) -> Plot:
    """Return clipped and masked shares at each policy lag."""
    parts = (
        ("clipped", BLUE, [(line.bucket, line.clip_fraction) for line in drift if line.clip_fraction is not None]),
        ("masked", ORANGE, [(line.bucket, line.masked) for line in drift if line.masked is not None]),
    )
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": [bucket for bucket, _ in shares],
            "y": [share for _, share in shares],
            "marker": {"color": color},
            "hovertemplate": "%{y:.1%}",
        }
        for name, color, shares in parts
        if shares
    ]
    return Plot(
        "Clipped and masked by policy lag",
        "Share of the completions of each lag whose gradient the clip band made zero, and of their tokens that the off-policy "
        "correction masked.",
        traces,
        lag_layout("share", y={"tickformat": ".1~%", "rangemode": "tozero"}) | {"barmode": "group", "bargap": 0.3},
        missing=_NO_DRIFT,
    )


def reward_and_length_by_lag(drift: Sequence[LagDrift]) -> Plot:
    """Return mean reward and length of the completions at each policy lag."""
    rewards = [(line.bucket, line.reward) for line in drift if line.reward is not None]
    lengths = [(line.bucket, line.length) for line in drift if line.length is not None]
    traces = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [bucket for bucket, _ in points],
            "y": [value for _, value in points],
            "yaxis": axis,
            "line": {"color": color, "width": 2},
            "hovertemplate": "%{y:,.3~f}",
        }
        for name, color, axis, points in (("reward", BLUE, "y", rewards), ("tokens", ORANGE, "y2", lengths))
    ]
    layout = lag_layout("reward")
    right = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "tickmode": "auto"}
    layout["yaxis2"] = layout["yaxis"] | right | {"title": layout["yaxis"]["title"] | {"text": "tokens"}}
    return Plot(
        "Reward and length by policy lag",
        "Mean reward (left) and mean tokens (right) of the completions of each lag: long completions take their time, "
        "and are older when they are trained on.",
        traces if rewards and lengths else [],
        layout,
        missing="No step has recorded rewards and lengths by policy lag.",
        is_wide=True,
    )
