"""Plots of the rollouts' staleness, the objective's clipping, and the drift at each policy lag."""

import math
from collections.abc import Sequence

from offbeat.common.pages import figures
from offbeat.lab.history import LagDrift, RunHistory

_NO_DRIFT = "No step has recorded its drift by policy lag."


def lag_histogram(history: RunHistory) -> figures.Plot:
    """Return the number of trained groups at each policy lag."""
    counts = history.groups_by_lag
    total = sum(counts.values())
    bars = figures.bar_trace(counts.items(), "", figures.BLUE, "lag %{x}: %{y} groups<extra></extra>")
    bars["text"] = [f"{count / total:.0%}" if count >= total / 100 else "< 1%" for count in counts.values()]
    bars |= {"textposition": "outside", "cliponaxis": False}
    layout = figures.plot_layout("policy lag (optimizer steps)", "groups", x={"dtick": 1 if len(counts) < 20 else None})
    layout["hovermode"] = "closest"
    return figures.Plot(
        "Policy lag of trained groups",
        "How many optimizer steps lay between a group's oldest token and the final step that trained on it, "
        "for all groups of the run.",
        [bars] if counts else [],
        layout,
        missing="No group has been trained on.",
    )


def lag_by_step(history: RunHistory) -> figures.Plot:
    """Return the mean and the largest policy lag of each step, with the bound."""
    steps, means = figures.series(history.steps, "lag/mean")
    largest_steps, largest = figures.series(history.steps, "lag/max", max)
    bounded_steps, bounds = figures.series(history.steps, "staleness/bound", max)
    stairs = {"shape": "hv", "width": 1.2}
    traces = [
        figures.line_trace(largest_steps, largest, "largest", figures.GRAY, stairs),
        figures.line_trace(steps, means, "mean", figures.BLUE),
    ]
    if bounds:
        look = {**stairs, "dash": "dash"}
        traces.append(figures.line_trace(bounded_steps, bounds, "max_staleness", figures.ORANGE, look))
    return figures.Plot(
        "Policy lag by step",
        "Mean and largest lag among the groups of each step; the dashed line is staleness.max_staleness as it was then, "
        "which only stragglers may pass.",
        traces if means else [],
        figures.step_layout("optimizer step", steps, "policy lag (steps)", y={"rangemode": "tozero"}),
        missing="No step has recorded its lag.",
    )


_CLIP_SIDES = (
    ("positive_above", "A > 0, above (clipped)", figures.BLUE),
    ("negative_below", "A < 0, below (clipped)", figures.RED),
    ("positive_below", "A > 0, below", figures.PALE_BLUE),
    ("negative_above", "A < 0, above", figures.PALE_RED),
)


def clip_fraction(history: RunHistory) -> figures.Plot:
    """Return the share of a completion's tokens outside the clip band, by sign of the advantage and side of the band."""
    caption = (
        "Share of a completion's tokens whose ratio left the clip band, averaged over completions (of a sequence ratio all or "
        "none of its tokens): PPO's clip takes the gradient of the two strong colors, "
        "and leaves that of the two pale ones (A < 0, above, no more than loss.dual_clip leaves, where that is set). "
        "The objectives cispo and ce_gppo leave a bounded gradient of all four."
    )
    traces: list[figures.Trace] = []
    steps: list[float] = []
    for name, label, color in _CLIP_SIDES:
        steps, fractions = figures.series(history.steps, f"clip/{name}")
        if fractions:
            area = figures.line_trace(steps, fractions, label, color, {"width": 0.5}, mode="lines")
            traces.append(area | {"stackgroup": "fractions", "fillcolor": color})
    noise_steps, noise = figures.series(history.steps, "clip/noise")
    if noise:
        label, look = "of the clipped, engine noise", {"dash": "dash"}
        traces.append(figures.line_trace(noise_steps, noise, label, figures.INK, look, mode="lines"))
        caption = f"{caption[:-1]}. Strong colors above the dashed line are drift, below it what engine noise alone clips."
    y_axis = {"tickformat": ".1~%", "rangemode": "tozero"}
    layout = figures.step_layout("optimizer step", steps, "share of tokens", y=y_axis)
    layout["legend"]["traceorder"] = "normal"
    return figures.Plot("Clip fraction", caption, traces, layout, missing="No step has recorded its clip fractions.")


