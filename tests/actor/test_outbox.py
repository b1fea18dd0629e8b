"""The outbox sends again exactly the groups that were not acknowledged."""

from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.actor.leases_at_work import Outbox
from offbeat.protocols.messages import LeaseFailed


def failed(lease_id: int) -> LeaseFailed:
    return LeaseFailed(lease_id=lease_id, reason="returned")


def due_ids(outbox: Outbox, now: float) -> list[int]:
    """Send the due messages; return their leases."""
    lease_ids = []
    for parcel in outbox.due(now):
        assert isinstance(parcel.message, LeaseFailed)
        lease_ids.append(parcel.message.lease_id)
        parcel.sent_at = now
    return lease_ids


def test_new_message_is_due_at_once_and_not_twice() -> None:
    outbox = Outbox(resend_after_s=10.0)
    outbox.put(1, failed(1))
    assert due_ids(outbox, now=0.0) == [1]
    assert due_ids(outbox, now=9.9) == []


def test_unacknowledged_message_is_sent_again_after_a_while() -> None:
    outbox = Outbox(resend_after_s=10.0)
    outbox.put(1, failed(1))
    assert [due_ids(outbox, now=now) for now in (0.0, 10.0, 15.0, 20.0)] == [[1], [1], [], [1]]


def test_message_that_could_not_be_sent_stays_due() -> None:
    outbox = Outbox(resend_after_s=10.0)
    outbox.put(1, failed(1))
    assert len(outbox.due(0.0)) == 1
    assert len(outbox.due(0.0)) == 1


def test_acknowledged_message_is_forgotten_and_a_second_acknowledgement_does_no_harm() -> None:
    outbox = Outbox(resend_after_s=10.0)
    outbox.put(1, failed(1))
    for _ in range(2):
        outbox.acknowledge(1)
        outbox.acknowledge(99)
    assert len(outbox) == 0
    assert due_ids(outbox, now=100.0) == []


def test_outbox_names_the_leases_that_it_answers() -> None:
    outbox = Outbox(resend_after_s=10.0)
    for lease_id in (3, 1):
        outbox.put(lease_id, failed(lease_id))
    due_ids(outbox, now=0.0)
    assert outbox.lease_ids == (3, 1)
    outbox.acknowledge(3)
    assert outbox.lease_ids == (1,)


def test_all_is_due_again_on_a_new_connection_oldest_first() -> None:
    outbox = Outbox(resend_after_s=10.0)
    for lease_id in (3, 1, 2):
        outbox.put(lease_id, failed(lease_id))
    due_ids(outbox, now=0.0)
    outbox.acknowledge(1)
    outbox.send_all_again()
    assert due_ids(outbox, now=0.1) == [3, 2]


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["put", "acknowledge", "reconnect", "wait"]), st.integers(0, 5)), max_size=60))
def test_exactly_the_unacknowledged_is_sent_sooner_or_later(operations: list[tuple[str, int]]) -> None:
    outbox, kept, now = Outbox(resend_after_s=3.0), set[int](), 0.0
    for operation, lease_id in operations:
        match operation:
            case "put":
                outbox.put(lease_id, failed(lease_id))
                kept.add(lease_id)
            case "acknowledge":
                outbox.acknowledge(lease_id)
                kept.discard(lease_id)
            case "reconnect":
                outbox.send_all_again()
            case "wait":
                now += lease_id
                assert set(due_ids(outbox, now)) <= kept
        assert len(outbox) == len(kept)
    assert set(due_ids(outbox, now + 3.0)) == kept
