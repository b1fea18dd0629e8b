"""Bad bytes are counted, do not grow the hub's memory, and do not disturb honest actors."""

import contextlib
import multiprocessing
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from offbeat.protocols import channels
from offbeat.protocols import connection_limits as flood_guard
from offbeat.protocols.channels import MAX_DROPS_AT_ONCE, Hub, Link
from offbeat.protocols.connection_limits import MAX_MALFORMED
from offbeat.protocols.keys import AllowList, HubKeys, LinkKeys, make_key_pair
from offbeat.protocols.messages import Goodbye, GroupDone
from offbeat.protocols.payload import CompletionMeta, Segment
from offbeat.protocols.wire import MAGIC, MAX_FRAMES, FromActor, UnknownMessageError, VersionError, WireError, encode
from tests.protocols.sockets import ANY_PORT, LIMIT, RawPeer, eventually, flood, flood_with_key, introduce, port_of, receive

pytestmark = pytest.mark.slow

GOODBYE = [bytes(frame) for frame in encode(Goodbye(reason="x"))]
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        yield hub


@pytest.fixture
def honest(hub: Hub) -> Iterator[Link]:
    with Link(hub.address, identity=b"honest", max_message_bytes=LIMIT) as link:
        introduce(hub, link)
        yield link


@pytest.fixture
def raw(hub: Hub) -> Iterator[RawPeer]:
    with RawPeer(port_of(hub), b"raw") as raw:
        yield raw


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b""],
        [b""] * 3,
        [MAGIC],
        [MAGIC, b""],
        [MAGIC, b"\xc1"],
        [*GOODBYE, b""],
        [b"x" * 1000, *GOODBYE],
        [b""] * (MAX_FRAMES + 1),
        [b""] * 50_000,
        [b"x"] * 50_000,
        [*GOODBYE, *[b""] * 50_000],
    ],
    ids=lambda frames: f"{len(frames)}-{sum(map(len, frames))}",
)
def test_malformed_message_is_an_answerable_error_and_the_next_one_is_read(hub: Hub, raw: RawPeer, frames: list[bytes]) -> None:
    raw.send(*frames)
    raw.send(*GOODBYE)
    malformed = receive(hub)
    assert malformed.peer == b"raw"
    assert isinstance(malformed.packet, WireError)
    assert receive(hub).packet == (Goodbye(reason="x"), ())
    assert hub.receive() is None


