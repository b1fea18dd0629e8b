"""The report's plots: each a Plotly figure made of a run's history, with a sentence on how to read it."""

import html
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offbeat.common.rows import CanaryRow, CommitRow, EvalRow, StepRow
from offbeat.lab.history import LagDrift, RunHistory, rate_over_time, sum_seconds

# Each color of the light page, and what stands for it on the dark one.
INK, MUTED, GRID, CARD = "#1d2127", "#6b7280", "#ebe8e1", "#ffffff"
BLUE, ORANGE, GREEN, RED, PURPLE, GOLD, GRAY = (
    "#2563c9",
    "#d9670b",
    "#2a8556",
    "#c8323a",
    "#7347b8",
    "#b98a12",
    "#a7adb6",
)
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
"""Longer series are drawn in so many buckets, to keep the page light."""

MAX_BARS = 40
"""With more actors, those beyond are added up in one bar."""

ACTOR_COLORS = (BLUE, ORANGE, GREEN, PURPLE, GOLD, RED, GRAY)

LEARNER_WORK = {
    "train": ("train", BLUE),
    "prepare": ("prepare batches", PURPLE),
    "snapshot": ("copy weights", GOLD),
    "publish_wait": ("wait for the last publish", ORANGE),
    "wait_rollouts": ("wait for rollouts", GRAY),
    "other": ("other", FAINT),
}
ACTOR_WORK = {
    "generate": ("generate", GREEN),
    "commit_weights": ("take weights", ORANGE),
    "wait_weights": ("wait for weights", PALE_ORANGE),
    "wait_rewards": ("wait for rewards", PALE_RED),
    "wait_leases": ("wait for leases", GRAY),
}


class Plot(NamedTuple):
    """One figure of the report."""

    title: str
    caption: str
    """How to read it, in one sentence."""
    figure: dict[str, Any] | None
    """Plotly's `data` and `layout`; None when the rows that it needs are missing."""
    missing: str = ""
    """What to say then."""
    wide: bool = False


def reward_by_step(history: RunHistory) -> Plot:
    """Mean reward of each step, with the held-out evaluations."""
    caption = (
        "Mean reward of the completions each step trained on (thin) and its running mean (bold); "
        "orange are the held-out prompts."
    )
    traces = _reward_traces(history, lambda row: row.policy_version)
    if not traces:
        return Plot("Reward by step", caption, None, _NO_REWARD)
    layout = _step_layout("optimizer step", traces[0]["x"], "reward")
    return Plot("Reward by step", caption, {"data": traces, "layout": layout})


def reward_by_time(history: RunHistory) -> Plot:
    """The same over wall time."""
    unit, scale = time_unit(history)
    start = history.first_time or 0.0
    caption = "The same rewards against the clock: what two runs of different staleness should be compared by."
    traces = _reward_traces(history, lambda row: (row.time - start) / scale)
    if not traces:
        return Plot("Reward by wall time", caption, None, _NO_REWARD)
    return Plot("Reward by wall time", caption, {"data": traces, "layout": plot_layout(f"wall time ({unit})", "reward")})


def gradient_norm(history: RunHistory, max_grad_norm: float | None) -> Plot:
    """Gradient norm before clipping."""
    steps, norms = _series(history.steps, "loss/grad_norm", max)
    caption = (
        "Length of the gradient before it is scaled down to train.max_grad_norm (dashed, where in range); "
        "spikes are steps to look at."
    )
    if not norms:
        return Plot("Gradient norm", caption, None, "No step has recorded a gradient norm.")
    layout = _step_layout("optimizer step", steps, "norm", y={"rangemode": "tozero"})
    # A limit far above the data would flatten it.
    if max_grad_norm is not None and max_grad_norm <= 3 * max(norms):
        _add_limit(layout, max_grad_norm, "max_grad_norm")
    return Plot("Gradient norm", caption, {"data": [line_trace(steps, norms, "norm", BLUE)], "layout": layout})


