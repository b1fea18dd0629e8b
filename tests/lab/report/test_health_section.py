"""The report says which health rules held, and which still did at the end."""

from offbeat.common.records.rows import EventRow
from offbeat.lab.report.sections import health_section

TOLD = EventRow(time=1060.0, event="health", detail="All <cut>", rule="all_cut", policy_version=30)
CLEARED = EventRow(time=1180.0, event="health_cleared", detail="not for 10 steps", rule="all_cut", policy_version=60)


def test_trouble_is_listed_with_its_time_version_and_reason_as_text() -> None:
    text = health_section([EventRow(time=1000.0, event="run_started", detail="x"), TOLD], 1000.0)
    assert "Not well at the end: all_cut." in text
    cells = '<td>1 min 00 s</td><td>30</td><td><span class="mark bad">all_cut</span></td><td></td><td>All &lt;cut&gt;</td>'
    assert cells in text


def test_trouble_that_was_cleared_is_listed_but_not_at_the_end() -> None:
    text = health_section([TOLD, CLEARED], 1000.0)
    assert "All of it had cleared by the end." in text
    assert text.count("all_cut") == 2


def test_run_without_trouble_says_so() -> None:
    text = health_section([EventRow(time=1.0, event="actor_joined", detail="x", actor="a")], None)
    assert "No health rule held at any time." in text
