"""The report of a run: one HTML page that needs neither a network nor other files.

Started as a program with the folder of a run, this module prints the report without its head, for the live page.
"""

import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from offbeat.common.formats import duration, number
from offbeat.common.pages import page
from offbeat.common.records.rows import LedgerSums
from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.records.writer import ROWS_FILE
from offbeat.common.settings.objectives import DEFAULTS
from offbeat.lab import drift
from offbeat.lab.history import LagDrift, RunHistory, TurnDrift, read_run_history
from offbeat.lab.report import run_plots, staleness_plots
from offbeat.lab.report.sections import evaluation_samples_sections, evaluation_sections, health_section, samples_section
from offbeat.lab.run_summary import RunSettings, read_settings, state_without_end
from offbeat.learner.diagnostics.length_bias import MAX_P, MIN_EFFECT, MIN_LEASES, MIN_SHARE
from offbeat.protocols.text import encodable

REPORT_FILE = "report.html"

MAX_EVENT_ROWS = 400
"""Number of events that the page shows; of a longer list, the first and the last half of this number."""

_NUM_EDGE_STEPS = 10
"""Steps that the first and the last reward are averaged over."""

_BAD_EVENTS = (
    *("actor_lost", "actor_excluded", "actor_refused", "actor_quarantined", "bad_message", "bias_alarm", "canary_mismatch"),
    *("completions_left_out", "group_rejected", "health", "learner_doubted", "metrics_rows_lost", "prompt_dropped"),
    *("reward_error", "reward_timeout"),
)
_DOUBTFUL_EVENTS = ("actor_left", "calibration_mismatch", "clip_mispredicted", "lease_expired", "noise_reaches_bounds")
_GOOD_EVENTS = ("actor_joined", "health_cleared")
_EVENT_TONES = dict.fromkeys(_BAD_EVENTS, "bad") | dict.fromkeys(_DOUBTFUL_EVENTS, "warn") | dict.fromkeys(_GOOD_EVENTS, "good")

OUTCOME_TONES = {"finished": "good", "stopped": "warn", "failed": "bad", "running": "calm"}


def write_report(run_folder: Path) -> Path:
    """Write `run_folder/report.html` from the run's metrics rows and settings; return its path.

    The page of a run that is short, empty, failed or still going says so. `SettingError` for a folder without metrics.
    """
    return page.write_page(run_folder / REPORT_FILE, read_report(run_folder))


def read_report(run_folder: Path) -> page.Page:
    """Return the report of the run so far, from its metrics rows and settings; raise as `write_report` does."""
    broken_lines: list[int] = []
    history = read_run_history(run_folder, broken_lines)
    return _page(encodable(run_folder.resolve().name), history, read_settings(run_folder), broken_lines, time.time())


def _page(name: str, history: RunHistory, config: RunSettings, broken_lines: Sequence[int], now: float) -> page.Page:
    report = drift.drift_report(history)
    newest_evaluation = history.evaluations[max(history.evaluations)] if history.evaluations else None
    sections = (
        health_section(history.events, history.first_time, newest_evaluation),
        _learning(history, config),
        *evaluation_sections(history),
        _staleness(history, config),
        _drift(report.by_lag, report.by_turn),
        samples_section(history.samples),
        *evaluation_samples_sections([row for _, row in sorted(history.evaluation_samples.items())]),
        _rollouts(history),
        _bias(report),
        _weights(history),
        _ledger(history),
        _actors(history),
        _events(history),
        _settings(config),
    )
    return page.Page(_head(name, history, config, now), _key_figures(history), sections, _foot(history, broken_lines, now))


# Head


def _head(name: str, history: RunHistory, config: RunSettings, now: float) -> page.PageHead:
    outcome, detail = outcome_of(history, now)
    return page.PageHead(name, OUTCOME_TONES.get(outcome, "warn"), outcome, detail, _facts(history, config))


def outcome_of(history: RunHistory, now: float) -> tuple[str, str]:
    """Return the outcome in a word and in a sentence."""
    if history.final is not None:
        return history.final.outcome, history.final.detail
    if history.last_time is None:
        return "empty", "The run has written no rows."
    state = state_without_end(history.last_time, now)
    if state == "running":
        return state, "This page shows the run so far; write the report again for a newer one."
    quiet_s = now - history.last_time
    return state, f"The rows end {duration(quiet_s)} ago without a final one: the learner hangs or was killed."


