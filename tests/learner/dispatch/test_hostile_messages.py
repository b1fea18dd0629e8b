"""Any field of any actor's message may hold anything: it is handled or refused, and leaves no trace that harms a reader."""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.common.records.rows import encode_row
from offbeat.learner.leases.groups import SMALLEST_LOGPROB
from offbeat.protocols.fields import LARGEST_REWARD
from offbeat.protocols.wire import WireError, decode_from_actor, encode
from tests.learner.dispatch.dispatch_desk import Actor, Desk
from tests.protocols.sample_messages import FROM_ACTOR, as_sent

EXTREMES: tuple[Any, ...] = (
    *(math.nan, math.inf, -math.inf, 1e300, -1e300, 3e38, 5e-324, -0.0),
    *(0, -1, -2, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *("", "a\nb\x1b[2J\x07", "\u202e", "[red]", "../..", "<script>", "x" * 70_000),
    *(None, True, [], {}, b"\xff"),
)


def test_every_extreme_value_in_every_field_is_handled_or_refused() -> None:
    num_handled = num_refused = 0
    for message, arrays in FROM_ACTOR:
        first, body, *rest = as_sent(encode(message, *arrays))
        desk = Desk()
        for tree in _mutations(msgspec.msgpack.decode(body)):
            try:
                packet = decode_from_actor([first, msgspec.msgpack.encode(tree), *rest])
            except WireError as error:
                num_refused += 1
                assert str(error).isprintable()
                continue
            num_handled += 1
            texts = [text for text in _leaves(msgspec.to_builtins(packet.message)) if isinstance(text, str)]
            assert all(text.isprintable() for text in texts), texts
            actor = Actor(desk, "a").join(capacity=4)
            desk.dispatcher.handle(actor.peer, packet.message, packet.arrays, desk.now)
            desk.tick()
        for row in desk.rows:
            written = list(_leaves(msgspec.json.decode(encode_row(row))))
            assert all(value.isprintable() for value in written if isinstance(value, str)), row
            assert not any(isinstance(value, float) and not math.isfinite(value) for value in _leaves(msgspec.to_builtins(row)))
        report = desk.status()
        assert all(text.isprintable() for text in _leaves(msgspec.to_builtins(report)) if isinstance(text, str))
    assert num_handled > 100
    assert num_refused > 500


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        ({"rewards": (0.0, 1e300)}, "reward 1e+300, not within 1e+06 of 0"),
        ({"rewards": (np.nextafter(-LARGEST_REWARD, -math.inf), 0.0)}, "reward -1e+06, not within 1e+06 of 0"),
        ({"logprobs": (-0.5, -3e38)}, "impossible log-probs"),
        ({"logprobs": (-0.5, np.nextafter(np.float32(SMALLEST_LOGPROB), np.float32(-np.inf)))}, "impossible log-probs"),
    ],
)
def test_number_beyond_the_stated_bounds_is_rejected_with_its_reason_and_counted(sent: dict[str, Any], why: str) -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    ack = actor.answer(lease.lease_id, **sent)
    assert ack.outcome == "rejected"
    assert why in ack.detail
    assert list(desk.status().rejected.values()) == [1]


def test_numbers_at_the_bounds_are_accepted() -> None:
    desk = Desk()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    ack = actor.answer(lease.lease_id, rewards=(LARGEST_REWARD, -LARGEST_REWARD), logprobs=(0.0, SMALLEST_LOGPROB))
    assert ack.outcome == "accepted"


def _mutations(tree: Any) -> Iterator[Any]:
    """Yield the tree with each of its values, and each key of a dict, replaced by each extreme value in turn."""
    yield from EXTREMES
    if isinstance(tree, dict):
        for key, value in tree.items():
            for other in _mutations(value):
                yield tree | {key: other}
            yield {("a\x1b[2J\n" if one == key else one): value for one, value in tree.items()}
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            for other in _mutations(value):
                yield [*tree[:index], other, *tree[index + 1 :]]


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield key
            yield from _leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree
