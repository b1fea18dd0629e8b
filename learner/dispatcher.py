"""Leases to the actors, groups from them: everything the learner decides about rollouts, without sockets or clock.

    PromptStream -> grant -> [actor generates] -> accept -> buffer (in the ledger) -> select -> trainer
                      ^  StalenessGate.capacity                                  StalenessGate.select

The hub thread feeds `handle` and `tick` and sends what `take_outgoing` returns; the training thread calls `take_batch`,
`finish_batch` and `publish`. Every public method takes the lock.
"""

import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from common.config import EvaluationSection, HubSection, RolloutSection
from common.shutdown import ServiceError
from learner.evaluation import Evaluations
from learner.groups import Group, Rollout
from learner.ledger import Ledger, LedgerCounts
from learner.members import Member, Members
from learner.prompts import Prompt, PromptStream, StreamState
from learner.staleness import StalenessGate
from protocols.channels import Array
from protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    CanaryScored,
    Cancel,
    Credit,
    EngineInfo,
    Goodbye,
    GroupDone,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    Refused,
    Sampling,
    Stop,
    TensorSpec,
    Unknown,
    WeightsCommitted,
    WeightsStaged,
    Welcome,
)
from protocols.wire import Frame, WireError, logprobs, token_ids

logger = logging.getLogger(__name__)

# Rounding may put the log-prob of a sure token a hair above 0.
LARGEST_LOGPROB = 1e-4

Record = Callable[..., None]
"""`record(kind, **row)`: one row of metrics.jsonl."""
WeightsMessage = WeightsStaged | WeightsCommitted


class RunFailedError(ServiceError):
    """The run cannot go on; the text says why and what to do."""


class Contract(NamedTuple):
    """What an actor must agree with, and is told."""

    run_id: str
    learner_incarnation: int
    layout: tuple[TensorSpec, ...]
    canary_token_ids: np.ndarray
    """int32 `[n]`."""
    dtype: str
    model_hash: str
    max_length: int
    """Longest prompt plus completion of this run, in tokens."""
    vocabulary_size: int


class Outgoing(NamedTuple):
    """A message to send."""

    peer: bytes
    message: LearnerMessage
    arrays: tuple[Array, ...] = ()


