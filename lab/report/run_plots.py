"""Plots of a run's learning, rollouts, time and weight updates."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from offbeat.common.pages import figures
from offbeat.common.records.rows import CanaryRow, CommitRow, EvalRow, StepRow
from offbeat.common.records.step_metrics import TASK_REWARDS, TASK_SHARES
from offbeat.lab.history import Interval, RunHistory, rate_over_time, sum_seconds

MAX_BARS = 40
"""Largest number of actors with a bar each; the others share one."""

LEARNER_WORK = {
    "train": ("train", figures.BLUE),
    "prepare": ("prepare batches", figures.PURPLE),
    "snapshot": ("copy weights", figures.GOLD),
    "publish_wait": ("wait for the last publish", figures.ORANGE),
    "wait_rollouts": ("wait for rollouts", figures.GRAY),
    "other": ("other", figures.FAINT),
}
"""Label and color of each part of the learner's time."""
ACTOR_WORK = {
    "generate": ("generate", figures.GREEN),
    "commit_weights": ("take weights", figures.ORANGE),
    "wait_weights": ("wait for weights", figures.PALE_ORANGE),
    "wait_rewards": ("wait for rewards", figures.PALE_RED),
    "wait_gpu": ("learner has the GPU", figures.GOLD),
    "wait_leases": ("wait for leases", figures.GRAY),
}
"""Label and color of each part of an actor's time."""

_NO_REWARD = "No step has been made: there is no reward to show."


# Learning


def reward_by_step(history: RunHistory) -> figures.Plot:
    """Return the mean reward of each step, with the held-out evaluations."""
    traces = _reward_traces(history, lambda row: row.policy_version)
    return figures.Plot(
        "Reward by step",
        "Mean reward of the completions each step trained on (thin) and its running mean (bold); "
        "orange are the held-out prompts.",
        traces,
        figures.step_layout("optimizer step", traces[0]["x"] if traces else [], "reward"),
        missing=_NO_REWARD,
    )


def reward_by_time(history: RunHistory) -> figures.Plot:
    """Return the mean reward of each step over wall time, with the held-out evaluations."""
    (unit, unit_s), start = time_unit(history), history.first_time or 0.0
    return figures.Plot(
        "Reward by wall time",
        "The same rewards against the clock: what two runs of different staleness should be compared by.",
        _reward_traces(history, lambda row: (row.time - start) / unit_s),
        figures.plot_layout(f"wall time ({unit})", "reward"),
        missing=_NO_REWARD,
    )


def reward_by_task(history: RunHistory) -> list[figures.Plot]:
    """Return the mean reward of each task by step, where the run tells tasks apart."""
    lead = "Running mean of the reward of each task (data.task_field)."
    return _by_task(history, TASK_REWARDS, "Reward by task", lead, "reward", smooths=True)


def share_by_task(history: RunHistory) -> list[figures.Plot]:
    """Return the share of each task's prompts that was leased, by step, where the run had a curriculum."""
    lead = "Share of each task's prompts that is leased in a pass over the data, as data.curriculum weighs them."
    return _by_task(history, TASK_SHARES, "Curriculum", lead, "share", smooths=False, y={"range": [0, 1.02]})


