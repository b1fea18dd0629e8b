"""`offbeat compare`: one page about several runs, their curves over each other and the settings in which they differ."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from offbeat.common.errors import SettingError
from offbeat.common.formats import duration, number
from offbeat.common.pages.figures import ACTOR_COLORS, Plot, line_trace, plot_layout, series
from offbeat.common.pages.page import Caption, Card, Grid, Mark, Missing, Page, PageHead, PageSection, Table, write_page
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.lab.history import RunHistory, read_run_history
from offbeat.lab.report.run_report import OUTCOME_TONES, outcome_of
from offbeat.lab.run_summary import RunSettings, read_settings
from offbeat.lab.sweep.estimates import Curve
from offbeat.lab.sweep.measures import NUM_FINAL_STEPS, RunCurves, RunMeasures, measure, reward_curves
from offbeat.lab.sweep.plots import NUM_SMOOTHED_STEPS, smooth
from offbeat.protocols.text import encodable

MOST_RUNS = len(ACTOR_COLORS)
"""Most runs of a page: as many as there are colors that the eye tells apart."""
_LEGEND_LINE = 18
"""Height of a line of the legend, in pixels."""


class ComparedRun(NamedTuple):
    """A run with everything that the page shows of it."""

    name: str
    history: RunHistory
    settings: RunSettings
    measures: RunMeasures
    curves: RunCurves


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page about the runs in `folders` to `path`; return `path`.

    Raise `SettingError` for a folder without a run, or for too few or too many of them.
    """
    if not 2 <= len(folders) <= MOST_RUNS:
        problem = f"{len(folders)} runs cannot be compared on one page"
        raise SettingError("RUN", " ".join(map(str, folders)), problem, f"Name from 2 to {MOST_RUNS} folders of runs.")
    runs = [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    return write_page(path, _page(runs, time.time()))


def differing_settings(runs: Sequence[RunSettings]) -> dict[str, list[str]]:
    """Return the settings in which runs differ, with each run's value; `not set` where a run's version did not have one."""
    flat = [run.flat() for run in runs]
    # The folder differs between any two runs.
    names = dict.fromkeys(name for settings in flat for name in settings if name != "run.dir")
    told = {name: [settings.get(name, "not set") for settings in flat] for name in names}
    return {name: values for name, values in told.items() if len(set(values)) > 1}


def _read(folder: Path, name: str) -> ComparedRun:
    history = read_run_history(folder)
    settings = read_settings(folder)
    steps, epochs = (int(settings.number("train", f"{name}_per_batch") or 1) for name in ("steps", "epochs"))
    train = TrainSection(steps_per_batch=steps, epochs_per_batch=epochs)
    return ComparedRun(name, history, settings, measure(history, train), reward_curves(history, train))


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its path without what all of them begin and end with."""
    parts = [folder.resolve().parts for folder in folders]
    shortest = min(map(len, parts))
    num_first = _num_equal(parts, shortest)
    num_last = _num_equal([one[::-1] for one in parts], shortest - num_first)
    return [encodable("/".join(one[num_first : len(one) - num_last]) or one[-1]) for one in parts]


def _num_equal(parts: Sequence[tuple[str, ...]], most: int) -> int:
    """Return how many parts, at most `most`, all paths begin with."""
    return next((index for index in range(most) if len({one[index] for one in parts}) > 1), most)


def _page(runs: Sequence[ComparedRun], now: float) -> Page:
    num_finished = sum(run.history.final is not None for run in runs)
    detail = f"{num_finished} of them have ended." if num_finished < len(runs) else "All of them have ended."
    tone = "good" if num_finished == len(runs) else "warn"
    sections = (
        _results(runs, now),
        _settings(runs),
        PageSection("Learning", "Who learns more of as many rollouts, and who gets there sooner?", [Grid(_learning(runs))]),
        PageSection("Staleness", "How old were the rollouts, and what did it cost?", [Grid(_staleness(runs))]),
        PageSection("Completions", "What became of the model's answers?", [Grid(_completions(runs))]),
    )
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    return Page(PageHead("Comparison", tone, f"{len(runs)} runs", detail, {}), None, sections, f"Written {written}.")


def _results(runs: Sequence[ComparedRun], now: float) -> PageSection:
    rows = []
    for run in runs:
        outcome, _ = outcome_of(run.history, now)
        measures = run.measures
        rows.append(
            (
                run.name,
                Mark(outcome, OUTCOME_TONES.get(outcome, "warn")),
                f"{measures.num_steps:,}",
                number(measures.final_reward),
                number(measures.held_out_reward),
                duration(measures.train_s),
                number(measures.tokens_per_s, ",.0f"),
                number(measures.learner_idle_share, ".0%"),
                number(measures.lag_mean, ".2f"),
                number(measures.clip_fraction, ".1%"),
            )
        )
    columns = ("Run", "State", "Steps", "Final reward", "Held-out", "Time", "Tokens / s", "Learner idle", "Lag", "Clipped")
    caption = Caption(
        f"A final reward is the mean of the last {NUM_FINAL_STEPS} steps, the held-out one that of the newest evaluation. "
        "Lags are those of each group's last step. The clock of a run starts with its first batch of rollouts. One run of each "
        "kind proves little: offbeat sweep compares over seeds, with intervals."
    )
    return PageSection("Results", "The runs in numbers.", [Card([Table(columns, rows, 2), caption])])


def _settings(runs: Sequence[ComparedRun]) -> PageSection:
    lead = "Settings in which the runs differ, but for their folders; all others are the same."
    differing = differing_settings([run.settings for run in runs])
    if not differing:
        return PageSection("Settings", lead, [Card([Missing(["They differ in no setting."])])])
    rows = [(name, *values) for name, values in sorted(differing.items())]
    return PageSection("Settings", lead, [Card([Table(("Setting", *(run.name for run in runs)), rows, 1 + len(runs))])])


def _learning(runs: Sequence[ComparedRun]) -> list[Plot]:
    by_groups = f"Reward over the groups trained on; means over {NUM_SMOOTHED_STEPS} steps."
    by_time = f"Reward over each run's clock; means over {NUM_SMOOTHED_STEPS} steps."
    held_out = "Reward on the held-out prompts."
    return [
        _plot("Reward by rollouts", "groups trained on", "reward", by_groups, runs, lambda run: smooth(run.curves.by_groups)),
        _plot("Reward by wall-clock", "seconds", "reward", by_time, runs, lambda run: smooth(run.curves.by_seconds)),
        _plot("Held-out reward", "policy version", "reward", held_out, runs, _held_out),
        _metric_plot("Gradient norm", "norm", "Length of the gradient before it is clipped", runs, "loss/grad_norm"),
    ]


def _staleness(runs: Sequence[ComparedRun]) -> list[Plot]:
    return [
        _metric_plot("Policy lag", "optimizer steps", "Mean lag of the groups of each step", runs, "lag/mean"),
        _metric_plot(
            "Clipped", "share", "Mean share of a completion's tokens that the objective clipped", runs, "clip/fraction"
        ),
        _metric_plot("Spread of the log ratio", "nats", "Standard deviation of the log sequence ratio", runs, "ratio/log_std"),
        _metric_plot("Waiting", "seconds", "Seconds of each step that the learner waited", runs, "time/wait_rollouts_s"),
    ]


def _completions(runs: Sequence[ComparedRun]) -> list[Plot]:
    return [
        _metric_plot("Length", "tokens", "Mean completion length of each step", runs, "length/mean"),
        _metric_plot("Entropy", "nats", "Mean entropy of the next token", runs, "entropy/mean"),
    ]


def _held_out(run: ComparedRun) -> Curve:
    rewards = run.history.held_out_rewards
    return Curve(list(rewards), list(rewards.values()))


def _metric_plot(title: str, unit: str, caption: str, runs: Sequence[ComparedRun], metric: str) -> Plot:
    def curve_of(run: ComparedRun) -> Curve:
        return smooth(Curve(*series(run.history.steps, metric)))

    plot = _plot(title, "optimizer step", unit, f"{caption}; means over {NUM_SMOOTHED_STEPS} steps.", runs, curve_of)
    plot.layout["yaxis"]["rangemode"] = "tozero"
    return plot


def _plot(
    title: str, x_title: str, y_title: str, caption: str, runs: Sequence[ComparedRun], curve_of: Callable[[ComparedRun], Curve]
) -> Plot:
    """Return one line for each run that has the curve; a run has the same color on all plots."""
    traces = [
        line_trace(curve.xs, curve.ys, run.name, color)
        for run, color in zip(runs, itertools.cycle(ACTOR_COLORS), strict=False)
        if (curve := curve_of(run)).xs
    ]
    layout = plot_layout(x_title, y_title)
    # Long names take a line of the legend each.
    layout["height"] += _LEGEND_LINE * len(runs)
    return Plot(title, caption, traces, layout, missing="No run has recorded it.")