def groups_without_signal(history: RunHistory) -> Plot:
    """Groups whose completions all got the same reward."""
    steps, counts = _series(history.steps, "reward/zero_variance_groups")
    caption = "Groups per step whose completions all got the same reward: their advantages are zero and teach nothing."
    if not counts:
        return Plot("Groups without signal", caption, None, "No step has recorded its zero-variance groups.")
    bars = {"type": "bar", "x": steps, "y": counts, "marker": {"color": GOLD}, "hovertemplate": "%{y:.3~g} groups"}
    layout = _step_layout("optimizer step", steps, "groups") | {"bargap": 0.1}
    return Plot("Groups without signal", caption, {"data": [bars | {"name": ""}], "layout": layout})


def lag_histogram(history: RunHistory) -> Plot:
    """Trained groups by policy lag."""
    counts = history.groups_by_lag
    caption = (
        "How many optimizer steps lay between a group's oldest token and the step that trained on it, "
        "for all groups of the run."
    )
    if not counts:
        return Plot("Policy lag of trained groups", caption, None, "No group has been trained on.")
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
    return Plot("Policy lag of trained groups", caption, {"data": [bars], "layout": layout})


def lag_by_step(history: RunHistory) -> Plot:
    """Mean and largest lag of each step."""
    steps, means = _series(history.steps, "lag/mean")
    _, largest = _series(history.steps, "lag/max", max)
    caption = (
        "Mean and largest lag among the groups of each step; the dashed line is staleness.max_staleness as it was then, "
        "which only stragglers may pass."
    )
    if not means:
        return Plot("Policy lag by step", caption, None, "No step has recorded its lag.")
    top = line_trace(steps, largest, "largest", GRAY)
    top["line"] |= {"shape": "hv", "width": 1.2}
    data = [top, line_trace(steps, means, "mean", BLUE)]
    bounded_steps, bounds = _series(history.steps, "staleness/bound", max)
    if bounds:
        bound = line_trace(bounded_steps, bounds, "max_staleness", ORANGE)
        bound["line"] |= {"shape": "hv", "width": 1.2, "dash": "dash"}
        data.append(bound)
    layout = _step_layout("optimizer step", steps, "policy lag (steps)", y={"rangemode": "tozero"})
    return Plot("Policy lag by step", caption, {"data": data, "layout": layout})


def clip_fraction(history: RunHistory) -> Plot:
    """Completions outside the clip band by sign of advantage and side."""
    caption = (
        "Share of completions whose sequence ratio left the clip band: the two strong colors lose their gradient, "
        "the two pale ones keep it (A < 0, above, no more than loss.dual_clip leaves, where that is set)."
    )
    parts = (
        ("positive_above", "A > 0, above (clipped)", BLUE),
        ("negative_below", "A < 0, below (clipped)", RED),
        ("positive_below", "A > 0, below", PALE_BLUE),
        ("negative_above", "A < 0, above", PALE_RED),
    )
    data, steps = [], []
    for name, label, color in parts:
        steps, fractions = _series(history.steps, f"clip/{name}")
        if fractions:
            area = line_trace(steps, fractions, html.escape(label), color)
            area["line"]["width"] = 0.5
            data.append(area | {"stackgroup": "fractions", "fillcolor": color, "mode": "lines"})
    if not data:
        return Plot("Clip fraction", caption, None, "No step has recorded its clip fractions.")
    noise_steps, noise = _series(history.steps, "clip/noise")
    if noise:
        line = line_trace(noise_steps, noise, "of the clipped, engine noise", INK)
        line["line"]["dash"] = "dash"
        data.append(line | {"mode": "lines"})
        caption = f"{caption[:-1]}. Strong colors above the dashed line are drift, below it what engine noise alone clips."
    y_axis = {"tickformat": ".1~%", "rangemode": "tozero"}
    layout = _step_layout("optimizer step", steps, "share of completions", y=y_axis)
    layout["legend"]["traceorder"] = "normal"
    return Plot("Clip fraction", caption, {"data": data, "layout": layout})


