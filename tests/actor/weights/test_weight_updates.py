"""Weight updates are received beside the engine, committed once, scored, and never taken from an earlier learner."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.actor.weights.updates import WeightUpdates
from offbeat.common.weights.flat import ALIGNMENT, WeightBuffer, checksum, make_layout
from offbeat.learner.weights.actor_versions import Recipient
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import (
    ActorHeartbeat,
    ActorMessage,
    CanaryRouted,
    CanaryScored,
    Chunk,
    ChunkRequest,
    FilesScored,
    GroupDone,
    Hello,
    LearnerMessage,
    SayHello,
    WeightPull,
    WeightsCommitted,
    WeightsStaged,
    WeightUpdate,
)
from offbeat.protocols.payload import Segment
from offbeat.protocols.wire import Array, FromActor, logprobs, routed_experts
from tests.actor.actor_harness import CANARY, LAYOUT, LIMIT, PATIENCE_S, PEER, FakeEngine, Learner, actor_of, eventually
from tests.waiting import wait_for

pytestmark = pytest.mark.slow


class OneActor:
    """The publisher's list of actors, with the test's only actor."""

    def __init__(self) -> None:
        self.posted: list[LearnerMessage] = []

    def recipients(self) -> list[Recipient]:
        return [Recipient(PEER, "actor-0", None)]

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        self.posted.append(message)

    def fail(self, error: BaseException) -> None:
        raise error


@contextmanager
def published(policy_version: int, weights: torch.Tensor, learner: Learner) -> Iterator[WeightUpdate]:
    """Yield the announcement of a publisher that waits for the actor; the test sends it."""
    actors = OneActor()
    publisher = WeightPublisher(
        layout=LAYOUT,
        transport=Transport(
            host="127.0.0.1",
            listen_on="127.0.0.1",
            backend="gloo",
            port=0,
            timeout_s=5.0,
            bucket_bytes=16,
            chunk_bytes=16,
            max_pulls=1,
        ),
        open_hub=lambda: Hub("tcp://127.0.0.1:0", max_message_bytes=LIMIT),
        max_pull_lag=lambda: 1,
        record=lambda row: None,
    )
    with publisher.writing() as buffer:
        dict(buffer.views())["w"].copy_(weights)
    publisher.publish(policy_version)
    publisher.start(actors)
    eventually(lambda: bool(actors.posted), learner)
    assert isinstance(actors.posted[0], WeightUpdate)
    yield actors.posted[0]
    publisher.close()


def test_update_is_committed_reported_and_scored(learner: Learner) -> None:
    weights = torch.arange(6.0).view(3, 2)
    with actor_of(learner, policy_version=None) as actor, published(0, weights, learner) as update:
        learner.welcome()
        learner.lease(1)
        learner.send(update)
        staged = learner.wait(WeightsStaged)
        assert (staged.policy_version, staged.error) == (0, "")
        assert learner.wait(WeightsCommitted).policy_version == 0
        canary, arrays = learner.wait_packet(CanaryScored)
        assert canary.policy_version == 0
        assert logprobs(arrays[0]).tolist() == [-6, -7]
        assert actor.engine.weights["w"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert learner.wait(GroupDone).lease_id == 1


def test_experts_of_the_canary_follow_its_log_probs(learner: Learner) -> None:
    experts = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    with actor_of(learner, policy_version=None) as actor, published(0, torch.ones(3, 2), learner) as update:
        actor.engine.routed_experts = experts
        learner.welcome()
        learner.send(update)
        assert learner.wait(CanaryScored).policy_version == 0
        routed, arrays = learner.wait_packet(CanaryRouted)
        assert routed == CanaryRouted(policy_version=0, num_tokens=2, num_layers=3, top_k=2)
        np.testing.assert_array_equal(routed_experts(routed, arrays[0]), experts)


@pytest.mark.parametrize(("is_dense", "routing_interval"), [(True, 10), (False, 0)])
def test_experts_are_not_sent_where_there_are_none_or_nobody_measures_them(
    learner: Learner, is_dense: bool, routing_interval: int
) -> None:
    with (
        actor_of(learner, policy_version=None, routing_interval=routing_interval) as actor,
        published(0, torch.ones(3, 2), learner) as update,
    ):
        actor.engine.routed_experts = None if is_dense else np.zeros((2, 3, 2), np.int32)
        learner.welcome()
        learner.send(update)
        learner.wait(CanaryScored)
        learner.lease(1)
        learner.wait(GroupDone)
        assert learner.hears_no(CanaryRouted, 0.0)


def test_idle_actor_commits_an_update_at_once(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.actor.service.IDLE_WAIT_S", 2.0)
    # Only the update may end the actor's wait.
    with actor_of(learner, heartbeat_s=60.0) as actor, published(1, torch.ones(3, 2), learner) as update:
        learner.welcome()
        learner.send(update)
        assert learner.wait(WeightsCommitted, patience_s=1.0).policy_version == 1

        def is_calm() -> bool:
            num_polls = actor.rewards.num_polls
            time.sleep(0.2)
            return actor.rewards.num_polls <= num_polls + 1

        # Waits are long again when the commit is over; with short ones the loop would go round all the time.
        wait_for(is_calm, 20.0)


@pytest.mark.parametrize("phase", ["load_weights", "score"])
def test_heartbeats_go_on_in_a_long_commit_until_it_counts_as_hanging(
    learner: Learner, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    is_busy, may_end = threading.Event(), threading.Event()
    work = getattr(FakeEngine, phase)

    def work_long(*arguments: Any, **options: Any) -> Any:
        is_busy.set()
        assert may_end.wait(PATIENCE_S)
        return work(*arguments, **options)

    with actor_of(learner, policy_version=None, heartbeat_s=0.02) as actor, published(0, torch.ones(3, 2), learner) as update:
        learner.welcome()
        # Not before: the actor scores the model's files after its welcome.
        learner.wait(FilesScored)
        monkeypatch.setattr(FakeEngine, phase, work_long)
        learner.send(update)
        eventually(is_busy.is_set, learner)
        learner.forget()
        # As many as a commit of 20 seconds takes at one a second.
        beats = [learner.wait(ActorHeartbeat) for _ in range(20)]
        assert {beat.policy_version for beat in beats} == {-1 if phase == "load_weights" else 0}
        actor.skipped_s += 1000.0
        learner.forget()
        assert learner.hears_no(ActorHeartbeat)
        may_end.set()
        assert learner.wait(CanaryScored).policy_version == 0
        learner.wait(ActorHeartbeat)
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeats"]


def test_heartbeats_go_on_while_the_files_are_scored(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, score = threading.Event(), FakeEngine.score

    def score_long(engine: FakeEngine, token_ids: list[int]) -> Any:
        assert may_end.wait(PATIENCE_S)
        return score(engine, token_ids)

    monkeypatch.setattr(FakeEngine, "score", score_long)
    with actor_of(learner, policy_version=None, heartbeat_s=0.02):
        learner.wait(Hello)
        learner.send(learner.make_welcome(), CANARY)
        assert [learner.wait(ActorHeartbeat).policy_version for _ in range(3)] == [-1] * 3
        may_end.set()
        _, arrays = learner.wait_packet(FilesScored)
        assert logprobs(arrays[0]).tolist() == [-6, -7]


class ChunkServer:
    """The learner's end of pulls: one chunk for each version, sent when the test asks for it."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0", max_message_bytes=LIMIT)
        self._buffers: dict[int, WeightBuffer] = {}

    def offer(self, policy_version: int, value: float) -> WeightPull:
        """Return the announcement of a version all of whose weights are `value`."""
        buffer = self._buffers[policy_version] = WeightBuffer(LAYOUT)
        dict(buffer.views())["w"].fill_(value)
        return WeightPull(
            policy_version=policy_version,
            host="127.0.0.1",
            port=int(self.hub.address.rpartition(":")[2]),
            num_bytes=len(buffer.flat),
            chunk_bytes=-(-len(buffer.flat) // ALIGNMENT) * ALIGNMENT,
            checksum=checksum(buffer.flat),
            timeout_s=PATIENCE_S,
        )

    def serve(self, policy_version: int) -> None:
        """Answer the request for this version, and wait until the puller has disconnected."""
        request = None
        deadline = time.monotonic() + PATIENCE_S
        while request is None or request.policy_version != policy_version:
            assert time.monotonic() < deadline
            self.hub.wait(0.05)
            received = self.hub.receive()
            if received is not None:
                assert isinstance(received.packet, FromActor)
                request = received.packet.message
                assert isinstance(request, ChunkRequest)
        flat = self._buffers[policy_version].flat
        chunk = Chunk(policy_version=policy_version, index=0, checksum=checksum(flat))
        assert self.hub.send(PEER, chunk, flat.numpy())
        while self.hub.send(PEER, SayHello()):
            assert time.monotonic() < deadline
            time.sleep(0.002)


class Bench:
    """`WeightUpdates` without a loop around it."""

    def __init__(self) -> None:
        self.server = ChunkServer()
        self.engine = FakeEngine(policy_version=None)
        self.sent: list[ActorMessage] = []
        self.file_scores: list[list[float]] = []
        self.updates = WeightUpdates(
            self.engine, self.send, self.open_link, nullcontext, recompute_kv=False, sends_routing=True
        )

    def send(self, message: ActorMessage, *arrays: Array) -> bool:
        self.sent.append(message)
        if isinstance(message, FilesScored):
            self.file_scores.append(arrays[0].tolist())
        return True

    def open_link(self, address: str) -> Link:
        return Link(address, identity=PEER, max_message_bytes=LIMIT)

    def outcome(self, patience_s: float = PATIENCE_S) -> WeightsStaged | None:
        """Return the next outcome, or None when there is none in time."""
        deadline = time.monotonic() + patience_s
        while (outcome := self.updates.outcome()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return outcome


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.updates.close()
    bench.server.hub.close()


def test_every_update_is_received_and_committed_not_only_the_first(bench: Bench) -> None:
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=False)
    for version in (1, 2, 3):
        bench.updates.announce(bench.server.offer(version, value=version / 2))
        assert bench.updates.is_busy
        bench.server.serve(version)
        assert bench.outcome() == WeightsStaged(policy_version=version, epoch=-1)
        bench.updates.commit(version)
        assert not bench.updates.is_busy
        assert bench.engine.policy_version == version
        assert bench.engine.weights["w"].tolist() == [[version / 2] * 2] * 3
    committed = [message.policy_version for message in bench.sent if isinstance(message, WeightsCommitted)]
    assert committed == [1, 2, 3]


def test_score_of_the_files_is_made_before_the_first_update_and_sent_to_each_learner(bench: Bench) -> None:
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=False)
    bench.updates.score_files()
    assert bench.file_scores == [[-6, -7]]
    bench.updates.announce(bench.server.offer(1, value=1.0))
    bench.server.serve(1)
    assert bench.outcome() == WeightsStaged(policy_version=1, epoch=-1)
    bench.updates.commit(1)
    bench.engine.logprob_offset = 0.5
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=True)
    bench.updates.score_files()
    bench.updates.score_files()
    assert bench.file_scores == [[-6, -7]] * 2, "the engine has other weights now: its score then is sent again"


