"""All decisions about rollouts are made behind one lock, so that two threads never disagree about a lease.

    actors' messages -> handle --> Roster            who is here and heard
                                   Quarantine        whose weights are trusted
                                   LeaseDesk         grant, expire, abort, give back
                                   Answers           groups and failures: check, book, acknowledge
                                   EvaluationLeases  leases of held-out prompts
    training thread <- take_batch  GroupBuffer       accept, drop, select, finish
                                   Watchdog          why a batch is late
    operators       <- handle      LiveSettings, Status

The hub's thread calls `handle` and `tick`, and sends the messages that `take_outgoing` returns. The training thread calls
`take_batch`, `finish_batch` and `publish`. Every public method takes the lock. There are no sockets here, and no clock but the
one passed in.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, assert_never

import numpy as np

from offbeat.common.records.rows import EventRow, LedgerSums, Recorder
from offbeat.common.settings.config import Config
from offbeat.learner.dispatch.answers import Answers, GroupCheck
from offbeat.learner.dispatch.canary import Canary
from offbeat.learner.dispatch.contract import Contract, JoinServer
from offbeat.learner.dispatch.group_buffer import GroupBuffer
from offbeat.learner.dispatch.lease_desk import EvaluationLeases, FinishEvaluation, LeaseDesk
from offbeat.learner.dispatch.live_settings import CREDIT_LIMIT, LiveSettings, record_change
from offbeat.learner.dispatch.quarantine import Quarantine, reason_to_dismiss
from offbeat.learner.dispatch.reports import report
from offbeat.learner.dispatch.roster import Member, MemberMessage, Mismatch, Roster
from offbeat.learner.dispatch.run_state import LeaseFailures, Versions, within_budget
from offbeat.learner.dispatch.send_queue import Outgoing, SendQueue
from offbeat.learner.dispatch.status import FleetMeter, FleetUse, Status
from offbeat.learner.dispatch.watchdog import Watchdog
from offbeat.learner.leases.events import Started, Tuned, Weighed
from offbeat.learner.leases.groups import Group, TaskResults, task_results
from offbeat.learner.leases.journal import DispatcherState, LeaseJournal
from offbeat.learner.leases.log_reading import LogFullError, Position
from offbeat.learner.leases.prompts import Prompts
from offbeat.learner.leases.scheduler import LeaseTarget, RolloutScheduler
from offbeat.protocols import messages
from offbeat.protocols.keys import NO_KEYS, Sender
from offbeat.protocols.wire import Frame, WireError, logprobs, routed_experts


class Listeners(NamedTuple):
    """Functions of the rest of the learner. The hub's thread calls them while it holds the dispatcher's lock."""

    joined: Callable[[bytes], None]
    """Takes the address of an actor that has joined."""
    introduced: Callable[[messages.Hello], None]
    """Takes the hello of an actor that has joined."""
    weights: Callable[[str, messages.WeightsStaged | messages.WeightsCommitted], None]
    """Takes an actor's name and its answer to an update of the weights."""
    distrusted: Callable[[bytes, str, str], None]
    """Takes address and name of an actor whose weights are not the ones it reports, and the reason."""
    routed: Callable[[str, int, np.ndarray], None]
    """Takes name, policy version and an actor's routing of the canary: int32 experts `[num_tokens - 1, num_layers, top_k]`."""
    evaluated: FinishEvaluation | None = None
    """Records a finished evaluation; None records its row as it is."""
    vitals: Callable[[], messages.Vitals] = messages.Vitals
    """Returns the newest step in short, and the health rules that are broken."""
    weight_problems: Callable[[], list[str]] = list
    """Returns problems of the transfer of weights, for the operator."""
    advice: Callable[[], list[str]] = list
    """Returns what the run needs instead of more actors."""
    hub_rejections: Callable[[], dict[str, int]] = dict
    """Returns the number of messages that the hub has rejected, by reason."""


