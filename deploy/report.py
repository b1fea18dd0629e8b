"""The report of a run: one HTML page that needs neither a network nor anything beside it."""

import html
import logging
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from common.metrics import ROWS_FILE, read_rows
from deploy import report_plots
from deploy.history import Ledger, RunHistory, fold_rows, number
from deploy.report_plots import Plot

logger = logging.getLogger(__name__)

REPORT_FILE = "report.html"
CONFIG_FILE = "config.toml"
"""The resolved settings, as the learner wrote them into the run's folder."""

MAX_EVENT_ROWS = 400
"""Of a longer list of events the page shows the first and the last half."""

ALIVE_WITHIN_S = 60.0
"""A run without a final row counts as running when its newest row is no older."""

_NUM_EDGE_STEPS = 10
"""The first and the last reward are means over so many steps."""

_EVENT_TONES = {
    "actor_joined": "good",
    "actor_lost": "bad",
    "actor_excluded": "bad",
    "actor_refused": "bad",
    "bad_message": "bad",
    "canary_mismatch": "bad",
    "group_rejected": "bad",
    "prompt_dropped": "bad",
    "reward_error": "bad",
    "reward_timeout": "bad",
    "metrics_rows_lost": "bad",
    "lease_expired": "warn",
    "actor_left": "warn",
}

_OUTCOME_TONES = {"finished": "good", "stopped": "warn", "failed": "bad", "running": "calm"}


def write_report(run_folder: Path) -> Path:
    """Write `run_folder/report.html` from the run's metrics rows and settings; returns its path.

    Works at any time: a run that is short, empty, failed or still going gives a page that says so. `FileNotFoundError`
    for a folder without metrics.
    """
    rows_file = run_folder / ROWS_FILE
    if not rows_file.is_file():
        raise FileNotFoundError(f"{run_folder} has no {ROWS_FILE}: it is not the folder of a run (setting run.dir)")
    broken_lines: list[int] = []
    history = fold_rows(read_rows(rows_file, broken_lines))
    page = _page(run_folder.resolve().name, history, _read_config(run_folder), broken_lines, time.time())
    # Under another name first: someone may be reading the report of a running run.
    unfinished = run_folder / f"{REPORT_FILE}.tmp"
    unfinished.write_text(page, encoding="utf-8")
    return unfinished.rename(run_folder / REPORT_FILE)


class _Config(NamedTuple):
    """The run's settings, as far as they could be read."""

    text: str
    sections: Mapping[str, Any]

    def setting(self, section: str, name: str) -> Any:
        """The setting's value, or None: the run may have been made by another version."""
        found = self.sections.get(section)
        return found.get(name) if isinstance(found, dict) else None

    def number(self, section: str, name: str) -> float | None:
        """The setting's value if it is a number."""
        return number({"value": self.setting(section, name)}, "value")


