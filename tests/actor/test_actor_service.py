"""The actor's loop against a real hub, with a fake engine: what it says to the learner, and when."""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from offbeat.actor.engine import Completion, Score
from offbeat.actor.rewards import Rewarded, RewardFailure, RewardRunner
from offbeat.actor.service import ActorService, RefusedError
from offbeat.actor.weight_receiver import Outcome
from offbeat.common.config import ActorSection, Config, HubSection, MetricsSection, RolloutSection, TaskSection
from offbeat.common.shutdown import StopRequest
from offbeat.common.weights import make_layout
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.standings import Recipient
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    CanaryRouted,
    CanaryScored,
    Cancel,
    Credit,
    CreditLimit,
    EngineInfo,
    Goodbye,
    GroupDone,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    ModelHashes,
    Refused,
    Sampling,
    SayHello,
    Segment,
    Stop,
    WeightsCommitted,
    WeightsStaged,
    WeightUpdate,
    Welcome,
)
from offbeat.protocols.wire import FromActor, logprobs, routed_experts, token_ids

LIMIT = 1 << 20
PATIENCE_S = 10.0
LAYOUT = make_layout([("w", (3, 2))], torch.float32)
CANARY = np.array([5, 6, 7], np.int32)
ENGINE = EngineInfo("fake", "1", "float32", "cpu", 64, ModelHashes("", "", ""))
PEER = b"actor-0/1"

M = TypeVar("M", bound=ActorMessage)


class FakeEngine:
    """Completes the request `lease/index` with the tokens `[lease, index]`, one a step; not while it `is_held`."""

    def __init__(self, policy_version: int = 0) -> None:
        self.info = ENGINE
        self.policy_version = policy_version
        self.num_generated_tokens = 0
        self.is_held = False
        self.is_stepping = False
        self.may_step = threading.Event()
        self.may_step.set()
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.routed_experts: NDArray[np.int32] | None = None

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], sampling: Sampling) -> None:
        self.running.append(request_id)

    def step(self) -> list[Completion]:
        self.is_stepping = True
        assert self.may_step.wait(PATIENCE_S)
        if self.is_held or not self.running:
            time.sleep(0.001)
            return []
        request_id = self.running.pop()
        self.num_generated_tokens += 2
        tokens = np.array([int(part) for part in request_id.split("/")], np.int32)
        return [Completion(request_id, tokens, -tokens.astype(np.float32), "stop", (Segment(self.policy_version, 0),))]

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += [request_id for request_id in request_ids if request_id in self.running]
        self.running = [request_id for request_id in self.running if request_id not in self.aborted]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], policy_version: int, *, recompute_kv: bool) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}
        self.policy_version = policy_version

    def score(self, token_ids: Sequence[int]) -> Score:
        return Score(-np.array(token_ids[1:], np.float32), self.routed_experts)

    def close(self) -> None:
        pass


class FakeRewards:
    """Rewards a completion with the number of its characters; fails for the prompt `bad`; keeps what is `is_held`."""

    def __init__(self) -> None:
        self.is_held = False
        self.submitted: list[tuple[str, dict[str, Any]]] = []
        self._results: list[Rewarded | RewardFailure] = []

    @property
    def num_pending(self) -> int:
        return len(self._results)

    def submit(self, key: int, prompt: str, completions: Sequence[str], row: dict[str, Any]) -> None:
        self.submitted.append((prompt, row))
        rewarded = Rewarded(key, tuple(float(len(text)) for text in completions))
        self._results.append(RewardFailure(key, "reward_error", "no such row") if prompt == "bad" else rewarded)

    def poll(self) -> list[Rewarded | RewardFailure]:
        if self.is_held:
            return []
        results, self._results = self._results, []
        return results


