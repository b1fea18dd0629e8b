"""An actor that has nothing asks a real hub for the run."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from offbeat.actor.contact import RefusedError
from offbeat.actor.joining import JoinReceiver, RunOverError
from offbeat.protocols.channels import Hub, Link, Received
from offbeat.protocols.message_parts import JoinSettings, encode_join_settings
from offbeat.protocols.messages import LearnerMessage, Refused, RunPart, RunRequest, Stop
from offbeat.protocols.wire import Array, FromActor
from tests.actor.served_hub import served

LIMIT = 1 << 20
FILES = {"config.json": b"{}", "tokenizer.json": bytes(100)}
CONTENT = encode_join_settings(JoinSettings("0.1.0", "[run]\n", FILES))
PIECE = 50

Answer = tuple[LearnerMessage, *tuple[Array, ...]]


def part(index: int, content: bytes = CONTENT, digest: str = "") -> Answer:
    message = RunPart(index=index, num_parts=-(-len(content) // PIECE), digest=digest or hashlib.sha256(content).hexdigest())
    return message, np.frombuffer(content[index * PIECE :][:PIECE], np.uint8)


@contextmanager
def learner_that(answer: Callable[[RunRequest], list[Answer]]) -> Iterator[str]:
    """Run a hub that answers what an actor asks before its hello; yield its address."""
    hub = Hub("tcp://127.0.0.1:0", max_message_bytes=LIMIT)

    def handle(received: Received) -> None:
        assert isinstance(received.packet, FromActor)
        message = received.packet.message
        assert isinstance(message, RunRequest)
        for one in answer(message):
            hub.send(received.peer, *one)

    with served(hub, handle) as address:
        yield address


def receive(address: str, patience_s: float = 20.0) -> JoinSettings:
    with Link(address, identity=b"a", max_message_bytes=LIMIT) as link:
        return JoinReceiver(link, address, patience_s=patience_s).receive()


def current(message: RunRequest) -> list[Answer]:
    """Answer as a learner does."""
    return [part(message.index)]


def test_kit_arrives_in_parts() -> None:
    asked: list[int] = []

    def answer(message: RunRequest) -> list[Answer]:
        asked.append(message.index)
        return current(message)

    with learner_that(answer) as address:
        received = receive(address)
    assert (received.software, received.settings, received.files) == ("0.1.0", "[run]\n", FILES)
    assert asked == list(range(-(-len(CONTENT) // PIECE)))


def test_answers_that_come_twice_or_late_do_no_harm() -> None:
    with learner_that(lambda message: [*current(message), *current(message)]) as address:
        assert receive(address).files == FILES


def test_learner_that_restarts_with_other_settings_is_asked_from_the_beginning() -> None:
    other = encode_join_settings(JoinSettings("0.1.0", "[run]\nseed = 1\n", FILES))
    is_restarted = False

    def answer(message: RunRequest) -> list[Answer]:
        nonlocal is_restarted
        is_restarted = is_restarted or message.index == 2
        return [part(message.index, other if is_restarted else CONTENT)]

    with learner_that(answer) as address:
        assert receive(address).settings == "[run]\nseed = 1\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(lambda _: [(Refused(reason="too large. Give the folder"),)], "accept --join: too large", id="refusal"),
        pytest.param(
            lambda message: [part(message.index, digest="0")],
            "did not arrive as it was sent",
            id="damage",
        ),
        pytest.param(lambda _: [part(0, b"no settings")], "what it sent is no run: malformed", id="rubbish"),
    ],
)
def test_learner_without_a_run_ends_the_actor_with_the_reason(answer: Callable[[RunRequest], list[Answer]], words: str) -> None:
    with learner_that(answer) as address, pytest.raises(RefusedError) as raised:
        receive(address)
    assert words in str(raised.value)
    assert address in str(raised.value)


def test_run_that_is_over_cannot_be_joined() -> None:
    with learner_that(lambda _: [(Stop(reason="finished"),)]) as address, pytest.raises(RunOverError, match="finished"):
        receive(address)


def test_silence_ends_with_who_did_not_answer_and_how_far_it_came() -> None:
    with (
        learner_that(lambda message: current(message) if message == RunRequest(index=0) else []) as address,
        pytest.raises(RefusedError) as raised,
    ):
        receive(address, patience_s=0.3)
    assert f"the learner at {address} did not answer for " in str(raised.value)
    assert "after 1 of 4 parts of the run: it is loading, or overloaded (actor.connect_timeout_s)" in str(raised.value)
    with pytest.raises(RefusedError, match="did not answer for 0 s: start it, or correct the address"):
        receive("tcp://127.0.0.1:1", patience_s=0.2)