def _facts(history: RunHistory, config: RunSettings) -> dict[str, str]:
    def told(section: str, name: str) -> str:
        value = config.setting(section, name)
        return "not recorded" if value in (None, "") else str(value)

    version, num_steps = history.steps[-1].policy_version if history.steps else 0, config.number("train", "num_steps")
    started = history.first_time
    facts = {
        "Model": told("model", "path"),
        "Task": told("data", "train_data"),
        "Reward": told("task", "reward"),
        "Policy version": f"{version:,}" if num_steps is None else f"{version:,} of {num_steps:,.0f}",
        "Actors seen": f"{len(history.actors)}",
        "Started": "never" if started is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "Wall time": duration(history.times.wall_s),
    }
    software = [event.detail for event in history.events if event.event == "run_started"]
    return facts | ({"Software": software[-1]} if software else {})


def _key_figures(history: RunHistory) -> page.Tiles:
    num_generated = sum(actor.num_generated_tokens for actor in history.actors.values())
    trained = _rate_figure("Trained", sum(_numbers(history, "tokens/trained")), history.times.wall_s)
    return page.Tiles(
        (
            _reward_figure(history),
            _held_out_figure(history),
            _lag_figure(history),
            _clip_figure(history),
            _rate_figure("Generated", num_generated, history.times.wall_s),
            trained._replace(note=f"{trained.note}{_utilization(history)}"),
            _idle_figure(history),
            _dropped_figure(history),
        )
    )


def _reward_figure(history: RunHistory) -> page.KeyFigure:
    rewards = _numbers(history, "reward/mean")
    if not rewards:
        return page.KeyFigure("Reward", "–", "", "no step yet")
    last = statistics.fmean(rewards[-_NUM_EDGE_STEPS:])
    if len(rewards) < 2 * _NUM_EDGE_STEPS:
        return page.KeyFigure("Reward", f"{last:.3f}", "", f"mean of the last {min(len(rewards), _NUM_EDGE_STEPS)} steps")
    first = statistics.fmean(rewards[:_NUM_EDGE_STEPS])
    return page.KeyFigure("Reward", f"{last:.3f}", "", f"last {_NUM_EDGE_STEPS} steps; first {_NUM_EDGE_STEPS}: {first:.3f}")


def _held_out_figure(history: RunHistory) -> page.KeyFigure:
    rewards = history.held_out_rewards
    if not rewards:
        return page.KeyFigure("Held-out reward", "–", "", "no evaluation")
    last, best = max(rewards), max(rewards, key=rewards.__getitem__)
    note = f"at version {last}; best {rewards[best]:.3f} at {best}"
    return page.KeyFigure("Held-out reward", f"{rewards[last]:.3f}", "", note)


def _lag_figure(history: RunHistory) -> page.KeyFigure:
    counts = history.groups_by_lag
    if not counts:
        return page.KeyFigure("Policy lag", "–", "", "no group trained")
    mean = sum(lag * count for lag, count in counts.items()) / sum(counts.values())
    num_over = sum(int(count) for count in _numbers(history, "staleness/over_bound"))
    note = f"largest {max(counts)}; above the bound {num_over:,} times"
    return page.KeyFigure("Policy lag", f"{mean:.2f}", "steps", note)


def _clip_figure(history: RunHistory) -> page.KeyFigure:
    fractions = _numbers(history, "clip/fraction")
    if not fractions:
        return page.KeyFigure("Clipped", "–", "", "no step yet")
    note = f"mean over completions; highest step {max(fractions):.1%}"
    return page.KeyFigure("Clipped", f"{statistics.fmean(fractions):.1%}", "", note)


def _utilization(history: RunHistory) -> str:
    """Return the share of its devices' speed that the learner used while it trained; empty where no step recorded it."""
    useful = made = possible = 0.0
    for row in history.steps:
        flops, again, share = (row.number(f"compute/{name}") for name in ("flops", "recomputed", "mfu"))
        if flops and share and again is not None:
            useful, made, possible = useful + flops, made + flops * (1 + again), possible + flops / share
    return f"; MFU {useful / possible:.0%}, with recomputation {made / possible:.0%}" if possible else ""


def _rate_figure(label: str, num_tokens: float, wall_s: float) -> page.KeyFigure:
    if not num_tokens or not wall_s:
        return page.KeyFigure(label, "–", "", "no tokens yet")
    return page.KeyFigure(label, f"{num_tokens / wall_s:,.0f}", "tok/s", f"{num_tokens:,.0f} completion tokens in all")


def _idle_figure(history: RunHistory) -> page.KeyFigure:
    seconds = history.learner_seconds()
    total = sum(seconds.values())
    if not total:
        return page.KeyFigure("Learner waited", "–", "", "no step yet")
    median = statistics.median(_numbers(history, "time/step_s") or [0.0])
    return page.KeyFigure("Learner waited", f"{seconds['wait_rollouts'] / total:.0%}", "", f"median step {median:.2f} s")


