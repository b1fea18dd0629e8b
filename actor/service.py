"""The actor: leases in, groups out, new weights between two engine steps. One loop on one thread.

    Link -> leases -> Engine.step -> completions -> RewardRunner -> groups -> Outbox -> Link
                          ^ commit <- WeightReceiver (thread) <- collective

Everything slow beside sampling (transfers, rewards) happens in threads and processes that the loop only looks at.
"""

import contextlib
import importlib.metadata
import logging
import os
import random
import socket
import time
import zlib
from collections.abc import Callable

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from offbeat.actor.engine import Completion, Engine
from offbeat.actor.engine_choice import make_engine
from offbeat.actor.jobs import Job, parse_request_id
from offbeat.actor.outbox import Outbox
from offbeat.actor.rewards import Rewarded, RewardRunner
from offbeat.actor.weight_receiver import WeightReceiver
from offbeat.common.config import Config
from offbeat.common.hub_keys import keys_of_peer
from offbeat.common.models import hash_model, resolve_model
from offbeat.common.shutdown import ServiceError, StopRequest
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorStats,
    CanaryRouted,
    CanaryScored,
    Cancel,
    Credit,
    CreditLimit,
    Goodbye,
    Hello,
    LearnerHeartbeat,
    Lease,
    LeaseFailed,
    Refused,
    SayHello,
    Stop,
    WeightPull,
    WeightsCommitted,
    WeightsStaged,
    WeightUpdate,
    Welcome,
)
from offbeat.protocols.wire import FromLearner, UnknownMessageError, VersionError, token_ids

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.05
"""How long the loop waits for a message when there is nothing to sample."""
BUSY_WAIT_S = 0.002
"""The same when a transfer or a reward is about to end."""
HELLO_INTERVAL_S = 1.0
SAY_WAITING_INTERVAL_S = 30.0


def run_actor(config: Config, stop: StopRequest) -> str:
    """Wire an actor and work until the run is over or a signal asks to leave; returns why it ended."""
    name = config.actor.name or f"{socket.gethostname()}-{os.getpid()}"
    incarnation = random.SystemRandom().getrandbits(62)
    # Before the engine: a reward that cannot be imported, or an address that is none, shows at once.
    rewards = RewardRunner(config.task.reward, num_workers=config.actor.reward_workers, timeout_s=config.task.reward_timeout_s)

    keys = keys_of_peer(config.hub, name)

    def open_link(address: str) -> Link:
        identity = f"{name}/{incarnation:x}".encode()
        max_message_bytes = config.hub.max_message_mb << 20
        return Link(address, identity=identity, max_message_bytes=max_message_bytes, key=keys.key, learner_key=keys.learner_key)

    with contextlib.closing(rewards), open_link(config.hub.address) as link:
        model = resolve_model(config.model.path)
        engine = make_engine(
            config.actor.engine,
            str(model),
            dtype=config.model.dtype,
            max_model_len=config.model.max_length,
            hashes=hash_model(model),
            seed=zlib.crc32(f"{config.run.seed}/{name}".encode()),
            options=config.actor.engine_options,
        )
        logger.info("engine ready: %s", engine.info)
        with contextlib.closing(engine):
            tokenizer = AutoTokenizer.from_pretrained(model)
            service = ActorService(
                name=name,
                incarnation=incarnation,
                config=config,
                engine=engine,
                tokenizer=tokenizer,
                rewards=rewards,
                link=link,
                open_pull_link=open_link,
                stop=stop,
            )
            return service.run()


class RefusedError(ServiceError):
    """The learner will not work with this actor, and said why."""