def _by_task(
    history: RunHistory, prefix: str, title: str, lead: str, y_title: str, *, smooths: bool, y: figures.Layout | None = None
) -> list[figures.Plot]:
    """Return a plot with a line for each task that has a metric of this prefix; none where no task has one."""
    names = sorted({name for row in history.steps for name in row.metrics if name.startswith(prefix)})
    if not names:
        return []
    traces: list[figures.Trace] = []
    for name, color in zip(names, itertools.cycle(figures.ACTOR_COLORS), strict=False):
        steps, values = figures.series(history.steps, name)
        shown = figures.running_mean(values, max(1, len(values) // 10)) if smooths else values
        traces.append(figures.line_trace(steps, shown, name.removeprefix(prefix), color, mode="lines"))
    layout = figures.step_layout("optimizer step", traces[0]["x"], y_title, y=y)
    return [figures.Plot(title, lead, traces, layout, missing=_NO_REWARD)]


def gradient_norm(history: RunHistory, max_grad_norm: float | None) -> figures.Plot:
    """Return the gradient norm before clipping."""
    steps, norms = figures.series(history.steps, "loss/grad_norm", max)
    layout = figures.step_layout("optimizer step", steps, "norm", y={"rangemode": "tozero"})
    # A limit far above the data would flatten it.
    if norms and max_grad_norm is not None and max_grad_norm <= 3 * max(norms):
        figures.add_limit(layout, max_grad_norm, "max_grad_norm")
    return figures.Plot(
        "Gradient norm",
        "Length of the gradient before it is scaled down to train.max_grad_norm (dashed, where in range); "
        "spikes are steps to look at.",
        [figures.line_trace(steps, norms, "norm", figures.BLUE)] if norms else [],
        layout,
        missing="No step has recorded a gradient norm.",
    )


def groups_without_signal(history: RunHistory) -> figures.Plot:
    """Return the number of groups in each step whose completions all got one reward."""
    steps, counts = figures.series(history.steps, "reward/zero_variance_groups")
    return figures.Plot(
        "Groups without signal",
        "Groups per step whose completions all got the same reward: their advantages are zero and teach nothing.",
        [figures.bar_trace(zip(steps, counts, strict=True), "", figures.GOLD, "%{y:.3~g} groups")] if counts else [],
        figures.step_layout("optimizer step", steps, "groups") | {"bargap": 0.1},
        missing="No step has recorded its zero-variance groups.",
    )


def _reward_traces(history: RunHistory, x_of: Callable[[StepRow | EvalRow], float]) -> list[figures.Trace]:
    """Return the rewards of steps, their running mean, and the evaluations' if any; no traces without steps."""
    rewards = [(row, reward) for row in history.steps if (reward := row.number("reward/mean")) is not None]
    if not rewards:
        return []
    xs, means = figures.bucket([x_of(row) for row, _ in rewards]), figures.bucket([reward for _, reward in rewards])
    running = figures.running_mean(means, max(1, len(means) // 10))
    traces = [
        figures.line_trace(xs, means, "per step", figures.PALE_BLUE, {"width": 1.5}),
        figures.line_trace(xs, running, "running mean", figures.BLUE, mode="lines"),
    ]
    evaluations = [(x_of(row), row.reward) for row in history.evaluations.values() if row.reward is not None]
    if not evaluations:
        return traces
    held_out = figures.scatter_trace(evaluations, "held-out", "markers" if len(evaluations) <= 40 else "lines") | {
        "marker": {"symbol": "diamond", "size": 9, "color": figures.ORANGE, "line": {"width": 1.5, "color": figures.CARD}},
        "line": {"color": figures.ORANGE, "width": 1.5},
        "hovertemplate": "%{y:.3f}",
    }
    return [*traces, held_out]


# Rollouts and time


def completion_lengths(history: RunHistory) -> figures.Plot:
    """Return the lengths of all generated completions beside those trained on."""
    generated, trained = history.lengths(trained_only=False), history.lengths(trained_only=True)
    longest = max(generated, default=0)
    width = max(1, math.ceil((longest + 1) / 30))
    num_bins = longest // width + 1
    traces: list[figures.Trace] = []
    for lengths, label, color in ((generated, "all generated", figures.GRAY), (trained, "trained", figures.BLUE)):
        in_bin = Counter(length // width for length in lengths)
        counts = [in_bin[index] for index in range(num_bins)]
        shares = [((index + 0.5) * width, count / max(1, len(lengths))) for index, count in enumerate(counts)]
        bars = figures.bar_trace(shares, f"{label} ({len(lengths):,})", color, "%{y:.1%} (%{customdata})")
        traces.append(bars | {"customdata": counts})
    layout = figures.plot_layout("completion tokens", "share of completions", y={"tickformat": ".0%"})
    means = f"; mean {statistics.fmean(generated):,.0f} tokens generated" if generated else ""
    means += f", {statistics.fmean(trained):,.0f} trained" if trained else ""
    return figures.Plot(
        "Completion lengths, generated and trained",
        f"Bars of one pair that differ mean that selection favors some lengths, which biases training{means}.",
        traces if generated else [],
        layout | {"barmode": "group", "bargap": 0.15, "bargroupgap": 0},
        missing="No group has been generated.",
    )


def throughput(history: RunHistory) -> figures.Plot:
    """Return the tokens per second, generated and trained on."""
    generated = [interval for actor in history.actors.values() for interval in actor.intervals()]
    trained = history.training_intervals()
    (unit, unit_s), start = time_unit(history), history.first_time or 0.0
    num_bins, width = _bins(start, generated, trained)
    edges = [start + index * width for index in range(num_bins + 1)]
    middles = [((low + width / 2) - start) / unit_s for low in edges[:-1]]
    traces = [
        figures.line_trace(middles, rate_over_time(intervals, edges), label, color)
        for intervals, label, color in ((generated, "generated", figures.GREEN), (trained, "trained", figures.BLUE))
        if intervals
    ]
    return figures.Plot(
        "Tokens per second",
        "Completion tokens the actors sampled and the learner trained on: a lasting gap is work thrown away, "
        "or rollouts piling up.",
        traces,
        figures.plot_layout(f"wall time ({unit})", "tokens / s", y={"rangemode": "tozero", "tickformat": ","}),
        missing="No actor has reported and no step has been made.",
    )


def _bins(start: float, generated: Sequence[Interval], trained: Sequence[Interval]) -> tuple[int, float]:
    """Return the number of equal bins from `start` to the last interval's end, and the seconds of each."""
    end = max((interval.end for interval in (*generated, *trained)), default=start)
    # No bin shorter than two steps: the tokens of a step come all at once.
    step_s = statistics.median([interval.end - interval.start for interval in trained]) if trained else 0.0
    num_bins = max(1, min(120, int((end - start) / max(2 * step_s, 2.0))))
    return num_bins, max((end - start) / num_bins, 1e-3)


def where_time_went(history: RunHistory) -> figures.Plot:
    """Return each service's time by kind of work."""
    bars: dict[str, dict[tuple[str, str], float]] = {}
    if history.steps:
        seconds = history.learner_seconds()
        bars["learner"] = {part: seconds[work] for work, part in LEARNER_WORK.items() if seconds[work] > 0}
    actors = sorted(history.actors.values(), key=lambda actor: actor.name)
    for actor in actors[:MAX_BARS]:
        bars[actor.name] = _actor_bar(actor.seconds)
    if len(actors) > MAX_BARS:
        bars[f"{len(actors) - MAX_BARS} more actors"] = _actor_bar(sum_seconds(actors[MAX_BARS:]))
    bars = {service: shares for service, shares in bars.items() if sum(shares.values()) > 0}
    layout = figures.plot_layout(
        "", "", x={"tickformat": ".0%", "range": [0, 1]}, y={"autorange": "reversed", "showgrid": False}
    )
    layout |= {"barmode": "stack", "bargap": 0.35, "hovermode": "closest", "height": 120 + 34 * len(bars)}
    layout["legend"]["traceorder"] = "normal"
    layout["margin"] = layout["margin"] | {"r": 24}
    return figures.Plot(
        "Where the time went",
        "Each service's own time, by what it was spent on: gray is idle, "
        "so the longer the gray, the less that side limits the run.",
        _stacked_bars(bars) if bars else [],
        layout,
        missing="No service has reported its time.",
        is_wide=True,
    )


def _actor_bar(seconds: Mapping[str, float]) -> dict[tuple[str, str], float]:
    """Return an actor's seconds by label and color."""
    known = {part: seconds[work] for work, part in ACTOR_WORK.items() if work in seconds}
    return known | {(work, figures.FAINT): spent for work, spent in seconds.items() if work not in ACTOR_WORK}


def _stacked_bars(bars: Mapping[str, Mapping[tuple[str, str], float]]) -> list[figures.Trace]:
    """Return one trace for each label and color, in the order of first appearance; values are shares of a bar."""
    parts = dict.fromkeys(part for shares in bars.values() for part in shares)
    totals = {service: sum(shares.values()) for service, shares in bars.items()}
    traces: list[figures.Trace] = []
    for label, color in parts:
        shown = {service: shares[label, color] for service, shares in bars.items() if shares.get((label, color), 0) > 0}
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "y": list(shown),
                "x": [spent / totals[service] for service, spent in shown.items()],
                "customdata": [f"{spent:,.1f} s" for spent in shown.values()],
                "marker": {"color": color, "line": {"width": 1, "color": figures.CARD}},
                "hovertemplate": "%{y}: %{fullData.name} %{x:.1%} (%{customdata})<extra></extra>",
            }
        )
    # Plotly orders the bars by first appearance in any trace: the first trace names them all.
    order = list(bars)
    anchor = {"type": "bar", "orientation": "h", "y": order, "x": [0.0] * len(order)}
    return [anchor | {"showlegend": False, "hoverinfo": "skip"}, *traces]


def time_unit(history: RunHistory) -> tuple[str, float]:
    """Return the unit for the run's wall time, and its seconds."""
    span = (history.last_time or 0.0) - (history.first_time or 0.0)
    if span < 300:
        return "s", 1.0
    return ("min", 60.0) if span < 3 * 3600 else ("h", 3600.0)


# Weights


def weight_sync(history: RunHistory) -> figures.Plot:
    """Return the publish and stall times of every weight update."""
    publish = _points([(row.policy_version, row.publish_s) for row in history.publishes], "publish", figures.INK)
    stalls = _by_actor([(row, row.stall_s) for row in history.commits], "stall, ")
    traces = [trace for trace in (publish, *stalls) if trace["x"]]
    return figures.Plot(
        "Weight updates",
        "Seconds from the start of a publish to its end, which training does not wait for, "
        "and seconds each actor's engine stood still to take it (log scale).",
        traces,
        figures.log_layout(traces, "seconds", "~g"),
        missing="No weights have been published.",
    )


def canary(history: RunHistory) -> figures.Plot:
    """Return the largest differences between engine and learner on the canary prompt."""
    traces = [trace for trace in _by_actor([(row, row.max_abs_diff) for row in history.canaries], "") if trace["x"]]
    return figures.Plot(
        "Canary: engine against learner",
        "Largest difference of one token's log-prob on a fixed prompt after each update (log scale): "
        "a jump means that an engine does not hold the learner's weights.",
        traces,
        figures.log_layout(traces, "max |Δ log-prob|", ".0e"),
        missing="No canary has been scored.",
    )


def _by_actor(measured: Iterable[tuple[CommitRow | CanaryRow, float | None]], prefix: str) -> list[figures.Trace]:
    """Return each actor's points; with more actors than colors, the median and the highest of each version."""
    values: dict[str, dict[int, float]] = {}
    for row, value in measured:
        if value is not None:
            values.setdefault(row.actor, {})[row.policy_version] = value
    if len(values) > len(figures.ACTOR_COLORS):
        by_version: dict[int, list[float]] = {}
        for version, value in (item for of_actor in values.values() for item in of_actor.items()):
            by_version.setdefault(version, []).append(value)
        versions = sorted(by_version)
        values = {
            f"median of {len(values)} actors": {version: statistics.median(by_version[version]) for version in versions},
            f"highest of {len(values)} actors": {version: max(by_version[version]) for version in versions},
        }
    return [
        _points(sorted(of_actor.items()), f"{prefix}{actor}", color)
        for (actor, of_actor), color in zip(sorted(values.items()), figures.ACTOR_COLORS, strict=False)
    ]


def _points(pairs: Iterable[tuple[float, float]], label: str, color: str) -> figures.Trace:
    """Return points over the policy version, without values that a log axis cannot show."""
    positive = [(version, value) for version, value in pairs if value > 0]
    xs, ys = figures.bucket([version for version, _ in positive]), figures.bucket([value for _, value in positive], max)
    return figures.line_trace(xs, ys, label, color, mode="markers") | {"marker": {"size": 5, "color": color, "opacity": 0.8}}
