"""A few pulls run at a time, all of one snapshot, which is lent only while it is pulled."""

import time
from typing import cast

import pytest
import torch

from offbeat.common.weights.flat import checksum
from offbeat.learner.weights import pulls as pulls_module
from offbeat.learner.weights.double_buffer import DoubleBuffer
from offbeat.learner.weights.pulls import PullService
from offbeat.learner.weights.server import Visitor, WeightServer
from offbeat.protocols.messages import WeightsStaged
from tests.learner.weights.weight_fakes import LAYOUT, TRANSPORT, FakeServer, actor


class Bench:
    """A pull service that lends version 3."""

    def __init__(self) -> None:
        self.snapshots, self.server = DoubleBuffer(LAYOUT), FakeServer()
        with self.snapshots.writing() as buffer:
            buffer.flat.fill_(3)
            self.snapshots.publish(3)
        self.pulls = PullService(self.snapshots, cast(WeightServer, self.server), TRANSPORT)
        self.pulls.lend(self.pulls.borrow())


def test_no_more_actors_pull_at_once_than_allowed() -> None:
    bench = Bench()
    bench.pulls.admit([actor("a"), actor("b", 2), actor("c")])
    assert list(bench.server.visitors) == [b"a", b"b"]
    assert bench.pulls.num_free == 0
    bench.pulls.end(b"a")
    bench.pulls.admit([actor("c")])
    assert b"c" in bench.pulls
    assert bench.pulls.lent_version == 3


def test_actor_that_the_lent_version_does_not_bring_forward_waits() -> None:
    bench = Bench()
    bench.pulls.admit([actor("a", 3), actor("b", 2)])
    assert list(bench.server.visitors) == [b"b"]


def test_edition_is_given_back_when_the_last_pull_ends() -> None:
    bench = Bench()
    bench.pulls.admit([actor("a"), actor("b")])
    lent = bench.pulls._lent
    assert lent is not None
    bench.pulls.end(b"a")
    assert (bench.server.lent_version, lent.num_readers) == (3, 1)
    bench.pulls.end(b"b")
    assert (bench.server.lent_version, lent.num_readers, bench.pulls.lent_version) == (None, 0, None)


def test_edition_that_nobody_begins_to_pull_is_given_back_at_once() -> None:
    bench = Bench()
    bench.pulls.admit([])
    assert bench.pulls.lent_version is None
    # Nothing is lent: nobody can begin.
    bench.pulls.admit([actor("a")])
    assert b"a" not in bench.pulls


def test_pull_is_announced_once_and_again_when_the_actor_comes_back_before_it_has_begun() -> None:
    bench = Bench()
    bench.pulls.admit([actor("a"), actor("b")])
    announced = bench.pulls.announce()
    assert [peer for peer, _ in announced] == [b"a", b"b"]
    message = announced[0][1]
    flat = torch.full((256,), 3, dtype=torch.uint8)
    assert (message.policy_version, message.host, message.port) == (3, "learner", 4711)
    assert (message.num_bytes, message.chunk_bytes, message.checksum, message.timeout_s) == (256, 100, checksum(flat), 5.0)
    assert bench.pulls.announce() == []
    bench.server.visitors[b"b"].num_requests = 1
    for peer in (b"a", b"b", b"unknown"):
        bench.pulls.announce_again(peer)
    assert [peer for peer, _ in bench.pulls.announce()] == [b"a"]


def test_pull_ends_when_its_actor_leaves_or_has_the_version() -> None:
    bench = Bench()
    bench.pulls.admit([actor("a"), actor("b")])
    bench.pulls.end_obsolete([actor("a", 2), actor("b")])
    assert list(bench.server.visitors) == [b"a", b"b"]
    bench.pulls.end_obsolete([actor("a", 3)])
    assert bench.server.visitors == {}
    assert b"a" not in bench.pulls
    assert b"b" not in bench.pulls


def test_report_ends_the_pull_of_that_actor_and_version() -> None:
    bench = Bench()
    bench.pulls.admit([actor("a"), actor("b")])
    assert bench.pulls.end_staged("a", WeightsStaged(policy_version=2, epoch=-1)) is None
    assert bench.pulls.end_staged("c", WeightsStaged(policy_version=3, epoch=-1)) is None
    bench.server.visitors[b"b"].num_bytes = 100
    ended = bench.pulls.end_staged("b", WeightsStaged(policy_version=3, epoch=-1))
    assert ended is not None
    peer, row = ended
    assert (peer, row.actor, row.policy_version, row.sent_bytes, row.full_bytes) == (b"b", "b", 3, 100, 256)
    assert row.delta_error is None
    assert b"b" not in bench.pulls
    assert b"a" in bench.pulls


def test_actor_that_asks_for_nothing_for_too_long_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.pulls.admit([actor("a"), actor("b")])
    began = time.monotonic()
    # 256 bytes in chunks of 100.
    bench.server.visitors = {b"a": Visitor(began, num_requests=2), b"b": Visitor(began + 1, num_requests=3)}
    monkeypatch.setattr(pulls_module.time, "monotonic", lambda: began + 5.5)
    assert bench.pulls.late() == [(b"a", "a", "asked for no chunk of version 3 within 5 s (weights.timeout_s)")]
    monkeypatch.setattr(pulls_module.time, "monotonic", lambda: began + 6.5)
    assert bench.pulls.late()[1] == (b"b", "b", "did not commit version 3 within 5 s (weights.timeout_s)")
    assert bench.pulls.problems()[0] == "a pulls weights 3: asked for 2 of 3 chunks"
    bench.server.visitors[b"a"] = Visitor(began)
    assert bench.pulls.late()[0][2] == (
        "neither asked for a chunk of version 3 nor committed it within 5 s (weights.timeout_s)"
    )
