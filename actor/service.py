"""The actor: leases in, groups out, new weights between two engine steps. One loop on one thread.

The engine must never stand still. So whatever is slow beside sampling (transfers, rewards, environments) is done by threads and
processes that the loop polls, and the loop never waits while there is something to sample.

    LearnerContact -> leases -> LeasesAtWork (Engine.step -> completions -> rewards -> groups) -> Outbox -> LearnerContact
                                         ^ commit <- WeightUpdates (thread) <- collective or pull
"""

import contextlib
import logging
import os
import random
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, assert_never, get_args

from offbeat.actor.contact import ActorIdentity, LearnerContact, RefusedError
from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import Engine, EngineSettings
from offbeat.actor.environments.episodes import Episodes
from offbeat.actor.environments.workers import start_workers
from offbeat.actor.judges.client import counts_of_judge, handed_to_processes
from offbeat.actor.leases_at_work import LeasesAtWork, Outbox
from offbeat.actor.page import ActorPage, serving
from offbeat.actor.rewards.runner import RewardRunner
from offbeat.actor.sampling import SingleTurns
from offbeat.actor.weights.updates import WeightUpdates
from offbeat.common.models.folders import hash_model, load_tokenizer, resolve_model
from offbeat.common.models.images import ImageReader
from offbeat.common.processes.gpu_turn import ActorTurn
from offbeat.common.processes.own_process import report_ready
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import doing
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import keys_of_peer
from offbeat.protocols import messages
from offbeat.protocols.channels import Link
from offbeat.protocols.text import as_name
from offbeat.protocols.wire import Frame, token_ids

logger = logging.getLogger(__name__)

Activity = Literal["generate", "commit_weights", "wait_leases", "wait_weights", "wait_rewards", "wait_gpu"]


IDLE_WAIT_S = 0.05
"""Longest wait for a message when there is nothing to sample."""
STEP_LIMIT_S = 600.0
"""Longest step of the engine during which heartbeats go on. The first one may compile, and a processor may be slow."""
BUSY_WAIT_S = 0.002
"""Longest wait for a message when a transfer or a reward is about to end."""


def run_actor(config: Config, stop: StopRequest) -> str:
    """Wire an actor and run it until the run is over or a signal asks to leave. Return the reason for its end."""
    name = config.actor.name or as_name(f"{socket.gethostname()}-{os.getpid()}")
    identity = ActorIdentity(name, random.SystemRandom().getrandbits(62))
    model = resolve_model(config.model.path)
    images = ImageReader(model) if config.data.image_field else None
    with contextlib.ExitStack() as stack:
        # Before the processes start that ask the judge.
        stack.enter_context(handed_to_processes(config))
        # Before the engine, which takes long: a function that cannot be imported, or a wrong address, shows at once.
        judge = start_workers(config, model) if config.task.environment else RewardRunner(config.task, config.actor)
        stack.enter_context(contextlib.closing(judge))
        keys, limit = keys_of_peer(config.hub, name), config.hub.max_message_mb << 20
        link = stack.enter_context(Link(config.hub.address, identity=identity.peer(), max_message_bytes=limit, keys=keys))
        turn = ActorTurn.of_process()
        with stop.at_once("the actor leaves before it has joined"), doing(logger, "starting the engine"):
            if turn is not None:
                turn.begin()
            engine = make_engine(config.actor.engine, str(model), _engine_settings(config, name, model, images, turn))
        stack.enter_context(contextlib.closing(engine))
        report_ready()
        info = engine.info
        logger.info(
            "engine ready: %s %s, %s on %s, %d tokens", *(info.name, info.version), info.dtype, info.device, info.max_model_len
        )
        outbox = Outbox(resend_after_s=config.hub.dead_after_s)
        sampler = (
            SingleTurns(engine, load_tokenizer(model), judge)
            if isinstance(judge, RewardRunner)
            else Episodes(engine, judge, config)
        )
        leases = LeasesAtWork(engine, sampler, outbox, max_message_bytes=limit, images=images)
        gpu = None if turn is None else _turns_of(engine, turn)
        service = ActorService(identity=identity, config=config, engine=engine, leases=leases, link=link, stop=stop, gpu=gpu)
        stack.enter_context(serving(service.page, config.metrics.actor_bind))
        return service.run()


