"""An `ActorService` on a thread, with a fake engine, and the learner's end of its hub."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from offbeat.actor.contact import ActorIdentity
from offbeat.actor.engines.engine import CacheUse, Completion, Score
from offbeat.actor.leases_at_work import LeasesAtWork, Outbox
from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.rewards.runner import Rewarded, RewardRunner
from offbeat.actor.rewards.samples import Sample
from offbeat.actor.sampling import SingleTurns
from offbeat.actor.service import ActorService
from offbeat.common.models.images import ImagePatches
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.settings.config import ActorSection, Config, HubSection, MetricsSection
from offbeat.common.weights.flat import WeightBuffer, make_layout
from offbeat.protocols.channels import Hub, Link
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import (
    ActorHeartbeat,
    ActorMessage,
    Credit,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    RewardTrouble,
    Sampling,
    Welcome,
)
from offbeat.protocols.payload import Segment
from offbeat.protocols.wire import FromActor

LIMIT = 1 << 20
PATIENCE_S = 10.0
LEAVE_WITHIN_S = 100.0
"""Seconds after which a leaving actor gives back its work, by its clock, which tests set forward."""
LAYOUT = make_layout([("w", (3, 2))], torch.float32)
CANARY = np.array([5, 6, 7], np.int32)
ENGINE = EngineInfo("fake", "1", "float32", "cpu", 64, ModelHashes("", "", ""))
IDENTITY = ActorIdentity("actor-0", 1)
PEER = IDENTITY.peer()

M = TypeVar("M", bound=ActorMessage)


class FakeEngine:
    """Completes the request `lease/index` with the tokens `[lease, index]`, one request a step, unless `is_held`."""

    def __init__(self, policy_version: int | None = 0) -> None:
        self.info = ENGINE
        self.policy_version = policy_version
        self.num_generated_tokens = 0
        self.num_loads = 0
        self.cache_use = CacheUse(0, 0)
        self.is_held = False
        self.step_s = 0.0
        self.running: list[str] = []
        self.aborted: list[str] = []
        self.submitted: dict[str, tuple[Sequence[int], Sampling]] = {}
        self.cached_at: dict[str, int | None] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.routed_experts: NDArray[np.int32] | None = None
        self.logprob_offset = 0.0

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def submit(
        self,
        request_ids: list[str],
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[ImagePatches] = (),
        *,
        cached_at: int | None = None,
    ) -> None:
        self.running += request_ids
        self.submitted |= dict.fromkeys(request_ids, (prompt_token_ids, sampling))
        self.cached_at |= dict.fromkeys(request_ids, cached_at)

    def step(self) -> list[Completion]:
        if self.is_held or not self.running:
            time.sleep(0.001)
            return []
        time.sleep(self.step_s)
        request_id = self.running.pop()
        assert self.policy_version is not None, "the actor started a lease without weights"
        self.num_generated_tokens += 2
        tokens = np.array([int(part) for part in request_id.split("/")], np.int32)
        return [Completion(request_id, tokens, -tokens.astype(np.float32), "stop", (Segment(self.policy_version, 0),))]

    def abort(self, request_ids: Iterable[str]) -> None:
        self.aborted += [request_id for request_id in request_ids if request_id in self.running]
        self.running = [request_id for request_id in self.running if request_id not in self.aborted]

    def load_weights(self, weights: WeightBuffer, policy_version: int, *, recompute_kv: bool) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights.views()}
        self.policy_version = policy_version

    def score(self, token_ids: Sequence[int]) -> Score:
        return Score(self.logprob_offset - np.array(token_ids[1:], np.float32), self.routed_experts)

    def close(self) -> None:
        pass


class FakeRewards:
    """Rewards a completion with the number of its characters; fails for the prompt `bad`; returns nothing while `is_held`."""

    def __init__(self) -> None:
        self.is_held = False
        self.is_failing = False
        self.num_polls = 0
        self.submitted: list[Sample] = []
        self.cancelled: list[int] = []
        self._results: list[Rewarded | SamplingFailure] = []

    @property
    def retries(self) -> "FakeRewards":
        return self

    @property
    def num_pending(self) -> int:
        return len(self._results)

    def submit(self, key: int, samples: Sequence[Sample]) -> None:
        self.submitted += samples
        rewarded = Rewarded(key, tuple(Reward(float(len(sample.completion)), {"length": 1.0}) for sample in samples))
        is_bad = samples[0].prompt == "bad"
        self._results.append(SamplingFailure(key, "reward_error", "no such row") if is_bad else rewarded)

    def cancel(self, key: int) -> None:
        self.cancelled.append(key)

    def trouble(self, now: float) -> RewardTrouble | None:
        if not self.is_held or not self._results:
            return None
        lease_ids = tuple(result.lease_id for result in self._results)
        return RewardTrouble(waiting_s=7.0, problem="the judge is down", lease_ids=lease_ids)

    def poll(self) -> list[Rewarded | SamplingFailure]:
        self.num_polls += 1
        if self.is_held:
            return []
        results, self._results = self._results, []
        return results


class FakeTokenizer:
    """Decodes token n as n letters."""

    def decode(self, token_ids: NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        return "x" * int(token_ids.sum())


class FakeStop:
    """A `StopRequest` without signals."""

    reason = "SIGTERM"

    def __init__(self) -> None:
        self.is_requested = False

    def __bool__(self) -> bool:
        return self.is_requested


class Learner:
    """The test's end of the hub: waits for messages of one kind and keeps the others."""

    def __init__(self) -> None:
        self.hub = Hub("tcp://127.0.0.1:0", max_message_bytes=LIMIT)
        self.incarnation = 1
        self.max_message_bytes = LIMIT
        self.newest_lease_id = -1
        """The newest lease id that heartbeats report."""
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

    def wait_heartbeat(self, claim: Callable[[ActorHeartbeat], bool]) -> ActorHeartbeat:
        """Return the first heartbeat, of those not read yet, for which the claim holds."""
        self.unread = [packet for packet in self.unread if not isinstance(packet.message, ActorHeartbeat)]
        deadline = time.monotonic() + PATIENCE_S
        while not claim(heartbeat := self.wait(ActorHeartbeat)):
            assert time.monotonic() < deadline, heartbeat
        return heartbeat

    def wait_until_held(self, *lease_ids: int) -> ActorHeartbeat:
        """Wait until the actor holds exactly these leases, at work or unacknowledged."""
        return self.wait_heartbeat(lambda heartbeat: sorted(heartbeat.lease_ids) == sorted(lease_ids))

    def read(self, timeout_s: float) -> None:
        self.hub.wait(timeout_s)
        while (received := self.hub.receive()) is not None:
            if received.peer != PEER:
                # The message came from a connection that the actor has replaced; its name belongs to the new one.
                continue
            assert isinstance(received.packet, FromActor)
            if isinstance(received.packet.message, ActorHeartbeat):
                self.hub.send(PEER, LearnerHeartbeat(newest_lease_id=self.newest_lease_id))
            self.unread.append(received.packet)

    def forget(self) -> None:
        """Drop all messages that have arrived."""
        self.read(0.05)
        self.unread.clear()

    def hears_no(self, kind: type[ActorMessage], seconds: float = 0.3) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.02)
        return not any(isinstance(packet.message, kind) for packet in self.unread)

    def welcome(self) -> Credit:
        """Answer a hello, and return the actor's credit."""
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

    def lease(
        self,
        lease_id: int,
        *,
        min_policy_version: int = 0,
        group_size: int = 2,
        prompt: str = "1+1=",
        timeout_s: float = 60.0,
    ) -> None:
        lease = Lease(
            lease_id=lease_id,
            prompt_id=9,
            group_size=group_size,
            sampling=Sampling(8),
            min_policy_version=min_policy_version,
            timeout_s=timeout_s,
            prompt=prompt,
            row='{"answer": "2"}',
        )
        self.send(lease, np.array([1, 2], np.int32))

    def restart(self) -> None:
        """Replace the hub by a new one at the same address, which knows no actor."""
        address = self.hub.address
        self.hub.close()
        self.unread.clear()
        self.hub = Hub(address, max_message_bytes=LIMIT)


