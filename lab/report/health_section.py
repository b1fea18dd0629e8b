"""The report's section on health: the health rules that held, with their times and reasons."""

import html
from collections.abc import Iterable

from offbeat.common.records.rows import EventRow
from offbeat.lab.report.page import duration, section, table_html
from offbeat.learner.diagnostics.health import troubles


def health_section(events: Iterable[EventRow], start: float | None) -> str:
    """Return the part of the page with every health rule that held; `start` is the run's first time, in epoch seconds."""
    lead = "Signs that the run was dead, broken or waiting, and what to do about each. docs/health.md lists the rules."
    told = [event for event in events if event.event in ("health", "health_cleared", "run_started")]
    rows = [
        (
            duration(event.time - (start or 0.0)),
            "" if event.policy_version is None else f"{event.policy_version:,}",
            f'<span class="mark {"bad" if event.event == "health" else "good"}">{html.escape(event.rule or "")}</span>',
            "" if event.event == "health" else "cleared",
            html.escape(event.detail),
        )
        for event in told
        if event.event != "run_started"
    ]
    if not rows:
        return section("Health", lead, '<div class="card"><p class="verdict good">No health rule held at any time.</p></div>')
    left = troubles(told)
    verdict = f"Not well at the end: {', '.join(left)}." if left else "All of it had cleared by the end."
    tone = "bad" if left else "good"
    listing = table_html(("After", "Version", "Rule", "", "Reason"), rows, num_text_columns=5)
    return section("Health", lead, f'<div class="card"><p class="verdict {tone}">{html.escape(verdict)}</p>{listing}</div>')