def test_buffer_is_not_overwritten_before_the_commit(bench: Bench) -> None:
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=False)
    bench.updates.announce(bench.server.offer(1, value=1.0))
    bench.server.serve(1)
    assert bench.outcome() == WeightsStaged(policy_version=1, epoch=-1)
    bench.updates.announce(bench.server.offer(2, value=2.0))
    assert bench.outcome(0.2) is None
    assert bench.server.hub.receive() is None, "the second pull has begun"
    bench.updates.commit(1)
    assert bench.engine.weights["w"].unique().tolist() == [1.0]
    bench.server.serve(2)
    assert bench.outcome() == WeightsStaged(policy_version=2, epoch=-1)


def test_weights_of_the_learner_before_are_not_committed_to_the_next(bench: Bench) -> None:
    of_others = set(threading.enumerate())
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=False)
    bench.updates.announce(bench.server.offer(9, value=1.0))
    bench.server.serve(9)
    # The transfer has ended and its outcome was not fetched when another learner process welcomes the actor.
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=True)
    assert bench.outcome(0.3) is None
    assert not bench.updates.is_busy
    assert sum(thread.name == "weight-receiver" for thread in set(threading.enumerate()) - of_others) == 1


def test_second_welcome_of_one_learner_does_not_lose_its_update(bench: Bench) -> None:
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=False)
    bench.updates.announce(bench.server.offer(9, value=1.0))
    bench.updates.join(LAYOUT, [8, 9], is_another_learner=False)
    bench.server.serve(9)
    assert bench.outcome() == WeightsStaged(policy_version=9, epoch=-1)


def test_another_layout_gets_another_buffer(bench: Bench) -> None:
    bench.updates.join(make_layout([("w", (100,))], torch.float32), CANARY.tolist(), is_another_learner=False)
    bench.updates.join(LAYOUT, CANARY.tolist(), is_another_learner=False)
    bench.updates.announce(bench.server.offer(1, value=1.0))
    bench.server.serve(1)
    assert bench.outcome() == WeightsStaged(policy_version=1, epoch=-1)


def test_actor_commits_a_second_update_and_samples_with_it(learner: Learner, bench: Bench) -> None:
    with actor_of(learner, policy_version=None) as actor:
        learner.welcome()
        for version in (1, 2):
            learner.send(bench.server.offer(version, value=float(version)))
            bench.server.serve(version)
            assert learner.wait(WeightsStaged).error == ""
            assert learner.wait(WeightsCommitted).policy_version == version
        assert actor.engine.weights["w"].unique().tolist() == [2.0]
        learner.lease(1, min_policy_version=2)
        assert learner.wait(GroupDone).completions[0].segments == (Segment(2, 0),)
