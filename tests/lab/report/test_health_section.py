"""The report says which health rules held, and which still did at the end."""

import pytest

from offbeat.common.pages.page import Card, Mark, Sentence, Table
from offbeat.common.records.rows import EvalRow, EventRow
from offbeat.lab.report.sections import health_section

TOLD = EventRow(time=1060.0, event="health", detail="All <cut>", rule="all_cut", policy_version=30)
CLEARED = EventRow(time=1180.0, event="health_cleared", detail="not for 10 steps", rule="all_cut", policy_version=60)


def test_trouble_is_listed_with_its_time_version_and_reason() -> None:
    (card,) = health_section([EventRow(time=1000.0, event="run_started", detail="x"), TOLD], 1000.0, None).blocks
    rows = [("1 min 00 s", "30", Mark("all_cut", "bad"), "", "All <cut>")]
    listing = Table(("After", "Version", "Rule", "", "Reason"), rows, 5)
    assert card == Card([Sentence("These rules held at the end: all_cut.", "bad"), listing])


def test_trouble_that_was_cleared_is_listed_but_not_at_the_end() -> None:
    (card,) = health_section([TOLD, CLEARED], 1000.0, None).blocks
    assert isinstance(card, Card)
    verdict, listing = card.blocks
    assert verdict == Sentence("Every problem had cleared by the end.", "good")
    assert isinstance(listing, Table) and [row[2:4] for row in listing.rows] == [
        (Mark("all_cut", "bad"), ""),
        (Mark("all_cut", "good"), "cleared"),
    ]


@pytest.mark.parametrize(
    ("rule", "reward", "expected"),
    [
        ("groups_alike", 1.0, Sentence("These rules held at the end: groups_alike. The task may be solved.")),
        ("groups_alike", 0.5, Sentence("These rules held at the end: groups_alike.", "bad")),
        ("all_cut", 1.0, Sentence("These rules held at the end: all_cut.", "bad")),
    ],
)
def test_run_that_has_perhaps_solved_its_task_is_not_called_ill(rule: str, reward: float, expected: Sentence) -> None:
    event = EventRow(time=1060.0, event="health", detail="Little signal", rule=rule, policy_version=30)
    evaluation = EvalRow(policy_version=30, reward=reward, length=4, num_completions=32, num_failed=0)
    (card,) = health_section([event], 1000.0, evaluation).blocks
    assert isinstance(card, Card)
    assert card.blocks[0] == expected


def test_run_without_trouble_says_so() -> None:
    section = health_section([EventRow(time=1.0, event="actor_joined", detail="x", actor="a")], None, None)
    assert section.blocks == [Card([Sentence("No health rule reported a problem.", "good")])]
