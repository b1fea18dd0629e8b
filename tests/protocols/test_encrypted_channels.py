"""Sockets with keys connect to allowed peers; all others receive nothing but the reason."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from offbeat.protocols import connection_limits as flood_guard
from offbeat.protocols import keys as key_check
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.keys import LOOK_INTERVAL_S, AllowList, HubKeys, KeyPair, LinkKeys, Sender, make_key_pair
from offbeat.protocols.messages import Credit, Goodbye, SayHello, Stop
from tests.protocols.sockets import ANY_PORT, LIMIT, PATIENCE_S, eventually, introduce, port_of, receive, replay, tapped

pytestmark = pytest.mark.slow

LEARNER = make_key_pair("learner", "learner")
ACTOR = make_key_pair("actor", "actor-0")
OTHER = make_key_pair("actor", "gpu-*")
OPERATOR = make_key_pair("operator", "me")
STRANGER = make_key_pair("actor", "actor-0")


@pytest.fixture
def allowed(tmp_path: Path) -> AllowList:
    path = tmp_path / "allowed_keys"
    write_list(path, ACTOR, OTHER, OPERATOR)
    return AllowList(path)


@pytest.fixture
def hub(allowed: AllowList) -> Iterator[Hub]:
    with Hub(ANY_PORT, max_message_bytes=LIMIT, keys=HubKeys(LEARNER, allowed)) as hub:
        yield hub


def write_list(path: Path, *keys: KeyPair) -> None:
    path.write_text("".join(f"{key.owner.line()}\n" for key in keys))


def link_to(address: str, key: KeyPair | None = ACTOR, learner: KeyPair | None = LEARNER, identity: bytes = b"actor-0") -> Link:
    keys = None if key is None or learner is None else LinkKeys(key, learner.owner)
    return Link(address, identity=identity, max_message_bytes=LIMIT, keys=keys)


def refusal_of(link: Link) -> str:
    """Return the link's refusal, which must come in bounded time and without any message sent."""
    assert not link.send(Credit(capacity=1))
    return eventually(link.refusal)


def assert_nothing_arrives(hub: Hub) -> None:
    for _ in range(5):
        hub.wait(0.02)
        assert hub.receive() is None


@pytest.mark.parametrize(
    ("key", "sender"),
    [(ACTOR, Sender("actor-0", "actor")), (OTHER, Sender("gpu-*", "actor")), (OPERATOR, Sender("me", "operator"))],
    ids=["actor", "fleet", "operator"],
)
def test_hub_knows_whose_key_a_message_came_under(hub: Hub, key: KeyPair, sender: Sender) -> None:
    with link_to(hub.address, key) as link:
        assert introduce(hub, link).sender == sender
        assert hub.send(b"actor-0", Stop(reason="x"))
        received = link.receive(PATIENCE_S)
        assert received is not None
        assert received.message == Stop(reason="x")
        assert link.refusal() is None
    assert hub.connections.num_refused == 0


def test_without_keys_everybody_may_be_anybody() -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub, link_to(hub.address, None, None) as link:
        sender = introduce(hub, link).sender
    assert sender.role is None
    assert sender.may_be("anybody")


def test_with_keys_a_hub_binds_beyond_loopback(allowed: AllowList) -> None:
    with (
        Hub("tcp://0.0.0.0:0", max_message_bytes=LIMIT, keys=HubKeys(LEARNER, allowed)) as hub,
        link_to(f"tcp://127.0.0.1:{port_of(hub)}") as link,
    ):
        introduce(hub, link)


def test_unknown_key_gets_nothing_and_is_told_which_line_is_missing(hub: Hub) -> None:
    with link_to(hub.address, STRANGER) as link:
        assert f"add the line `{STRANGER.owner.line()}` to its hub.allowed_keys" in refusal_of(link)
        assert not link.send(Credit(capacity=1))
        assert_nothing_arrives(hub)
    assert hub.connections.num_refused >= 1


def test_key_that_is_allowed_later_is_let_in_without_a_restart(hub: Hub, allowed: AllowList) -> None:
    with link_to(hub.address, STRANGER) as link:
        refusal_of(link)
        write_list(allowed.path, ACTOR, STRANGER)
        assert introduce(hub, link).sender == Sender("actor-0", "actor")
        assert link.refusal() is None


def test_wrong_key_of_the_learner_is_suspected_by_its_setting(hub: Hub) -> None:
    with link_to(hub.address, learner=make_key_pair("learner", "learner")) as link:
        assert "hub.learner_key is not its public key" in refusal_of(link)
        assert_nothing_arrives(hub)
    assert hub.connections.num_refused >= 1


def test_peer_without_a_key_is_told_to_get_one(hub: Hub) -> None:
    with link_to(hub.address, None, None) as link:
        refusal = refusal_of(link)
        assert "it demands keys" in refusal or "demands keys, and this side has none" in refusal
        assert "offbeat keygen" in refusal
        assert_nothing_arrives(hub)
    assert hub.connections.num_refused >= 1


def test_peer_with_a_key_is_told_that_the_learner_has_none() -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub, link_to(hub.address) as link:
        assert "works without keys" in refusal_of(link)
        assert_nothing_arrives(hub)
        assert hub.connections.num_refused >= 1