def log_ratio(history: RunHistory, clip_low: float | None, clip_high: float | None) -> figures.Plot:
    """Return the distribution of the sequence log-ratio, with the clip band."""
    steps, means = figures.series(history.steps, "ratio/log_mean")
    _, spreads = figures.series(history.steps, "ratio/log_std")
    spreads = spreads if len(spreads) == len(means) else [0.0] * len(means)
    lower = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    upper = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    traces = figures.band_traces(steps, lower, upper, "± 1 std", figures.PALE_BLUE)
    for name, label, how in (("ratio/log_min", "lowest", min), ("ratio/log_max", "highest", max)):
        extreme_steps, extremes = figures.series(history.steps, name, how)
        traces.append(figures.line_trace(extreme_steps, extremes, label, figures.GRAY, {"width": 1}))
    traces.append(figures.line_trace(steps, means, "mean", figures.BLUE))
    layout = figures.step_layout("optimizer step", steps, "log ratio")
    if clip_low is not None and clip_low < 1:
        figures.add_limit(layout, math.log(1 - clip_low), "1 − clip_low", below=True)
    if clip_high is not None:
        figures.add_limit(layout, math.log(1 + clip_high), "1 + clip_high")
    return figures.Plot(
        "Sequence log-ratio",
        "Log of GSPO's sequence ratio: mean, one standard deviation around it (band), extremes (thin), "
        "and the clip band (dashed); drift to one side means the policies part.",
        traces if means else [],
        layout,
        missing="No step has recorded its ratios.",
    )


def log_ratio_by_lag(drift: Sequence[LagDrift]) -> figures.Plot:
    """Return mean and spread of the sequence log-ratio at each policy lag."""
    lines = [line for line in drift if line.log_ratio_mean is not None]
    points = figures.scatter_trace([(line.bucket, line.log_ratio_mean) for line in lines], "mean ± std", "markers") | {
        "error_y": {
            "type": "data",
            "array": [line.log_ratio_std or 0.0 for line in lines],
            "color": figures.PALE_BLUE,
            "thickness": 6,
        },
        "marker": {"size": 9, "color": figures.BLUE},
        "customdata": [[line.log_ratio_std, line.count] for line in lines],
        "hovertemplate": "%{y:.3~g} ± %{customdata[0]:.3~g}, %{customdata[1]:,} completions<extra></extra>",
    }
    return figures.Plot(
        "Log-ratio by policy lag",
        "Log of the sequence ratio between policy and anchor, before anything is masked: mean and one standard deviation over "
        "all completions of a lag. What lag 0 has is the engine's noise; what grows with the lag is drift.",
        [points] if lines else [],
        figures.lag_layout("log ratio"),
        missing=_NO_DRIFT,
    )


def clip_by_lag(drift: Sequence[LagDrift]) -> figures.Plot:
    """Return clipped and masked shares at each policy lag."""
    parts = (
        ("clipped", figures.BLUE, [(line.bucket, line.clip_fraction) for line in drift if line.clip_fraction is not None]),
        ("masked", figures.ORANGE, [(line.bucket, line.masked) for line in drift if line.masked is not None]),
    )
    traces = [figures.bar_trace(shares, name, color, "%{y:.1%}") for name, color, shares in parts if shares]
    return figures.Plot(
        "Clipped and masked by policy lag",
        "Share of a completion's tokens whose gradient a clip made zero, averaged over the completions of each lag, and share "
        "of all their tokens that the off-policy correction masked.",
        traces,
        figures.lag_layout("share", y={"tickformat": ".1~%", "rangemode": "tozero"}) | {"barmode": "group", "bargap": 0.3},
        missing=_NO_DRIFT,
    )


def reward_and_length_by_lag(drift: Sequence[LagDrift]) -> figures.Plot:
    """Return mean reward and length of the completions at each policy lag."""
    rewards = [(line.bucket, line.reward) for line in drift if line.reward is not None]
    lengths = [(line.bucket, line.length) for line in drift if line.length is not None]
    traces = [
        figures.scatter_trace(points, name, "lines+markers")
        | {"yaxis": axis, "line": {"color": color, "width": 2}, "hovertemplate": "%{y:,.3~f}"}
        for name, color, axis, points in (("reward", figures.BLUE, "y", rewards), ("tokens", figures.ORANGE, "y2", lengths))
    ]
    layout = figures.lag_layout("reward")
    right = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "tickmode": "auto"}
    layout["yaxis2"] = layout["yaxis"] | right | {"title": layout["yaxis"]["title"] | {"text": "tokens"}}
    return figures.Plot(
        "Reward and length by policy lag",
        "Mean reward (left) and mean tokens (right) of the completions of each lag: long completions take their time, "
        "and are older when they are trained on.",
        traces if rewards and lengths else [],
        layout,
        missing="No step has recorded rewards and lengths by policy lag.",
        is_wide=True,
    )
