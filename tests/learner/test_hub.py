"""The hub's thread over real sockets, with a dispatcher that gives one answer to everything."""

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest

from offbeat.common.settings.config import Config, DataSection, ModelSection, WeightsSection
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.send_queue import Outgoing
from offbeat.learner.hub import RECEIVE_S, SWITCH_S, HubThread, open_weight_hub
from offbeat.protocols import connection_limits as flood_guard
from offbeat.protocols.addresses import ChannelError
from offbeat.protocols.channels import Hub, Link, Received
from offbeat.protocols.messages import Ack, Goodbye, LearnerMessage, Refused
from offbeat.protocols.wire import FromActor
from tests.protocols.sockets import ANY_PORT, LIMIT, PATIENCE_S, eventually

ACCEPTED = Ack(lease_id=1, outcome="accepted")
REJECTIONS = [
    Ack(lease_id=1, outcome="unknown"),
    Ack(lease_id=1, outcome="rejected"),
    Ack(lease_id=1, outcome="duplicate"),
    Refused(reason="x"),
]
SECONDS_PER_MESSAGE = RECEIVE_S / 4
MUTED = "actor-0: not listened to after a flood of bad messages"


class FakeDispatcher:
    """A dispatcher that answers every message with the next of `answers`, in a cycle."""

    def __init__(self, answers: list[LearnerMessage]) -> None:
        self.num_handled = 0
        self.handled_at_ticks: list[int] = []
        """Messages handled until each tick."""
        self._answers = answers
        self._outgoing: list[Outgoing] = []

    def handle(self, peer: bytes, message: object, arrays: object, **_: Any) -> None:
        self._outgoing.append(Outgoing(peer, self._answers[self.num_handled % len(self._answers)]))
        self.num_handled += 1

    def take_outgoing(self) -> list[Outgoing]:
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def tick(self, now: float) -> None:
        self.handled_at_ticks.append(self.num_handled)

    def fail(self, error: BaseException) -> None:
        raise error


class BusyHub:
    """A hub at which a message always waits, each of which takes `SECONDS_PER_MESSAGE`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_sent = 0

    def wait(self, timeout_s: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def receive(self) -> Received:
        self.now += SECONDS_PER_MESSAGE
        return Received(b"actor-0", FromActor(Goodbye(reason="x"), ()))

    def send(self, peer: bytes, message: LearnerMessage, *arrays: object) -> bool:
        self.num_sent += 1
        return True

    def note_verdict(self, peer: bytes, *, is_good: bool) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(flood_guard, "MAX_REJECTED", 10)
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        yield hub


def ask(link: Link) -> bool:
    """Send a message; return False when no answer comes in time."""
    eventually(lambda: link.send(Goodbye(reason="x")))
    return link.receive(0.5) is not None


@pytest.mark.parametrize("rejection", REJECTIONS, ids=lambda rejection: str(rejection)[:40])
def test_peer_whose_messages_are_all_rejected_is_muted_and_others_are_not(hub: Hub, rejection: LearnerMessage) -> None:
    dispatcher = FakeDispatcher([rejection])
    thread = HubThread(hub, cast(Dispatcher, dispatcher))
    thread.start()
    with (
        Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT) as link,
        Link(hub.address, identity=b"actor-1", max_message_bytes=LIMIT) as other,
    ):
        for _ in range(10):
            eventually(lambda: link.send(Goodbye(reason="x")))
            assert link.receive(PATIENCE_S) is not None
        assert not ask(link)
        assert ask(other)
        thread.close()
    assert dict(hub.num_dropped) == {MUTED: 1}
    assert dispatcher.num_handled == 11


def test_accepted_group_makes_good_for_rejected_messages(hub: Hub) -> None:
    dispatcher = FakeDispatcher([*REJECTIONS * 2, ACCEPTED])
    thread = HubThread(hub, cast(Dispatcher, dispatcher))
    thread.start()
    with Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT) as link:
        for _ in range(30):
            eventually(lambda: link.send(Goodbye(reason="x")))
            assert link.receive(PATIENCE_S) is not None
        thread.close()
    assert not hub.num_dropped


def test_other_threads_take_short_turns_once_the_hub_is_served(hub: Hub) -> None:
    # A busy training thread left a hub of 1,000 actors at 500 groups a second with acknowledgements of 0.24 s (p99).
    sys.setswitchinterval(0.005)
    thread = HubThread(hub, cast(Dispatcher, FakeDispatcher([ACCEPTED])))
    thread.start()
    thread.close()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)


def test_thread_that_has_no_memory_to_report_its_end_reports_it_later(hub: Hub) -> None:
    problems: list[BaseException] = []

    class Full(FakeDispatcher):
        num_tries = 0

        def tick(self, now: float) -> None:
            raise MemoryError("the tick")

        def fail(self, error: BaseException) -> None:
            self.num_tries += 1
            if self.num_tries < 3:
                raise MemoryError("the report")
            problems.append(error)

    thread = HubThread(hub, cast(Dispatcher, Full([])))
    thread.start()
    eventually(lambda: bool(problems))
    thread.close()
    assert [str(problem) for problem in problems] == ["the tick"]


def test_port_of_the_weight_server_in_use_is_named_by_its_own_setting(hub: Hub) -> None:
    port = int(hub.address.rpartition(":")[2])
    model, data = ModelSection(path="model"), DataSection(train_data="data.jsonl")
    config = Config(model=model, data=data, weights=WeightsSection(pull_port=port))
    with pytest.raises(ChannelError, match=rf"cannot bind {hub.address}: .* set weights\.pull_port to another port") as raised:
        open_weight_hub(config)
    assert "hub." not in str(raised.value)


def test_answers_do_not_wait_for_the_end_of_a_flood() -> None:
    busy, dispatcher = BusyHub(), FakeDispatcher([ACCEPTED])
    thread = HubThread(cast(Hub, busy), cast(Dispatcher, dispatcher), lambda: busy.now)
    thread.start()
    eventually(lambda: len(dispatcher.handled_at_ticks) > 3)
    thread.close()
    num_handled = [after - before for before, after in pairwise([0, *dispatcher.handled_at_ticks])]
    assert set(num_handled) <= {4, 5}
    assert busy.num_sent == dispatcher.num_handled
