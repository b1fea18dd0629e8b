"""Real sockets over loopback: messages arrive, and undeliverable ones do no harm."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offbeat.protocols.addresses import ChannelError
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import Ack, CanaryScored, Credit, Goodbye, Lease, Sampling, SayHello, Stop
from offbeat.protocols.wire import FromActor, FromLearner, WireError, logprobs, token_ids
from tests.chaos.strangers import GREETINGS, MORE_BYTES
from tests.protocols.sockets import (
    ANY_PORT,
    INTRODUCTION,
    LIMIT,
    PATIENCE_S,
    RawPeer,
    eventually,
    free_port,
    introduce,
    port_of,
    receive,
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        yield hub


@pytest.fixture
def link(hub: Hub) -> Iterator[Link]:
    with Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT) as link:
        yield link


@pytest.mark.parametrize("address", ["tcp://*:0", "tcp://0.0.0.0:0", "tcp://lo:0"])
def test_hub_without_keys_does_not_bind_beyond_loopback(address: str) -> None:
    with pytest.raises(ChannelError, match=r"other machines.*offbeat keygen"):
        Hub(address, max_message_bytes=LIMIT)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this machine has no IPv6")
def test_hub_and_actor_meet_at_an_ipv6_address_and_at_a_name() -> None:
    for bound, connected in (("[::1]", "[::1]"), ("127.0.0.1", "localhost")):
        with Hub(f"tcp://{bound}:0", max_message_bytes=LIMIT) as hub:
            address = f"tcp://{connected}:{hub.address.rpartition(':')[2]}"
            assert hub.address.startswith(f"tcp://{bound}:")
            with Link(address, identity=b"actor-0", max_message_bytes=LIMIT) as link:
                eventually(lambda link=link: link.send(Goodbye(reason="done")))
                assert receive(hub)[0] == b"actor-0"


def test_message_and_array_of_the_actor_reach_the_hub(hub: Hub, link: Link) -> None:
    values = np.linspace(-3, 0, 50_000, dtype=np.float32)
    eventually(lambda: link.send(CanaryScored(policy_version=3), values))
    peer, packet, _ = receive(hub)
    assert peer == b"actor-0"
    assert isinstance(packet, FromActor)
    assert packet.message == CanaryScored(policy_version=3)
    np.testing.assert_array_equal(logprobs(packet.arrays[0]), values)


def test_message_and_array_of_the_learner_reach_the_actor(hub: Hub, link: Link) -> None:
    introduce(hub, link)
    lease = Lease(
        lease_id=1, prompt_id=2, group_size=3, sampling=Sampling(4), min_policy_version=0, timeout_s=5.0, prompt="", row="{}"
    )
    assert hub.send(b"actor-0", lease, np.array([7, 8], dtype=np.int32))
    received = link.receive(PATIENCE_S)
    assert isinstance(received, FromLearner)
    assert received.message == lease
    assert token_ids(received.arrays[0]).tolist() == [7, 8]


def test_messages_keep_their_order_in_both_directions(hub: Hub, link: Link) -> None:
    introduce(hub, link)
    for number in range(200):
        assert link.send(Credit(capacity=number))
        assert hub.send(b"actor-0", Ack(lease_id=number, outcome="accepted"))
    assert [receive(hub).packet for _ in range(200)] == [(Credit(capacity=number), ()) for number in range(200)]
    acks = [link.receive(PATIENCE_S) for _ in range(200)]
    assert acks == [(Ack(lease_id=number, outcome="accepted"), ()) for number in range(200)]


def test_nothing_received_is_none(hub: Hub, link: Link) -> None:
    assert hub.receive() is None
    assert link.receive() is None
    assert link.receive(0.01) is None


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=GREETINGS)
def test_stranger_of_another_protocol_does_not_end_the_hub(hub: Hub, link: Link, greeting: bytes) -> None:
    introduce(hub, link)
    with socket.create_connection(("127.0.0.1", port_of(hub))) as stranger:
        stranger.sendall(greeting)
        stranger.sendall(MORE_BYTES)
        numbers = []
        for number in range(20):
            assert link.send(Credit(capacity=number))
            numbers.append(number)
        while numbers:
            message = receive(hub).packet
            if message == (Credit(capacity=numbers[0]), ()):
                del numbers[0]
            else:
                assert isinstance(message, WireError)


def test_port_in_use_names_address_and_cure(hub: Hub) -> None:
    with pytest.raises(ChannelError, match=rf"cannot bind {hub.address}: Address already in use.*another port"):
        Hub(hub.address, max_message_bytes=LIMIT)


@pytest.mark.parametrize("address", ["127.0.0.1:5700", "tcp://127.0.0.1", "tcp://127.0.0.1:port", ""])
def test_address_that_is_none_names_the_setting(address: str) -> None:
    with pytest.raises(ChannelError, match=r"hub\.address"):
        Link(address, identity=b"a", max_message_bytes=LIMIT)
    with pytest.raises(ChannelError, match=r"hub\.bind"):
        Hub(address, max_message_bytes=LIMIT)


def test_closed_hub_frees_its_port() -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        address = hub.address
    Hub(address, max_message_bytes=LIMIT).close()


def test_send_to_a_peer_that_never_was_is_false(hub: Hub) -> None:
    assert not hub.send(b"nobody", SayHello())


def test_send_to_a_vanished_peer_becomes_false(hub: Hub) -> None:
    with Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT) as link:
        introduce(hub, link)
        assert hub.send(b"actor-0", SayHello())
    eventually(lambda: not hub.send(b"actor-0", SayHello()))


def test_actor_without_a_learner_cannot_send_and_is_not_blocked() -> None:
    with Link(f"tcp://127.0.0.1:{free_port()}", identity=b"actor-0", max_message_bytes=LIMIT) as link:
        started = time.monotonic()
        assert not link.send(Credit(capacity=1))
        assert link.receive(0.01) is None
        assert time.monotonic() - started < 2
    assert time.monotonic() - started < 4


def test_link_made_before_the_hub_finds_it() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with Link(address, identity=b"actor-0", max_message_bytes=LIMIT) as link:
        assert not link.send(Credit(capacity=1))
        with Hub(address, max_message_bytes=LIMIT) as hub:
            introduce(hub, link)


def test_link_finds_the_hub_again_after_its_restart() -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        address = hub.address
        link = Link(address, identity=b"actor-0", max_message_bytes=LIMIT)
        introduce(hub, link)
    with Hub(address, max_message_bytes=LIMIT) as hub, link:
        introduce(hub, link)
        assert hub.send(b"actor-0", Stop(reason="x"))
        received = link.receive(PATIENCE_S)
        assert received is not None
        assert received.message == Stop(reason="x")


def test_goodbye_before_close_arrives(hub: Hub) -> None:
    link = Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT)
    introduce(hub, link)
    link.send(Goodbye(reason="done"))
    link.close()
    assert receive(hub).packet == (Goodbye(reason="done"), ())


def test_wake_ends_a_wait(hub: Hub) -> None:
    timer = threading.Timer(0.1, hub.wake)
    timer.start()
    started = time.monotonic()
    hub.wait(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    timer.join()


def test_wake_before_the_wait_is_not_lost_and_not_remembered_twice(hub: Hub) -> None:
    for _ in range(100_000):
        hub.wake()
    started = time.monotonic()
    hub.wait(PATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    started = time.monotonic()
    hub.wait(0.2)
    assert time.monotonic() - started > 0.1


def test_oversized_message_is_not_delivered_and_its_sender_can_connect_again(hub: Hub, link: Link) -> None:
    introduce(hub, link)
    packets = []

    def goodbye_arrives() -> bool:
        # Repeated, because the oversized message costs the connection, and with it what was sent behind it.
        link.send(Goodbye(reason="after"))
        hub.wait(0.05)
        while (received := hub.receive()) is not None:
            packets.append(received.packet)
        return (Goodbye(reason="after"), ()) in packets

    assert link.send(CanaryScored(policy_version=0), np.zeros(LIMIT, dtype=np.float32))
    eventually(goodbye_arrives)
    assert not [packet for packet in packets if packet not in [(INTRODUCTION, ()), (Goodbye(reason="after"), ())]]


def test_foreign_frames_are_a_wire_error_at_the_hub_and_change_nothing(hub: Hub, link: Link) -> None:
    with RawPeer(port_of(hub), b"stranger") as stranger:
        stranger.send(b"GET / HTTP/1.1", b"x")
        peer, packet, _ = receive(hub)
    assert peer == b"stranger"
    assert isinstance(packet, WireError)
    introduce(hub, link)


def test_bytes_that_are_no_zeromq_do_not_kill_the_hub(hub: Hub, link: Link) -> None:
    with socket.create_connection(("127.0.0.1", int(hub.address.rpartition(":")[2]))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        introduce(hub, link)


def test_newer_connection_of_the_same_identity_takes_over(hub: Hub) -> None:
    first = Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT)
    introduce(hub, first)
    with first, Link(hub.address, identity=b"actor-0", max_message_bytes=LIMIT) as second:
        introduce(hub, second)
        assert hub.send(b"actor-0", SayHello())
        assert second.receive(PATIENCE_S) is not None
        assert first.receive(0.1) is None


def test_port_that_is_taken_for_a_moment_is_bound_when_it_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        threading.Timer(0.1, other.close).start()
        with Hub(address, max_message_bytes=LIMIT, patience_s=PATIENCE_S) as hub:
            assert hub.address == address


def test_port_that_stays_taken_is_an_error_after_the_deadline_that_says_how_long_was_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ChannelError, match=r"cannot bind .* for 0\.1 s"):
            Hub(address, max_message_bytes=LIMIT, patience_s=0.1)