def _read_config(run_folder: Path) -> _Config:
    try:
        text = (run_folder / CONFIG_FILE).read_text(encoding="utf-8")
        return _Config(text, tomllib.loads(text))
    except FileNotFoundError:
        return _Config("", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return _Config(f"# {CONFIG_FILE} could not be read: {error}", {})


# The page


def _page(name: str, history: RunHistory, config: _Config, broken_lines: Sequence[int], now: float) -> str:
    figures = _Figures()
    body = "\n".join(
        (
            _head(name, history, config, now),
            _key_figures(history),
            _learning(figures, history, config),
            _staleness(figures, history, config),
            _rollouts(figures, history),
            _weights(figures, history),
            _ledger(history),
            _actors(history),
            _events(history),
            _settings(config),
            _foot(history, broken_lines, now),
        )
    )
    # The policy makes the browser itself refuse every request that the page could make.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{html.escape(name)} · offbeat</title>
<style>
{_asset("report.css")}</style>
</head>
<body>
<main>
{body}
</main>
{figures.scripts()}
</body>
</html>
"""


class _Figures:
    """Collects the figures of the page while its text is made."""

    def __init__(self) -> None:
        self._figures: list[dict[str, Any]] = []

    def card(self, plot: Plot) -> str:
        """The plot's frame, with its title and caption."""
        if plot.figure is None:
            drawing = f'<div class="missing">{html.escape(plot.missing)}</div>'
        else:
            drawing = f'<div class="plot" data-figure="figure-{len(self._figures)}"></div>'
            self._figures.append(plot.figure)
        css_class = "card wide" if plot.wide else "card"
        return (
            f'<figure class="{css_class}"><h3>{html.escape(plot.title)}</h3>{drawing}'
            f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        )

    def scripts(self) -> str:
        """Plotly, the figures as JSON, and what draws them; nothing at all for a page without figures."""
        if not self._figures:
            return ""
        # Imported here: it reads 5 MB.
        from plotly.offline import get_plotlyjs

        data = "\n".join(
            f'<script type="application/json" id="figure-{index}">{_script_json(figure)}</script>'
            for index, figure in enumerate(self._figures)
        )
        colors = f'<script type="application/json" id="dark-colors">{_script_json(report_plots.DARK_COLORS)}</script>'
        return f"<script>{get_plotlyjs()}</script>\n{data}\n{colors}\n<script>\n{_asset('report.js')}</script>"


def _script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("deploy").joinpath(name).read_text(encoding="utf-8")


def _section(title: str, lead: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(lead)}</p>{content}</section>"


def _grid(cards: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(cards)}</div>'


# Head


def _head(name: str, history: RunHistory, config: _Config, now: float) -> str:
    outcome, detail = _outcome(history, now)
    tone = _OUTCOME_TONES.get(outcome, "warn")
    facts = "".join(
        f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(fact)}</dd></div>"
        for label, fact in _facts(history, config).items()
    )
    return f"""<header>
<div class="wordmark">{_WORDMARK} offbeat</div>
<h1>{html.escape(name)}</h1>
<p class="outcome"><span class="pill {tone}">{html.escape(outcome)}</span> {html.escape(detail)}</p>
<dl class="facts">{facts}</dl>
</header>"""


# Four beats, the accents between them.
_WORDMARK = (
    '<svg width="30" height="18" viewBox="0 0 30 18" fill="none" stroke-width="2.6" stroke-linecap="round">'
    + "".join(
        f'<path d="M{2 + 3.7 * index:.1f} {9 - height}v{2 * height}" stroke="var(--{"accent" if index % 2 else "muted"})"/>'
        for index, height in enumerate((2, 7, 2, 5, 2, 7, 2, 4))
    )
    + "</svg>"
)


def _outcome(history: RunHistory, now: float) -> tuple[str, str]:
    """A word for the outcome, and a sentence."""
    if history.final is not None:
        return str(history.final.get("outcome")), str(history.final.get("detail") or "")
    if history.last_time is None:
        return "empty", "The run has written no rows."
    quiet_s = now - history.last_time
    if quiet_s <= ALIVE_WITHIN_S:
        return "running", "This page shows the run so far; write the report again for a newer one."
    return "unfinished", f"The rows end {_duration(quiet_s)} ago without a final one: the learner hangs or was killed."


def _facts(history: RunHistory, config: _Config) -> dict[str, str]:
    def told(section: str, name: str) -> str:
        value = config.setting(section, name)
        return "not recorded" if value in (None, "") else str(value)

    version, num_steps = _last_version(history), config.number("train", "num_steps")
    started = history.first_time
    facts = {
        "Model": told("model", "path"),
        "Task": told("task", "train_data"),
        "Reward": told("task", "reward"),
        "Policy version": f"{version:,}" if num_steps is None else f"{version:,} of {num_steps:,.0f}",
        "Actors seen": f"{len(history.actors)}",
        "Started": "never" if started is None else time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(started)),
        "Wall time": _duration(history.wall_s),
    }
    software = [str(event.get("detail")) for event in history.events if event.get("event") == "run_started"]
    return facts | ({"Software": software[-1]} if software else {})


def _last_version(history: RunHistory) -> int:
    return int(history.steps[-1]["policy_version"]) if history.steps else 0


class _KeyFigure(NamedTuple):
    label: str
    value: str
    unit: str
    note: str


