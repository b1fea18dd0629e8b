"""The report of a sweep: one HTML page that needs no network, and a file with its numbers."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from offbeat.common.formats import duration, number
from offbeat.common.pages import page
from offbeat.common.processes import files
from offbeat.common.records.run_folder import writing
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import resolved_toml
from offbeat.lab.report.run_report import REPORT_FILE
from offbeat.lab.sweep import plots as sweep_plots
from offbeat.lab.sweep.estimates import CONFIDENCE, PAIRED_CONFIDENCE, SIGNIFICANT, AgainstBaseline, Estimate
from offbeat.lab.sweep.measures import NUM_FINAL_STEPS
from offbeat.lab.sweep.plan import ENDED, read_baseline, read_plan
from offbeat.lab.sweep.recommendation import RULE
from offbeat.lab.sweep.summary import Curves, Summary, Value, gather

SUMMARY_FILE = "sweep.json"
"""The file of the sweep's `Summary`."""

_STATE_TONES = {"finished": "good", "hopeless": "bad", "broken off": "bad", "new": "idle"}


def write_sweep_report(folder: Path, margin: float, baseline: Sequence[str] = ()) -> Path:
    """Write `folder/report.html` and `folder/sweep.json` from the rows of its runs so far; return the page's path.

    `margin` is the loss of final reward that does not matter, see `lab.sweep.recommendation`. `baseline` has settings
    `KEY=VALUE` whose value the others are compared with, all other settings alike; empty: the reference is compared with all.
    Raises `SettingError` where the folder is no sweep's, or cannot be written.
    """
    plan = read_plan(folder)
    summary, curves, config = gather(folder, plan, margin, read_baseline(plan, baseline))
    with writing(folder, "--out"):
        files.replace(folder / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(summary)) + b"\n")
    return page.write_page(folder / REPORT_FILE, _page(folder.resolve().name, summary, curves, config))


def _page(name: str, summary: Summary, curves: Curves, config: Config) -> page.Page:
    sections = (
        _recommendation(summary),
        _learning(summary, curves),
        _speed(summary),
        _staleness(summary),
        _bias(summary),
        _differences(summary),
        _runs(summary),
        _settings(config),
    )
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    foot = f"Written {written}; all numbers are in {SUMMARY_FILE}."
    return page.Page(_head(name, summary, config), _key_figures(summary), sections, foot)


def _head(name: str, summary: Summary, config: Config) -> page.PageHead:
    num_ended = sum(run.state in ENDED for run in summary.runs)
    num_hopeless = sum(run.state == "hopeless" for run in summary.runs)
    is_complete = num_ended == len(summary.runs)
    what = "complete" if is_complete else "incomplete"
    detail = f"{num_ended} of {len(summary.runs)} runs are finished; only these count."
    if is_complete:
        detail = f"{num_ended} runs, one after another or side by side; each has a report of its own."
    if num_hopeless:
        detail += f" {num_hopeless} of them were stopped as hopeless, and count with the reward that they had then."
    facts = {
        "Varied": "; ".join(f"{setting} = {', '.join(values)}" for setting, values in summary.settings.items()),
        "Seeds": f"{len(summary.seeds)} ({', '.join(map(str, summary.seeds))})",
        "Reference": _title(summary, summary.reference),
        "Training time of all runs": duration(sum(run.measures.train_s for run in summary.runs)),
        "Model": config.model.path,
        "Task": config.data.train_data,
        "Objective": config.loss.objective,
        "Steps": f"{config.train.num_steps:,} of {config.train.groups_per_step} groups",
    }
    return page.PageHead(name, "good" if is_complete else "warn", what, detail, facts)


def _title(summary: Summary, label: str) -> str:
    return f"{next(iter(summary.settings))} = {label}" if len(summary.settings) == 1 else label


def _key_figures(summary: Summary) -> page.Tiles:
    best = next((value for value in summary.values if value.label == summary.recommendation.label), None)
    base = next(value for value in summary.values if value.label == summary.reference)
    return page.Tiles(
        (
            page.KeyFigure("Recommended", best.label if best else "–", "", _setting_names(summary)),
            _reward_tile("Final reward of the reference", base),
            _reward_tile("Final reward of the recommended", best),
            _ratio_tile(best, summary),
        )
    )


def _setting_names(summary: Summary) -> str:
    return ", ".join(summary.settings)


def _reward_tile(label: str, value: Value | None) -> page.KeyFigure:
    reward = value.estimates.get("final_reward") if value else None
    if value is None or reward is None:
        return page.KeyFigure(label, "–", "", "no finished run")
    spread = "one seed" if reward.std is None else f"± {reward.std:.3f} between {reward.num_seeds} seeds"
    return page.KeyFigure(label, f"{reward.mean:.3f}", "", f"{value.label}; {spread}")


def _ratio_tile(best: Value | None, summary: Summary) -> page.KeyFigure:
    note = f"wall-clock to within {summary.margin:g} of the reference's reward, over the reference's"
    if best is None or best.time_ratio is None:
        return page.KeyFigure("Time", "–", "", note)
    return page.KeyFigure("Time", f"{best.time_ratio.difference:.2f}", "×", note)


