"""Peers of another minor version understand each other; another major version is refused with the cure."""

import msgspec
import pytest

from offbeat.protocols import messages
from offbeat.protocols.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    ActorMessage,
    GroupDone,
    LearnerMessage,
)
from offbeat.protocols.payload import CompletionMeta, Segment
from offbeat.protocols.wire import (
    MAGIC,
    Array,
    UnknownMessageError,
    VersionError,
    WireError,
    decode_from_actor,
    decode_from_learner,
    encode,
    refusal_for,
)
from tests.protocols.sample_messages import FROM_ACTOR, FROM_LEARNER, NEWER, as_sent, name_of


@pytest.mark.parametrize(
    ("first", "theirs"), [(b"offbeat\x02", "2"), (b"offbeat\x03\x00", "3.0"), (b"offbeat\xff\x07", "255.7")]
)
@pytest.mark.parametrize("decode", [decode_from_actor, decode_from_learner])
def test_other_major_version_is_named_with_ours_and_the_cure(decode, first: bytes, theirs: str) -> None:
    ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    with pytest.raises(VersionError, match=rf"version {theirs} of .* speaks {ours}: install the same release"):
        decode([first, b"whatever"])


def test_refusal_of_another_major_is_in_its_own_version() -> None:
    with pytest.raises(VersionError) as raised:
        decode_from_actor([b"offbeat\x02", b"whatever"])
    first, body = refusal_for(raised.value)
    assert first == b"offbeat\x02"
    # Every version must keep understanding this body.
    assert msgspec.msgpack.decode(body) == {"type": "Refused", "reason": str(raised.value)}


def extended(message: ActorMessage | LearnerMessage) -> bytes:
    """Return the body with unknown fields in every struct, nested ones included, as a newer minor version may send it."""

    def extend(value: object) -> object:
        if isinstance(value, dict):
            return {key: extend(item) for key, item in value.items()} | {"from_the_future": {"a": [1, 2]}}
        return [extend(item) for item in value] if isinstance(value, list) else value

    tree = msgspec.to_builtins(message)
    assert isinstance(tree, dict)
    # Mappings with arbitrary keys are not structs.
    free = {key: tree[key] for key in ("ledger", "rejected", "settings", "sources") if key in tree}
    for name in tree.keys() & {"stats", "vitals"}:
        free[name] = tree[name] | {"from_the_future": 1}
    whole = extend(tree)
    assert isinstance(whole, dict)
    return msgspec.msgpack.encode(whole | free)


@pytest.mark.parametrize(("message", "arrays"), FROM_ACTOR + FROM_LEARNER, ids=name_of)
def test_of_a_newer_minor_what_is_known_is_taken(message: ActorMessage | LearnerMessage, arrays: tuple[Array, ...]) -> None:
    decode = decode_from_actor if isinstance(message, ActorMessage) else decode_from_learner
    _, body, *rest = as_sent(encode(message, *arrays))
    assert decode([NEWER, body, *rest]).message == message
    assert extended(message) != body
    assert decode([NEWER, extended(message), *rest]).message == message
    with pytest.raises(WireError, match="unknown field"):
        decode([MAGIC, extended(message), *rest])


def test_of_a_newer_minor_ends_of_arrays_are_left_out() -> None:
    body = msgspec.to_builtins(GroupDone(lease_id=1, completions=(CompletionMeta(1, "stop", 1.0, ()),), generate_s=0.0))
    body["completions"][0]["segments"] = [[4, 0, "added later"]]
    frames = [msgspec.msgpack.encode(body), bytes(4), bytes(4)]
    message = decode_from_actor([NEWER, *frames]).message
    assert isinstance(message, GroupDone)
    assert message.completions[0].segments == (Segment(4, 0),)
    with pytest.raises(WireError):
        decode_from_actor([MAGIC, *frames])


@pytest.mark.parametrize("decode", [decode_from_actor, decode_from_learner])
def test_message_that_only_a_newer_minor_has_is_told_from_a_malformed_one(decode) -> None:
    body = msgspec.msgpack.encode({"type": "Gossip", "about": "weights"})
    with pytest.raises(UnknownMessageError, match=r"Gossip is a message of a newer offbeat"):
        decode([NEWER, body])
    with pytest.raises(WireError, match="malformed") as raised:
        decode([MAGIC, body])
    assert not isinstance(raised.value, UnknownMessageError)
    with pytest.raises(UnknownMessageError) as raised:
        decode([NEWER, msgspec.msgpack.encode({"type": "x" * 1000})])
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x01",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode({"type": 1}),
        msgspec.msgpack.encode({"type": "Credit"}),
        msgspec.msgpack.encode({"type": "Credit", "capacity": -1}),
        msgspec.msgpack.encode({"type": "Credit", "capacity": "1"}),
        msgspec.msgpack.encode({"type": "Hello", "engine": [1]}),
        msgspec.msgpack.encode({"type": "GroupDone", "completions": {"a": 1}}),
        b"\x81\xa4type" + b"\x91" * 100_000 + b"\x01",
        b"\x81\xa4type\xd6\xff\0\0\0\0",
        b"\x81\x81\x01\x02\x03",
        b"\xdf\xff\xff\xff\xff",
    ],
)
def test_newer_minor_is_no_excuse_for_nonsense(body: bytes) -> None:
    with pytest.raises(WireError, match="malformed"):
        decode_from_actor([NEWER, body])


def test_older_minor_may_leave_out_what_has_a_default_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "PROTOCOL_MINOR", PROTOCOL_MINOR + 1)
    body = {"type": "LeaseFailed", "lease_id": 3, "reason": "returned"}
    assert decode_from_actor([MAGIC, msgspec.msgpack.encode(body)]).message == msgspec.convert(body, messages.ActorMessage)
    with pytest.raises(WireError, match="missing required field"):
        decode_from_actor([MAGIC, msgspec.msgpack.encode({"type": "LeaseFailed", "lease_id": 3})])
    with pytest.raises(WireError, match="unknown field"):
        decode_from_actor([MAGIC, msgspec.msgpack.encode(body | {"more": 1})])