class FakeTokenizer:
    """A token is so many letters."""

    def decode(self, token_ids: NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        return "x" * int(token_ids.sum())


class Learner:
    """The test's end of the hub: waits for messages of a kind and keeps the others."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0", max_message_bytes=LIMIT)
        self.incarnation = 1
        self.max_message_bytes = LIMIT
        self.newest_lease_id = -1
        """What it answers heartbeats with."""
        self.unread: list[FromActor] = []

    def send(self, message: LearnerMessage, *arrays: NDArray[np.int32]) -> None:
        assert self.hub.send(PEER, message, *arrays)

    def wait(self, kind: type[M], patience_s: float = PATIENCE_S) -> M:
        return self.wait_packet(kind, patience_s)[0]

    def wait_packet(self, kind: type[M], patience_s: float = PATIENCE_S) -> tuple[M, tuple[Any, ...]]:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            for packet in self.unread:
                if isinstance(packet.message, kind):
                    self.unread.remove(packet)
                    return packet.message, packet.arrays
            self.read(0.02)
        raise AssertionError(f"no {kind.__name__} within {patience_s} s")

    def read(self, timeout_s: float) -> None:
        self.hub.wait(timeout_s)
        while (received := self.hub.receive()) is not None:
            if received.peer != PEER:
                # Of a connection that the actor has given up: the ROUTER has given its name to the new one.
                continue
            assert isinstance(received.packet, FromActor)
            if isinstance(received.packet.message, ActorHeartbeat):
                self.hub.send(PEER, LearnerHeartbeat(newest_lease_id=self.newest_lease_id))
            self.unread.append(received.packet)

    def forget(self) -> None:
        """Whatever has arrived."""
        self.read(0.05)
        self.unread.clear()

    def hears_no(self, kind: type[ActorMessage], seconds: float = 0.3) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.02)
        return not any(isinstance(packet.message, kind) for packet in self.unread)

    def welcome(self) -> Credit:
        """Answer a hello; the actor's credit."""
        self.wait(Hello)
        self.send(self.make_welcome(), CANARY)
        return self.wait(Credit)

    def make_welcome(self) -> Welcome:
        return Welcome(
            run_id="r",
            learner_incarnation=self.incarnation,
            max_message_bytes=self.max_message_bytes,
            layout=LAYOUT,
            policy_version=0,
        )

    def lease(self, lease_id: int, *, min_policy_version: int = 0, group_size: int = 2, prompt: str = "1+1=") -> None:
        lease = Lease(
            lease_id=lease_id,
            prompt_id=9,
            group_size=group_size,
            sampling=Sampling(8),
            min_policy_version=min_policy_version,
            timeout_s=60.0,
            prompt=prompt,
            row='{"answer": "2"}',
        )
        self.send(lease, np.array([1, 2], np.int32))

    def restart(self) -> None:
        """A hub at the same address that knows nobody."""
        address = self.hub.address
        self.hub.close()
        self.unread.clear()
        self.hub = Hub(address, max_message_bytes=LIMIT)


class Actor:
    """An `ActorService` on a thread of its own."""

    def __init__(self, address: str, engine: FakeEngine, actor: ActorSection, hub: HubSection) -> None:
        self.engine = engine
        self.rewards = FakeRewards()
        self.stop = StopRequest()
        self.link = Link(address, identity=PEER, max_message_bytes=LIMIT)
        self.service = ActorService(
            name="actor-0",
            incarnation=1,
            config=Config(actor=actor, hub=hub),
            engine=engine,
            tokenizer=cast(Any, FakeTokenizer()),
            rewards=cast(RewardRunner, self.rewards),
            link=self.link,
            open_pull_link=lambda address: Link(address, identity=PEER, max_message_bytes=LIMIT),
            stop=self.stop,
        )
        self.reason = ""
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            self.reason = self.service.run()
        except Exception as error:  # noqa: BLE001  the test wants to see it
            self.error = error

    def terminate(self) -> None:
        # A second signal would end the process at once: this one.
        if not self.stop:
            self.stop._on_signal(signal.SIGTERM, None)

    def wait(self) -> str:
        """Why it ended."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.reason

    def close(self) -> None:
        self.terminate()
        self.thread.join(PATIENCE_S)
        self.link.close()
        if self.service._receiver is not None:
            self.service._receiver.close()
        assert not self.thread.is_alive()


@pytest.fixture
def learner() -> Iterator[Learner]:
    learner = Learner()
    yield learner
    learner.hub.close()


@contextmanager
def actor_of(
    learner: Learner,
    *,
    policy_version: int = 0,
    max_inflight_groups: int = 4,
    connect_timeout_s: float = 0.0,
    heartbeat_s: float = 0.1,
    dead_after_s: float = 5.0,
) -> Iterator[Actor]:
    actor = Actor(
        learner.hub.address,
        FakeEngine(policy_version),
        ActorSection(max_inflight_groups=max_inflight_groups, connect_timeout_s=connect_timeout_s),
        HubSection(heartbeat_s=heartbeat_s, dead_after_s=dead_after_s),
    )
    try:
        yield actor
    finally:
        # Not to wait for acknowledgements that the test does not give.
        actor.service._is_welcome = False
        actor.close()


def eventually(claim: Callable[[], bool], learner: Learner) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < deadline
        learner.read(0.01)


def test_hello_says_who_is_there_and_credit_follows_the_welcome(learner: Learner) -> None:
    with actor_of(learner, policy_version=-1, max_inflight_groups=7):
        hello = learner.wait(Hello)
        assert (hello.actor, hello.incarnation, hello.engine) == ("actor-0", 1, ENGINE)
        assert (hello.temperature, hello.reward) == (RolloutSection().temperature, TaskSection().reward)
        assert (hello.run_id, hello.lease_ids) == ("", ())
        again = learner.wait(Hello)
        assert again == hello, "said again until it is answered"
        assert learner.welcome() == Credit(capacity=7)
        beat = learner.wait(ActorHeartbeat)
        assert (beat.policy_version, beat.lease_ids, beat.seen_lease_id) == (-1, (), -1)


def test_concurrency_that_the_learner_asks_for_is_its_credit_from_then_on(learner: Learner) -> None:
    with actor_of(learner, max_inflight_groups=7):
        assert learner.welcome() == Credit(capacity=7)
        learner.send(CreditLimit(capacity=3))
        assert learner.wait(Credit) == Credit(capacity=3)
        learner.send(SayHello())
        assert learner.welcome() == Credit(capacity=3)


def test_actor_that_leaves_takes_no_more_work_whatever_the_concurrency(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(1)
        eventually(lambda: actor.engine.num_unfinished > 0, learner)
        actor.terminate()
        assert learner.wait(Credit) == Credit(capacity=0)
        learner.send(CreditLimit(capacity=9))
        assert learner.hears_no(Credit, 0.1)
        learner.send(learner.make_welcome(), CANARY)
        assert learner.wait(Credit) == Credit(capacity=0)


def test_lease_becomes_a_group_in_the_order_of_its_completions(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        learner.lease(3, group_size=3)
        done, arrays = learner.wait_packet(GroupDone)
        assert done.lease_id == 3
        assert token_ids(arrays[0]).tolist() == [3, 0, 3, 1, 3, 2]
        assert logprobs(arrays[1]).tolist() == [-3, 0, -3, -1, -3, -2]
        assert [completion.reward for completion in done.completions] == [3, 4, 5]
        assert {completion.num_tokens for completion in done.completions} == {2}
        assert {completion.segments for completion in done.completions} == {(Segment(0, 0),)}
        assert actor.rewards.submitted == [("1+1=", {"answer": "2"})]
        learner.send(Ack(lease_id=3, outcome="accepted"))
        eventually(lambda: len(actor.service._outbox) == 0, learner)
        beat = learner.wait(ActorHeartbeat)
        assert beat.stats.num_running_completions == 0


def test_heartbeats_count_each_group_once_although_it_is_sent_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.3):
        learner.welcome()
        learner.lease(3)
        for _ in range(3):
            assert learner.wait(GroupDone).lease_id == 3
        learner.send(SayHello())
        learner.welcome()
        assert learner.wait(GroupDone).lease_id == 3
        learner.lease(4, prompt="bad")
        assert learner.wait(LeaseFailed).lease_id == 4
        learner.unread.clear()
        assert learner.wait(ActorHeartbeat).stats.num_groups_sent == 1


def test_unacknowledged_group_is_sent_again_and_an_acknowledged_one_is_not(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5):
        learner.welcome()
        learner.lease(1)
        first = learner.wait_packet(GroupDone)
        learner.lease(2)
        assert learner.wait(GroupDone).lease_id == 2
        learner.send(Ack(lease_id=2, outcome="accepted"))
        again = learner.wait_packet(GroupDone)
        assert again[0] == first[0]
        assert [bytes(array) for array in again[1]] == [bytes(array) for array in first[1]]
        learner.send(Ack(lease_id=1, outcome="duplicate"))
        learner.forget()
        assert learner.hears_no(GroupDone, 0.8)


def test_unacknowledged_groups_are_sent_again_when_the_hub_is_back(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=60.0) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        actor.engine.is_held = True
        learner.lease(2)
        eventually(lambda: actor.engine.num_unfinished == 2, learner)
        learner.restart()
        learner.wait(ActorHeartbeat)
        learner.send(SayHello())
        learner.welcome()
        assert learner.wait(GroupDone).lease_id == 1
        # The same learner process: what is being generated goes on.
        actor.engine.is_held = False
        assert learner.wait(GroupDone).lease_id == 2


def test_work_goes_on_when_another_learner_process_of_the_run_takes_over(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=60.0) as actor:
        learner.welcome()
        learner.lease(1)
        first = learner.wait_packet(GroupDone)
        actor.engine.is_held = True
        learner.lease(2)
        learner.lease(3, min_policy_version=9)
        eventually(lambda: len(actor.service._jobs) == 2 and actor.engine.num_unfinished == 2, learner)
        learner.restart()
        learner.incarnation = 2
        learner.wait(ActorHeartbeat)
        learner.send(SayHello())
        hello = learner.wait(Hello)
        assert hello.run_id == "r"
        assert sorted(hello.lease_ids) == [1, 2, 3]
        learner.send(learner.make_welcome(), CANARY)
        again = learner.wait_packet(GroupDone)
        assert again[0] == first[0]
        assert [bytes(array) for array in again[1]] == [bytes(array) for array in first[1]]
        actor.engine.is_held = False
        assert learner.wait(GroupDone).lease_id == 2
        actor.engine.policy_version = 9
        assert learner.wait(GroupDone).lease_id == 3
        assert actor.engine.aborted == []


def test_heartbeat_lists_what_is_held_and_the_newest_lease_it_knows_of(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.engine.is_held = True
        learner.lease(4)
        learner.lease(6, min_policy_version=9)
        eventually(lambda: len(actor.service._jobs) == 2, learner)
        learner.newest_lease_id = 6
        eventually(lambda: actor.service._seen_lease_id == 6, learner)
        learner.forget()
        beat = learner.wait(ActorHeartbeat)
        assert (sorted(beat.lease_ids), beat.seen_lease_id) == ([4, 6], 6)
        actor.engine.is_held = False
        learner.wait(GroupDone)
        learner.forget()
        assert sorted(learner.wait(ActorHeartbeat).lease_ids) == [4, 6], "kept until it is acknowledged"
        learner.send(Ack(lease_id=4, outcome="accepted"))
        eventually(lambda: len(actor.service._outbox) == 0, learner)
        learner.forget()
        assert learner.wait(ActorHeartbeat).lease_ids == (6,)


def test_after_a_new_welcome_no_lease_counts_as_seen(learner: Learner) -> None:
    # A learner that took the actor for dead counts anew: the newest lease of its last life must not condemn the next ones.
    with actor_of(learner) as actor:
        learner.welcome()
        learner.newest_lease_id = 6
        eventually(lambda: actor.service._seen_lease_id == 6, learner)
        learner.send(SayHello())
        learner.wait(Hello)
        learner.unread.clear()
        learner.send(learner.make_welcome(), CANARY)
        assert learner.wait(ActorHeartbeat).seen_lease_id == -1


def test_group_larger_than_the_learner_takes_is_given_back_instead_of_sent(learner: Learner) -> None:
    learner.max_message_bytes = 40
    with actor_of(learner):
        learner.welcome()
        learner.lease(1, group_size=6)
        failed = learner.wait(LeaseFailed)
        assert (failed.lease_id, failed.reason) == (1, "too_large")
        assert "hub.max_message_mb" in failed.detail
        learner.lease(2, group_size=5)
        assert learner.wait(GroupDone).lease_id == 2


def test_weights_of_the_learner_before_are_not_committed_to_the_next(learner: Learner) -> None:
    update = WeightUpdate(
        policy_version=9,
        epoch=1,
        rank=1,
        world_size=2,
        store_host="127.0.0.1",
        store_port=9,
        backend="gloo",
        bucket_bytes=16,
        checksum=0,
        timeout_s=1.0,
    )
    with actor_of(learner, heartbeat_s=60.0, dead_after_s=60.0) as actor:
        learner.welcome()
        before = actor.service._receiver
        assert before is not None
        actor.engine.may_step.clear()
        learner.lease(1)
        eventually(lambda: actor.engine.is_stepping, learner)
        # During a long step a transfer ends, the learner dies, and another one welcomes the actor.
        before._outcome = Outcome(update.policy_version, update.epoch, "")
        learner.incarnation = 2
        learner.send(learner.make_welcome(), CANARY)
        # The actor's thread is held in the step, so the socket may be looked at from this one.
        assert actor.link._socket.poll(round(PATIENCE_S * 1000))
        actor.engine.may_step.set()
        learner.wait(Credit)
        assert learner.hears_no(WeightsCommitted)
        assert actor.engine.policy_version == 0
        assert not before._thread.is_alive()


def test_lease_waits_for_the_weights_that_it_asks_for(learner: Learner) -> None:
    with actor_of(learner, policy_version=2) as actor:
        learner.welcome()
        learner.lease(1, min_policy_version=3)
        learner.lease(2, min_policy_version=2)
        assert learner.wait(GroupDone).lease_id == 2
        assert learner.hears_no(GroupDone)
        actor.engine.policy_version = 3
        done = learner.wait(GroupDone)
        assert done.lease_id == 1
        assert {completion.segments for completion in done.completions} == {(Segment(3, 0),)}


class OneActor:
    """The publisher's way to the actor of a test."""

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
    """A publisher that waits for the actor; its announcement, which is the test's to send."""
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
    with actor_of(learner, policy_version=-1) as actor, published(0, weights, learner) as update:
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
    with actor_of(learner, policy_version=-1) as actor, published(0, torch.ones(3, 2), learner) as update:
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
    metrics = MetricsSection(routing_interval=routing_interval)
    with actor_of(learner, policy_version=-1) as actor, published(0, torch.ones(3, 2), learner) as update:
        actor.service._config = msgspec.structs.replace(actor.service._config, metrics=metrics)
        actor.engine.routed_experts = None if is_dense else np.zeros((2, 3, 2), np.int32)
        learner.welcome()
        learner.send(update)
        learner.wait(CanaryScored)
        learner.lease(1)
        learner.wait(GroupDone)
        assert learner.hears_no(CanaryRouted, 0.0)


def test_idle_actor_commits_an_update_at_once(learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.actor.service.IDLE_WAIT_S", 2.0)
    # Nothing but the update must end its waiting.
    with actor_of(learner, heartbeat_s=60.0) as actor, published(1, torch.ones(3, 2), learner) as update:
        learner.welcome()
        learner.send(update)
        assert learner.wait(WeightsCommitted, patience_s=1.0).policy_version == 1
        # It waits long again: a committed update is nothing to look out for.
        time.sleep(0.1)
        assert actor.service._patience() == 2.0


def test_failed_reward_gives_the_lease_back_with_its_reason(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5):
        learner.welcome()
        learner.lease(1, prompt="bad")
        failed = LeaseFailed(lease_id=1, reason="reward_error", detail="no such row")
        assert learner.wait(LeaseFailed) == failed
        assert learner.wait(LeaseFailed) == failed, "sent again until it is acknowledged"
        learner.send(Ack(lease_id=1, outcome="accepted"))
        learner.forget()
        assert learner.hears_no(LeaseFailed, 0.8)


def test_cancelled_answer_is_not_sent_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        learner.send(Cancel(lease_ids=(1,)))
        eventually(lambda: len(actor.service._outbox) == 0, learner)
        learner.forget()
        assert learner.hears_no(GroupDone, 0.8)


def test_cancelled_leases_are_aborted_wherever_they_are(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        actor.rewards.is_held = True
        learner.lease(1)
        eventually(lambda: actor.rewards.num_pending == 1, learner)
        actor.engine.is_held = True
        learner.lease(2)
        learner.lease(3, min_policy_version=9)
        eventually(lambda: actor.engine.num_unfinished == 2 and len(actor.service._jobs) == 3, learner)
        learner.send(Cancel(lease_ids=(1, 2, 3, 4)))
        eventually(lambda: not actor.service._jobs, learner)
        assert sorted(actor.engine.aborted) == ["2/0", "2/1"]
        actor.rewards.is_held = actor.engine.is_held = False
        learner.lease(5)
        assert learner.wait(GroupDone).lease_id == 5
        assert learner.hears_no(GroupDone)


def test_sigterm_hands_leases_back_waits_for_acknowledgements_and_says_goodbye(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        actor.engine.is_held = True
        learner.lease(2)
        learner.lease(3, min_policy_version=9)
        eventually(lambda: len(actor.service._jobs) == 2, learner)
        actor.terminate()
        returned = sorted(learner.wait(LeaseFailed).lease_id for _ in range(2))
        assert returned == [2, 3]
        assert learner.wait(Credit).capacity == 0
        assert learner.hears_no(Goodbye, 0.2)
        for lease_id in (1, 2, 3):
            learner.send(Ack(lease_id=lease_id, outcome="accepted"))
        assert learner.wait(Goodbye).reason.startswith("SIGTERM")
        assert actor.wait().startswith("SIGTERM")
        assert actor.engine.num_unfinished == 0


def test_sigterm_without_a_learner_ends_at_once(learner: Learner) -> None:
    with actor_of(learner) as actor:
        actor.terminate()
        started = time.monotonic()
        actor.wait()
        assert time.monotonic() - started < 3


def test_sigterm_does_not_wait_for_ever_for_acknowledgements(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.5) as actor:
        learner.welcome()
        learner.lease(1)
        learner.wait(GroupDone)
        actor.terminate()
        assert actor.wait().startswith("SIGTERM")


def test_refusal_raises_with_the_reason(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.wait(Hello)
        learner.send(Refused(reason="another tokenizer"))
        with pytest.raises(RefusedError, match="another tokenizer"):
            actor.wait()


def test_stop_ends_the_actor_with_the_learners_reason(learner: Learner) -> None:
    with actor_of(learner) as actor:
        learner.welcome()
        learner.send(Stop(reason="finished"))
        assert actor.wait() == "the learner ended the run: finished"
        learner.wait(Goodbye)


def test_silent_learner_is_greeted_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=1.5) as actor:
        learner.welcome()
        learner.unread.clear()
        # Nobody reads the hub meanwhile, so no heartbeat is answered.
        time.sleep(2.5)
        learner.welcome()
        learner.lease(1)
        assert learner.wait(GroupDone).lease_id == 1
        assert actor.thread.is_alive()


def test_learner_that_answers_heartbeats_is_not_greeted_again(learner: Learner) -> None:
    with actor_of(learner, dead_after_s=0.4):
        learner.welcome()
        learner.forget()
        assert learner.hears_no(Hello, 1.0)


def test_actor_gives_up_when_no_learner_answers_in_time() -> None:
    learner = Learner()
    learner.hub.close()
    with actor_of(learner, connect_timeout_s=0.3) as actor, pytest.raises(RefusedError, match=r"actor\.connect_timeout_s"):
        actor.wait()