def _recommendation(summary: Summary) -> page.PageSection:
    told = summary.recommendation
    caption = page.Caption(
        f"The rule: {RULE} The margin is {summary.margin:g} (--difference), the reference "
        f"{_title(summary, summary.reference)}; values are compared by Welch's t-test at {CONFIDENCE:.0%}. A "
        f"final reward is the mean of the last {NUM_FINAL_STEPS} steps, whose completions are as old as the run's lag: where "
        "the policy still improves, the held-out reward is the fairer one."
    )
    headline = page.Sentence(told.headline, "good" if told.label is not None else "warn")
    card = page.Card([headline, page.Bullets(told.sentences), caption])
    return page.PageSection("Recommendation", "What these runs say, and what they cannot say.", [card])


def _learning(summary: Summary, curves: Curves) -> page.PageSection:
    plots = (
        sweep_plots.reward_by_groups(summary, curves),
        sweep_plots.reward_by_time(summary, curves),
        sweep_plots.final_reward(summary),
        sweep_plots.seconds_to_margin(summary),
    )
    columns: dict[str, Callable[[Value], str]] = {
        "Runs": _num_runs,
        "Final reward": _shown("final_reward", ".3f"),
        "Held-out reward": _shown("held_out_reward", ".3f"),
        "Wall-clock, s": _shown("train_s", ",.1f"),
        f"To within {summary.margin:g}, s": lambda value: _reach(value.seconds_to_margin, value.num_to_margin, value),
        "In groups": lambda value: _estimate(value.groups_to_margin, ",.0f"),
        "Over the reference's": lambda value: value.time_ratio.text(".2f") if value.time_ratio else "–",
        "To the reference's own, s": lambda value: _reach(value.seconds_to_reference, value.num_to_reference, value),
    }
    caption = (
        "Mean and standard deviation between seeds. The clock of a run starts with its first batch of rollouts. “To within "
        f"{summary.margin:g}” and “to the reference's own”: until the mean of {NUM_FINAL_STEPS} steps is as high as the "
        "reference's final reward, less the margin or not; “k of n” where not every seed came there, of those that did."
    )
    table = _value_table(summary, columns, caption)
    return page.PageSection(
        "Learning", "Does a staler run learn as much, and does it get there sooner?", [page.Grid(plots), table]
    )


def _speed(summary: Summary) -> page.PageSection:
    columns = {
        "Tokens trained / s": _shown("tokens_per_s", ",.0f"),
        "Groups / s": _shown("groups_per_s", ".2f"),
        "Learner idle": _shown("learner_idle_share", ".1%"),
        "Actors: wait for leases": _shown("actor_wait_leases_share", ".1%"),
        "for weights": _shown("actor_wait_weights_share", ".1%"),
        "for rewards": _shown("actor_wait_rewards_share", ".1%"),
        "generate": _shown("actor_generate_share", ".1%"),
    }
    caption = (
        "Mean and standard deviation between seeds; actors' shares are of their main loops, all of a run's actors together."
    )
    plots = (sweep_plots.throughput(summary), sweep_plots.waiting(summary))
    table = _value_table(summary, columns, caption)
    return page.PageSection("Throughput", "Who waits for whom?", [page.Grid(plots), table])


def _staleness(summary: Summary) -> page.PageSection:
    columns = {
        "Lag, mean": _shown("lag_mean", ".2f"),
        "Lag, largest": _shown("lag_max", ".1f"),
        "KL(behavior ‖ policy)": _shown("kl_behavior_policy", ".2e"),
        "Clip fraction": _shown("clip_fraction", ".2%"),
        "Std of log ratio": _shown("log_ratio_std", ".4f"),
    }
    caption = (
        "Mean and standard deviation between seeds, of means over each run's steps; lags are those of each group's last "
        "step, in optimizer steps, the largest is the mean of each run's largest; KL is the k3 estimate in nats per token."
    )
    plots = (sweep_plots.lag(summary), sweep_plots.drift(summary))
    lead = "How old were the rollouts, and how far had the policy moved on?"
    return page.PageSection("Lag and drift", lead, [page.Grid(plots), _value_table(summary, columns, caption)])


def _bias(summary: Summary) -> page.PageSection:
    ended = [run for run in summary.runs if run.state in ENDED]
    alarms = [f"{run.name}: {run.measures.bias_alarm}" for run in ended if run.measures.bias_alarm is not None]
    columns = {
        "Length generated": _shown("generated_length", ",.1f"),
        "Length trained": _shown("trained_length", ",.1f"),
        "Dropped": _shown("dropped_share", ".1%"),
    }
    caption = "Mean and standard deviation between seeds. Lengths are in tokens. `offbeat drift` tells more about one run."
    verdict: list[page.Block] = [page.Sentence("No run raises the bias alarm.", "good")]
    if alarms:
        verdict = [page.Sentence(f"Bias alarms: {len(alarms)}", "bad"), page.Bullets(alarms)]
    blocks = [_value_table(summary, columns, caption), page.Card(verdict)]
    return page.PageSection("Bias", "Is anything kept from training for what it is?", blocks)


