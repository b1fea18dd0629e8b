"""Events are logged, then applied: a full log refuses an event entirely, and later logs delayed events in order."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained
from offbeat.learner.leases.groups import Group, make_group
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.log_reading import LogFullError
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.dispatch.dispatch_desk import WillingLog, make_prompts
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained

NUM_PROMPTS = 4
PROMPTS = make_prompts(NUM_PROMPTS, "train")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WillingLog]:
    log = WillingLog(tmp_path / "log")
    yield log
    log.close()


def make(log: WillingLog | None) -> LeaseJournal:
    return LeaseJournal(log, Ledger(), PromptStream(NUM_PROMPTS, seed=0), lambda: 7.0)


def grant(journal: LeaseJournal, lease_id: int) -> Granted:
    """Return the event that leases the stream's next prompt."""
    prompt_id, epoch = journal.stream.peek()
    return make_granted(lease_id, at=7.0, prompt_id=prompt_id, epoch=epoch)


def accept(journal: LeaseJournal, lease_id: int) -> tuple[Accepted, list[memoryview], Group]:
    completions = (CompletionMeta(2, "stop", 1.0, (Segment(0, 0),)),)
    event = make_accepted(lease_id, at=7.0, completions=completions, generate_s=0.5)
    frames = [memoryview(np.array([1, 2], np.int32).tobytes()), memoryview(np.array([-1, -2], np.float32).tobytes())]
    return event, frames, make_group(event, frames, PROMPTS[journal.ledger.find(lease_id).prompt_id])


def trained(lease_id: int) -> Trained:
    return make_trained(lease_id, at=7.0, selected_at=7.0, selected_after=2)


def test_committed_event_is_in_the_log_the_ledger_and_the_prompt_stream(log: WillingLog) -> None:
    journal = make(log)
    first = journal.stream.peek()
    granted = grant(journal, 0)
    journal.commit(granted)
    assert log.events() == [granted]
    assert journal.stream.position == 1
    assert PromptTurn(journal.ledger.find(0).prompt_id, journal.ledger.find(0).epoch) == first
    journal.commit(*accept(journal, 0))
    (_, record) = log.records()
    assert [group.lease_id for group in journal.ledger.ready_groups()] == [0]
    assert journal.ledger.find(0).position == record.position
    assert journal.num_events == 2


def test_event_that_a_full_log_refuses_has_not_happened(log: WillingLog) -> None:
    journal = make(log)
    log.will_append = False
    with pytest.raises(LogFullError):
        journal.commit(grant(journal, 0))
    assert (journal.stream.position, journal.ledger.num_open, journal.num_events, log.events()) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("event", "is_served_again"),
    [
        (Expired(at=7.0, lease_id=0, reason="late"), True),
        (Dropped(at=7.0, lease_id=0, reason="aborted", is_final=False), True),
        (Dropped(at=7.0, lease_id=0, reason="zero_variance", is_final=True), False),
    ],
)
def test_prompt_of_a_lease_that_ends_is_served_again_unless_the_end_is_final(event: LeaseEvent, is_served_again: bool) -> None:
    journal = make(None)
    first = journal.stream.peek()
    journal.commit(grant(journal, 0))
    journal.commit_late(event)
    assert journal.ledger.num_open == 0
    assert (journal.stream.peek() == first) == is_served_again


def test_event_that_cannot_wait_is_applied_at_once_and_logged_when_there_is_room_before_any_later_one(log: WillingLog) -> None:
    journal = make(log)
    for lease_id in (0, 1):
        journal.commit(grant(journal, lease_id))
    journal.commit(*accept(journal, 0))
    log.will_append = False
    ended = trained(0)
    journal.commit_late(ended)
    assert (journal.ledger.counts().trained, journal.waiting, journal.num_events) == (1, [ended], 4)
    log.will_append = True
    with pytest.raises(LogFullError, match="earlier events wait"):
        journal.commit(grant(journal, 2))
    late = Expired(at=7.0, lease_id=1, reason="late")
    journal.commit_late(late)
    assert journal.waiting == [ended, late]
    journal.flush()
    assert journal.waiting == []
    journal.commit(granted := grant(journal, 2))
    assert log.events()[-3:] == [ended, late, granted]


def test_room_is_required_on_the_disk_and_for_the_events_that_wait(log: WillingLog) -> None:
    journal = make(log)
    log.has_room = False
    with pytest.raises(LogFullError, match=r"log\.min_free_mb"):
        journal.require_room()
    log.has_room, log.will_append = True, False
    journal.commit_late(Started(at=7.0, run_id="run", learner_incarnation=1, policy_version=0))
    with pytest.raises(LogFullError):
        journal.require_room()
    log.will_append = True
    journal.require_room()
    assert len(log.events()) == 1


def test_run_without_a_log_applies_events_and_never_runs_out_of_room() -> None:
    journal = make(None)
    journal.require_room()
    journal.commit(grant(journal, 0))
    journal.commit(*accept(journal, 0))
    journal.commit_late(trained(0))
    journal.flush()
    counts = journal.ledger.counts()
    assert (counts.leased, counts.trained, journal.waiting, journal.num_events, journal.end) == (1, 1, [], 0, None)


def test_prompt_granted_out_of_its_turn_is_refused() -> None:
    journal = make(None)
    granted = grant(journal, 0)
    journal.commit(granted)
    with pytest.raises(ValueError, match="was next"):
        journal.commit(granted)