def log_ratio(history: RunHistory, clip_low: float | None, clip_high: float | None) -> Plot:
    """Distribution of the sequence log-ratio."""
    steps, means = _series(history.steps, "ratio/log_mean")
    caption = (
        "Log of GSPO's sequence ratio: mean, one standard deviation around it (band), extremes (thin), "
        "and the clip band (dashed); drift to one side means the policies part."
    )
    if not means:
        return Plot("Sequence log-ratio", caption, None, "No step has recorded its ratios.")
    _, spreads = _series(history.steps, "ratio/log_std")
    spreads = spreads if len(spreads) == len(means) else [0.0] * len(means)
    lower = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    upper = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
    data = band_traces(steps, lower, upper, "± 1 std", PALE_BLUE)
    for name, label, how in (("ratio/log_min", "lowest", min), ("ratio/log_max", "highest", max)):
        extreme_steps, extremes = _series(history.steps, name, how)
        extreme = line_trace(extreme_steps, extremes, label, GRAY)
        extreme["line"] |= {"width": 1}
        data.append(extreme)
    data.append(line_trace(steps, means, "mean", BLUE))
    layout = _step_layout("optimizer step", steps, "log ratio")
    if clip_low is not None and clip_low < 1:
        _add_limit(layout, math.log(1 - clip_low), "1 − clip_low", below=True)
    if clip_high is not None:
        _add_limit(layout, math.log(1 + clip_high), "1 + clip_high")
    return Plot("Sequence log-ratio", caption, {"data": data, "layout": layout})


def log_ratio_by_lag(drift: Sequence[LagDrift]) -> Plot:
    """Mean and spread of the sequence log-ratio at each policy lag."""
    title = "Log-ratio by policy lag"
    caption = (
        "Log of the sequence ratio between policy and anchor, before anything is masked: mean and one standard deviation over "
        "all completions of a lag. What lag 0 has is the engine's noise; what grows with the lag is drift."
    )
    lines = [line for line in drift if line.log_ratio_mean is not None]
    if not lines:
        return Plot(title, caption, None, _NO_DRIFT)
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
    return Plot(title, caption, {"data": [points], "layout": _lag_layout("log ratio")})


def clip_by_lag(drift: Sequence[LagDrift]) -> Plot:
    """Clipped and masked shares at each policy lag."""
    title = "Clipped and masked by policy lag"
    caption = (
        "Share of the completions of each lag whose gradient the clip band made zero, and of their tokens that the off-policy "
        "correction masked."
    )
    data = [
        {
            "type": "bar",
            "name": name,
            "x": [line.bucket for line, value in values if value is not None],
            "y": [value for _, value in values if value is not None],
            "marker": {"color": color},
            "hovertemplate": "%{y:.1%}",
        }
        for name, color, values in (
            ("clipped", BLUE, [(line, line.clip_fraction) for line in drift]),
            ("masked", ORANGE, [(line, line.masked) for line in drift]),
        )
        if any(value is not None for _, value in values)
    ]
    if not data:
        return Plot(title, caption, None, _NO_DRIFT)
    layout = _lag_layout("share", y={"tickformat": ".1~%", "rangemode": "tozero"}) | {"barmode": "group", "bargap": 0.3}
    return Plot(title, caption, {"data": data, "layout": layout})


