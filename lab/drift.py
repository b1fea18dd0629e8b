"""`offbeat drift`: the effect of staleness on a run, as drift at each policy lag and bias of the training data."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from offbeat.common.formats import number
from offbeat.common.records.rows import EventRow, LedgerSums
from offbeat.lab.history import LagDrift, RunHistory, TurnDrift, read_run_history
from offbeat.lab.terminal import print_result, table
from offbeat.learner.diagnostics import length_bias
from offbeat.learner.dispatch.lease_desk import LATE

_UNFINISHED_OUTCOMES = {"lease_expired": "expired", "lease_aborted": "dropped"}
"""Outcome of a lease that ended without a group, by the event that tells of it."""


class DriftReport(msgspec.Struct, frozen=True):
    """The content of the command's output."""

    by_lag: list[LagDrift]
    by_turn: list[TurnDrift]
    """Empty for a run without episodes of several turns."""
    bias: length_bias.BiasReport
    verdict: list[str]
    """The bias report in sentences, see `verdict`."""
    books: LedgerSums | None
    """The learner's own count of the leases; None until the run has ended."""


def print_drift(run_folder: Path, *, as_json: bool) -> None:
    """Print the drift and bias report of a run, finished or not. `SettingError` for a folder that holds no run."""
    report = drift_report(read_run_history(run_folder))
    print_result(report, render_drift(report), as_json=as_json)


def drift_report(history: RunHistory) -> DriftReport:
    """Return the run's drift by policy lag and its bias report."""
    bias = length_bias.bias_report(ended_leases(history))
    return DriftReport(history.drift_by_lag, history.drift_by_turn, bias, bias_verdict(bias, history.ledger), history.ledger)


def ended_leases(history: RunHistory) -> list[length_bias.EndedLease]:
    """Return the run's leases that have ended, in the order of their ends.

    Of the leases without a group, only those taken back or aborted have a row that tells of them.
    """
    ended = [(group.ended_at, group.lease) for group in history.groups.values()]
    ended += [
        (row.time, lease) for row in history.events if (lease := _unfinished(row)) and lease.lease_id not in history.groups
    ]
    return [lease for _, lease in sorted(ended, key=lambda item: item[0])]


def _unfinished(row: EventRow) -> length_bias.EndedLease | None:
    if row.event not in _UNFINISHED_OUTCOMES or row.lease_id is None:
        return None
    reason = "aborted" if row.event == "lease_aborted" else row.detail
    # The time until an actor was lost or left says nothing about its groups.
    is_slow = row.event == "lease_aborted" or row.detail.startswith(LATE)
    duration_s = math.nan if row.after_s is None or not is_slow else row.after_s
    return length_bias.EndedLease(row.lease_id, _UNFINISHED_OUTCOMES[row.event], reason, duration_s=duration_s)


def bias_verdict(report: length_bias.BiasReport, books: LedgerSums | None) -> list[str]:
    """Return the bias report in sentences: the alarm or the reason for its absence, then lateness and unknown leases."""
    trained = next(part.count for part in report.parts if part.name == "trained")
    if not trained:
        return ["No group has been trained on: there is nothing to compare."]
    sentences = [f"ALARM: {report.alarm}." if report.alarm else f"No sign of bias: {_why_silent(report)}."]
    late = report.lateness
    if late is not None and late.share > 0:
        sentences.append(
            f"{late.share:.0%} of the trained groups came after their turn, by {late.mean_batches:.1f} batches on average "
            f"(rank correlation with length {late.length_correlation:+.2f}, with duration {late.duration_correlation:+.2f}): "
            "long groups are trained on at a larger lag, but they are trained on."
        )
    return [*sentences, _unknown(report, books)]


def _why_silent(report: length_bias.BiasReport) -> str:
    strongest = max(report.comparisons, key=lambda comparison: (comparison.count, abs(comparison.effect)))
    if not strongest.count:
        return "no lease with signal was dropped"
    return (
        f"the {strongest.count:,} ({strongest.share:.1%}) that were dropped are too few or too like the others to matter "
        f"(largest effect {strongest.effect:+.2f} in {length_bias.LABELS[strongest.quantity]}, p = {strongest.p_value:.2g})"
    )