class ActorService:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        name: str,
        incarnation: int,
        config: Config,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardRunner,
        link: Link,
        open_pull_link: Callable[[str], Link],
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._config = config
        self._engine = engine
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._link = link
        self._stop = stop
        self._clock = clock
        self._incarnation = incarnation
        self._software = importlib.metadata.version("offbeat")
        self._open_pull_link = open_pull_link
        self._run_id = ""
        self._learner_incarnation = 0
        self._max_message_bytes = config.hub.max_message_mb << 20
        self._seen_lease_id = -1
        self._is_welcome = False
        self._outbox = Outbox(resend_after_s=config.hub.dead_after_s)
        self._jobs: dict[int, Job] = {}
        self._waiting: list[Job] = []
        self._receiver: WeightReceiver | None = None
        self._canary: list[int] = []
        self._seconds: dict[str, float] = dict.fromkeys(
            ("generate", "commit_weights", "wait_leases", "wait_weights", "wait_rewards"), 0.0
        )
        self._num_groups_sent = 0
        self._capacity = config.actor.max_inflight_groups
        """Its credit; an operator may change it, and it is 0 once the actor is to leave."""
        self._is_over = ""
        now = clock()
        self._heard_at = now
        self._searching_since = now
        self._hello_at = float("-inf")
        self._beat_at = float("-inf")
        self._said_waiting_at = now

    def run(self) -> str:
        """Work until the learner says stop or a signal asks for it; returns why it ended.

        Consumes: leases, weight updates. Waits for: the learner's messages, never longer than `IDLE_WAIT_S` at a time.
        Produces: groups, heartbeats. Raises `RefusedError`, or whatever ended the engine.
        """
        while not self._is_over:
            now = self._clock()
            self._keep_in_touch(now)
            self._commit_weights()
            self._start_waiting()
            if self._engine.num_unfinished:
                self._generate()
            self._collect_rewards()
            self._send_outbox()
            self._read(self._patience())
            if self._stop:
                self._drain()
        logger.info("leaving: %s", self._is_over)
        self._link.send(Goodbye(reason=self._is_over))
        if self._receiver is not None:
            self._receiver.close()
        return self._is_over

    # Staying in touch

    def _keep_in_touch(self, now: float) -> None:
        silent_s = now - self._heard_at
        if self._is_welcome and silent_s > self._config.hub.dead_after_s:
            logger.warning("the learner at %s is silent for %.1f s", self._config.hub.address, silent_s)
            # A connection may be half open, or closed to this actor's key: a new one tells.
            self._link.reconnect()
            self._lose_touch()
        if not self._is_welcome:
            self._say_hello(now, now - self._searching_since)
        elif now - self._beat_at >= self._config.hub.heartbeat_s:
            self._beat_at = now
            heartbeat = ActorHeartbeat(
                policy_version=self._engine.policy_version,
                stats=self._stats(),
                lease_ids=self._held(),
                seen_lease_id=self._seen_lease_id,
            )
            self._link.send(heartbeat)

    def _lose_touch(self) -> None:
        # Not since the last message: an actor that was stopped itself must look for the learner before it gives up.
        self._searching_since = self._clock()
        self._is_welcome = False

    def _say_hello(self, now: float, silent_s: float) -> None:
        limit_s = self._config.actor.connect_timeout_s
        if limit_s and silent_s > limit_s:
            cure = self._link.refusal() or "start `offbeat learner`, or correct hub.address"
            raise RefusedError(
                f"no learner answered at {self._config.hub.address} for {silent_s:.0f} s (actor.connect_timeout_s): {cure}"
            )
        if now - self._said_waiting_at > SAY_WAITING_INTERVAL_S:
            self._said_waiting_at = now
            why = f": {refusal}" if (refusal := self._link.refusal()) else ""
            logger.info("waiting for the learner at %s, %.0f s so far%s", self._config.hub.address, silent_s, why)
        if now - self._hello_at >= HELLO_INTERVAL_S:
            hello = Hello(
                actor=self._name,
                incarnation=self._incarnation,
                engine=self._engine.info,
                temperature=self._config.rollout.temperature,
                reward=self._config.task.reward,
                software=self._software,
                run_id=self._run_id,
                lease_ids=self._held(),
            )
            if self._link.send(hello):
                self._hello_at = now

    def _held(self) -> tuple[int, ...]:
        """Leases at work, and those whose answers are not acknowledged."""
        return (*self._jobs, *self._outbox.lease_ids)

    def _stats(self) -> ActorStats:
        return ActorStats(
            num_generated_tokens=self._engine.num_generated_tokens,
            num_groups_sent=self._num_groups_sent,
            num_running_completions=self._engine.num_unfinished,
            seconds=dict(self._seconds),
        )

    def _patience(self) -> float:
        """How long the next read may wait."""
        if self._engine.num_unfinished:
            return 0.0
        is_update_due = self._receiver is not None and self._receiver.is_busy
        is_something_due = is_update_due or self._rewards.num_pending or self._waiting or not self._is_welcome
        return BUSY_WAIT_S if is_something_due else IDLE_WAIT_S

    def _read(self, timeout_s: float) -> None:
        started = self._clock()
        received = self._receive(timeout_s)
        if timeout_s:
            self._seconds[self._waiting_for()] += self._clock() - started
        while received is not None:
            self._heard_at = self._clock()
            self._handle(received.message, received.arrays)
            received = self._receive(0.0)

    def _receive(self, timeout_s: float) -> FromLearner | None:
        try:
            return self._link.receive(timeout_s)
        except UnknownMessageError as error:
            # Of a newer learner, which can do without an answer.
            logger.debug("left out: %s", error)
        except VersionError as error:
            raise RefusedError(f"the learner at {self._config.hub.address}: {error}") from error
        return None

    def _waiting_for(self) -> str:
        if self._rewards.num_pending:
            return "wait_rewards"
        is_behind = self._waiting or self._engine.policy_version < 0
        return "wait_weights" if is_behind else "wait_leases"

    def _handle(self, message: object, arrays: tuple) -> None:
        match message:
            case Welcome():
                self._enter(message, token_ids(arrays[0]).tolist())
            case SayHello():
                self._lose_touch()
            case Lease():
                self._waiting.append(Job(message, token_ids(arrays[0]).tolist()))
                self._jobs[message.lease_id] = self._waiting[-1]
            case Ack():
                if message.outcome == "rejected":
                    logger.warning("the learner rejected lease %d: %s", message.lease_id, message.detail)
                self._outbox.acknowledge(message.lease_id)
            case Cancel():
                self._forget(message.lease_ids)
                for lease_id in message.lease_ids:
                    self._outbox.acknowledge(lease_id)
            case CreditLimit():
                self._take_concurrency(message.capacity)
            case WeightUpdate() | WeightPull():
                if self._receiver is not None:
                    self._receiver.announce(message)
            case LearnerHeartbeat():
                self._seen_lease_id = message.newest_lease_id
            case Refused():
                raise RefusedError(f"the learner refused this actor: {message.reason}")
            case Stop():
                self._is_over = f"the learner ended the run: {message.reason}"

    def _enter(self, welcome: Welcome, canary: list[int]) -> None:
        """The learner admitted this actor (again): send it what it has not acknowledged."""
        is_new_learner = self._learner_incarnation not in (0, welcome.learner_incarnation)
        if is_new_learner:
            held = len(self._jobs) + len(self._outbox)
            logger.warning("the learner is a new process of the same run; the %d leases held here go on", held)
        if self._receiver is None or is_new_learner or self._receiver.layout != welcome.layout:
            # A version that the learner before has sent must not be committed as one of this learner's.
            if self._receiver is not None:
                self._receiver.close()
            self._receiver = WeightReceiver(welcome.layout, self._open_pull_link)
        if not self._is_welcome:
            logger.info("joined run %s at policy version %d", welcome.run_id, welcome.policy_version)
        self._run_id = welcome.run_id
        self._learner_incarnation = welcome.learner_incarnation
        self._max_message_bytes = welcome.max_message_bytes
        # What was leased before this welcome and is not here is taken back by the learner, which has just been told.
        self._seen_lease_id = -1
        self._canary = canary
        self._is_welcome = True
        self._outbox.send_all_again()
        self._link.send(Credit(capacity=self._capacity))

    def _take_concurrency(self, capacity: int) -> None:
        if self._stop:
            return
        if capacity != self._capacity:
            logger.info("works on %d groups at once from now on, as the learner's operator asked", capacity)
        self._capacity = capacity
        self._link.send(Credit(capacity=capacity))

    def _forget(self, lease_ids: tuple[int, ...]) -> None:
        for lease_id in lease_ids:
            job = self._jobs.pop(lease_id, None)
            if job is not None:
                self._engine.abort(job.request_ids())
                self._waiting = [waiting for waiting in self._waiting if waiting is not job]

    # Sampling

    def _start_waiting(self) -> None:
        """Submit the leases whose weights are here."""
        able = [job for job in self._waiting if job.lease.min_policy_version <= self._engine.policy_version]
        self._waiting = [job for job in self._waiting if job.lease.min_policy_version > self._engine.policy_version]
        for job in able:
            job.started_at = self._clock()
            for request in job.request_ids():
                self._engine.submit(request, job.prompt_token_ids, job.lease.sampling)

    def _generate(self) -> None:
        started = self._clock()
        for completion in self._engine.step():
            self._take(completion)
        self._seconds["generate"] += self._clock() - started

    def _take(self, completion: Completion) -> None:
        lease_id, index = parse_request_id(completion.request_id)
        job = self._jobs.get(lease_id)
        if job is None:
            return
        job.completions[index] = completion
        if not job.is_generated:
            return
        assert job.started_at is not None
        job.generated_s = self._clock() - job.started_at
        texts = [str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)) for completion in job.in_order()]
        self._rewards.submit(lease_id, job.lease.prompt, texts, msgspec.json.decode(job.lease.row))

    def _collect_rewards(self) -> None:
        for result in self._rewards.poll():
            job = self._jobs.pop(result.key, None)
            if job is None:
                continue
            if isinstance(result, Rewarded):
                self._answer(job, list(result.rewards))
            else:
                self._outbox.put(result.key, LeaseFailed(lease_id=result.key, reason=result.reason, detail=result.detail))

    def _answer(self, job: Job, rewards: list[float]) -> None:
        message, arrays = job.group(rewards)
        lease_id = job.lease.lease_id
        largest = max(array.nbytes for array in arrays)
        if largest > self._max_message_bytes:
            # Sent, it would cost the connection, again and again.
            detail = f"the group has {largest} bytes; the learner's hub.max_message_mb takes {self._max_message_bytes}"
            self._outbox.put(lease_id, LeaseFailed(lease_id=lease_id, reason="too_large", detail=detail))
            return
        self._outbox.put(lease_id, message, *arrays)
        self._num_groups_sent += 1

    def _send_outbox(self) -> None:
        if not self._is_welcome:
            return
        now = self._clock()
        for parcel in self._outbox.due(now):
            if not self._link.send(parcel.message, *parcel.arrays):
                return
            parcel.sent_at = now

    # Weights

    def _commit_weights(self) -> None:
        """If a version lies in the buffer: swap it in, tell the learner, and score the canary under it."""
        outcome = self._receiver.outcome() if self._receiver is not None else None
        if outcome is None:
            return
        assert self._receiver is not None
        version = outcome.policy_version
        self._link.send(WeightsStaged(policy_version=version, epoch=outcome.epoch, error=outcome.error))
        if outcome.error:
            return
        started = self._clock()
        self._engine.load_weights(
            self._receiver.buffer.views(), version, recompute_kv=self._config.actor.on_update == "recompute_kv"
        )
        stall_s = self._clock() - started
        self._receiver.release()
        self._link.send(WeightsCommitted(policy_version=version, stall_s=stall_s))
        self._score_canary(version)
        self._seconds["commit_weights"] += self._clock() - started

    def _score_canary(self, policy_version: int) -> None:
        score = self._engine.score(self._canary)
        self._link.send(CanaryScored(policy_version=policy_version), score.logprobs)
        if score.routed_experts is not None and self._config.metrics.routing_interval:
            num_tokens, num_layers, top_k = score.routed_experts.shape
            routed = CanaryRouted(policy_version=policy_version, num_tokens=num_tokens, num_layers=num_layers, top_k=top_k)
            self._link.send(routed, score.routed_experts)

    # The end

    def _drain(self) -> None:
        """A signal asked to leave: hand back what is not finished, send what is."""
        for lease_id in list(self._jobs):
            self._forget((lease_id,))
            self._outbox.put(lease_id, LeaseFailed(lease_id=lease_id, reason="returned"))
        self._capacity = 0
        self._link.send(Credit(capacity=0))
        deadline = self._clock() + self._config.hub.dead_after_s
        while self._is_welcome and len(self._outbox) and self._clock() < deadline and not self._is_over:
            self._send_outbox()
            self._read(BUSY_WAIT_S)
        self._is_over = self._is_over or f"{self._stop.reason}: handed back its leases"