def _engine_settings(
    config: Config, name: str, model: Path, images: ImageReader | None, turn: ActorTurn | None
) -> EngineSettings:
    return EngineSettings(
        dtype=config.model.dtype,
        max_model_len=config.model.max_length,
        hashes=hash_model(model),
        seed=zlib.crc32(f"{config.run.seed}/{name}".encode()),
        options=config.actor.engine_options,
        images=images,
        records_experts=config.loss.routing_replay == "sampled",
        has_turns=bool(config.task.environment),
        sleeps=turn is not None,
    )


def _turns_of(engine: Engine, turn: ActorTurn) -> Callable[[], bool]:
    from offbeat.actor.engines.vllm_engine import VllmEngine

    assert isinstance(engine, VllmEngine), "the device plan gives turns to vLLM alone"
    return partial(turn.look, engine.sleep, engine.wake)


class ActorService:
    """One actor: its loop, and the answers to the learner's messages."""

    def __init__(
        self,
        *,
        identity: ActorIdentity,
        config: Config,
        engine: Engine,
        leases: LeasesAtWork,
        link: Link,
        stop: StopRequest,
        gpu: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gpu`: takes turns with the learner on a GPU, and returns whether the engine is awake; None: there is no need."""
        self._config = config
        self._gpu = gpu
        self._is_awake = True
        """The engine may work: the GPU is not the learner's."""
        self._engine = engine
        self._leases = leases
        self._outbox = leases.outbox
        self._stop = stop
        self._clock = clock
        self._seconds: dict[str, float] = dict.fromkeys(get_args(Activity), 0.0)
        """Seconds spent on each activity since the start."""
        self.page = ActorPage(clock)
        """The numbers and probes of this actor, for a web server."""
        self._learner = LearnerContact(link, identity, config, engine.info, clock)
        self._weights = WeightUpdates(
            engine,
            self._learner.send,
            link.second_link,
            self._staying_in_touch,
            recompute_kv=config.actor.on_update == "recompute_kv",
            sends_routing=config.metrics.routing_interval > 0,
            clock=clock,
        )
        self._capacity = config.actor.max_inflight_groups
        """Leases that the actor holds at most. An operator may change it; it is 0 once the actor is to leave."""
        self._finish_by: float | None = None
        """Time at which a leaving actor gives back what it has not finished; None before a signal asks it to leave."""
        self._offered: int | None = None
        """Leases that the learner was last told that the actor takes; None before the first time."""
        self._end_reason: str | None = None
        """Reason for the end of the loop; None while the loop runs."""

    def run(self) -> str:
        """Work until the learner says stop or a signal asks for it. Return the reason for the end.

        Consumes: leases, weight updates. Waits for: the learner's messages, never longer than `IDLE_WAIT_S` at a time.
        Produces: groups, heartbeats. Raises `RefusedError`, or the error that ended the engine.
        """
        with contextlib.closing(self._weights), contextlib.closing(self._learner):
            while self._end_reason is None:
                self._keep_in_touch()
                self._share_gpu()
                if self._is_awake:
                    self._commit_weights()
                if self._stop:
                    self._leases.return_waiting()
                elif self._is_awake:
                    self._leases.start_ready()
                if self._engine.num_unfinished and self._is_awake:
                    self._generate()
                self._leases.collect()
                self._send_answers()
                self._read_messages(self._longest_wait_s())
                if self._stop:
                    self._leave()
            logger.info("leaving: %s", self._end_reason)
            self._learner.send(messages.Goodbye(reason=self._end_reason))
        return self._end_reason

    def _keep_in_touch(self) -> None:
        """Say hello until the learner welcomes this actor; from then on send heartbeats."""
        self._learner.reconnect_if_silent()
        if not self._learner.is_welcome:
            self._learner.say_hello(self._held_lease_ids())
            return
        if self._learner.is_heartbeat_due():
            self._learner.send_heartbeat(self._heartbeat())
        if self._offered != self._credit():
            self._offer()

    def _heartbeat(self) -> messages.ActorHeartbeat:
        version, seen_lease_id = self._engine.policy_version, self._learner.newest_lease_id
        heartbeat = messages.ActorHeartbeat(
            policy_version=-1 if version is None else version,
            stats=self._stats(),
            lease_ids=self._held_lease_ids(),
            seen_lease_id=-1 if seen_lease_id is None else seen_lease_id,
            reward_trouble=self._leases.sampler.retries.trouble(time.monotonic()),
        )
        self.page.show(heartbeat)
        return heartbeat

    def _staying_in_touch(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which heartbeats go on during an update of the weights."""
        if self._learner.is_welcome:
            # The last one may be from before the weights were loaded.
            self._learner.send_heartbeat(self._heartbeat())
        return self._busy(self._config.weights.timeout_s, "an update of the weights")

    def _busy(self, most_s: float, work: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which heartbeats go on and the actor is healthy, for work that may take this long."""
        self.page.be_busy(most_s)
        return self._learner.busy(most_s, work)

    def _share_gpu(self) -> None:
        """Let the learner have the GPU between two steps of the engine, and take it back."""
        if self._gpu is not None:
            with self._spent_on("wait_gpu"), self._busy(STEP_LIMIT_S, "a change of turns on the GPU"):
                self._is_awake = self._gpu()

    @contextlib.contextmanager
    def _spent_on(self, activity: Activity) -> Iterator[None]:
        """Add the time inside the `with` block to `activity`."""
        started = self._clock()
        yield
        self._seconds[activity] += self._clock() - started

    def _commit_weights(self) -> None:
        """Report the end of a weight transfer; after a success, swap the weights in. Score the model's files before."""
        self._weights.score_files()
        outcome = self._weights.outcome()
        if outcome is None:
            return
        self._learner.send(outcome)
        if not outcome.error:
            with self._spent_on("commit_weights"):
                self._weights.commit(outcome.policy_version)

    def _generate(self) -> None:
        with self._spent_on("generate"), self._busy(STEP_LIMIT_S, "a step of the engine"):
            self._leases.step()

    def _send_answers(self) -> None:
        """Send finished groups and failures that are new, or not acknowledged for long."""
        if not self._learner.is_welcome:
            return
        now = self._clock()
        for parcel in self._outbox.due(now):
            if not self._learner.send(parcel.message, *parcel.arrays):
                return
            parcel.sent_at = now

    def _longest_wait_s(self) -> float:
        """Return how long the next read may wait for a message."""
        if not self._is_awake:
            return IDLE_WAIT_S
        if self._engine.num_unfinished:
            return 0.0
        is_change_expected = (
            self._weights.is_busy
            or self._leases.sampler.is_waiting
            or self._leases.are_waiting_for_weights
            or not self._learner.is_welcome
        )
        return BUSY_WAIT_S if is_change_expected else IDLE_WAIT_S

    def _read_messages(self, longest_wait_s: float) -> None:
        """Handle every message that is here; wait for the first one."""
        self.page.turn(is_welcome=self._learner.is_welcome, has_weights=self._engine.policy_version is not None)
        with self._spent_on(self._reason_to_wait()) if longest_wait_s else contextlib.nullcontext():
            received = self._learner.receive(longest_wait_s)
        while received is not None:
            self._handle(received.message, received.arrays)
            received = self._learner.receive(0.0)

    def _reason_to_wait(self) -> Activity:
        if not self._is_awake:
            return "wait_gpu"
        if self._leases.sampler.is_waiting:
            return "wait_rewards"
        is_behind = self._leases.are_waiting_for_weights or self._engine.policy_version is None
        return "wait_weights" if is_behind else "wait_leases"

    def _handle(self, message: messages.LearnerMessage, arrays: tuple[Frame, ...]) -> None:
        match message:
            case messages.Welcome():
                self._join(message, canary=token_ids(arrays[0]).tolist())
            case messages.SayHello():
                self._learner.lose()
            case messages.Lease():
                self._leases.add(message, token_ids(arrays[0]).tolist(), *arrays[1:])
            case messages.Ack():
                if message.outcome == "rejected":
                    logger.warning("the learner rejected lease %d: %s", message.lease_id, message.detail)
                self._outbox.acknowledge(message.lease_id)
            case messages.Cancel():
                self._leases.cancel(message.lease_ids)
            case messages.CreditLimit():
                self._change_capacity(message.capacity)
            case messages.WeightUpdate() | messages.WeightPull():
                self._weights.announce(message)
            case messages.LearnerHeartbeat():
                self._learner.note_heartbeat(message)
            case messages.Refused():
                raise RefusedError(f"the learner refused this actor: {message.reason}")
            case messages.Stop():
                self._end_reason = f"the learner ended the run: {message.reason}"
            case (
                messages.Chunk()
                | messages.ChunkGone()
                | messages.RunPart()
                | messages.StatusReport()
                | messages.LiveSettingsReport()
            ):
                # Answers to questions that are not asked over the hub's link.
                pass
            case _:
                assert_never(message)

    def _join(self, welcome: messages.Welcome, canary: list[int]) -> None:
        """Begin or resume work for the learner that admitted this actor: send it every unacknowledged answer again."""
        is_another_learner = self._learner.accept(welcome)
        if is_another_learner:
            num_held = len(self._held_lease_ids())
            logger.warning("the learner is a new process of the same run; continuing the %d leases held here", num_held)
        self._weights.join(welcome.layout, canary, is_another_learner=is_another_learner)
        self._leases.max_message_bytes = welcome.max_message_bytes
        self._outbox.send_all_again()
        self._offer()

    def _change_capacity(self, capacity: int) -> None:
        if self._stop:
            return
        if capacity != self._capacity:
            logger.info("working on %d groups at a time from now on, as an operator requested", capacity)
        self._capacity = capacity
        self._offer()

    def _credit(self) -> int:
        """Return the number of leases to hold now: those that can be answered in time, one while most rewards or episodes fail.

        More would only add to those that wait; with none, nobody would see that they succeed again.
        """
        most = 1 if self._leases.sampler.retries.is_failing else self._leases.most
        return int(min(self._capacity, most))

    def _offer(self) -> None:
        credit = self._credit()
        if self._offered is not None and credit < min(self._offered, self._capacity):
            if self._leases.sampler.retries.is_failing:
                reason = "most rewards or episodes of the last minute failed, until one succeeds"
            else:
                reason = "others expired; raise rollout.lease_timeout_s, or lower actor.max_inflight_groups"
            logger.warning("takes %d leases at a time: %s", credit, reason)
        if self._learner.send(messages.Credit(capacity=credit)):
            self._offered = credit

    def _held_lease_ids(self) -> tuple[int, ...]:
        """Return the leases at work, and those whose answers are not acknowledged."""
        return (*self._leases.lease_ids, *self._outbox.lease_ids)

    def _stats(self) -> messages.ActorStats:
        return messages.ActorStats(
            num_generated_tokens=self._engine.num_generated_tokens,
            num_groups_sent=self._leases.num_groups,
            num_running_completions=self._engine.num_unfinished,
            seconds=dict(self._seconds),
            judge=counts_of_judge(),
            environment=self._leases.sampler.counts(),
        )

    def _leave(self) -> None:
        """Take no more leases, and hand over as soon as those at work are finished or their time is over."""
        now = self._clock()
        if self._finish_by is None:
            settings = self._config.actor
            self._finish_by = now + (settings.leave_within_s if settings.leave == "finish" else 0.0)
            self._capacity = 0
            self._offer()
            logger.info(
                "%s: %d leases at work; actor.leave = %s", self._stop.reason, len(self._leases.lease_ids), settings.leave
            )
        if not self._leases.lease_ids or now >= self._finish_by or not self._learner.is_welcome:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give unfinished leases back, and wait for the learner to acknowledge all answers."""
        num_returned = len(self._leases.lease_ids)
        self._leases.return_all()
        deadline = self._clock() + self._config.hub.dead_after_s
        while self._learner.is_welcome and len(self._outbox) and self._clock() < deadline and self._end_reason is None:
            self._keep_in_touch()
            self._send_answers()
            self._read_messages(BUSY_WAIT_S)
            # Leases that were under way when the learner heard of the credit of 0.
            self._leases.return_all()
        if self._end_reason is None:
            self._end_reason = f"{self._stop.reason}: returned {num_returned} leases"