class Dispatcher:
    """Owns the lock, the way of a message, the order of a tick, and the outgoing messages."""

    def __init__(
        self,
        contract: Contract,
        settings: LiveSettings,
        prompts: Prompts,
        journal: LeaseJournal,
        versions: Versions,
        canary: Canary,
        listeners: Listeners,
        record: Recorder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the parts, each after those that it uses; `clock` gives seconds, as `now` does in every message and tick."""
        config, rollout, now = settings.config, settings.config.rollout, clock()
        self._lock = threading.Condition()
        """Notified when a batch may be complete, a round of evaluation has ended, an actor has left, or the run fails."""
        wake = self._lock.notify_all
        self._contract = contract
        self._settings = settings
        self._journal = journal
        self._versions = versions
        self._canary = canary
        self._listeners = listeners
        self._record = record
        self._clock = clock
        self._ticked_at = now
        self._stop_reason: str | None = None
        queue = self._send_queue = SendQueue()
        self._join_server = JoinServer(contract.join_payload, queue)
        failures = self._failures = LeaseFailures(config.run.max_failed_leases, wake)
        evaluations = EvaluationLeases(
            config.evaluation, rollout, prompts, versions.evaluated, record, listeners.evaluated, wake
        )
        self._evaluations = evaluations
        target = LeaseTarget(settings.staleness, config.weights.interval)
        scheduler = RolloutScheduler(settings.staleness, evaluations.rounds, journal.ledger, target)
        self._scheduler = scheduler
        roster = self._roster = Roster(contract, config.hub, versions, queue, within_budget(config, failures, record))
        claims_until = now + config.hub.dead_after_s
        desk = LeaseDesk(rollout, prompts.train, journal, scheduler, evaluations, queue, record, claims_until)
        self._desk = desk
        drop_equal = config.loss.zero_variance == "drop"
        buffer = GroupBuffer(prompts.train, journal, scheduler, versions, failures, record, wake, drop_equal)
        self._buffer = buffer
        check = GroupCheck(config, contract.vocabulary_size, contract.experts, versions)
        self._answers = Answers(check, desk, buffer, evaluations, failures, roster.rejections, queue, record)
        self._quarantine = Quarantine(roster, desk, buffer, failures, settings, record)
        self._watchdog = Watchdog(settings, roster, desk, journal, versions, evaluations, failures, record)
        self._status = Status(contract.run_id, settings, roster, desk, journal, self._watchdog, versions, now)
        self._fleet = FleetMeter(roster, desk, now)

    # The training thread

    def begin(self) -> None:
        """Mark in the log that this process has taken over."""
        with self._lock:
            started = Started(
                at=self._journal.now(),
                run_id=self._contract.run_id,
                learner_incarnation=self._contract.learner_incarnation,
                policy_version=self._versions.current,
            )
            # Readers of the log count from here on. The first shares of a curriculum are in it already.
            self._journal.num_events = 0
            self._journal.commit_late(started)
            self._buffer.begin()
            self._desk.abort(self._roster, self._versions.current)
            # If a power failure lost this record, the next process would grant the same lease ids again.
            self._journal.sync()

    def doing(self, activity: str) -> None:
        """Note what the training loop does from now on, for `offbeat status`."""
        with self._lock:
            self._status.doing(activity, self._clock())

    def take_batch(self, timeout_s: float) -> list[Group] | None:
        """Return the next batch, first the group to train on first; None when it is not complete within `timeout_s`.

        Consumes: buffered groups. Waits for: the last group of a batch. Unblocked by: `handle` accepting one, or `fail`.
        Raises `RunFailedError`, or the error that ended the hub's thread.
        """
        with self._lock:
            self._scheduler.ask(self._clock())
            groups = self._lock.wait_for(self._select, timeout_s)
            if groups is None:
                self._watchdog.look(self._clock(), self._listeners.weight_problems)
                return None
            self._scheduler.take(self._clock())
            self._watchdog.rest()
            return groups

    def finish_batch(self, groups: Sequence[Group], policy_version: int) -> None:
        """Enter a batch as trained on; the learner is at `policy_version` now."""
        with self._lock:
            trained = self._buffer.finish(groups, policy_version - self._versions.current)
            self._versions.advance(policy_version)
            self._desk.abort(self._roster, policy_version)
        # Without the lock: the hub need not wait for rows.
        self._buffer.record_trained(groups, trained)

    def publish(self, policy_version: int, *, last: bool = False) -> None:
        """Note that the weights of this version are on their way to the actors."""
        with self._lock:
            self._versions.published = policy_version
            self._evaluations.rounds.reach(policy_version, last=last)

    def wait_evaluations(self, timeout_s: float) -> bool:
        """Wait until every due evaluation is finished; return False when the time is over.

        Unblocked by: the end of the last round, or an error that ends the run, which `raise_if_failed` raises.
        """
        with self._lock:
            return self._lock.wait_for(lambda: self._evaluations.rounds.is_idle or self._failures.error is not None, timeout_s)

    def num_evaluation_answers(self) -> int:
        """Return the number of evaluation leases of this process whose completions have arrived."""
        with self._lock:
            return self._evaluations.num_answered

    def raise_if_failed(self) -> None:
        """Raise the error that must end the run, if there is one."""
        with self._lock:
            if self._failures.error is not None:
                raise self._failures.error

    def fail(self, error: BaseException) -> None:
        """Make the training thread raise this error."""
        with self._lock:
            self._failures.end_run(error)

    def stop(self, reason: str) -> None:
        """Grant nothing more, and tell every actor that the run is over, now or when it next speaks."""
        with self._lock:
            self._stop_reason = reason
            for member in self._roster:
                self._send_queue.send(member.peer, messages.Stop(reason=reason))

    def wait_left(self, timeout_s: float) -> bool:
        """Wait until every actor has said goodbye or is lost; return False when the time is over."""
        with self._lock:
            return self._lock.wait_for(lambda: not len(self._roster), timeout_s)

    def state(self) -> DispatcherState:
        """Return what a checkpoint keeps, or raise `LogFullError` while the log lacks events that the state rests on."""
        with self._lock:
            self._journal.flush()
            # Records that the checkpoint refers to must be on disk before it is.
            self._journal.sync()
            ledger, stream = self._journal.ledger.state(), self._journal.stream.state()
            return DispatcherState(stream, ledger, self._journal.end, self._versions.newest, dict(self._settings.changed))

    def prune_log(self, needed: Position) -> None:
        """Let the log delete old segments; no restart reads a record before `needed`."""
        with self._lock:
            self._journal.prune(needed)

    def is_log_over(self) -> bool:
        """Return whether the log is too large, and only a checkpoint lets it be shortened."""
        with self._lock:
            return self._journal.is_over

    def counts(self) -> LedgerSums:
        """Return the ledger's sums."""
        with self._lock:
            return self._journal.ledger.counts()

    def settings(self) -> Config:
        """Return the run's settings as they are now."""
        with self._lock:
            return self._settings.config

    def tune(self, settings: Mapping[str, str], who: str, reason: str = "") -> tuple[messages.SettingChange, ...]:
        """Change settings (`section.key` to TOML) from now on, all or none; return those that had another value.

        Raises `SettingError` when one is refused, `LogFullError` while a restart could not know of the change.
        """
        with self._lock:
            changed = self._settings.propose(settings).settings
            if not changed:
                return ()
            version = self._versions.current
            event = Tuned(at=self._journal.now(), settings=changed, who=who, reason=reason, policy_version=version)
            self._journal.commit(event)
            changes = self._settings.apply(event)
            self._desk.abort(self._roster, version)
            if CREDIT_LIMIT in changed:
                for member in self._roster:
                    self._send_credit_limit(member)
            for change in changes:
                record_change(self._record, change, reason)
            return changes

    def task_results(self, num_prompts: Mapping[str, int]) -> dict[str, TaskResults]:
        """Return the results of the tasks so far, which have this many prompts."""
        with self._lock:
            return task_results(num_prompts, self._journal.stream.shares, self._journal.ledger.tasks)

    def weigh(self, shares: Mapping[str, float]) -> None:
        """Lease these shares of the tasks' prompts from now on (`PromptStream.weigh`)."""
        with self._lock:
            event = Weighed(at=self._journal.now(), shares=dict(shares), policy_version=self._versions.current)
            self._journal.commit_late(event)

    def take_fleet_use(self) -> FleetUse:
        """Return the use of the actors since the last call."""
        with self._lock:
            return self._fleet.take()

    def buffer_sizes(self) -> tuple[int, int]:
        """Return the number of groups ready, and of leases in flight."""
        with self._lock:
            ledger = self._journal.ledger
            return ledger.num_ready, ledger.num_open - ledger.num_ready

    def lease_limit(self) -> int:
        """Return the largest number of leases that may be open now."""
        with self._lock:
            return self._scheduler.lease_limit

    def members(self) -> list[tuple[bytes, str, int | None, str | None]]:
        """Return address, name, policy version (None: it has no weights of this process) and GPU of every live actor."""
        with self._lock:
            return [(member.peer, member.name, member.policy_version, member.hello.engine.gpu) for member in self._roster]

    def waiting_for(self) -> str | None:
        """Return one line that says what keeps the next batch; None when it is complete."""
        with self._lock:
            return self._watchdog.waiting_for()

    def judge_canary(
        self, actor: str, policy_version: int, flaw: str | None, agrees_with: Sequence[str] = (), *, is_certain: bool = True
    ) -> None:
        """Trust an actor whose log-probs of the canary are right; quarantine or dismiss one whose log-probs have this flaw.

        `agrees_with` names the actors whose log-probs have the same flaw. Where it is not certain that they are right, a flaw
        of the next version makes its groups under this one doubtful too.
        """
        with self._lock:
            if flaw is None:
                self._quarantine.release(actor, policy_version, is_certain=is_certain)
                return
            member = self._quarantine.impose(actor, Mismatch(flaw, tuple(agrees_with)))
            if member is None:
                return
            reason = reason_to_dismiss(member)
            if reason is None:
                self._listeners.distrusted(member.peer, actor, flaw)
            else:
                self._roster.dismiss(member, reason)
                self._lose(member, "actor_lost", "dismissed for its weights")

    # The hub's thread

    def handle(
        self, peer: bytes, message: messages.ActorMessage, arrays: Sequence[Frame], now: float, sender: Sender = NO_KEYS
    ) -> None:
        """Take one message of an actor or an operator."""
        with self._lock:
            match message:
                case messages.StatusRequest() | messages.LiveSettingsRequest():
                    self._answer_operator(peer, message, now, sender)
                case _ if not self._may_speak(peer, sender):
                    pass
                case messages.Hello():
                    self._tell_end(peer)
                    self._join(peer, message, now, sender)
                case messages.RunRequest():
                    self._tell_end(peer)
                    self._join_server.answer(peer, message.index)
                case _:
                    self._hear(peer, message, arrays, now)

    def refuse(self, peer: bytes, error: WireError, sender: Sender = NO_KEYS) -> None:
        """Refuse bytes that are no message of ours."""
        with self._lock:
            self._roster.reject(peer, self._roster.name_of(peer, sender), str(error))

    def count_rejected(self, name: str, reason: str) -> None:
        """Count a message that was refused elsewhere and needs no answer."""
        with self._lock:
            self._roster.rejections.count(name, reason)

    def unreachable(self, outgoing: Outgoing) -> None:
        """Take back a lease that could not be sent, and grant its actor no more until it is heard again."""
        with self._lock:
            member = self._roster.find(outgoing.peer)
            if member is None:
                return
            member.is_reachable = False
            if isinstance(outgoing.message, messages.Lease):
                self._desk.give_back(member, outgoing.message.lease_id, "actor not reachable")

    def status_report(self) -> messages.StatusReport:
        """Return the state of the run for people."""
        with self._lock:
            return self._report(self._clock())

    def silence_s(self) -> float:
        """Return the seconds since the last tick."""
        return self._clock() - self._ticked_at

    def tick(self, now: float) -> None:
        """Lose silent actors, expire late leases, grant new ones, then put the log on disk.

        Acknowledgements leave after it (`take_outgoing`), so the log has what they are for.
        """
        with self._lock:
            self._forgive_own_absence(now)
            for member, silent_s in self._roster.silent(now):
                self._lose(member, "actor_lost", f"not heard of for {silent_s:.1f} s (hub.dead_after_s)")
            self._desk.look_for_room(now)
            version = self._versions.current
            self._desk.expire_late(self._roster, now)
            self._desk.give_up_unclaimed(now)
            if self._stop_reason is None:
                try:
                    self._desk.grant(self._roster, version, now)
                except LogFullError as error:
                    self._desk.stall(error)
            self._fleet.tick(now, self._stop_reason is None and self._desk.is_held_back(self._roster, version))
            self._buffer.record_epochs()
            self._journal.sync_before_acks()

    def take_outgoing(self) -> list[Outgoing]:
        """Return the messages to send, in order."""
        with self._lock:
            return self._send_queue.take()

    def post(self, peer: bytes, message: messages.LearnerMessage) -> None:
        """Queue a message of another part (the weight publisher)."""
        with self._lock:
            self._send_queue.send(peer, message)

    # Messages

    def _may_speak(self, peer: bytes, sender: Sender) -> bool:
        """Return whether a message to the actors' side comes with the right key; refuse it otherwise."""
        if sender.role == "operator":
            self._roster.reject(peer, sender.name, "an operator's key, and an actor's message", "use a key of role actor")
            return False
        member = self._roster.find(peer)
        if member is not None and member.key_name != sender.name:
            cure = "each actor needs its own key and name"
            self._roster.reject(peer, sender.name, "a message in another actor's name", cure)
            return False
        return True

    def _join(self, peer: bytes, hello: messages.Hello, now: float, sender: Sender) -> None:
        """Admit or refuse an actor, or agree again with one that is here already."""
        objection = self._roster.objection(peer, hello, sender)
        if objection is not None:
            self._roster.turn_away(peer, hello, objection)
            return
        replaced = self._roster.replaced_by(peer, hello)
        if replaced is not None:
            self._lose(replaced, "actor_lost", "replaced by a newer process of the same name")
        member = self._roster.hear(peer, now)
        if member is None:
            member = self._roster.add(peer, hello, sender, now)
            self._desk.claim(member, now)
            self._canary.joined(hello.actor)
            self._listeners.joined(peer)
            self._listeners.introduced(hello)
            self._roster.report_joined(member)
        elif member.is_repeated(hello, now):
            return
        self._roster.welcome(member, hello, now)
        self._send_credit_limit(member)
        # Leases may have been lost with the last connection.
        self._desk.reconcile(member, hello.lease_ids, member.newest_lease_id)

    def _hear(self, peer: bytes, message: MemberMessage, arrays: Sequence[Frame], now: float) -> None:
        """Take a message that only members may send."""
        if isinstance(message, messages.ActorHeartbeat):
            self._tell_end(peer)
        member = self._roster.hear(peer, now)
        if member is None:
            if not isinstance(message, messages.Goodbye):
                self._send_queue.send(peer, messages.SayHello())
            return
        match message:
            case messages.Credit():
                self._desk.set_capacity(member, message.capacity)
            case messages.GroupDone():
                self._answers.take_group(member, message, arrays)
            case messages.LeaseFailed():
                self._answers.take_failure(member, message)
            case messages.ActorHeartbeat():
                self._roster.note_heartbeat(member, message)
                self._desk.reconcile(member, message.lease_ids, message.seen_lease_id)
                self._desk.wait_for_rewards(member, self._settings.config.task.reward_retry_s)
                newest = -1 if member.newest_lease_id is None else member.newest_lease_id
                self._send_queue.send(peer, messages.LearnerHeartbeat(newest_lease_id=newest))
            case messages.WeightsStaged():
                self._listeners.weights(member.name, message)
            case messages.WeightsCommitted():
                lie = self._roster.note_commit(member, message)
                if lie is None:
                    self._listeners.weights(member.name, message)
                else:
                    self._listeners.distrusted(peer, member.name, lie)
            case messages.CanaryScored():
                verdict = self._canary.judge(member.name, message.policy_version, logprobs(arrays[0]).copy())
                if verdict is not None:
                    self.judge_canary(
                        member.name, message.policy_version, verdict.flaw, verdict.agrees_with, is_certain=verdict.is_certain
                    )
            case messages.FilesScored():
                self._canary.measure_floor(member.name, logprobs(arrays[0]).copy())
            case messages.CanaryRouted():
                self._listeners.routed(member.name, message.policy_version, routed_experts(message, arrays[0]))
            case messages.ChunkRequest():
                self._roster.reject(peer, member.name, "a chunk request at the hub", "chunks are at weights.pull_port")
            case messages.Goodbye():
                self._lose(member, "actor_left", message.reason)
            case _:
                assert_never(message)

    def _answer_operator(
        self, peer: bytes, message: messages.StatusRequest | messages.LiveSettingsRequest, now: float, sender: Sender
    ) -> None:
        if sender.role == "actor":
            cure = "use a key of role operator"
            self._roster.reject(peer, sender.name, "an actor's key, and an operator's message", cure)
            return
        is_question = isinstance(message, messages.StatusRequest)
        self._send_queue.send(peer, self._report(now) if is_question else self._change_settings(message, sender))

    def _report(self, now: float) -> messages.StatusReport:
        ask, is_over = self._listeners, self._stop_reason is not None
        problems, failure = [*ask.weight_problems(), *ask.advice()], self._failures.error
        return self._status.report(now, ask.vitals(), problems, failure, ask.hub_rejections(), is_over=is_over)

    def _change_settings(self, request: messages.LiveSettingsRequest, sender: Sender) -> messages.LiveSettingsReport:
        who = f"{request.who} (key {sender.name})" if sender.role else request.who
        return self._settings.answer(request.settings, self._versions.current, lambda: self.tune(request.settings, who))

    # Parts of the above

    def _select(self) -> list[Group] | None:
        self.raise_if_failed()
        return self._buffer.select()

    def _lose(self, member: Member, event: str, detail: str) -> None:
        """Let a member go that leaves (`actor_left`) or is lost (`actor_lost`): its leases go to others."""
        report(self._record, EventRow(event=event, detail=detail, actor=member.name))
        self._desk.lose(member, event)
        self._roster.remove(member)
        self._lock.notify_all()

    def _forgive_own_absence(self, now: float) -> None:
        """Do not hold it against the actors that this process was stopped or starved since the last tick."""
        absent_s = now - self._ticked_at
        self._ticked_at = now
        if absent_s < self._settings.config.hub.dead_after_s / 2:
            return
        self._roster.forgive(absent_s, now)
        self._desk.forgive(absent_s)

    def _tell_end(self, peer: bytes) -> None:
        """Tell an actor that has not heard of it, or came too late, that the run is over."""
        if self._stop_reason is not None:
            self._send_queue.send(peer, messages.Stop(reason=self._stop_reason))

    def _send_credit_limit(self, member: Member) -> None:
        limit = self._settings.credit_limit
        if limit is not None:
            self._send_queue.send(member.peer, messages.CreditLimit(capacity=limit))
