"""The plots of a sweep's report: curves with confidence bands, and the runs of all values side by side."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from offbeat.common.pages import figures
from offbeat.lab.sweep.estimates import CONFIDENCE, Band, Curve, Estimate, average_curves
from offbeat.lab.sweep.measures import RunCurves
from offbeat.lab.sweep.summary import Curves, Summary, SweepRun

NUM_SMOOTHED_STEPS = 5
"""Steps around each point that a plotted curve is averaged over."""

_BAND_OPACITY = "2e"
"""Opacity of a band's color, in hexadecimal."""
_NO_RUN = "No run has finished."


def reward_by_groups(summary: Summary, curves: Curves) -> figures.Plot:
    """Return the reward over the groups trained on."""
    bands = _bands(curves, lambda run: run.by_groups)
    return _reward_plot("Reward by rollouts", "groups trained on", "How much a rollout teaches at each value", summary, bands)


def reward_by_time(summary: Summary, curves: Curves) -> figures.Plot:
    """Return the reward over wall-clock time."""
    bands = _bands(curves, lambda run: run.by_seconds)
    lead = "What counts in the end: reward against the clock, which starts with the first batch of rollouts"
    return _reward_plot("Reward by wall-clock", "seconds", lead, summary, bands)


def final_reward(summary: Summary) -> figures.Plot:
    """Return the final reward of each value's runs."""
    caption = f"Mean of the last steps: each run (dots), and the mean over seeds with its {CONFIDENCE:.0%} interval."
    return _dot_plot("Final reward", caption, "reward", summary, lambda run: run.measures.final_reward, "final_reward")


def seconds_to_margin(summary: Summary) -> figures.Plot:
    """Return the time that each value's runs took to come within the margin of the reference's reward."""
    caption = (
        f"Seconds until the mean of ten steps was within {summary.margin:g} of the final reward of {summary.reference}; a run "
        "that never was has no dot."
    )
    title = "Wall-clock to the reference's reward"
    plot = _dot_plot(title, caption, "seconds", summary, lambda run: run.to_margin.seconds, "")
    plot.layout["yaxis"]["rangemode"] = "tozero"
    return plot


def throughput(summary: Summary) -> figures.Plot:
    """Return the tokens trained on per second."""
    caption = f"Completion tokens trained on in a second: each run (dots), and the mean with its {CONFIDENCE:.0%} interval."
    plot = _dot_plot("Throughput", caption, "tokens / s", summary, lambda run: run.measures.tokens_per_s, "tokens_per_s")
    plot.layout["yaxis"] |= {"rangemode": "tozero", "tickformat": ","}
    return plot


def waiting(summary: Summary) -> figures.Plot:
    """Return the shares of time that learner and actors waited."""
    caption = (
        "Share of the learner's time without rollouts to train on, and of the actors' without leases (nothing may be generated "
        "yet) or new weights; means over seeds."
    )
    parts = (
        ("learner_idle_share", "learner, for rollouts", figures.BLUE),
        ("actor_wait_leases_share", "actors, for leases", figures.ORANGE),
        ("actor_wait_weights_share", "actors, for weights", figures.PALE_ORANGE),
    )
    return _bar_plot("Waiting", caption, "share of time", summary, parts, {"tickformat": ".0%", "rangemode": "tozero"})


def lag(summary: Summary) -> figures.Plot:
    """Return the mean and the largest policy lag."""
    caption = "Policy lag of the groups trained on, in optimizer steps: the mean, and the largest of a run; means over seeds."
    parts = (("lag_mean", "mean", figures.BLUE), ("lag_max", "largest", figures.GRAY))
    return _bar_plot("Policy lag", caption, "optimizer steps", summary, parts, {"rangemode": "tozero"})


def drift(summary: Summary) -> figures.Plot:
    """Return the spread of the log-ratio and the clip fraction."""
    caption = "Standard deviation of the log sequence ratio, and share of a completion's tokens clipped; means over seeds."
    parts = (("log_ratio_std", "std of log ratio", figures.BLUE), ("clip_fraction", "clip fraction", figures.GOLD))
    return _bar_plot("Drift", caption, "", summary, parts, {"rangemode": "tozero"})


def _bands(curves: Curves, curve_of: Callable[[RunCurves], Curve]) -> dict[str, Band]:
    averaged = {label: average_curves([smooth(curve_of(run)) for run in runs]) for label, runs in curves.items()}
    return {label: band for label, band in averaged.items() if band is not None}