def _differences(summary: Summary) -> page.PageSection:
    lead = "Every value less its baseline, over the seeds that both have, and whether the corrected test distinguishes them."
    if not any(one.final_reward for one in summary.differences):
        return page.PageSection("Comparisons", lead, [page.Card([page.Missing(["There are no two values to compare."])])])
    rows = [
        (
            one.label,
            one.baseline,
            _verdict(one.final_reward),
            *_difference(one.final_reward),
            *_difference(one.held_out_reward),
            one.train_s.text(".2f") if one.train_s else "–",
        )
        for one in summary.differences
    ]
    columns = ("Value", "Baseline", "Final reward", "Difference", "p (Holm)", "Held-out", "p (Holm)", "Wall-clock, ratio")
    caption = page.Caption(
        f"Mean difference in pairs of one seed, with Student's interval at {PAIRED_CONFIDENCE:.0%}. P-values are corrected by "
        f"Holm's method for all values of one baseline; distinguishable means p < {SIGNIFICANT:g}. Ratios of wall-clock are of "
        f"finished runs, with Welch's interval at {CONFIDENCE:.0%}. --baseline KEY=VALUE chooses what is compared with what."
    )
    return page.PageSection("Comparisons", lead, [page.Card([page.Table(columns, rows, 3), caption])])


def _verdict(against: AgainstBaseline | None) -> page.Mark:
    if against is None:
        return page.Mark("no pair", "idle")
    if against.adjusted_p is None:
        return page.Mark("one seed", "idle")
    if not against.is_significant:
        return page.Mark("not distinguishable", "calm")
    return page.Mark("higher", "good") if against.compared.difference > 0 else page.Mark("lower", "bad")


def _difference(against: AgainstBaseline | None) -> tuple[str, str]:
    """Return the difference with its interval, and its corrected p-value."""
    if against is None:
        return "–", "–"
    return against.compared.text(), number(against.adjusted_p, ".3f")


def _runs(summary: Summary) -> page.PageSection:
    rows = [
        (
            page.LinkedText(run.name, f"{run.name}/{REPORT_FILE}") if run.measures.num_steps else run.name,
            page.Mark(run.state if run.state != "new" else "not begun", _STATE_TONES[run.state]),
            f"{run.measures.num_steps:,}",
            number(run.measures.final_reward, ".3f"),
            number(run.measures.held_out_reward, ".3f"),
            f"{run.measures.train_s:,.1f}",
            number(run.to_margin.seconds, ",.1f"),
            number(run.to_reference.seconds, ",.1f"),
            number(run.measures.lag_mean, ".2f"),
            ", ".join(f"{reason} {count:,}" for reason, count in run.measures.dropped.items()) or "–",
        )
        for run in summary.runs
    ]
    columns = ("Run", "State", "Steps", "Final reward", "Held-out", "Wall-clock, s")
    columns += (f"To within {summary.margin:g}, s", "To the reference's own, s", "Lag", "Dropped")
    return page.PageSection("Runs", "Each run's own report is behind its name.", [page.Card([page.Table(columns, rows, 2)])])


def _settings(config: Config) -> page.PageSection:
    lead = "Of the first run, all of them; the others differ in what is varied, and in run.seed and run.dir."
    return page.PageSection("Settings", lead, [page.Folded("run.toml", "", [resolved_toml(config)])])


def _value_table(summary: Summary, columns: dict[str, Callable[[Value], str]], caption: str) -> page.Card:
    """Return a card with a line for each value; `columns` makes the cells under each heading."""
    rows = [(_label(summary, value), *(cell(value) for cell in columns.values())) for value in summary.values]
    return page.Card([page.Table((_setting_names(summary), *columns), rows, 1), page.Caption(caption)])


def _label(summary: Summary, value: Value) -> page.NotedText:
    marks = [
        mark
        for mark, label in (("reference", summary.reference), ("recommended", summary.recommendation.label))
        if label == value.label
    ]
    return page.NotedText(value.label, ", ".join(marks))


def _shown(name: str, form: str) -> Callable[[Value], str]:
    return lambda value: _estimate(value.estimates.get(name), form)


def _estimate(number: Estimate | None, form: str) -> str:
    """Return mean and standard deviation as text."""
    if number is None:
        return "–"
    return f"{number.mean:{form}}" if number.std is None else f"{number.mean:{form}} ± {number.std:{form}}"


def _num_runs(value: Value) -> str:
    hopeless = f", {value.num_hopeless} hopeless" if value.num_hopeless else ""
    return f"{value.num_finished} of {value.num_planned}{hopeless}"


def _reach(seconds: Estimate | None, num_seeds: int, value: Value) -> str:
    """Return the seconds, and where not every seed came there, the number that did."""
    if seconds is None:
        return f"{num_seeds} of {value.num_finished}" if value.num_finished else "–"
    some = "" if num_seeds == value.num_finished else f" ({num_seeds} of {value.num_finished})"
    return _estimate(seconds, ",.1f") + some