def test_of_a_message_of_thousands_of_frames_few_are_kept(hub: Hub, raw: RawPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("offbeat.protocols.wire.decode_from_actor", lambda frames: seen.append(len(frames)))
    raw.send(*[b"x"] * 10_000)
    receive(hub)
    assert seen == [MAX_FRAMES + 1]


@pytest.mark.parametrize("size", [LIMIT + 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_frame_above_the_limit_ends_its_connection_before_it_is_read(hub: Hub, honest: Link, raw: RawPeer, size: int) -> None:
    raw.send_bytes(b"\x02" + struct.pack(">Q", size) + b"x" * 1000)
    assert raw.is_cut_off()
    introduce(hub, honest)


def test_frame_at_the_limit_is_read(hub: Hub, raw: RawPeer) -> None:
    raw.send(b"x" * LIMIT)
    assert isinstance(receive(hub).packet, WireError)


def test_peer_that_only_sends_rubbish_is_not_decoded_for_a_while_and_counted(
    hub: Hub, honest: Link, raw: RawPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flood_guard, "MUTE_S", 1.0)
    for _ in range(MAX_MALFORMED):
        raw.send(b"rubbish")
    for _ in range(MAX_MALFORMED):
        assert isinstance(receive(hub).packet, WireError)
    for _ in range(30):
        raw.send(*GOODBYE)
    eventually(lambda: hub.receive() is None and sum(hub.num_dropped.values()) == 30)
    assert dict(hub.num_dropped) == {"raw: not listened to after a flood of bad messages": 30}
    introduce(hub, honest)

    def is_heard_again() -> bool:
        raw.send(*GOODBYE)
        received = hub.receive()
        return received is not None and received.packet == (Goodbye(reason="x"), ())

    eventually(is_heard_again)


def test_peer_that_sends_rubbish_now_and_then_is_listened_to(hub: Hub, raw: RawPeer) -> None:
    for _ in range(3):
        for _ in range(MAX_MALFORMED - 1):
            raw.send(b"rubbish")
        raw.send(*GOODBYE)
        for _ in range(MAX_MALFORMED - 1):
            assert isinstance(receive(hub).packet, WireError)
        assert receive(hub).packet == (Goodbye(reason="x"), ())
    assert not hub.num_dropped


def test_receive_comes_back_in_mid_flood(hub: Hub, raw: RawPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_MALFORMED", 1)
    monkeypatch.setattr(channels, "MAX_DROPS_AT_ONCE", 5)
    for _ in range(13):
        raw.send(b"rubbish")
    assert isinstance(receive(hub).packet, WireError)
    eventually(lambda: hub.receive() is None and sum(hub.num_dropped.values()) >= 5)
    assert MAX_DROPS_AT_ONCE <= 1000
    eventually(lambda: hub.receive() is None and sum(hub.num_dropped.values()) == 12)


def test_messages_of_newer_minors_are_never_held_against_their_sender(hub: Hub, raw: RawPeer) -> None:
    newer = MAGIC[:-1] + bytes([MAGIC[-1] + 1])
    for _ in range(MAX_MALFORMED + 1):
        raw.send(newer, b"\x81\xa4type\xa6Gossip")
        assert isinstance(receive(hub).packet, UnknownMessageError)
    raw.send(*GOODBYE)
    assert isinstance(receive(hub).packet, FromActor)


@pytest.mark.parametrize("first", [b"offbeat\x02", b"offbeat\x03\x00", b"offbeat\x03\x07more"])
def test_peer_of_another_major_version_is_refused_in_its_own(hub: Hub, raw: RawPeer, first: bytes) -> None:
    raw.send(first, b"whatever its body is")
    received = receive(hub)
    assert isinstance(received.packet, VersionError)
    version, body = raw.receive()
    assert version == first
    assert (
        body
        == b"\x82\xa4type\xa7Refused\xa6reason" + b"\xd9" + bytes([len(str(received.packet))]) + str(received.packet).encode()
    )


def test_floods_under_fresh_names_grow_no_table_of_drops(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_MALFORMED", 1)
    monkeypatch.setattr(flood_guard, "MAX_DROP_KINDS", 5)
    for number in range(30):
        with RawPeer(port_of(hub), b"\xff%d" % number + b"x" * 200) as raw:
            raw.send(b"rubbish")
            raw.send(b"rubbish")
            assert isinstance(receive(hub).packet, WireError)
            eventually(lambda: hub.receive() is None and sum(hub.num_dropped.values()) == number + 1)  # noqa: B023
    assert len(hub.num_dropped) == 6
    assert hub.num_dropped["others: not listened to after a flood of bad messages"] == 25
    assert max(map(len, hub.num_dropped)) < 120


def test_every_honest_group_arrives_through_a_flood(hub: Hub, honest: Link) -> None:
    with flooded(flood, port_of(hub)):
        assert_honest_groups_arrive(hub, honest)
        eventually(lambda: hub.receive() is None and "flood: not listened to after a flood of bad messages" in hub.num_dropped)


def test_every_honest_group_arrives_while_a_key_holder_floods_on_ever_new_connections(tmp_path: Path) -> None:
    learner, actor = make_key_pair("learner", "learner"), make_key_pair("actor", "honest")
    rogue = make_key_pair("actor", "rogue")
    path = tmp_path / "allowed_keys"
    path.write_text(f"{actor.owner.line()}\n{rogue.owner.line()}\n")
    with (
        Hub(ANY_PORT, max_message_bytes=LIMIT, keys=HubKeys(learner, AllowList(path))) as hub,
        Link(hub.address, identity=b"honest", max_message_bytes=LIMIT, keys=LinkKeys(actor, learner.owner)) as honest,
    ):
        introduce(hub, honest)
        with flooded(flood_with_key, hub.address, rogue, learner.owner):
            assert_honest_groups_arrive(hub, honest)
            # The peer has sent enough for its key to be shut out.
            eventually(lambda: hub.receive() is None and hub.connections.num_refused > 0)


@contextlib.contextmanager
def flooded(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """With a process that does it."""
    process = SPAWN.Process(target=target, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def assert_honest_groups_arrive(hub: Hub, honest: Link) -> None:
    eventually(lambda: isinstance(receive(hub).packet, WireError))
    num_groups, num_sent = 300, 0
    arrived: list[int] = []
    ids, logprobs = np.arange(512, dtype=np.int32), np.zeros(512, np.float32)
    completion = CompletionMeta(512, "stop", 1.0, (Segment(0, 0),))
    while len(arrived) < num_groups:
        if num_sent < num_groups:
            num_sent += honest.send(GroupDone(lease_id=num_sent, completions=(completion,), generate_s=0.1), ids, logprobs)
        received = hub.receive()
        if received is None:
            hub.wait(0.01)
        elif received.peer == b"honest":
            assert isinstance(received.packet, FromActor)
            message, arrays = received.packet
            if isinstance(message, GroupDone):
                assert bytes(arrays[0]) == ids.tobytes()
                arrived.append(message.lease_id)
        else:
            assert isinstance(received.packet, WireError)
    assert arrived == list(range(num_groups))
