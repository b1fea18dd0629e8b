"""Join settings are sent in parts to any peer that may be an actor."""

import hashlib

import pytest

from offbeat.learner.dispatch.contract import MAX_PEERS, MAX_SERVINGS, JoinPayload, JoinServer
from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.protocols.keys import Sender
from offbeat.protocols.message_parts import PART_BYTES
from offbeat.protocols.messages import Refused, RunPart, RunRequest, Stop
from tests.learner.dispatch.dispatch_desk import CONTRACT, Actor, Desk

CONTENT = bytes(range(256)) * (PART_BYTES // 256) + b"the rest"


def parts_of(queue: SendQueue) -> list[tuple[RunPart, bytes]]:
    return [(one.message, one.arrays[0].tobytes()) for one in queue.take() if isinstance(one.message, RunPart)]


def test_parts_are_the_kit_and_carry_its_digest() -> None:
    queue = SendQueue()
    server = JoinServer(JoinPayload(CONTENT), queue)
    for index in (0, 1):
        server.answer(b"a", index)
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert parts_of(queue) == [
        (RunPart(index=0, num_parts=2, digest=digest), CONTENT[:PART_BYTES]),
        (RunPart(index=1, num_parts=2, digest=digest), b"the rest"),
    ]


def test_part_that_is_not_there_and_a_flood_of_requests_are_refused_to_that_peer_alone() -> None:
    queue = SendQueue()
    server = JoinServer(JoinPayload(CONTENT), queue)
    server.answer(b"a", 2)
    (refused,) = (one.message for one in queue.take())
    assert isinstance(refused, Refused)
    for _ in range(2 * MAX_SERVINGS + 3):
        server.answer(b"a", 0)
    assert len(parts_of(queue)) == 2 * MAX_SERVINGS
    server.answer(b"b", 0)
    assert len(parts_of(queue)) == 1
    for number in range(MAX_PEERS):
        server.answer(str(number).encode(), 0)
    queue.take()
    server.answer(b"a", 0)
    assert len(parts_of(queue)) == 1, "forgotten among many, it begins anew"


def test_learner_without_a_kit_says_why() -> None:
    queue = SendQueue()
    JoinServer(JoinPayload(b"", "the model has buffers"), queue).answer(b"a", 0)
    assert [one.message for one in queue.take()] == [Refused(reason="the model has buffers")]


@pytest.mark.parametrize(("role", "kind"), [(None, RunPart), ("actor", RunPart), ("operator", Refused)])
def test_strangers_get_the_run_but_operators_do_not(role, kind) -> None:
    desk = Desk(contract=CONTRACT._replace(join_payload=JoinPayload(CONTENT)))
    stranger = Actor(desk, "a", sender=Sender("a", role) if role else Sender())
    stranger.say(RunRequest(index=1))
    assert len(stranger.heard(kind)) == 1
    assert desk.dispatcher.members() == [], "asking is not joining"


def test_run_that_is_over_is_said_first() -> None:
    desk = Desk(contract=CONTRACT._replace(join_payload=JoinPayload(CONTENT)))
    desk.dispatcher.stop("finished")
    Actor(desk, "a").say(RunRequest(index=0))
    assert isinstance(desk.dispatcher.take_outgoing()[0].message, Stop)