def _dropped_figure(history: RunHistory) -> page.KeyFigure:
    num_groups = len(history.groups)
    if not num_groups:
        return page.KeyFigure("Groups dropped", "–", "", "no group yet")
    num_dropped = sum(history.groups_by_drop_reason.values())
    return page.KeyFigure("Groups dropped", f"{num_dropped / num_groups:.1%}", "", f"{num_dropped:,} of {num_groups:,}")


def _numbers(history: RunHistory, name: str) -> list[float]:
    return [value for row in history.steps if (value := row.number(name)) is not None]


# Plots


def _learning(history: RunHistory, config: RunSettings) -> page.PageSection:
    plots = (
        run_plots.reward_by_step(history),
        run_plots.reward_by_time(history),
        *run_plots.reward_by_task(history),
        *run_plots.share_by_task(history),
        run_plots.gradient_norm(history, config.number("train", "max_grad_norm")),
        run_plots.groups_without_signal(history),
    )
    return page.PageSection("Learning", "Does the policy get better, and is the optimization calm?", [page.Grid(plots)])


def _staleness(history: RunHistory, config: RunSettings) -> page.PageSection:
    clip_low, clip_high = config.number("loss", "clip_low"), config.number("loss", "clip_high")
    objective = DEFAULTS.get(str(config.setting("loss", "objective")).partition("(")[0])
    by_length = config.setting("loss", "clip_by") == "own_length"
    if by_length or (objective is not None and objective.bounds_divergence):
        clip_low = clip_high = None
    plots = (
        staleness_plots.lag_histogram(history),
        staleness_plots.lag_by_step(history),
        staleness_plots.clip_fraction(history),
        staleness_plots.log_ratio(history, clip_low, clip_high),
    )
    lead = "How old were the rollouts when they were trained on, and how much of them did the objective set aside?"
    return page.PageSection("Staleness", lead, [page.Grid(plots)])


def _drift(lines: Sequence[LagDrift], by_turn: Sequence[TurnDrift]) -> page.PageSection:
    lead = "How far had the policy moved from what sampled the completions, at each policy lag?"
    if not lines:
        return page.PageSection(
            "Drift by policy lag", lead, [page.Card([page.Missing(["No step has recorded its drift by policy lag."])])]
        )
    note = page.Caption(
        "Means over all completions of the run at that lag. The spread is that of all of them; the effective sample size (ESS) "
        "is the share of each step's completions that counts, averaged over the steps by their completions."
    )
    tables = [page.Card([page.Table(drift.DRIFT_HEAD, [drift.drift_cells(line) for line in lines], 1), note], is_wide=True)]
    if by_turn:
        note = page.Caption(
            "Means over the sampled tokens of such turns: of their own lag, and of the KL estimate of engine and learner."
        )
        tables.append(
            page.Card([page.Table(drift.TURN_HEAD, [drift.turn_cells(line) for line in by_turn], 1), note], is_wide=True)
        )
    plots = (
        staleness_plots.log_ratio_by_lag(lines),
        staleness_plots.clip_by_lag(lines),
        staleness_plots.reward_and_length_by_lag(lines),
    )
    return page.PageSection("Drift by policy lag", lead, [page.Grid([*tables, *plots])])


def _rollouts(history: RunHistory) -> page.PageSection:
    plots = (run_plots.completion_lengths(history), run_plots.throughput(history), run_plots.where_time_went(history))
    return page.PageSection("Rollouts and time", "Who waits for whom, and is anything biased away?", [page.Grid(plots)])


def _weights(history: RunHistory) -> page.PageSection:
    plots = (run_plots.weight_sync(history), run_plots.canary(history))
    return page.PageSection("Weights", "What the updates cost, and whether they arrived.", [page.Grid(plots)])


# Bias


def _bias(report: drift.DriftReport) -> page.PageSection:
    lead = "Did training leave out leases that differ from the others in length, duration or reward?"
    first, *others = report.verdict
    blocks: list[page.Block] = [page.Sentence(first, "bad" if report.bias.alarm else "good"), *map(page.Sentence, others)]
    blocks.append(page.Table(drift.part_head(report.bias), drift.part_rows(report.bias, report.books), 1))
    if tests := drift.comparison_rows(report.bias):
        blocks.append(page.Table(drift.COMPARISON_HEAD, tests, 2))
    note = page.Caption(
        "Lengths and rewards are means of a group's completions. Mann-Whitney U tests are among leases that ended about the "
        "same time. Effect: rank-biserial correlation, from -1 to 1; "
        f"an alarm needs p < {MAX_P:g}, an effect of {MIN_EFFECT:g}, and {MIN_SHARE:.0%} and {MIN_LEASES} of the leases."
    )
    return page.PageSection("Bias", lead, [page.Card([*blocks, note])])


# Ledger