def test_refused_peer_goes_on_trying_until_another_learner_takes_it(allowed: AllowList) -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        address = hub.address
        link = link_to(address)
        refusal_of(link)
    with Hub(address, max_message_bytes=LIMIT, keys=HubKeys(LEARNER, allowed)) as hub, link:
        introduce(hub, link)
        assert link.refusal() is None


def test_nobody_is_let_in_when_nobody_answers_for_the_allow_list(allowed: AllowList, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent:
        """A stand-in for the authenticator that answers no handshake."""

        def __init__(self, context: zmq.Context, log: logging.Logger) -> None:
            pass

        def start(self) -> None:
            pass

        def configure_curve_callback(self, domain: str, credentials_provider: object) -> None:
            pass

        def stop(self) -> None:
            pass

    monkeypatch.setattr(key_check, "ThreadAuthenticator", Absent)
    with Hub(ANY_PORT, max_message_bytes=LIMIT, keys=HubKeys(LEARNER, allowed)) as hub, link_to(hub.address) as link:
        eventually(lambda: hub.connections.num_refused > 0)
        assert not link.send(Credit(capacity=1))


def test_revoked_key_is_dropped_in_mid_connection_and_others_are_not(hub: Hub, allowed: AllowList) -> None:
    with link_to(hub.address) as revoked, link_to(hub.address, OTHER, identity=b"gpu-1") as other:
        introduce(hub, revoked)
        introduce(hub, other)
        write_list(allowed.path, OTHER)
        eventually(lambda: allowed.sender(ACTOR.owner.public) is None)
        assert revoked.send(Goodbye(reason="still here"))
        eventually(lambda: hub.receive() is None and sum(hub.num_dropped.values()) > 0)
        assert list(hub.num_dropped) == [f"{ACTOR.owner.public.decode()}: its key was revoked"]
        assert not hub.send(b"actor-0", SayHello())
        introduce(hub, other)
        assert hub.send(b"gpu-1", SayHello())
        # A peer that finds the learner silent connects again and receives the reason.
        revoked.reconnect()
        assert "does not know the key" in eventually(revoked.refusal)


def test_link_with_keys_finds_the_hub_again_after_its_restart(allowed: AllowList) -> None:
    with Hub(ANY_PORT, max_message_bytes=LIMIT, keys=HubKeys(LEARNER, allowed)) as hub:
        address = hub.address
        link = link_to(address)
        introduce(hub, link)
    with Hub(address, max_message_bytes=LIMIT, keys=HubKeys(LEARNER, allowed)) as hub, link:
        introduce(hub, link)


def test_reconnected_link_works(hub: Hub) -> None:
    with link_to(hub.address) as link:
        introduce(hub, link)
        link.reconnect()
        introduce(hub, link)


def test_recorded_bytes_hide_the_message_and_replayed_are_worth_nothing(hub: Hub) -> None:
    secret = "the message itself"
    with tapped(hub) as tap, link_to(tap.address) as link:
        introduce(hub, link)
        link.send(Goodbye(reason=secret))
        assert receive(hub).packet == (Goodbye(reason=secret), ())
        recorded = tap.from_link
    assert b"CURVE" in recorded
    assert secret.encode() not in recorded
    # The hub answers the first two steps, for which no secret is needed, and nothing after them.
    assert b"WELCOME" in replay(port_of(hub), recorded)
    eventually(lambda: hub.connections.num_refused == 1)
    assert_nothing_arrives(hub)
    with link_to(hub.address) as link:
        introduce(hub, link)


def test_recorded_bytes_without_keys_would_have_been_taken() -> None:
    # What makes the test before mean something.
    with Hub(ANY_PORT, max_message_bytes=LIMIT) as hub:
        with tapped(hub) as tap, link_to(tap.address, None, None) as link:
            introduce(hub, link)
            link.send(Goodbye(reason="again"))
            receive(hub)
            recorded = tap.from_link
        replay(port_of(hub), recorded)
        assert receive(hub).packet == (Goodbye(reason="again"), ())


def test_all_connections_of_a_muted_key_are_muted_and_other_keys_are_not(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_REJECTED", 1)
    with (
        link_to(hub.address, OTHER, identity=b"gpu-1") as first,
        link_to(hub.address, OTHER, identity=b"gpu-2") as second,
        link_to(hub.address) as honest,
    ):
        for link in (first, second, honest):
            introduce(hub, link)
        hub.note_verdict(b"gpu-1", is_good=False)
        assert second.send(Goodbye(reason="x"))
        eventually(lambda: hub.receive() is None and sum(hub.num_dropped.values()) > 0)
        assert list(hub.num_dropped) == ["gpu-*: not listened to after a flood of bad messages"]
        introduce(hub, honest)


def test_keys_of_peers_are_forgotten_oldest_first(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_guard, "MAX_REMEMBERED", 3)
    peers = [f"actor-{number}".encode() for number in range(6)]
    with contextlib.ExitStack() as links:
        for peer in peers:
            introduce(hub, links.enter_context(link_to(hub.address, identity=peer)))
        # All are connected, and nothing is sent to a connection whose key is not known any more.
        assert [hub.send(peer, SayHello()) for peer in peers] == [False] * 3 + [True] * 3


def test_look_interval_is_what_the_documentation_says() -> None:
    assert LOOK_INTERVAL_S < 1
