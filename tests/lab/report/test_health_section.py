"""The report says which health rules held, and which still did at the end."""

from offbeat.common.pages.page import Card, Mark, Sentence, Table
from offbeat.common.records.rows import EventRow
from offbeat.lab.report.sections import health_section

TOLD = EventRow(time=1060.0, event="health", detail="All <cut>", rule="all_cut", policy_version=30)
CLEARED = EventRow(time=1180.0, event="health_cleared", detail="not for 10 steps", rule="all_cut", policy_version=60)


def test_trouble_is_listed_with_its_time_version_and_reason() -> None:
    (card,) = health_section([EventRow(time=1000.0, event="run_started", detail="x"), TOLD], 1000.0).blocks
    rows = [("1 min 00 s", "30", Mark("all_cut", "bad"), "", "All <cut>")]
    listing = Table(("After", "Version", "Rule", "", "Reason"), rows, 5)
    assert card == Card([Sentence("These rules held at the end: all_cut.", "bad"), listing])


def test_trouble_that_was_cleared_is_listed_but_not_at_the_end() -> None:
    (card,) = health_section([TOLD, CLEARED], 1000.0).blocks
    assert isinstance(card, Card)
    verdict, listing = card.blocks
    assert verdict == Sentence("Every problem had cleared by the end.", "good")
    assert isinstance(listing, Table) and [row[2:4] for row in listing.rows] == [
        (Mark("all_cut", "bad"), ""),
        (Mark("all_cut", "good"), "cleared"),
    ]


def test_run_that_has_perhaps_solved_its_task_is_not_called_ill() -> None:
    alike = "Little signal: ... The task may be solved (held-out 1.000). If not, use harder prompts."
    solved = EventRow(time=1060.0, event="health", detail=alike, rule="groups_alike", policy_version=30)
    (card,) = health_section([solved], 1000.0).blocks
    assert isinstance(card, Card)
    assert card.blocks[0] == Sentence("These rules held at the end: groups_alike. The task may be solved.")


def test_run_without_trouble_says_so() -> None:
    section = health_section([EventRow(time=1.0, event="actor_joined", detail="x", actor="a")], None)
    assert section.blocks == [Card([Sentence("No health rule reported a problem.", "good")])]