def _ledger(history: RunHistory) -> page.PageSection:
    books = history.ledger
    lead = "Every lease ends in exactly one way; whatever is lost or counted twice would break this sum."
    if books is None:
        missing = page.Missing(
            [
                "The books are closed in the final row, which this run has not written.",
                f"So far its rows tell of {history.num_groups_trained:,} groups trained and "
                f"{sum(history.groups_by_drop_reason.values()):,} dropped{_reasons(history.groups_by_drop_reason)}.",
            ]
        )
        return page.PageSection("Ledger", lead, [page.Card([missing])])
    terms = (
        page.Term("trained", books.trained, "calm"),
        page.Term(f"dropped{_reasons(books.dropped)}", sum(books.dropped.values()), "bad"),
        page.Term("expired", books.expired, "warn"),
        page.Term("in flight", books.in_flight, "idle"),
    )
    return page.PageSection(
        "Ledger", lead, [page.Card([page.Sum(page.Term("leased", books.leased, "whole"), terms), _law(books, terms)])]
    )


def _law(books: LedgerSums, terms: Sequence[page.Term]) -> page.Sentence:
    sum_text = f"{' + '.join(f'{term.number:,}' for term in terms)} = {books.num_accounted:,}"
    missing = books.leased - books.num_accounted
    if missing == 0:
        return page.Sentence(f"The law holds: {sum_text}, every lease is accounted for.", "good")
    fault = f"{missing:,} leases are unaccounted for" if missing > 0 else f"{-missing:,} are counted twice"
    return page.Sentence(f"The law is broken: {sum_text}, not {books.leased:,}; {fault}.", "bad")


def _reasons(dropped: Mapping[str, int]) -> str:
    """Return ` { stale 18, reward_error 2 }`, empty without drops."""
    parts = sorted(dropped.items(), key=lambda item: -item[1])
    text = ", ".join(f"{reason or 'no reason'} {count:,}" for reason, count in parts)
    return f" {{ {text} }}" if text else ""


# Tables


def _actors(history: RunHistory) -> page.PageSection:
    lead = "What each actor did, all its restarts under one name added up."
    if not history.actors:
        return page.PageSection("Actors", lead, [page.Card([page.Missing(["No actor has reported."])])])
    start = history.first_time or 0.0
    rows = [
        (
            actor.name,
            number(actor.policy_version, ","),
            f"{actor.num_groups_sent:,}",
            f"{actor.num_generated_tokens:,}",
            number(actor.tokens_per_s, ",.0f"),
            duration(actor.times[0] - start),
            duration(actor.times[-1] - start),
        )
        for actor in sorted(history.actors.values(), key=lambda actor: actor.name)
    ]
    columns = ("Actor", "Last version", "Groups sent", "Tokens", "tok/s", "First heard at", "Last heard at")
    return page.PageSection("Actors", lead, [page.Card([page.Table(columns, rows, 1)])])


def _events(history: RunHistory) -> page.PageSection:
    lead = "Joins, losses, exclusions, and whatever else was out of the ordinary."
    if not history.events:
        return page.PageSection("Events", lead, [page.Card([page.Missing(["Nothing happened."])])])
    counts = Counter(event.event for event in history.events)
    shown, note = history.events, []
    if len(shown) > MAX_EVENT_ROWS:
        note = [page.Caption(f"The first and the last {MAX_EVENT_ROWS // 2} of {len(shown):,} events.")]
        shown = shown[: MAX_EVENT_ROWS // 2] + shown[-MAX_EVENT_ROWS // 2 :]
    start = history.first_time or 0.0
    rows = [
        (
            duration(event.time - start),
            page.Mark(event.event, _EVENT_TONES.get(event.event, "calm")),
            event.actor or "",
            event.detail,
        )
        for event in shown
    ]
    listing = page.Table(("After", "Event", "Actor", "Detail"), rows, 4)
    return page.PageSection("Events", lead, [page.Card([page.NamedNumbers(dict(counts.most_common())), listing, *note])])


def _settings(config: RunSettings) -> page.PageSection:
    lead = "The resolved settings the run was started with."
    if not config.text:
        return page.PageSection("Settings", lead, [page.Card([page.Missing([f"The folder has no {CONFIG_FILE}."])])])
    return page.PageSection("Settings", lead, [page.Folded(CONFIG_FILE, "", [config.text])])


def _foot(history: RunHistory, broken_lines: Sequence[int], now: float) -> str:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    broken = ""
    if broken_lines:
        first = ", ".join(str(line) for line in broken_lines[:5])
        broken = f" {len(broken_lines):,} unreadable lines were skipped (first: {first})."
    return f"Written {written} from {history.num_rows:,} rows of {ROWS_FILE}.{broken}"


if __name__ == "__main__":
    sys.stdout.buffer.write(page.sections_html(read_report(Path(sys.argv[1]))).encode())