def _key_figures(history: RunHistory) -> str:
    tiles = "".join(
        f'<div class="figure"><div class="label">{html.escape(label)}</div>'
        f'<div class="value">{html.escape(value)} <small>{html.escape(unit)}</small></div>'
        f'<div class="note">{html.escape(note)}</div></div>'
        for label, value, unit, note in (
            _reward_figure(history),
            _held_out_figure(history),
            _lag_figure(history),
            _clip_figure(history),
            _generated_figure(history),
            _trained_figure(history),
            _idle_figure(history),
            _dropped_figure(history),
        )
    )
    return f'<div class="figures">{tiles}</div>'


def _reward_figure(history: RunHistory) -> _KeyFigure:
    rewards = _numbers(history, "reward/mean")
    if not rewards:
        return _KeyFigure("Reward", "–", "", "no step yet")
    last = statistics.fmean(rewards[-_NUM_EDGE_STEPS:])
    if len(rewards) < 2 * _NUM_EDGE_STEPS:
        return _KeyFigure("Reward", f"{last:.3f}", "", f"mean of the last {min(len(rewards), _NUM_EDGE_STEPS)} steps")
    first = statistics.fmean(rewards[:_NUM_EDGE_STEPS])
    return _KeyFigure("Reward", f"{last:.3f}", "", f"last {_NUM_EDGE_STEPS} steps; first {_NUM_EDGE_STEPS}: {first:.3f}")


def _held_out_figure(history: RunHistory) -> _KeyFigure:
    rewards = {v: row["reward"] for v, row in history.evaluations.items() if number(row, "reward") is not None}
    if not rewards:
        return _KeyFigure("Held-out reward", "–", "", "no evaluation")
    last, best = max(rewards), max(rewards, key=rewards.__getitem__)
    note = f"at version {last}; best {rewards[best]:.3f} at {best}"
    return _KeyFigure("Held-out reward", f"{rewards[last]:.3f}", "", note)


def _lag_figure(history: RunHistory) -> _KeyFigure:
    counts = history.groups_by_lag
    if not counts:
        return _KeyFigure("Policy lag", "–", "", "no group trained")
    mean = sum(lag * count for lag, count in counts.items()) / sum(counts.values())
    num_over = sum(int(count) for count in _numbers(history, "staleness/over_bound"))
    note = f"largest {max(counts)}; {num_over:,} groups above the bound"
    return _KeyFigure("Policy lag", f"{mean:.2f}", "steps", note)


def _clip_figure(history: RunHistory) -> _KeyFigure:
    fractions = _numbers(history, "clip/fraction")
    if not fractions:
        return _KeyFigure("Clipped", "–", "", "no step yet")
    note = f"of completions; highest step {max(fractions):.1%}"
    return _KeyFigure("Clipped", f"{statistics.fmean(fractions):.1%}", "", note)


def _generated_figure(history: RunHistory) -> _KeyFigure:
    total = sum(actor.num_generated_tokens for actor in history.actors.values())
    return _rate_figure("Generated", total, history.wall_s)


def _trained_figure(history: RunHistory) -> _KeyFigure:
    return _rate_figure("Trained", sum(_numbers(history, "tokens/trained")), history.wall_s)


def _rate_figure(label: str, num_tokens: float, wall_s: float) -> _KeyFigure:
    if not num_tokens or not wall_s:
        return _KeyFigure(label, "–", "", "no tokens yet")
    return _KeyFigure(label, f"{num_tokens / wall_s:,.0f}", "tok/s", f"{num_tokens:,.0f} completion tokens in all")


def _idle_figure(history: RunHistory) -> _KeyFigure:
    seconds = history.learner_seconds()
    total = sum(seconds.values())
    if not total:
        return _KeyFigure("Learner waited", "–", "", "no step yet")
    median = statistics.median(_numbers(history, "time/step_s") or [0.0])
    return _KeyFigure("Learner waited", f"{seconds['wait_rollouts'] / total:.0%}", "", f"median step {median:.2f} s")


