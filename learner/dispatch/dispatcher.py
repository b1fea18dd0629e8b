"""Leases to the actors, groups from them: everything the learner decides about rollouts, without sockets or clock.

    PromptStream -> grant -> [actor generates] -> accept -> buffer (in the ledger) -> evict, select -> trainer
                      ^ StalenessPolicy.admit        ^ .abort                          ^ StalenessPolicy

The hub thread feeds `handle` and `tick` and sends what `take_outgoing` returns; the training thread calls `take_batch`,
`finish_batch` and `publish`. Every public method takes the lock.
"""

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from offbeat.common.config import Config, EvaluationSection, HubSection, RolloutSection
from offbeat.common.rows import ActorRow, CommitRow, EpochRow, EventRow, GroupRow, Recorder
from offbeat.common.settings import SettingError
from offbeat.common.shutdown import ServiceError
from offbeat.learner.diagnostics.length_bias import BiasMonitor, ended_group
from offbeat.learner.dispatch.contract import Contract, differences, objection
from offbeat.learner.dispatch.live_settings import CONCURRENCY, Tuning
from offbeat.learner.dispatch.rejections import Rejections
from offbeat.learner.dispatch.roster import Member, Members, Room
from offbeat.learner.leases.evaluation import Evaluations
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned
from offbeat.learner.leases.groups import Group, Limits, Rollout, flaw, make_group, unpack
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.ledger import Ledger, LedgerCounts
from offbeat.learner.leases.prompts import Prompt, PromptStream
from offbeat.learner.leases.recovery import DispatcherState
from offbeat.learner.leases.rollout_log import LogFullError, Position, RolloutLog
from offbeat.learner.leases.staleness import InFlight, StalenessPolicy
from offbeat.protocols.channels import Array
from offbeat.protocols.keys import NO_KEYS, Sender
from offbeat.protocols.messages import (
    Ack,
    ActorHeartbeat,
    ActorMessage,
    CanaryRouted,
    CanaryScored,
    Cancel,
    ChunkRequest,
    Credit,
    CreditLimit,
    Goodbye,
    GroupDone,
    Hello,
    LearnerHeartbeat,
    LearnerMessage,
    Lease,
    LeaseFailed,
    LiveSettingsReport,
    LiveSettingsRequest,
    Refused,
    Sampling,
    SayHello,
    SettingChange,
    StatusReport,
    StatusRequest,
    Stop,
    WeightsCommitted,
    WeightsStaged,
    Welcome,
)
from offbeat.protocols.wire import Frame, WireError, logprobs, routed_experts

logger = logging.getLogger(__name__)

WeightsMessage = WeightsStaged | WeightsCommitted


class RunFailedError(ServiceError):
    """The run cannot go on; the text says why and what to do."""