def reward_and_length_by_lag(drift: Sequence[LagDrift]) -> Plot:
    """Mean reward and length of the completions at each policy lag."""
    title = "Reward and length by policy lag"
    caption = (
        "Mean reward (left) and mean tokens (right) of the completions of each lag: long completions take their time, "
        "and are older when they are trained on."
    )
    rewards = [(line.bucket, line.reward) for line in drift if line.reward is not None]
    lengths = [(line.bucket, line.length) for line in drift if line.length is not None]
    if not rewards or not lengths:
        return Plot(title, caption, None, "No step has recorded rewards and lengths by policy lag.", wide=True)
    data = [
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
    layout = _lag_layout("reward")
    right = {"overlaying": "y", "side": "right", "showgrid": False, "rangemode": "tozero", "tickmode": "auto"}
    layout["yaxis2"] = layout["yaxis"] | right | {"title": layout["yaxis"]["title"] | {"text": "tokens"}}
    return Plot(title, caption, {"data": data, "layout": layout}, wide=True)


def completion_lengths(history: RunHistory) -> Plot:
    """Lengths of all generated completions beside those trained on."""
    generated, trained = history.lengths(trained_only=False), history.lengths(trained_only=True)
    caption = "Bars of one pair that differ mean that selection favors some lengths, which biases training."
    title = "Completion lengths, generated and trained"
    if not generated:
        return Plot(title, caption, None, "No group has been generated.")
    means = f"mean {statistics.fmean(generated):,.0f} tokens generated"
    if trained:
        means += f", {statistics.fmean(trained):,.0f} trained"
    width = max(1, math.ceil((max(generated) + 1) / 30))
    num_bins = max(generated) // width + 1
    data = []
    for lengths, label, color in ((generated, "all generated", GRAY), (trained, "trained", BLUE)):
        counts = [0] * num_bins
        for length in lengths:
            counts[length // width] += 1
        data.append(
            {
                "type": "bar",
                "name": f"{label} ({len(lengths):,})",
                "x": [(index + 0.5) * width for index in range(num_bins)],
                "y": [count / max(1, len(lengths)) for count in counts],
                "customdata": counts,
                "marker": {"color": color},
                "hovertemplate": "%{y:.1%} (%{customdata})",
            }
        )
    layout = plot_layout("completion tokens", "share of completions", y={"tickformat": ".0%"})
    layout |= {"barmode": "group", "bargap": 0.15, "bargroupgap": 0}
    return Plot(title, f"{caption[:-1]}; {means}.", {"data": data, "layout": layout})


def throughput(history: RunHistory) -> Plot:
    """Tokens per second, generated and trained on."""
    title = "Tokens per second"
    caption = (
        "Completion tokens the actors sampled and the learner trained on: a lasting gap is work thrown away, "
        "or rollouts piling up."
    )
    generated = [interval for actor in history.actors.values() for interval in actor.intervals()]
    trained = history.training_intervals()
    if not generated and not trained:
        return Plot(title, caption, None, "No actor has reported and no step has been made.")
    start, end = history.first_time or 0.0, max(interval.end for interval in (*generated, *trained))
    # No bin shorter than two steps: the tokens of a step come all at once.
    step_s = statistics.median([interval.end - interval.start for interval in trained]) if trained else 0.0
    num_bins = max(1, min(120, int((end - start) / max(2 * step_s, 2.0))))
    width = max((end - start) / num_bins, 1e-3)
    edges = [start + index * width for index in range(num_bins + 1)]
    unit, scale = time_unit(history)
    middles = [((a + width / 2) - start) / scale for a in edges[:-1]]
    data = [
        line_trace(middles, rate_over_time(intervals, edges), label, color)
        for intervals, label, color in ((generated, "generated", GREEN), (trained, "trained", BLUE))
        if intervals
    ]
    layout = plot_layout(f"wall time ({unit})", "tokens / s", y={"rangemode": "tozero", "tickformat": ","})
    return Plot(title, caption, {"data": data, "layout": layout})


def where_time_went(history: RunHistory) -> Plot:
    """Each service's time by what it went to."""
    title = "Where the time went"
    caption = (
        "Each service's own time, by what it was spent on: gray is idle, "
        "so the longer the gray, the less that side limits the run."
    )
    bars: dict[str, dict[str, tuple[str, str, float]]] = {}
    if history.steps:
        seconds = history.learner_seconds()
        bars["learner"] = {work: (*LEARNER_WORK[work], seconds[work]) for work in LEARNER_WORK if seconds[work] > 0}
    actors = sorted(history.actors.values(), key=lambda actor: actor.name)
    for actor in actors[:MAX_BARS]:
        bars[actor.name] = _actor_bar(actor.seconds)
    if len(actors) > MAX_BARS:
        bars[f"{len(actors) - MAX_BARS} more actors"] = _actor_bar(sum_seconds(actors[MAX_BARS:]))
    bars = {service: parts for service, parts in bars.items() if sum(part[2] for part in parts.values()) > 0}
    if not bars:
        return Plot(title, caption, None, "No service has reported its time.", wide=True)
    data = _stacked_bars(bars)
    layout = plot_layout("", "", x={"tickformat": ".0%", "range": [0, 1]}, y={"autorange": "reversed", "showgrid": False})
    layout |= {"barmode": "stack", "bargap": 0.35, "hovermode": "closest", "height": 120 + 34 * len(bars)}
    layout["legend"]["traceorder"] = "normal"
    layout["margin"] = layout["margin"] | {"r": 24}
    return Plot(title, caption, {"data": data, "layout": layout}, wide=True)


def weight_sync(history: RunHistory) -> Plot:
    """Publish and stall times of every update."""
    title = "Weight updates"
    caption = (
        "Seconds from the start of a publish to its end, which training does not wait for, "
        "and seconds each actor's engine stood still to take it (log scale)."
    )
    publish = _points([(row.policy_version, row.publish_s) for row in history.publishes], "publish", INK)
    data = [trace for trace in (publish, *_by_actor([(row, row.stall_s) for row in history.commits], "stall, ")) if trace["x"]]
    if not data:
        return Plot(title, caption, None, "No weights have been published.")
    return Plot(title, caption, {"data": data, "layout": _log_layout(data, "seconds", "~g")})


def canary(history: RunHistory) -> Plot:
    """Largest difference between engine and learner on the canary prompt."""
    title = "Canary: engine against learner"
    caption = (
        "Largest difference of one token's log-prob on a fixed prompt after each update (log scale): "
        "a jump means that an engine does not hold the learner's weights."
    )
    data = [trace for trace in _by_actor([(row, row.max_abs_diff) for row in history.canaries], "") if trace["x"]]
    if not data:
        return Plot(title, caption, None, "No canary has been scored.")
    return Plot(title, caption, {"data": data, "layout": _log_layout(data, "max |Δ log-prob|", ".0e")})


def time_unit(history: RunHistory) -> tuple[str, float]:
    """Name and seconds of the unit that wall time is plotted in."""
    span = (history.last_time or 0.0) - (history.first_time or 0.0)
    if span < 300:
        return "s", 1.0
    return ("min", 60.0) if span < 3 * 3600 else ("h", 3600.0)


_NO_DRIFT = "No step has recorded its drift by policy lag."
_NO_REWARD = "No step has been made: there is no reward to show."


def _reward_traces(history: RunHistory, x_of: Callable[[StepRow | EvalRow], float]) -> list[dict[str, Any]]:
    """Rewards of steps, their running mean, and those of evaluations if there are any; nothing without steps."""
    rewards = [(row, reward) for row in history.steps if (reward := row.number("reward/mean")) is not None]
    if not rewards:
        return []
    xs, means = _bucket([x_of(row) for row, _ in rewards]), _bucket([reward for _, reward in rewards])
    thin = line_trace(xs, means, "per step", PALE_BLUE)
    thin["line"]["width"] = 1.5
    smooth = line_trace(xs, running_mean(means, max(1, len(means) // 10)), "running mean", BLUE) | {"mode": "lines"}
    evaluations = [row for row in history.evaluations.values() if row.reward is not None]
    held_out = {
        "type": "scatter",
        "mode": "markers" if len(evaluations) <= 40 else "lines",
        "name": "held-out",
        "x": [x_of(row) for row in evaluations],
        "y": [row.reward for row in evaluations],
        "marker": {"symbol": "diamond", "size": 9, "color": ORANGE, "line": {"width": 1.5, "color": CARD}},
        "line": {"color": ORANGE, "width": 1.5},
        "hovertemplate": "%{y:.3f}",
    }
    return [thin, smooth, *([held_out] if evaluations else [])]


def _actor_bar(seconds: Mapping[str, float]) -> dict[str, tuple[str, str, float]]:
    known = {work: (*ACTOR_WORK[work], seconds[work]) for work in ACTOR_WORK if work in seconds}
    return known | {work: (work, FAINT, spent) for work, spent in seconds.items() if work not in ACTOR_WORK}


def _stacked_bars(bars: Mapping[str, Mapping[str, tuple[str, str, float]]]) -> list[dict[str, Any]]:
    """One trace for each kind of work, in the order in which the bars name them; values are shares of each bar."""
    kinds = {(label, color): None for parts in bars.values() for label, color, _ in parts.values()}
    data = []
    for label, color in kinds:
        seconds = {service: sum(spent for name, _, spent in parts.values() if name == label) for service, parts in bars.items()}
        shown = {service: spent for service, spent in seconds.items() if spent > 0}
        totals = {service: sum(part[2] for part in bars[service].values()) for service in shown}
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": html.escape(label),
                "y": [html.escape(service) for service in shown],
                "x": [spent / totals[service] for service, spent in shown.items()],
                "customdata": [f"{spent:,.1f} s" for spent in shown.values()],
                "marker": {"color": color, "line": {"width": 1, "color": CARD}},
                "hovertemplate": f"%{{y}}: {html.escape(label)} %{{x:.1%}} (%{{customdata}})<extra></extra>",
            }
        )
    # Plotly orders the bars by first appearance in any trace: the first trace names them all.
    order = [html.escape(service) for service in bars]
    anchor = {"type": "bar", "orientation": "h", "y": order, "x": [0.0] * len(order)}
    return [anchor | {"showlegend": False, "hoverinfo": "skip"}, *data]


def _by_actor(measured: Sequence[tuple[CommitRow | CanaryRow, float | None]], prefix: str) -> list[dict[str, Any]]:
    """Points of each actor; of more actors than there are colors, the middle and the highest one of each version."""
    values: dict[str, dict[int, float]] = {}
    for row, value in measured:
        if value is not None:
            values.setdefault(row.actor, {})[row.policy_version] = value
    if len(values) > len(ACTOR_COLORS):
        by_version: dict[int, list[float]] = {}
        for version, value in (item for series in values.values() for item in series.items()):
            by_version.setdefault(version, []).append(value)
        versions = sorted(by_version)
        values = {
            f"median of {len(values)} actors": {v: statistics.median(by_version[v]) for v in versions},
            f"highest of {len(values)} actors": {v: max(by_version[v]) for v in versions},
        }
    return [
        _points(sorted(series.items()), html.escape(f"{prefix}{actor}"), color)
        for (actor, series), color in zip(sorted(values.items()), ACTOR_COLORS, strict=False)
    ]


def _points(pairs: Iterable[tuple[float, float | None]], label: str, color: str) -> dict[str, Any]:
    """Points over the policy version; what is not positive has no place on a log axis."""
    positive = [(version, value) for version, value in pairs if value is not None and value > 0]
    xs, ys = _bucket([version for version, _ in positive]), _bucket([value for _, value in positive], max)
    trace = line_trace(xs, ys, label, color) | {"mode": "markers", "marker": {"size": 5, "color": color, "opacity": 0.8}}
    return trace | {"hovertemplate": "%{y:.3~g}"}


def _log_layout(traces: Sequence[Mapping[str, Any]], y_title: str, tick_format: str) -> dict[str, Any]:
    """A log axis whose ticks fit its range: 1, 2, 5 over few decades, else powers of ten."""
    values = [value for trace in traces for value in trace["y"]]
    num_decades = math.log10(max(values)) - math.log10(min(values))
    dtick = "D2" if num_decades < 2.5 else math.ceil(num_decades / 8)
    versions = [version for trace in traces for version in trace["x"]]
    return _step_layout("policy version", versions, y_title, y={"type": "log", "dtick": dtick, "tickformat": tick_format})


def _series(
    rows: Sequence[StepRow], name: str, how: Callable[[list[float]], float] = statistics.fmean
) -> tuple[list[float], list[float]]:
    """Policy versions and values of the rows that have this number."""
    pairs = [(row.policy_version, value) for row in rows if (value := row.number(name)) is not None]
    return _bucket([version for version, _ in pairs]), _bucket([value for _, value in pairs], how)


def _bucket(values: Sequence[float], how: Callable[[list[float]], float] = statistics.fmean) -> list[float]:
    """At most `MAX_POINTS` values, each made of its neighbors."""
    if len(values) <= MAX_POINTS:
        return list(values)
    edges = [len(values) * index // MAX_POINTS for index in range(MAX_POINTS + 1)]
    return [how(list(values[edges[i] : edges[i + 1]])) for i in range(MAX_POINTS)]


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over about `window` values around each: one that looked back only would trail behind the curve."""
    half = window // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def line_trace(xs: Sequence[float], ys: Sequence[float], name: str, color: str) -> dict[str, Any]:
    """A line, with its points where there are few."""
    return {
        "type": "scatter",
        # A line through one point is invisible.
        "mode": "lines" if len(xs) > 12 else "lines+markers",
        "name": name,
        "x": list(xs),
        "y": list(ys),
        "line": {"color": color, "width": 2},
        "hovertemplate": "%{y:.3~g}",
    }


def band_traces(
    xs: Sequence[float], lower: Sequence[float], upper: Sequence[float], name: str, color: str
) -> list[dict[str, Any]]:
    """The area between two lines, one entry of the legend (none where `name` is empty)."""
    edges = [line_trace(xs, lower, "", color), line_trace(xs, upper, name, color)]
    for edge in edges:
        edge |= {"mode": "lines", "hoverinfo": "skip"}
        edge["line"]["width"] = 0
    edges[0]["showlegend"] = False
    edges[1] |= {"fill": "tonexty", "fillcolor": color} | ({} if name else {"showlegend": False})
    return edges


def _step_layout(x_title: str, steps: Sequence[float], y_title: str, *, y: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A layout over steps or versions; a short run's axis has no ticks between them."""
    is_short = bool(steps) and max(steps) - min(steps) <= 8
    return plot_layout(x_title, y_title, x={"dtick": 1} if is_short else None, y=y)


def _lag_layout(y_title: str, *, y: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A layout over buckets of lags, which are names and no numbers."""
    return plot_layout("policy lag (optimizer steps)", y_title, x={"type": "category"}, y=y)


def plot_layout(
    x_title: str, y_title: str, *, x: Mapping[str, Any] | None = None, y: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """How every figure looks; `x` and `y` go over what an axis has."""
    axis = {
        "gridcolor": GRID,
        "linecolor": GRID,
        "zeroline": False,
        "automargin": True,
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


def _add_limit(layout: dict[str, Any], value: float, label: str, *, below: bool = False) -> None:
    """A dashed horizontal line, with its setting's name at the right, above or below it."""
    layout["shapes"].append(
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": value,
            "y1": value,
            "line": {"color": ORANGE, "width": 1.2, "dash": "dash"},
        }
    )
    layout["annotations"].append(
        {
            "xref": "paper",
            "x": 1,
            "xanchor": "right",
            "y": value,
            "yanchor": "top" if below else "bottom",
            "yshift": -2 if below else 2,
            "borderpad": 1,
            "bgcolor": CARD,
            "text": html.escape(label),
            "showarrow": False,
            "font": {"color": ORANGE, "size": 10},
        }
    )