class Actor:
    """An `ActorService` on a thread."""

    def __init__(self, config: Config, engine: FakeEngine, gpu: Callable[[], bool] | None = None) -> None:
        self.engine = engine
        self.rewards = FakeRewards()
        self.stop = FakeStop()
        self.skipped_s = 0.0
        """Seconds by which the actor's clock is ahead."""
        self.reason = ""
        self.error: BaseException | None = None
        self._link = Link(config.hub.address, identity=PEER, max_message_bytes=LIMIT)
        outbox = Outbox(resend_after_s=config.hub.dead_after_s)
        play = SingleTurns(engine, cast(Any, FakeTokenizer()), cast(RewardRunner, self.rewards))
        self._service = ActorService(
            identity=IDENTITY,
            config=config,
            engine=engine,
            leases=LeasesAtWork(engine, play, outbox, max_message_bytes=config.hub.max_message_mb << 20),
            link=self._link,
            stop=cast(StopRequest, self.stop),
            gpu=gpu,
            clock=lambda: time.monotonic() + self.skipped_s,
        )
        self.page = self._service.page
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def terminate(self) -> None:
        """Ask the actor to leave, as SIGTERM does."""
        self.stop.is_requested = True

    def wait(self) -> str:
        """Wait for the end; return its reason, or raise the actor's error."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.reason

    def close(self) -> None:
        """End the actor without waiting for acknowledgements."""
        self.terminate()
        deadline = time.monotonic() + PATIENCE_S
        while self.thread.is_alive() and time.monotonic() < deadline:
            self.skipped_s += 10_000.0
            self.thread.join(0.02)
        self._link.close()
        assert not self.thread.is_alive()

    def _run(self) -> None:
        try:
            self.reason = self._service.run()
        except Exception as error:  # noqa: BLE001  the test wants to see it
            self.error = error


@contextmanager
def actor_of(
    learner: Learner,
    *,
    policy_version: int | None = 0,
    max_inflight_groups: int = 4,
    connect_timeout_s: float = 0.0,
    heartbeat_s: float = 0.1,
    dead_after_s: float = 5.0,
    routing_interval: int = 10,
    leave: Literal["finish", "return"] = "finish",
    address: str = "",
    gpu: Callable[[], bool] | None = None,
) -> Iterator[Actor]:
    """Yield an actor that connects to the learner, or to another `address`."""
    config = Config(
        actor=ActorSection(
            max_inflight_groups=max_inflight_groups,
            connect_timeout_s=connect_timeout_s,
            leave=leave,
            leave_within_s=LEAVE_WITHIN_S,
        ),
        hub=HubSection(address=address or learner.hub.address, dead_after_s=dead_after_s),
        metrics=MetricsSection(routing_interval=routing_interval),
    )
    with patch("offbeat.actor.contact.HEARTBEAT_S", heartbeat_s):
        actor = Actor(config, FakeEngine(policy_version), gpu)
        try:
            yield actor
        finally:
            actor.close()


def eventually(claim: Callable[[], bool], learner: Learner) -> None:
    """Answer heartbeats until the claim holds; fail after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < deadline
        learner.read(0.01)