def smooth(curve: Curve) -> Curve:
    """Return the running mean over `NUM_SMOOTHED_STEPS`."""
    return Curve(curve.xs, figures.running_mean(curve.ys, NUM_SMOOTHED_STEPS))


def _reward_plot(title: str, x_title: str, lead: str, summary: Summary, bands: dict[str, Band]) -> figures.Plot:
    caption = (
        f"{lead}: mean over seeds and its {CONFIDENCE:.0%} interval; each point is a mean over {NUM_SMOOTHED_STEPS} steps, and "
        "a curve ends with its shortest run."
    )
    colors = dict(zip([value.label for value in summary.values], itertools.cycle(figures.ACTOR_COLORS), strict=False))
    traces: list[figures.Trace] = []
    for label, band in bands.items():
        if band.num_seeds > 1:
            traces += figures.band_traces(band.xs, band.lows, band.highs, "", colors[label] + _BAND_OPACITY)
    for label, band in bands.items():
        traces.append(figures.line_trace(band.xs, band.means, _title(summary, label), colors[label]))
    layout: figures.Layout = figures.plot_layout(x_title, "reward") | {"height": 380}
    layout["legend"]["traceorder"] = "normal"
    return figures.Plot(title, caption, traces, layout, missing=_NO_RUN, is_wide=True)


def _title(summary: Summary, label: str) -> str:
    """Return a value's label with its setting."""
    return f"{next(iter(summary.settings)).rpartition('.')[2]} = {label}" if len(summary.settings) == 1 else label


def _dot_plot(
    title: str, caption: str, y_title: str, summary: Summary, number_of: Callable[[SweepRun], float | None], name: str
) -> figures.Plot:
    """Return a dot for each finished run beside the estimate `name`; with an empty name, beside `seconds_to_margin`."""
    dots = [
        (run.label, run.seed, number)
        for run in summary.runs
        if run.state == "finished" and (number := number_of(run)) is not None
    ]
    traces: list[figures.Trace] = [
        figures.scatter_trace([(label, number) for label, _, number in dots], "runs", "markers")
        | {
            "customdata": [seed for _, seed, _ in dots],
            "marker": {"color": figures.GRAY, "size": 8},
            "hovertemplate": "seed %{customdata}: %{y:.4~g}<extra></extra>",
        }
    ]
    told = [(value.label, value.estimates[name]) for value in summary.values if name in value.estimates]
    if not name:
        told = [(value.label, value.seconds_to_margin) for value in summary.values if value.seconds_to_margin is not None]
    if told:
        traces.append(_means(told))
    return figures.Plot(title, caption, traces if dots else [], _value_layout(summary, y_title), missing=_NO_RUN)


def _means(told: Sequence[tuple[str, Estimate]]) -> figures.Trace:
    upper = [0.0 if number.high is None else number.high - number.mean for _, number in told]
    return figures.scatter_trace([(label, number.mean) for label, number in told], "mean", "markers") | {
        "error_y": {"type": "data", "array": upper, "color": figures.BLUE, "thickness": 1.5, "width": 5},
        "marker": {"color": figures.BLUE, "size": 10, "symbol": "diamond"},
        "hovertemplate": "mean %{y:.4~g}<extra></extra>",
    }


def _bar_plot(
    title: str, caption: str, y_title: str, summary: Summary, parts: Sequence[tuple[str, str, str]], y_axis: dict[str, Any]
) -> figures.Plot:
    """Return bars side by side for each value; `parts` are names of estimates, with labels and colors."""
    traces: list[figures.Trace] = []
    for name, label, color in parts:
        told = [(value.label, value.estimates[name].mean) for value in summary.values if name in value.estimates]
        if told:
            traces.append(figures.bar_trace(told, label, color, "%{y:.3~g}"))
    layout = _value_layout(summary, y_title, y_axis) | {"barmode": "group", "bargap": 0.35, "hovermode": "x unified"}
    return figures.Plot(title, caption, traces, layout, missing=_NO_RUN)


def _value_layout(summary: Summary, y_title: str, y_axis: dict[str, Any] | None = None) -> figures.Layout:
    """Return a layout with a place for each value, even without runs."""
    labels = [value.label for value in summary.values]
    x_title = next(iter(summary.settings)).rpartition(".")[2] if len(summary.settings) == 1 else ""
    # As categories: a numeric axis would place values by size, and merge 1 and 1.0.
    x_axis = {"type": "category", "categoryorder": "array", "categoryarray": labels, "range": [-0.5, len(labels) - 0.5]}
    return figures.plot_layout(x_title, y_title, x=x_axis, y=y_axis) | {"hovermode": "closest"}