def _dropped_figure(history: RunHistory) -> _KeyFigure:
    num_groups = len(history.groups)
    if not num_groups:
        return _KeyFigure("Groups dropped", "–", "", "no group yet")
    num_dropped = sum(history.groups_by_drop_reason.values())
    return _KeyFigure("Groups dropped", f"{num_dropped / num_groups:.1%}", "", f"{num_dropped:,} of {num_groups:,}")


def _numbers(history: RunHistory, name: str) -> list[float]:
    return [value for row in history.steps if (value := number(row, name)) is not None]


# Plots


def _learning(figures: _Figures, history: RunHistory, config: _Config) -> str:
    plots = (
        report_plots.reward_by_step(history),
        report_plots.reward_by_time(history),
        report_plots.gradient_norm(history, config.number("train", "max_grad_norm")),
        report_plots.groups_without_signal(history),
    )
    return _section("Learning", "Does the policy get better, and is the optimization calm?", _cards(figures, plots))


def _staleness(figures: _Figures, history: RunHistory, config: _Config) -> str:
    clip_low, clip_high = config.number("loss", "clip_low"), config.number("loss", "clip_high")
    plots = (
        report_plots.lag_histogram(history),
        report_plots.lag_by_step(history, config.number("staleness", "max_staleness")),
        report_plots.clip_fraction(history),
        report_plots.log_ratio(history, clip_low, clip_high),
    )
    lead = "How old were the rollouts when they were trained on, and how much of them did the objective set aside?"
    return _section("Staleness", lead, _cards(figures, plots))


def _rollouts(figures: _Figures, history: RunHistory) -> str:
    plots = (
        report_plots.completion_lengths(history),
        report_plots.throughput(history),
        report_plots.where_time_went(history),
    )
    return _section("Rollouts and time", "Who waits for whom, and is anything biased away?", _cards(figures, plots))


def _weights(figures: _Figures, history: RunHistory) -> str:
    plots = (report_plots.weight_sync(history), report_plots.canary(history))
    return _section("Weights", "What the updates cost, and whether they arrived.", _cards(figures, plots))


def _cards(figures: _Figures, plots: Iterable[Plot]) -> str:
    return _grid(figures.card(plot) for plot in plots)


# Ledger


def _ledger(history: RunHistory) -> str:
    books = history.ledger
    lead = "Every lease ends in exactly one way; whatever is lost or counted twice would break this sum."
    if books is None:
        content = (
            '<div class="missing">The books are closed in the final row, which this run has not written.<br>'
            f"So far its rows tell of {history.num_groups_trained:,} groups trained and "
            f"{sum(history.groups_by_drop_reason.values()):,} dropped{_reasons(history.groups_by_drop_reason)}.</div>"
        )
        return _section("Ledger", lead, f'<div class="card">{content}</div>')
    return _section("Ledger", lead, f'<div class="card">{_law(books)}</div>')


def _law(books: Ledger) -> str:
    num_dropped = sum(books.dropped.values())
    parts = (
        ("trained", books.trained, "calm"),
        (f"dropped{_reasons(books.dropped)}", num_dropped, "bad"),
        ("expired", books.expired, "warn"),
        ("in flight", books.in_flight, "idle"),
    )
    boxes = '<div class="sign">+</div>'.join(_term(label, count, tone) for label, count, tone in parts)
    shares = "".join(
        f'<div class="{tone}" style="flex: {count}" title="{count:,} {label}"></div>' for label, count, tone in parts if count
    )
    sum_text = f"{' + '.join(f'{count:,}' for _, count, _ in parts)} = {books.num_accounted:,}"
    missing = books.leased - books.num_accounted
    if missing == 0:
        verdict = f'<p class="verdict good">The law holds: {sum_text}, every lease is accounted for.</p>'
    else:
        fault = f"{missing:,} leases are unaccounted for" if missing > 0 else f"{-missing:,} are counted twice"
        verdict = f'<p class="verdict bad">The law is broken: {sum_text}, not {books.leased:,}; {fault}.</p>'
    leased = f'{_term("leased", books.leased, "whole")}<div class="sign">=</div>'
    return f'<div class="law">{leased}{boxes}</div><div class="shares">{shares}</div>{verdict}'