def _unknown(report: length_bias.BiasReport, books: LedgerSums | None) -> str:
    if books is None:
        return "Leases that are still in flight are not in this comparison, and long ones are more often among them."
    told_of = sum(part.count for part in report.parts if part.name != "generated")
    silent = max(0, books.leased - books.in_flight - told_of)
    unknown = [f"{books.in_flight:,} were in flight at the end"] if books.in_flight else []
    unknown += [f"{silent:,} ended without a group"] if silent else []
    if not unknown:
        return f"All {books.leased:,} leases are in this comparison."
    return f"Of {books.leased:,} leases {' and '.join(unknown)}: nothing is known of these."


# The terminal

DRIFT_HEAD = ("lag", "count", "log-ratio", "± std", "ESS", "clipped", "masked", "reward", "tokens")
TURN_HEAD = ("turn", "tokens", "token lag", "KL (k3)")
COMPARISON_HEAD = ("dropped / trained", "leases", "mean", "effect", "p")


def drift_cells(line: LagDrift) -> tuple[str, ...]:
    """Return a line's cells as text, under `DRIFT_HEAD`."""
    return (
        line.bucket,
        f"{line.count:,}",
        number(line.log_ratio_mean, "+.2e"),
        number(line.log_ratio_std, ".2e"),
        number(line.ess, ".3f"),
        number(line.clip_fraction, ".1%"),
        number(line.masked, ".1%"),
        number(line.reward, ".3f"),
        number(line.length, ",.1f"),
    )


def turn_cells(line: TurnDrift) -> tuple[str, ...]:
    """Return a line's cells as text, under `TURN_HEAD`."""
    return (line.bucket, f"{line.num_tokens:,}", number(line.lag_mean, ".2f"), number(line.k3, ".2e"))


def part_head(report: length_bias.BiasReport) -> tuple[str, ...]:
    """Return the head of `part_rows`."""
    return ("leases", "count", *(f"{length_bias.LABELS[quantity]}: mean/median/p95" for quantity in _quantities(report)))


def part_rows(report: length_bias.BiasReport, books: LedgerSums | None) -> list[tuple[str, ...]]:
    """Return the bias report's parts as text under `part_head`, with the leases that only the learner's books know."""
    quantities = _quantities(report)
    rows = [(part.name, f"{part.count:,}", *_summaries(part, quantities)) for part in report.parts]
    if books is None:
        return rows
    unknown = ("–",) * len(quantities)
    return [("leased", f"{books.leased:,}", *unknown), *rows, ("in flight", f"{books.in_flight:,}", *unknown)]


def _quantities(report: length_bias.BiasReport) -> tuple[length_bias.Quantity, ...]:
    """Return the quantities of a run: turns only where there are episodes."""
    has_episodes = any(part.num_turns is not None for part in report.parts)
    return (*length_bias.QUANTITIES, *length_bias.OF_EPISODES) if has_episodes else length_bias.QUANTITIES


def _summaries(part: length_bias.OutcomeSummary, quantities: Sequence[length_bias.Quantity]) -> Iterator[str]:
    distributions = msgspec.structs.asdict(part)
    for quantity in quantities:
        values, spec = distributions[quantity], length_bias.FORMATS[quantity]
        yield "–" if values is None else f"{values.mean:{spec}}/{values.median:{spec}}/{values.p95:{spec}}"


def comparison_rows(report: length_bias.BiasReport) -> list[tuple[str, ...]]:
    """Return the tests as text under `COMPARISON_HEAD`, without those that had nothing to compare."""
    return [
        (
            length_bias.LABELS[test.quantity],
            f"{test.count:,} / {test.num_others:,}",
            f"{test.mean:{length_bias.FORMATS[test.quantity]}} / {test.mean_of_others:{length_bias.FORMATS[test.quantity]}}",
            f"{test.effect:+.2f}",
            f"{test.p_value:.2g}",
        )
        for test in report.comparisons
        if test.count and test.num_others
    ]


def render_drift(report: DriftReport) -> RenderableType:
    """Return the report as tables and sentences."""
    lags, turns = [drift_cells(line) for line in report.by_lag], [turn_cells(line) for line in report.by_turn]
    none = Text("No step has recorded its drift by policy lag.", style="yellow")
    head, tests = part_head(report.bias), comparison_rows(report.bias)
    style = "red" if report.bias.alarm else "green"
    return Group(
        table(DRIFT_HEAD, lags, title="Drift by policy lag") if lags else none,
        *([table(TURN_HEAD, turns, title="Drift by turn")] if turns else []),
        table(head, part_rows(report.bias, report.books), title="How the leases ended"),
        *([table(COMPARISON_HEAD, tests, title="Tests of bias")] if tests else []),
        *(Text(sentence, style=style if index == 0 else "") for index, sentence in enumerate(report.verdict)),
    )