class Outgoing(NamedTuple):
    """A message to send."""

    peer: bytes
    message: LearnerMessage
    arrays: tuple[Array, ...] = ()


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
        log: RolloutLog | None,
        staleness: StalenessPolicy,
        tuning: Tuning,
        drop_zero_variance: bool,
        drop_quarantined: bool,
        max_failed_leases: int,
        num_steps: int,
        policy_version: int,
        newest_version: int,
        record: Recorder,
        on_join: Callable[[bytes], None],
        on_weights: Callable[[str, WeightsMessage], None],
        on_canary: Callable[[str, int, np.ndarray], None],
        on_routed: Callable[[str, int, np.ndarray], None],
        on_distrust: Callable[[bytes, str, str], None],
        weight_problems: Callable[[], list[str]] = list,
        hub_rejections: Callable[[], dict[str, int]] = dict,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._contract = contract
        self._rollout = rollout
        self._evaluation = evaluation
        self._hub = hub
        self._prompts = prompts
        self._eval_prompts = eval_prompts
        self._stream = stream
        self._ledger = ledger
        self._journal = LeaseJournal(log)
        self._staleness = staleness
        self._tuning = tuning
        self._drop_zero_variance = drop_zero_variance
        self._drop_quarantined = drop_quarantined
        self._max_failed_leases = max_failed_leases
        self._num_steps = num_steps
        self._policy_version = policy_version
        self._newest_version = max(newest_version, policy_version)
        self._published_version = -1
        self._record = record
        self._on_join = on_join
        self._on_weights = on_weights
        self._on_canary = on_canary
        self._on_routed = on_routed
        self._on_distrust = on_distrust
        self._weight_problems = weight_problems
        self._hub_rejections = hub_rejections
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = clock()
        self._ticked_at = self._started_at
        self._is_held_back = False
        """Since the last tick an actor has room, and staleness alone keeps it from a lease."""
        self._held_back_s = 0.0
        self._doing = ("starting", self._started_at)
        self._members = Members()
        self._rejections = Rejections()
        self._evaluations = Evaluations(
            interval=evaluation.interval,
            num_prompts=min(evaluation.num_prompts, len(eval_prompts)),
            max_attempts=rollout.max_lease_attempts,
        )
        self._evaluation_leases: set[int] = set()
        self._deadlines: dict[int, float] = {}
        """When leases that are being generated expire."""
        self._unclaimed = {lease.lease_id: lease.actor for lease in ledger.generating()}
        """Granted by the learner process before this one, and not claimed by their actors yet."""
        self._unclaimed_until = self._started_at + hub.dead_after_s
        self._selected = (0.0, 0)
        """When the batch that is trained on was selected: wall clock, and the journal's events then."""
        self._is_log_full = False
        self._outgoing: deque[Outgoing] = deque()
        self._prompt_failures: Counter[int] = Counter()
        self._failed_in_a_row = 0
        self._failure: BaseException | None = None
        self._bias = BiasMonitor()
        self._in_training: set[int] = set()
        """Leases of the batch that was selected and is not finished."""
        self._stop_reason: str | None = None
        self._lock = threading.RLock()
        self._progress = threading.Condition(self._lock)

    # The training thread

    def begin(self) -> None:
        """Mark in the log that this process took over."""
        started = Started(
            at=self._wall_clock(),
            run_id=self._contract.run_id,
            learner_incarnation=self._contract.learner_incarnation,
            policy_version=self._policy_version,
        )
        with self._lock:
            self._record_fact(started)
            self._abort()
            # A power failure must not take it: the next process would lease out this one's lease ids again.
            self._journal.sync()

    def doing(self, what: str) -> None:
        """What the training loop does from now on, for `offbeat status`."""
        with self._lock:
            self._doing = (what, self._clock())

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
            trained = Trained(
                at=self._wall_clock(),
                lease_ids=tuple(group.lease_id for group in groups),
                policy_version=trained_at,
                num_steps=policy_version - trained_at,
                selected_at=self._selected[0],
                selected_after=self._selected[1],
            )
            self._record_fact(trained)
            self._in_training = set()
            self._policy_version = policy_version
            self._newest_version = max(self._newest_version, policy_version)
            self._abort()
        # Without the lock: the hub need not wait for rows.
        for index, group in enumerate(groups):
            self._record_group(group, "trained", "", self._staleness.trained_at(trained_at, index), trained.selected_at)

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
        """Tell every actor that the run is over, and whoever still speaks after that; grant nothing more."""
        with self._lock:
            self._stop_reason = reason
            for member in self._members:
                self._send(member, Stop(reason=reason))

    def wait_left(self, timeout_s: float) -> bool:
        """Until every actor has said goodbye, or is lost; False when the time is over."""
        with self._progress:
            return self._progress.wait_for(lambda: not len(self._members), timeout_s)

    def state(self) -> DispatcherState:
        """What a checkpoint keeps; `LogFullError` while the log has not taken all that the state rests on."""
        with self._lock:
            self._journal.flush()
            # What the checkpoint refers to must be on disk when it is.
            self._journal.sync()
            tuned = dict(self._tuning.tuned)
            return DispatcherState(self._stream.state(), self._ledger.state(), self._journal.end, self._newest_version, tuned)

    def prune_log(self, needed: Position) -> None:
        """No restart needs older records than this one."""
        with self._lock:
            self._journal.prune(needed)

    def is_log_over(self) -> bool:
        """Whether the log has outgrown its setting, and only a checkpoint allows to shorten it."""
        with self._lock:
            return self._journal.is_over

    def counts(self) -> LedgerCounts:
        """The ledger's sums."""
        with self._lock:
            return self._ledger.counts()

    def settings(self) -> Config:
        """The run's settings as they are now."""
        with self._lock:
            return self._tuning.config

    def tune(self, settings: Mapping[str, str], who: str, reason: str = "") -> tuple[SettingChange, ...]:
        """Change these settings (`section.key` to TOML) from now on, all or none; what had another value before.

        `SettingError` when they are refused, `LogFullError` while a restart could not know of the change.
        """
        with self._lock:
            changed, _ = self._tuning.propose(settings)
            if not changed:
                return ()
            event = Tuned(at=self._wall_clock(), settings=changed, who=who, reason=reason, policy_version=self._policy_version)
            self._journal.append(event)
            changes = self._tuning.apply(event)
            self._staleness.bounds = self._tuning.config.staleness
            self._abort()
            if CONCURRENCY in changed:
                for member in self._members:
                    self._send_concurrency(member)
            for change in changes:
                self._record_change(change, reason)
            return changes

    def take_held_back_s(self) -> float:
        """Seconds, since this was asked last, in which an actor had room and staleness alone kept it from a lease."""
        with self._lock:
            seconds, self._held_back_s = self._held_back_s, 0.0
            return seconds

    def buffer_sizes(self) -> tuple[int, int]:
        """Groups ready, and leases in flight."""
        with self._lock:
            return self._ledger.num_ready, self._ledger.num_open - self._ledger.num_ready

    def members(self) -> list[tuple[bytes, str, int]]:
        """Address, name and policy version of every live actor."""
        with self._lock:
            return [(member.peer, member.name, member.policy_version) for member in self._members]

    def hello_of(self, peer: bytes) -> Hello:
        """What the live actor at this address said of itself."""
        with self._lock:
            member = self._members.find(peer)
            assert member is not None, "the actor has left"
            return member.hello

    def waiting_for(self) -> str:
        """One line for the log: what keeps the next batch."""
        with self._lock:
            if not len(self._members):
                return f"no actor is connected: start one with `offbeat actor`, hub.address = {self._hub.address}"
            behind = [member.name for member in self._members if member.policy_version < self._published_version]
            sizes = f"{self._ledger.num_ready} groups ready, {len(self._ledger.generating())} being generated"
            return f"{sizes}; weights {self._published_version} not yet at: {', '.join(behind)}" if behind else sizes

    # The hub thread

    def handle(self, peer: bytes, message: ActorMessage, arrays: Sequence[Frame], now: float, sender: Sender = NO_KEYS) -> None:
        """Take one message of an actor (or an operator)."""
        with self._lock:
            if isinstance(message, StatusRequest | LiveSettingsRequest):
                self._answer_operator(peer, message, sender, now)
                return
            if sender.role == "operator":
                self._reject(peer, sender.name, "an operator's key, and an actor's message", "use a key of role actor")
                return
            member = self._members.find(peer)
            if member is not None and member.key_name != sender.name:
                self._reject(peer, sender.name, "a message in another actor's name", "each actor needs its own key and name")
                return
            if self._stop_reason is not None and isinstance(message, Hello | ActorHeartbeat):
                # It has not heard that the run is over, or it has come too late.
                self._outgoing.append(Outgoing(peer, Stop(reason=self._stop_reason)))
            if isinstance(message, Hello):
                self._welcome(peer, message, now, sender)
                return
            if member is None:
                if not isinstance(message, Goodbye):
                    self._outgoing.append(Outgoing(peer, SayHello()))
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
                    self._take_commit(member, message)
                case CanaryScored():
                    self._on_canary(member.name, message.policy_version, logprobs(arrays[0]).copy())
                case CanaryRouted():
                    self._on_routed(member.name, message.policy_version, routed_experts(message, arrays[0]))
                case ChunkRequest():
                    self._reject(peer, member.name, "a chunk request at the hub", "chunks are at weights.pull_port")
                case Goodbye():
                    self._lose(member, "actor_left", message.reason)

    def refuse(self, peer: bytes, error: WireError, sender: Sender = NO_KEYS) -> None:
        """A peer sent what is no message of ours."""
        with self._lock:
            member = self._members.find(peer)
            name = member.name if member is not None else sender.name if sender.role else peer.decode(errors="replace")
            self._reject(peer, name, str(error), "")

    def count_rejected(self, name: str, reason: str) -> None:
        """Something was refused elsewhere, and needs no answer."""
        with self._lock:
            self._rejections.count(name, reason)

    def judge_canary(self, actor: str, policy_version: int, detail: str) -> None:
        """An actor's log-probs of the canary were compared: `detail` says how they are wrong, empty when they are right."""
        with self._lock:
            member = self._members.named(actor)
            if member is None:
                return
            if not detail:
                member.good_version = policy_version
                if member.is_quarantined:
                    member.is_quarantined = False
                    self._event("actor_released", f"its log-probs are right under version {policy_version}", actor=actor)
            else:
                self._quarantine(member, detail)

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
        """Whatever time brings: dead actors, expired leases, room on the disk, new leases; then what was logged is committed.

        Acknowledgements leave after it (`take_outgoing`), so the log has what they are for.
        """
        with self._lock:
            if self._is_held_back:
                self._held_back_s += now - self._ticked_at
            self._forgive_own_absence(now)
            for member in self._members:
                silent_s = now - member.last_heard
                if silent_s > self._hub.dead_after_s:
                    self._lose(member, "actor_lost", f"not heard of for {silent_s:.1f} s (hub.dead_after_s)")
            self._watch_log(now)
            try:
                self._expire(now)
                self._give_up_unclaimed(now)
                if self._stop_reason is None:
                    self._grant_evaluations(now)
                    self._grant(now)
            except LogFullError as error:
                self._stall(error)
            self._is_held_back = self._stop_reason is None and self._holds_back()
            self._end_epochs()
            self._journal.commit()

    def _forgive_own_absence(self, now: float) -> None:
        """What was not heard while this process was stopped or starved is not the actors' silence."""
        absent_s = now - self._ticked_at
        self._ticked_at = now
        if absent_s < self._hub.dead_after_s / 2:
            return
        for member in self._members:
            # Not into the future: what was sent meanwhile has just been read.
            member.last_heard = min(now, member.last_heard + absent_s)
        self._deadlines = {lease_id: deadline + absent_s for lease_id, deadline in self._deadlines.items()}
        self._unclaimed_until += absent_s

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

    def _welcome(self, peer: bytes, hello: Hello, now: float, sender: Sender) -> None:
        reason = self._objection(peer, hello, sender)
        if reason:
            if self._rejections.count(hello.actor, reason):
                self._event("actor_refused", reason, actor=hello.actor)
            self._outgoing.append(Outgoing(peer, Refused(reason=reason)))
            return
        namesake = self._members.named(hello.actor)
        if namesake is not None and namesake.peer != peer:
            self._members.remember_replaced(namesake)
            self._lose(namesake, "actor_lost", "replaced by a newer process of the same name")
        member = self._members.find(peer)
        if member is None:
            member = Member(peer=peer, hello=hello, key_name=sender.name, last_heard=now)
            self._members.add(member)
            self._claim(member, now)
            self._on_join(peer)
            engine = hello.engine
            unlike = "".join(f"; {difference}" for difference in differences(self._contract, hello))
            detail = f"{engine.name} {engine.version} {engine.dtype} on {engine.device}{unlike}"
            self._event("actor_joined", detail, actor=hello.actor)
        member.last_heard = now
        member.is_reachable = True
        contract = self._contract
        welcome = Welcome(
            run_id=contract.run_id,
            learner_incarnation=contract.learner_incarnation,
            max_message_bytes=contract.max_message_bytes,
            layout=contract.layout,
            policy_version=self._policy_version,
        )
        self._send(member, welcome, contract.canary_token_ids)
        if CONCURRENCY in self._tuning.tuned:
            self._send_concurrency(member)
        # Whatever was under way when the connection broke.
        self._reconcile(member, hello.lease_ids, member.newest_lease_id)

    def _objection(self, peer: bytes, hello: Hello, sender: Sender) -> str:
        if not sender.may_be(hello.actor):
            return (
                f"the actor's key is for {sender.name!r}, and it calls itself {hello.actor!r}: set actor.name, or use its key"
            )
        if self._members.was_replaced(hello):
            return f"another actor named {hello.actor!r}, started later, is in the run: set actor.name"
        if self._members.find(peer) is None and len(self._members) >= self._hub.max_actors:
            return f"the run has hub.max_actors = {self._hub.max_actors} actors already"
        return objection(self._contract, hello)

    def _claim(self, member: Member, now: float) -> None:
        """Leases of the learner process before this one are its actor's still, if that works on them."""
        held = set(member.hello.lease_ids)
        mine = [lease_id for lease_id, actor in self._unclaimed.items() if actor == member.name]
        for lease_id in mine:
            del self._unclaimed[lease_id]
            if lease_id in held:
                member.lease_ids.add(lease_id)
                self._deadlines[lease_id] = now + self._rollout.lease_timeout_s
            else:
                self._expire_lease(lease_id, "the actor no longer has it")

    def _lose(self, member: Member, event: str, detail: str) -> None:
        self._event(event, detail, actor=member.name)
        for lease_id in sorted(member.lease_ids):
            self._take_back(member, lease_id, event)
        self._members.remove(member)
        self._progress.notify_all()

    def _take_heartbeat(self, member: Member, heartbeat: ActorHeartbeat) -> None:
        now = member.last_heard
        # A flood of heartbeats must not become a flood of rows.
        if now - member.stats_at >= self._hub.heartbeat_s / 2:
            seconds = now - member.stats_at
            tokens = heartbeat.stats.num_generated_tokens - member.stats.num_generated_tokens
            member.tokens_per_s = tokens / seconds if math.isfinite(seconds) else 0.0
            member.stats, member.stats_at = heartbeat.stats, now
            stats = msgspec.structs.asdict(heartbeat.stats)
            self._record(ActorRow(actor=member.name, policy_version=heartbeat.policy_version, **stats))
        self._reconcile(member, heartbeat.lease_ids, heartbeat.seen_lease_id)
        self._send(member, LearnerHeartbeat(newest_lease_id=member.newest_lease_id))

    def _reconcile(self, member: Member, lease_ids: Sequence[int], seen_lease_id: int) -> None:
        """Agree with an actor on what it holds: leases lost on the way go to others, work that nobody wants ends."""
        held = set(lease_ids)
        for lease_id in sorted(member.lease_ids - held):
            if lease_id <= seen_lease_id:
                self._take_back(member, lease_id, "lost on the way to the actor")
        unwanted = tuple(sorted(held - member.lease_ids))
        if unwanted:
            self._send(member, Cancel(lease_ids=unwanted))

    def _take_commit(self, member: Member, commit: WeightsCommitted) -> None:
        if commit.policy_version > self._published_version:
            why = f"claims to have weights {commit.policy_version}; the newest published are {self._published_version}"
            self._rejections.count(member.name, "weights from the future")
            self._event("actor_lied", why, actor=member.name)
            self._on_distrust(member.peer, member.name, why)
            return
        member.policy_version = commit.policy_version
        self._record(CommitRow(actor=member.name, policy_version=commit.policy_version, stall_s=commit.stall_s))
        self._on_weights(member.name, commit)

    def _quarantine(self, member: Member, detail: str) -> None:
        """No leases until its log-probs are right again, and nothing that it sampled since they last were."""
        self._event("actor_quarantined", detail, actor=member.name)
        member.is_quarantined = True
        # The publisher takes it for one without weights, and has it pull them.
        member.policy_version = -1
        held = tuple(sorted(member.lease_ids))
        for lease_id in held:
            self._take_back(member, lease_id, "its actor was quarantined")
        if held:
            self._send(member, Cancel(lease_ids=held))
        doubtful = [
            group
            for group in self._ledger.ready_groups()
            if group.actor == member.name
            and group.newest_version > member.good_version
            # Too late for those.
            and group.lease_id not in self._in_training
        ]
        for group in doubtful if self._drop_quarantined else ():
            self._drop_group(group, "quarantined", is_final=False)
        if doubtful:
            fate = "dropped" if self._drop_quarantined else "kept (weights.on_canary_mismatch)"
            leases = ", ".join(str(group.lease_id) for group in doubtful)
            self._event("groups_doubtful", f"{fate}: leases {leases}", actor=member.name)
        self._on_distrust(member.peer, member.name, detail)

    def _reject(self, peer: bytes, name: str, reason: str, cure: str) -> None:
        """Count what was sent, tell the sender, change nothing."""
        if self._rejections.count(name, reason):
            self._event("bad_message", reason, peer=name)
        self._outgoing.append(Outgoing(peer, Refused(reason=f"{reason}: {cure}" if cure else reason)))

    # Leases

    def _grant(self, now: float) -> None:
        capacity = self._staleness.admit(self._policy_version, self._ledger.num_open)
        if self._is_log_full or not capacity:
            return
        room = Room(self._members)
        for _ in range(capacity):
            min_version = self._staleness.min_policy_version(self._policy_version, self._ledger.num_open)
            member = room.take(min_version)
            if member is None:
                return
            turn = self._stream.peek()
            granted = Granted(
                at=self._wall_clock(),
                lease_id=self._ledger.next_lease_id(),
                prompt_id=turn.prompt_id,
                epoch=turn.epoch,
                actor=member.name,
                policy_version=self._policy_version,
                oldest_version=max(min_version, member.policy_version),
            )
            self._journal.append(granted)
            self._stream.next()
            self._ledger.apply(granted)
            sampling = Sampling(max_new_tokens=self._rollout.max_new_tokens, temperature=self._rollout.temperature)
            prompt = self._prompts[turn.prompt_id]
            self._send_lease(member, granted.lease_id, prompt, self._rollout.group_size, sampling, min_version, now)

    def _holds_back(self) -> bool:
        """Whether after a round of granting an actor has room still, though the run has leases to come."""
        if self._is_log_full or not any(member.free > 0 and member.takes_leases for member in self._members):
            return False
        # Either the bound admits no more, or only for newer weights than that actor has.
        return self._staleness.left_in_run(self._policy_version) > self._ledger.num_open

    def _grant_evaluations(self, now: float) -> None:
        current = self._evaluations.begin()
        if current is None:
            return
        room = Room(self._members)
        while current.has_prompt:
            member = room.take(current.policy_version)
            if member is None:
                return
            lease_id = self._ledger.next_lease_id()
            prompt = self._eval_prompts[current.next_prompt(lease_id)]
            self._evaluation_leases.add(lease_id)
            sampling = Sampling(max_new_tokens=self._rollout.max_new_tokens, temperature=self._evaluation.temperature)
            self._send_lease(member, lease_id, prompt, self._evaluation.group_size, sampling, current.policy_version, now)

    def _send_lease(
        self, member: Member, lease_id: int, prompt: Prompt, group_size: int, sampling: Sampling, min_version: int, now: float
    ) -> None:
        member.lease_ids.add(lease_id)
        member.newest_lease_id = lease_id
        self._deadlines[lease_id] = now + self._rollout.lease_timeout_s
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
        # While the log is full no group can be taken: their being late is not the actors' fault.
        if self._is_log_full:
            return
        late = {lease_id for lease_id, deadline in self._deadlines.items() if deadline < now}
        for member in self._members if late else ():
            for lease_id in sorted(member.lease_ids & late):
                self._send(member, Cancel(lease_ids=(lease_id,)))
                self._take_back(member, lease_id, f"no group within {self._rollout.lease_timeout_s:g} s")

    def _abort(self) -> None:
        """Cancel what is being generated and could not be trained on any more: only a new version or bound can bring that."""
        generating = [InFlight(lease.lease_id, lease.oldest_version) for lease in self._ledger.generating()]
        aborted = set(self._staleness.abort(generating, self._policy_version))
        for member in self._members if aborted else ():
            if mine := tuple(sorted(member.lease_ids & aborted)):
                self._send(member, Cancel(lease_ids=mine))
            for lease_id in mine:
                self._release(member, lease_id)
        for lease_id in sorted(aborted):
            self._unclaimed.pop(lease_id, None)
            dropped = Dropped(at=self._wall_clock(), lease_id=lease_id, reason="aborted", is_final=False)
            self._lose_lease(dropped, "lease_aborted", "too stale to be trained on")

    def _give_up_unclaimed(self, now: float) -> None:
        """Actors of the learner process before this one that did not come back."""
        if not self._unclaimed or now < self._unclaimed_until or self._is_log_full:
            return
        for lease_id in list(self._unclaimed):
            self._expire_lease(lease_id, "its actor did not come back after the learner's restart")
            del self._unclaimed[lease_id]

    def _take_back(self, member: Member, lease_id: int, reason: str) -> None:
        """The group of a lease will not come: lease its prompt again."""
        if lease_id in self._evaluation_leases:
            self._release(member, lease_id)
            self._evaluation_leases.discard(lease_id)
            self._end_evaluation(lease_id, None)
        elif self._ledger.status(lease_id) == "generating":
            self._expire_lease(lease_id, reason)
            self._release(member, lease_id)

    def _expire_lease(self, lease_id: int, reason: str) -> None:
        self._lose_lease(Expired(at=self._wall_clock(), lease_id=lease_id, reason=reason), "lease_expired", reason)

    def _lose_lease(self, fact: Expired | Dropped, event: str, detail: str) -> None:
        """A lease ends without a group, and its prompt is leased again."""
        lease = self._ledger.find(fact.lease_id)
        self._record_fact(fact)
        self._stream.give_back(lease.prompt_id, lease.epoch)
        self._event(event, detail, actor=lease.actor, lease_id=fact.lease_id, after_s=fact.at - lease.granted_at)

    def _release(self, member: Member, lease_id: int) -> None:
        """The actor no longer owes this lease."""
        member.lease_ids.discard(lease_id)
        self._deadlines.pop(lease_id, None)

    def _take_failure(self, member: Member, failure: LeaseFailed) -> None:
        # Reported again because the acknowledgement was late, or too late: counted once, or not at all.
        if failure.lease_id not in member.lease_ids:
            self._send(member, Ack(lease_id=failure.lease_id, outcome="accepted"))
            return
        is_evaluation = failure.lease_id in self._evaluation_leases
        if failure.reason == "returned":
            self._take_back(member, failure.lease_id, "handed back by the actor")
        else:
            if not is_evaluation and self._ledger.status(failure.lease_id) == "generating":
                try:
                    self._drop(failure.lease_id, failure.reason)
                except LogFullError as error:
                    # Not acknowledged: the actor tells again.
                    self._stall(error)
                    return
            self._release(member, failure.lease_id)
            self._event(failure.reason, failure.detail, actor=member.name, lease_id=failure.lease_id)
            self._count_failure(f"{failure.reason}: {failure.detail}. Repair task.reward, or raise task.reward_timeout_s.")
            if is_evaluation:
                self._evaluation_leases.discard(failure.lease_id)
                self._end_evaluation(failure.lease_id, None)
        self._send(member, Ack(lease_id=failure.lease_id, outcome="accepted"))

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
        lease = self._ledger.find(lease_id)
        is_final = self._prompt_failures[lease.prompt_id] + 1 >= self._rollout.max_lease_attempts
        fact = Dropped(at=self._wall_clock(), lease_id=lease_id, reason=reason, is_final=is_final)
        self._journal.append(fact)
        self._ledger.apply(fact)
        if is_final:
            del self._prompt_failures[lease.prompt_id]
            self._event("prompt_dropped", f"prompt {lease.prompt_id} failed {self._rollout.max_lease_attempts} times: {reason}")
        else:
            self._prompt_failures[lease.prompt_id] += 1
            self._stream.give_back(lease.prompt_id, lease.epoch)

    def _drop_group(self, group: Group, reason: str, *, is_final: bool) -> None:
        """A group in the buffer is not trained on."""
        lease = self._ledger.find(group.lease_id)
        self._record_fact(Dropped(at=self._wall_clock(), lease_id=group.lease_id, reason=reason, is_final=is_final))
        if not is_final:
            self._stream.give_back(lease.prompt_id, lease.epoch)
        self._record_group(group, "dropped", reason, self._policy_version, self._wall_clock())

    # Groups

    def _take_group(self, member: Member, done: GroupDone, arrays: Sequence[Frame]) -> None:
        lease_id = done.lease_id
        # Only the holder of a lease may answer it, once; its late answer to a lease that ended is nothing unusual.
        if lease_id not in member.lease_ids:
            outcome = "duplicate" if self._ledger.status(lease_id) in ("ended", "ready") else "unknown"
            if outcome == "unknown" or self._ledger.status(lease_id) == "generating":
                self._rejections.count(member.name, "a lease that is not its own")
            self._send(member, Ack(lease_id=lease_id, outcome=outcome))
            return
        is_evaluation = lease_id in self._evaluation_leases
        limits = Limits(
            group_size=self._evaluation.group_size if is_evaluation else self._rollout.group_size,
            max_new_tokens=self._rollout.max_new_tokens,
            vocabulary_size=self._contract.vocabulary_size,
            newest_version=self._newest_version,
        )
        wrong = flaw(done.completions, arrays, limits)
        if not is_evaluation:
            try:
                if wrong:
                    self._drop(lease_id, "rejected")
                else:
                    self._buffer(member, done, arrays)
            except LogFullError as error:
                # Not acknowledged: the actor keeps the group and sends it again.
                self._stall(error)
                return
        self._release(member, lease_id)
        self._send(member, Ack(lease_id=lease_id, outcome="rejected" if wrong else "accepted", detail=wrong))
        if wrong:
            self._rejections.count(member.name, wrong)
            self._event("group_rejected", wrong, actor=member.name, lease_id=lease_id)
            self._count_failure(f"a group of {member.name} that cannot be trained on: {wrong}.")
        if is_evaluation:
            self._evaluation_leases.discard(lease_id)
            self._end_evaluation(lease_id, None if wrong else unpack(done.completions, arrays))

    def _buffer(self, member: Member, done: GroupDone, arrays: Sequence[Frame]) -> None:
        accepted = Accepted(
            at=self._wall_clock(),
            lease_id=done.lease_id,
            actor=member.name,
            completions=done.completions,
            generate_s=done.generate_s,
            policy_version=self._policy_version,
        )
        position = self._journal.append(accepted, *arrays)
        group = make_group(accepted, arrays, self._prompts[self._ledger.find(done.lease_id).prompt_id])
        self._ledger.apply(accepted, group, position)
        self._failed_in_a_row = 0
        self._prompt_failures.pop(group.prompt_id, None)
        if self._drop_zero_variance and len({completion.reward for completion in done.completions}) == 1:
            self._drop_group(group, "zero_variance", is_final=True)
        elif self._ledger.num_ready >= self._staleness.batch_groups:
            self._progress.notify_all()

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
        self._record(current.row())
        self._progress.notify_all()

    def _select(self) -> list[Group] | None:
        if self._failure is not None:
            raise self._failure
        if self._ledger.num_ready < self._staleness.batch_groups:
            return None
        order = self._staleness.bounds.selection
        for group in self._staleness.evict(self._ledger.ready_groups(order), self._policy_version):
            self._drop_group(group, "stale", is_final=False)
        selected = self._staleness.select(self._ledger.ready_groups(order))
        self._in_training = {group.lease_id for group in selected}
        self._selected = (self._wall_clock(), self._journal.num_events)
        return selected or None

    # The log

    def _record_fact(self, event: LeaseEvent) -> None:
        """Log and apply what cannot wait for room on the disk; it is logged later then."""
        self._journal.append_late(event)
        self._ledger.apply(event)

    def _stall(self, error: LogFullError) -> None:
        if not self._is_log_full:
            self._is_log_full = True
            self._event("log_full", f"{error}; no lease is granted and no group acknowledged until there is room again")

    def _watch_log(self, now: float) -> None:
        try:
            self._journal.require_room()
        except LogFullError as error:
            self._stall(error)
            return
        if self._is_log_full:
            self._is_log_full = False
            self._deadlines = dict.fromkeys(self._deadlines, now + self._rollout.lease_timeout_s)
            self._event("log_has_room", "leases are granted again")

    def _end_epochs(self) -> None:
        while (ended := self._ledger.end_epoch(len(self._prompts))) is not None:
            epoch, account = ended
            self._record(EpochRow(epoch=epoch, num_trained=account.num_trained, dropped=account.dropped))

    # Operators

    def _answer_operator(self, peer: bytes, message: StatusRequest | LiveSettingsRequest, sender: Sender, now: float) -> None:
        if sender.role == "actor":
            self._reject(peer, sender.name, "an actor's key, and an operator's message", "use a key of role operator")
            return
        answer = self._status(now) if isinstance(message, StatusRequest) else self._take_tuning(message, sender)
        self._outgoing.append(Outgoing(peer, answer))

    def _take_tuning(self, request: LiveSettingsRequest, sender: Sender) -> LiveSettingsReport:
        who = f"{request.who} (key {sender.name})" if sender.role else request.who
        try:
            warnings = self._tuning.propose(request.settings).warnings
            changed = self.tune(request.settings, who)
        except (SettingError, LogFullError) as error:
            return LiveSettingsReport(policy_version=self._policy_version, error=str(error))
        return LiveSettingsReport(policy_version=self._policy_version, changed=changed, warnings=tuple(warnings))

    def _status(self, now: float) -> StatusReport:
        doing, since = self._doing
        problems = [*self._weight_problems()]
        if self._is_log_full:
            problems.append("the rollout log's disk is full: no leases, no acknowledgements until there is room")
        if self._failure is not None:
            problems.append(f"the run is ending: {self._failure}")
        return StatusReport(
            run_id=self._contract.run_id,
            policy_version=self._policy_version,
            num_steps=self._num_steps,
            published_version=self._published_version,
            doing=doing,
            doing_s=now - since,
            waiting_for="" if self._ledger.num_ready >= self._staleness.batch_groups else self.waiting_for(),
            uptime_s=now - self._started_at,
            members=tuple(member.status(now) for member in self._members),
            ledger=self._ledger.counts().sums(),
            num_ready=self._ledger.num_ready,
            num_generating=self._ledger.num_open - self._ledger.num_ready,
            epoch=self._stream.epoch,
            epoch_position=self._stream.share_served,
            log_bytes=self._journal.num_bytes,
            problems=tuple(problems),
            rejected=self._rejections.counts() | self._hub_rejections(),
            changed_settings=self._tuning.in_force(),
        )

    # Rows

    def _record_group(self, group: Group, outcome: str, reason: str, trained_at: int, taken_at: float) -> None:
        row = GroupRow(
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
            ready_at=group.ready_at,
            taken_at=taken_at,
        )
        self._record(row)
        alarm = self._bias.take(ended_group(group, outcome=outcome, reason=reason, taken_at=taken_at))
        if alarm:
            self._event("bias_alarm", alarm)

    def _record_change(self, change: SettingChange, reason: str) -> None:
        detail = f"{change.setting} = {change.after}, was {change.before}; by {change.who}{f': {reason}' if reason else ''}"
        logger.info("setting changed at policy version %d: %s", change.policy_version, detail)
        self._record(EventRow(event="setting_changed", detail=detail, reason=reason, **msgspec.structs.asdict(change)))

    def _event(self, event: str, detail: str, **fields: Any) -> None:
        # A lost actor, or a new version, brings one such event for each of its leases.
        level = logging.DEBUG if event in ("lease_expired", "lease_aborted") else logging.INFO
        logger.log(level, "%s: %s", " ".join([event, *(str(value) for value in fields.values())]), detail)
        self._record(EventRow(event=event, detail=detail, **fields))

    def _send_concurrency(self, member: Member) -> None:
        self._send(member, CreditLimit(capacity=self._tuning.config.actor.max_inflight_groups))

    def _send(self, member: Member, message: LearnerMessage, *arrays: Array) -> None:
        self._outgoing.append(Outgoing(member.peer, message, arrays))