class DispatcherState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint keeps: enough to lease every prompt that was not trained again."""

    stream: StreamState
    open_prompts: list[int]
    counts: LedgerCounts


class Dispatcher:
    """See the module's docstring."""

    def __init__(
        self,
        *,
        contract: Contract,
        rollout: RolloutSection,
        evaluation: EvaluationSection,
        hub: HubSection,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        stream: PromptStream,
        ledger: Ledger,
        gate: StalenessGate,
        drop_zero_variance: bool,
        max_failed_leases: int,
        policy_version: int,
        record: Record,
        on_join: Callable[[bytes], None],
        on_weights: Callable[[str, WeightsMessage], None],
        on_canary: Callable[[str, int, np.ndarray], None],
    ) -> None:
        self._contract = contract
        self._rollout = rollout
        self._evaluation = evaluation
        self._hub = hub
        self._prompts = prompts
        self._eval_prompts = eval_prompts
        self._stream = stream
        self._ledger = ledger
        self._gate = gate
        self._drop_zero_variance = drop_zero_variance
        self._max_failed_leases = max_failed_leases
        self._policy_version = policy_version
        self._published_version = -1
        self._record = record
        self._on_join = on_join
        self._on_weights = on_weights
        self._on_canary = on_canary
        self._members = Members()
        self._evaluations = Evaluations(
            interval=evaluation.interval,
            num_prompts=min(evaluation.num_prompts, len(eval_prompts)),
            max_attempts=rollout.max_lease_attempts,
        )
        self._eval_deadlines: dict[int, float] = {}
        self._outgoing: deque[Outgoing] = deque()
        self._prompt_failures: Counter[int] = Counter()
        self._failed_in_a_row = 0
        self._failure: BaseException | None = None
        self._is_stopping = False
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)

    # The training thread

    def take_batch(self, timeout_s: float) -> list[Group] | None:
        """A batch of groups, oldest lease first; None when it is not complete within `timeout_s`.

        Consumes: buffered groups. Waits for: the last group of a batch. Unblocked by: `handle` accepting one, or `fail`.
        Raises `RunFailedError`, or whatever ended the hub thread.
        """
        with self._progress:
            return self._progress.wait_for(self._select, timeout_s)

    def finish_batch(self, groups: Sequence[Group], policy_version: int) -> None:
        """The groups were trained on; the learner is at `policy_version` now."""
        with self._lock:
            trained_at = self._policy_version
            steps = policy_version - trained_at
            for index, group in enumerate(groups):
                self._ledger.train(group)
                self._record_group(group, "trained", "", trained_at + index * steps // len(groups))
            self._policy_version = policy_version

    def publish(self, policy_version: int, *, last: bool = False) -> None:
        """The weights of this version are on their way to the actors."""
        with self._lock:
            self._published_version = policy_version
            self._evaluations.reach(policy_version, last=last)

    def wait_evaluations(self, timeout_s: float) -> bool:
        """Until every due evaluation is finished; False when the time is over."""
        with self._progress:
            return self._progress.wait_for(lambda: self._evaluations.is_idle or self._failure is not None, timeout_s)

    def fail(self, error: BaseException) -> None:
        """Make the training thread raise this."""
        with self._progress:
            self._failure = error
            self._progress.notify_all()

    def stop(self, reason: str) -> None:
        """Tell every actor that the run is over; grant nothing more."""
        with self._lock:
            self._is_stopping = True
            for member in self._members:
                self._send(member, Stop(reason=reason))

    def wait_left(self, timeout_s: float) -> bool:
        """Until every actor has said goodbye, or is lost; False when the time is over."""
        with self._progress:
            return self._progress.wait_for(lambda: not len(self._members), timeout_s)

    def state(self) -> DispatcherState:
        """What a checkpoint keeps."""
        with self._lock:
            return DispatcherState(self._stream.state(), self._ledger.open_prompts(), self._ledger.counts())

    def counts(self) -> LedgerCounts:
        """The ledger's sums."""
        with self._lock:
            return self._ledger.counts()

    def buffer_sizes(self) -> tuple[int, int]:
        """Groups ready, and leases in flight."""
        with self._lock:
            return self._ledger.num_ready, self._ledger.num_open - self._ledger.num_ready

    def members(self) -> list[tuple[bytes, str, int]]:
        """Address, name and policy version of every live actor."""
        with self._lock:
            return [(member.peer, member.name, member.policy_version) for member in self._members]

    def waiting_for(self) -> str:
        """One line for the log: what keeps the next batch."""
        with self._lock:
            if not len(self._members):
                return f"no actor is connected: start one with `offbeat actor`, hub.address = {self._hub.address}"
            behind = [member.name for member in self._members if member.policy_version < self._published_version]
            sizes = f"{self._ledger.num_ready} groups ready, {len(self._ledger.generating())} being generated"
            return f"{sizes}; weights {self._published_version} not yet at: {', '.join(behind)}" if behind else sizes

    # The hub thread

    def handle(self, peer: bytes, message: ActorMessage, arrays: Sequence[Frame], now: float) -> None:
        """Take one message of an actor."""
        with self._lock:
            member = self._members.find(peer)
            if isinstance(message, Hello):
                self._welcome(peer, message, now)
                return
            if member is None:
                if not isinstance(message, Goodbye):
                    self._outgoing.append(Outgoing(peer, Unknown()))
                return
            member.last_heard = now
            member.is_reachable = True
            match message:
                case Credit():
                    member.capacity = message.capacity
                case GroupDone():
                    self._take_group(member, message, arrays)
                case LeaseFailed():
                    self._take_failure(member, message)
                case ActorHeartbeat():
                    self._take_heartbeat(member, message)
                case WeightsStaged():
                    self._on_weights(member.name, message)
                case WeightsCommitted():
                    member.policy_version = message.policy_version
                    self._record("commit", actor=member.name, policy_version=message.policy_version, stall_s=message.stall_s)
                    self._on_weights(member.name, message)
                case CanaryScored():
                    self._on_canary(member.name, message.policy_version, logprobs(arrays[0]).copy())
                case Goodbye():
                    self._lose(member, "actor_left", message.reason)

    def refuse(self, peer: bytes, error: WireError) -> None:
        """A peer sent what is no message of ours."""
        with self._lock:
            self._event("bad_message", str(error), peer=peer.decode(errors="replace"))
            self._outgoing.append(Outgoing(peer, Refused(reason=str(error))))

    def unreachable(self, outgoing: Outgoing) -> None:
        """A message could not be sent: take a lease back, and grant no more until the actor is heard again."""
        with self._lock:
            member = self._members.find(outgoing.peer)
            if member is None:
                return
            member.is_reachable = False
            if isinstance(outgoing.message, Lease):
                self._take_back(member, outgoing.message.lease_id, "actor not reachable")

    def tick(self, now: float) -> None:
        """Whatever time brings: dead actors, expired leases, new leases."""
        with self._lock:
            for member in self._members:
                silent_s = now - member.last_heard
                if silent_s > self._hub.dead_after_s:
                    self._lose(member, "actor_lost", f"not heard of for {silent_s:.1f} s (hub.dead_after_s)")
            self._expire(now)
            if not self._is_stopping:
                self._grant_evaluations(now)
                self._grant(now)

    def take_outgoing(self) -> list[Outgoing]:
        """The messages to send, in order."""
        with self._lock:
            outgoing = list(self._outgoing)
            self._outgoing.clear()
            return outgoing

    def post(self, peer: bytes, message: LearnerMessage) -> None:
        """Queue a message of another part (the weight publisher)."""
        with self._lock:
            self._outgoing.append(Outgoing(peer, message))

    # Actors

    def _welcome(self, peer: bytes, hello: Hello, now: float) -> None:
        reason = self._objection(hello.engine)
        namesake = self._members.named(hello.actor)
        if not reason and namesake is not None and namesake.hello.incarnation > hello.incarnation:
            reason = f"another actor named {hello.actor!r}, started later, is in the run: set actor.name"
        if reason:
            self._event("actor_refused", reason, actor=hello.actor)
            self._outgoing.append(Outgoing(peer, Refused(reason=reason)))
            return
        if namesake is not None and namesake.hello.incarnation < hello.incarnation:
            self._lose(namesake, "actor_lost", "replaced by a newer process of the same name")
        member = self._members.find(peer)
        if member is None:
            member = Member(peer=peer, hello=hello, last_heard=now)
            self._members.add(member)
            self._on_join(peer)
            engine = hello.engine
            self._event("actor_joined", f"{engine.name} {engine.version} {engine.dtype} on {engine.device}", actor=hello.actor)
        member.last_heard = now
        member.is_reachable = True
        contract = self._contract
        welcome = Welcome(
            run_id=contract.run_id,
            learner_incarnation=contract.learner_incarnation,
            layout=contract.layout,
            policy_version=self._policy_version,
        )
        self._send(member, welcome, contract.canary_token_ids)

    def _objection(self, engine: EngineInfo) -> str:
        contract = self._contract
        if engine.model_hash != contract.model_hash:
            return "the actor's model config or tokenizer differs from the learner's: give both the same model.path contents"
        if engine.dtype != contract.dtype:
            return f"the actor's engine computes in {engine.dtype}, the run in {contract.dtype}: give both the same model.dtype"
        if engine.max_model_len < contract.max_length:
            return f"the actor's engine takes {engine.max_model_len} tokens, the run needs {contract.max_length}"
        return ""

    def _lose(self, member: Member, event: str, detail: str) -> None:
        self._event(event, detail, actor=member.name)
        for lease_id in sorted(member.lease_ids):
            self._take_back(member, lease_id, event)
        self._members.remove(member)
        self._progress.notify_all()

    def _take_heartbeat(self, member: Member, heartbeat: ActorHeartbeat) -> None:
        member.stats = heartbeat.stats
        self._record(
            "actor", actor=member.name, policy_version=heartbeat.policy_version, **msgspec.structs.asdict(heartbeat.stats)
        )
        self._send(member, LearnerHeartbeat(policy_version=self._policy_version))

    # Leases

    def _grant(self, now: float) -> None:
        for _ in range(self._gate.capacity(self._policy_version, self._ledger.num_open)):
            min_version = self._gate.min_policy_version(self._policy_version, self._ledger.num_open)
            member = self._freest(min_version)
            if member is None:
                return
            prompt = self._prompts[self._stream.next()]
            lease = self._ledger.grant(prompt.prompt_id, member.name, now + self._rollout.lease_timeout_s)
            sampling = Sampling(max_new_tokens=self._rollout.max_new_tokens, temperature=self._rollout.temperature)
            self._send_lease(member, lease.lease_id, prompt, self._rollout.group_size, sampling, min_version)

    def _grant_evaluations(self, now: float) -> None:
        current = self._evaluations.begin()
        while current is not None and current.has_prompt:
            member = self._freest(current.policy_version)
            if member is None:
                return
            lease_id = self._ledger.next_lease_id()
            prompt = self._eval_prompts[current.next_prompt(lease_id)]
            self._eval_deadlines[lease_id] = now + self._rollout.lease_timeout_s
            sampling = Sampling(max_new_tokens=self._rollout.max_new_tokens, temperature=self._evaluation.temperature)
            self._send_lease(member, lease_id, prompt, self._evaluation.group_size, sampling, current.policy_version)

    def _freest(self, min_policy_version: int) -> Member | None:
        """The actor with the most room among those whose weights are new enough."""
        able = [
            member
            for member in self._members
            if member.is_reachable and 0 <= min_policy_version <= member.policy_version and member.free > 0
        ]
        return max(able, key=lambda member: member.free, default=None)

    def _send_lease(
        self, member: Member, lease_id: int, prompt: Prompt, group_size: int, sampling: Sampling, min_version: int
    ) -> None:
        member.lease_ids.add(lease_id)
        lease = Lease(
            lease_id=lease_id,
            prompt_id=prompt.prompt_id,
            group_size=group_size,
            sampling=sampling,
            min_policy_version=min_version,
            timeout_s=self._rollout.lease_timeout_s,
            prompt=prompt.text,
            row=prompt.row,
        )
        self._send(member, lease, prompt.token_ids)

    def _expire(self, now: float) -> None:
        late = [lease.lease_id for lease in self._ledger.generating() if lease.deadline < now]
        late += [lease_id for lease_id, deadline in self._eval_deadlines.items() if deadline < now]
        for member in self._members:
            for lease_id in sorted(member.lease_ids.intersection(late)):
                self._send(member, Cancel(lease_ids=(lease_id,)))
                self._take_back(member, lease_id, f"no group within {self._rollout.lease_timeout_s:g} s")

    def _take_back(self, member: Member, lease_id: int, reason: str) -> None:
        """The group of a lease will not come: lease its prompt again."""
        member.lease_ids.discard(lease_id)
        if self._eval_deadlines.pop(lease_id, None) is not None:
            self._end_evaluation(lease_id, None)
        elif self._ledger.status(lease_id) == "generating":
            lease = self._ledger.expire(lease_id)
            self._stream.give_back(lease.prompt_id)
            self._event("lease_expired", reason, actor=member.name, lease_id=lease_id)

    def _take_failure(self, member: Member, failure: LeaseFailed) -> None:
        self._send(member, Ack(lease_id=failure.lease_id, outcome="accepted"))
        # Reported again because the acknowledgement was late, or too late: counted once, or not at all.
        if failure.lease_id not in member.lease_ids:
            return
        if failure.reason == "returned":
            self._take_back(member, failure.lease_id, "handed back by the actor")
            return
        member.lease_ids.discard(failure.lease_id)
        self._event(failure.reason, failure.detail, actor=member.name, lease_id=failure.lease_id)
        self._count_failure(f"{failure.reason}: {failure.detail}. Repair task.reward, or raise task.reward_timeout_s.")
        if self._eval_deadlines.pop(failure.lease_id, None) is not None:
            self._end_evaluation(failure.lease_id, None)
        elif self._ledger.status(failure.lease_id) == "generating":
            self._drop(failure.lease_id, failure.reason)

    def _count_failure(self, last: str) -> None:
        """Too many in a row, and nothing but failures is to be expected: end the run."""
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._max_failed_leases:
            self.fail(
                RunFailedError(
                    f"the last {self._failed_in_a_row} leases failed (train.max_failed_leases), the last one with {last}"
                )
            )

    def _drop(self, lease_id: int, reason: str) -> None:
        """A lease brought nothing usable: its prompt gets another try, `max_lease_attempts` in all."""
        lease = self._ledger.drop(lease_id, reason)
        self._prompt_failures[lease.prompt_id] += 1
        if self._prompt_failures[lease.prompt_id] < self._rollout.max_lease_attempts:
            self._stream.give_back(lease.prompt_id)
        else:
            self._event("prompt_dropped", f"prompt {lease.prompt_id} failed {self._rollout.max_lease_attempts} times: {reason}")

    # Groups

    def _take_group(self, member: Member, done: GroupDone, arrays: Sequence[Frame]) -> None:
        # Only the holder of a lease may answer it, once; its late answer to a lease that ended is nothing unusual.
        if done.lease_id not in member.lease_ids:
            outcome = "duplicate" if self._ledger.status(done.lease_id) in ("ended", "ready") else "unknown"
            self._send(member, Ack(lease_id=done.lease_id, outcome=outcome))
            return
        member.lease_ids.discard(done.lease_id)
        is_evaluation = done.lease_id in self._eval_deadlines
        rollouts = _unpack(done, arrays)
        flaw = self._flaw(rollouts, self._evaluation.group_size if is_evaluation else self._rollout.group_size)
        self._send(member, Ack(lease_id=done.lease_id, outcome="rejected" if flaw else "accepted", detail=flaw))
        if flaw:
            self._event("group_rejected", flaw, actor=member.name, lease_id=done.lease_id)
            self._count_failure(f"a group of {member.name} that cannot be trained on: {flaw}.")
        if is_evaluation:
            del self._eval_deadlines[done.lease_id]
            self._end_evaluation(done.lease_id, None if flaw else rollouts)
        elif flaw:
            self._drop(done.lease_id, "rejected")
        else:
            self._buffer(member, done, rollouts)

    def _buffer(self, member: Member, done: GroupDone, rollouts: tuple[Rollout, ...]) -> None:
        self._failed_in_a_row = 0
        prompt_id = self._ledger.find(done.lease_id).prompt_id
        self._prompt_failures.pop(prompt_id, None)
        prompt_token_ids = self._prompts[prompt_id].token_ids
        group = Group(done.lease_id, prompt_id, prompt_token_ids, rollouts, member.name, done.generate_s)
        if self._drop_zero_variance and len({rollout.reward for rollout in rollouts}) == 1:
            self._ledger.drop(done.lease_id, "zero_variance")
            self._record_group(group, "dropped", "zero_variance", self._policy_version)
            return
        self._ledger.accept(group)
        self._progress.notify_all()

    def _flaw(self, rollouts: Sequence[Rollout], group_size: int) -> str:
        """Why this group cannot be trained on; empty when it can."""
        if len(rollouts) != group_size:
            return f"{len(rollouts)} completions for a group of {group_size}"
        for index, rollout in enumerate(rollouts):
            if len(rollout.token_ids) > self._rollout.max_new_tokens:
                return f"completion {index} has {len(rollout.token_ids)} tokens, more than {self._rollout.max_new_tokens}"
            if rollout.token_ids.min() < 0 or rollout.token_ids.max() >= self._contract.vocabulary_size:
                return f"completion {index} has token ids outside the vocabulary"
            if not np.isfinite(rollout.behavior_logprobs).all() or rollout.behavior_logprobs.max() > LARGEST_LOGPROB:
                return f"completion {index} has impossible log-probs"
            if not math.isfinite(rollout.reward):
                return f"completion {index} has reward {rollout.reward}"
            if rollout.segments[-1].policy_version > self._policy_version:
                return f"completion {index} claims policy version {rollout.segments[-1].policy_version}, not made yet"
        return ""

    def _end_evaluation(self, lease_id: int, rollouts: tuple[Rollout, ...] | None) -> None:
        current = self._evaluations.current
        if current is None or not current.holds(lease_id):
            return
        if rollouts is None:
            current.fail(lease_id)
        else:
            current.complete(lease_id, rollouts)
        if not current.is_finished:
            return
        self._evaluations.end()
        num_completions = len(current.rewards)
        self._record(
            "eval",
            policy_version=current.policy_version,
            reward=float(np.mean(current.rewards)) if num_completions else math.nan,
            length=float(np.mean(current.lengths)) if num_completions else math.nan,
            num_completions=num_completions,
            num_failed=current.num_failed,
        )
        self._progress.notify_all()

    def _select(self) -> list[Group] | None:
        if self._failure is not None:
            raise self._failure
        selection = self._gate.select(self._ledger.ready_groups(), self._policy_version)
        for group in selection.too_stale:
            self._ledger.drop(group.lease_id, "stale")
            self._stream.give_back(group.prompt_id)
            self._record_group(group, "dropped", "stale", self._policy_version)
        return selection.selected or None

    # Rows

    def _record_group(self, group: Group, outcome: str, reason: str, trained_at: int) -> None:
        self._record(
            "group",
            lease_id=group.lease_id,
            prompt_id=group.prompt_id,
            actor=group.actor,
            outcome=outcome,
            reason=reason,
            policy_version=trained_at,
            policy_lag=group.policy_lag(trained_at),
            lengths=[len(rollout.token_ids) for rollout in group.rollouts],
            rewards=[rollout.reward for rollout in group.rollouts],
            generate_s=group.generate_s,
            num_segments=max(len(rollout.segments) for rollout in group.rollouts),
        )

    def _event(self, event: str, detail: str, **fields: Any) -> None:
        # A lost actor brings one such event for each of its leases.
        level = logging.DEBUG if event == "lease_expired" else logging.INFO
        logger.log(level, "%s: %s", " ".join([event, *(str(value) for value in fields.values())]), detail)
        self._record("event", event=event, detail=detail, **fields)

    def _send(self, member: Member, message: LearnerMessage, *arrays: Array) -> None:
        self._outgoing.append(Outgoing(member.peer, message, arrays))


def _unpack(done: GroupDone, arrays: Sequence[Frame]) -> tuple[Rollout, ...]:
    """The completions of a group, cut out of its two frames."""
    all_ids, all_logprobs = token_ids(arrays[0]), logprobs(arrays[1])
    ends = np.cumsum([completion.num_tokens for completion in done.completions])
    return tuple(
        Rollout(
            token_ids=all_ids[end - completion.num_tokens : end],
            behavior_logprobs=all_logprobs[end - completion.num_tokens : end],
            reward=completion.reward,
            finish_reason=completion.finish_reason,
            segments=completion.segments,
        )
        for completion, end in zip(done.completions, ends, strict=True)
    )