def _term(label: str, count: int, tone: str) -> str:
    return f'<div class="term {tone}"><b>{count:,}</b><span>{label}</span></div>'


def _reasons(dropped: Mapping[str, int]) -> str:
    """` { stale 18, reward_error 2 }`, or nothing."""
    parts = sorted(dropped.items(), key=lambda item: -item[1])
    text = ", ".join(f"{html.escape(reason or 'no reason')} {count:,}" for reason, count in parts)
    return f" {{ {text} }}" if text else ""


# Tables


def _actors(history: RunHistory) -> str:
    lead = "What each actor did, all its restarts under one name added up."
    if not history.actors:
        return _section("Actors", lead, '<div class="card"><div class="missing">No actor has reported.</div></div>')
    start = history.first_time or 0.0
    rows = [
        (
            html.escape(actor.name),
            f"{actor.policy_version:,}",
            f"{actor.num_groups_sent:,}",
            f"{actor.num_generated_tokens:,}",
            "–" if actor.tokens_per_s is None else f"{actor.tokens_per_s:,.0f}",
            _duration(actor.times[0] - start),
            _duration(actor.times[-1] - start),
        )
        for actor in sorted(history.actors.values(), key=lambda actor: actor.name)
    ]
    head = ("Actor", "Last version", "Groups sent", "Tokens", "tok/s", "First heard at", "Last heard at")
    return _section("Actors", lead, f'<div class="card">{_table(head, rows, num_text_columns=1)}</div>')


def _events(history: RunHistory) -> str:
    lead = "Joins, losses, exclusions, and whatever else was out of the ordinary."
    if not history.events:
        return _section("Events", lead, '<div class="card"><div class="missing">Nothing happened.</div></div>')
    counts = Counter(str(event.get("event")) for event in history.events)
    chips = "".join(f"<li>{html.escape(name)} <b>{count:,}</b></li>" for name, count in counts.most_common())
    shown, note = history.events, ""
    if len(shown) > MAX_EVENT_ROWS:
        note = f"<figcaption>The first and the last {MAX_EVENT_ROWS // 2} of {len(shown):,} events.</figcaption>"
        shown = shown[: MAX_EVENT_ROWS // 2] + shown[-MAX_EVENT_ROWS // 2 :]
    start = history.first_time or 0.0
    rows = [
        (
            _duration(event["time"] - start),
            f'<span class="mark {_EVENT_TONES.get(str(event.get("event")), "calm")}">'
            f"{html.escape(str(event.get('event')))}</span>",
            html.escape(str(event.get("actor") or "")),
            html.escape(str(event.get("detail") or "")),
        )
        for event in shown
    ]
    table = _table(("After", "Event", "Actor", "Detail"), rows, num_text_columns=4)
    return _section("Events", lead, f'<div class="card"><ul class="chips">{chips}</ul>{table}{note}</div>')


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_text_columns: int) -> str:
    """A table of ready-made HTML cells; the columns after the text ones are aligned as numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        aligned = (
            f"<{tag}{'' if index < num_text_columns else ' class=number'}>{cell}</{tag}>" for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(aligned)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'


def _settings(config: _Config) -> str:
    lead = "The resolved settings the run was started with."
    if not config.text:
        missing = f'<div class="missing">The folder has no {CONFIG_FILE}.</div>'
        return _section("Settings", lead, f'<div class="card">{missing}</div>')
    text = f"<details><summary>{CONFIG_FILE}</summary><pre>{html.escape(config.text)}</pre></details>"
    return _section("Settings", lead, f'<div class="card">{text}</div>')


def _foot(history: RunHistory, broken_lines: Sequence[int], now: float) -> str:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    broken = ""
    if broken_lines:
        first = ", ".join(str(line) for line in broken_lines[:5])
        broken = f" {len(broken_lines):,} unreadable lines were skipped (first: {first})."
    return f"<footer>Written {written} from {history.num_rows:,} rows of {ROWS_FILE}.{broken}</footer>"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
