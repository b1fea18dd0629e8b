"""Leases between grant and answer: who must answer which, until when, and what becomes of those that nobody answers.

grant -> [actor generates] -> release (answered)
                           -> give back (late, lost, returned: `Expired`)
                           -> abort (too stale to be trained on: `Dropped`)
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offbeat.common.records.rows import EvalRow, EventRow, Recorder
from offbeat.common.settings.config import EvaluationSection, RolloutSection
from offbeat.learner.diagnostics.sample_rows import EvaluationSampleRows
from offbeat.learner.dispatch.reports import report
from offbeat.learner.dispatch.roster import LeaseTurns, Member, Roster
from offbeat.learner.dispatch.send_queue import Offer, SendQueue
from offbeat.learner.leases.evaluation import MAX_LOST_LEASES, Evaluations, Round
from offbeat.learner.leases.events import Dropped, Expired, Granted
from offbeat.learner.leases.groups import Group, Rollout, unpack
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.log_reading import LogFullError
from offbeat.learner.leases.prompts import Prompt, Prompts
from offbeat.learner.leases.scheduler import RolloutScheduler
from offbeat.protocols.messages import Cancel, GroupDone, Sampling
from offbeat.protocols.wire import Frame

LATE = "no group within"
"""Beginning of the reason for which a late lease is taken back."""
FinishEvaluation = Callable[[EvalRow, Mapping[int, tuple[Rollout, ...]]], None]
"""Records the row of a finished evaluation, now or later; takes its completions by prompt."""


class EvaluationLeases:
    """Owns the evaluation rounds and the leases in them, which are in no ledger and no log."""

    def __init__(
        self,
        evaluation: EvaluationSection,
        rollout: RolloutSection,
        prompts: Prompts,
        evaluated: int,
        record: Recorder,
        finish: FinishEvaluation | None,
        wake: Callable[[], None],
    ) -> None:
        """`evaluated` is that of `Versions`. `wake` is called when a round ends: somebody may wait for that.

        `finish` None records the row as it is.
        """
        self.group_size = evaluation.group_size
        self._pass_reward = evaluation.pass_reward
        self._sets = [prompt.data_set for prompt in prompts.evaluation]
        num_prompts = min(evaluation.num_prompts * len(set(self._sets)), len(prompts.evaluation))
        self.rounds = Evaluations(interval=evaluation.interval, num_prompts=num_prompts, evaluated=evaluated)
        self._samples = EvaluationSampleRows(num_prompts, prompts.decode, record)
        self.num_answered = 0
        """Leases whose completions have arrived."""
        self._sampling = Sampling(max_new_tokens=rollout.max_new_tokens, temperature=evaluation.temperature)
        self._prompts = prompts.evaluation
        self._finish = finish or (lambda row, rollouts: record(row))
        self._wake = wake

    def offer(self, round_: Round, lease_id: int) -> Offer:
        """Take the next prompt of a round, and return the lease to send for it."""
        prompt = self._prompts[round_.next_prompt(lease_id)]
        return Offer(lease_id, prompt, self.group_size, self._sampling, round_.policy_version, is_evaluation=True)

    def holds(self, lease_id: int) -> bool:
        """Return whether this is an evaluation lease that has not ended."""
        return self.rounds.current is not None and self.rounds.current.holds(lease_id)

    def accept(self, actor: str, done: GroupDone, arrays: Sequence[Frame]) -> None:
        """Take the completions of a held-out prompt into the round."""
        self.num_answered += 1
        current = self._current()
        rollouts = unpack(done.completions, arrays)
        prompt = self._prompts[current.complete(done.lease_id, rollouts)]
        self._samples.record(prompt, rollouts[0], current.policy_version)
        self._end_finished()

    def give_back(self, lease_id: int) -> None:
        """End a lease whose group will not come from its actor; its prompt goes to another."""
        self._current().give_back(lease_id)
        self._end_finished()

    def fail(self, lease_id: int, reason: str) -> None:
        """End a lease that brought nothing usable; its prompt gets another try, up to `MAX_LEASE_ATTEMPTS`."""
        self._current().fail(lease_id)
        self._end_finished()

    def _end_finished(self) -> None:
        """Record the current round and end it, if all of its leases have ended."""
        current = self._current()
        if current.is_finished:
            self.rounds.end()
            self._finish(current.row(self._sets, self._pass_reward), current.rollouts)
            self._wake()

    def _current(self) -> Round:
        assert self.rounds.current is not None, "the lease is of no round"
        return self.rounds.current


class LeaseDesk:
    """Owns the deadlines of leases, and those that a learner process before this one granted and nobody has claimed yet.

    While the log is full it grants nothing and lets nothing expire: no group can be taken, which is not the actors' fault.
    """

    def __init__(
        self,
        rollout: RolloutSection,
        prompts: Sequence[Prompt],
        journal: LeaseJournal,
        scheduler: RolloutScheduler[Group],
        evaluations: EvaluationLeases,
        send_queue: SendQueue,
        record: Recorder,
        claims_until: float,
    ) -> None:
        """`claims_until` is when leases of the learner process before this one are given up, on the clock of `now`."""
        self.is_log_full = False
        """True until a full log has room again. Meanwhile nothing is granted, acknowledged, or taken back for being late."""
        self.deadlines: dict[int, float] = {}
        """Times at which the leases that members hold expire, by lease."""
        self._first_expiry = -math.inf
        """A time before which no lease expires."""
        self._may_have_room: dict[Member, None] = {}
        """All members with room for a lease, and perhaps others. With many actors, a look at each of them at every tick would
        take longer than everything else."""
        self._num_lost = Counter[tuple[int, int]]()
        """Leases that were lost with their actors, by prompt and epoch."""
        self._waiting_for_rewards: set[int] = set()
        """Leases that got more time because their rewards are unavailable."""
        self._timeout_s = rollout.lease_timeout_s
        self._group_size = rollout.group_size
        self._sampling = Sampling(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
        self._prompts = prompts
        self._journal = journal
        self._scheduler = scheduler
        self._evaluations = evaluations
        self._send_queue = send_queue
        self._record = record
        self._unclaimed = {lease.lease_id: lease.actor for lease in journal.ledger.generating()}
        """Actors of the leases that a learner process before this one granted and that are not claimed yet."""
        self._claims_until = claims_until

    # Granting

    def grant(self, roster: Roster, policy_version: int, now: float) -> None:
        """Send the leases that the bound admits and members have room for; raise `LogFullError` at the first not logged."""
        self._scheduler.grant(policy_version, _Grants(self, roster, policy_version, now))

    def is_held_back(self, roster: Roster, policy_version: int) -> bool:
        """Return whether, after `grant`, staleness alone keeps a lease from a member that has room."""
        if self.is_log_full or not self._scheduler.is_held_back(policy_version):
            return False
        return bool(self.with_room(roster))

    def with_room(self, roster: Roster) -> list[Member]:
        """Return the members that take leases and have room for one."""
        self._may_have_room = {
            member: None for member in self._may_have_room if member.free > 0 and roster.find(member.peer) is member
        }
        return [member for member in self._may_have_room if member.takes_leases]

    def set_capacity(self, member: Member, capacity: int) -> None:
        """Note the number of leases that a member takes at once."""
        member.capacity = capacity
        self._may_have_room[member] = None

    def lease_training(self, member: Member, policy_version: int, min_version: int, now: float) -> None:
        """Lease the next prompt of the stream to a member, or raise `LogFullError` and change nothing."""
        stream = self._journal.stream
        turn = stream.peek()
        prompt = self._prompts[turn.prompt_id]
        assert member.policy_version is not None, "a member without weights takes no leases"
        granted = Granted(
            at=self._journal.now(),
            lease_id=self._journal.ledger.next_lease_id(),
            prompt_id=turn.prompt_id,
            epoch=turn.epoch,
            epoch_size=stream.size_of(turn.epoch),
            actor=member.name,
            policy_version=policy_version,
            oldest_version=member.policy_version,
            prompt_hash=prompt.content_hash,
            task=prompt.task,
        )
        self._journal.commit(granted)
        self._send(member, Offer(granted.lease_id, prompt, self._group_size, self._sampling, min_version), now)

    def lease_evaluation(self, member: Member, round_: Round, now: float) -> None:
        """Lease the next prompt of an evaluation round to a member."""
        self._send(member, self._evaluations.offer(round_, self._journal.ledger.next_lease_id()), now)

    # Ending

    def has_answer(self, lease_id: int) -> bool:
        """Return whether a lease needs no answer: its group has arrived, or the lease has ended."""
        return self._journal.ledger.status(lease_id) in ("ready", "ended")

    def release(self, member: Member, lease_id: int) -> None:
        """Note that a member no longer owes a lease."""
        member.lease_ids.discard(lease_id)
        self._may_have_room[member] = None
        self.deadlines.pop(lease_id, None)
        self._waiting_for_rewards.discard(lease_id)

    def give_back(self, member: Member, lease_id: int, reason: str) -> None:
        """End a lease whose group will not come from this member; its prompt is re-queued."""
        if self._evaluations.holds(lease_id):
            self.release(member, lease_id)
            self._evaluations.give_back(lease_id)
        elif self._journal.ledger.status(lease_id) == "generating":
            self._expire(lease_id, reason)
            self.release(member, lease_id)

    def give_back_all(self, member: Member, reason: str) -> None:
        """End every lease of a member."""
        for lease_id in sorted(member.lease_ids):
            self.give_back(member, lease_id, reason)

    def lose(self, member: Member, reason: str) -> None:
        """End every lease of a member that is gone. A prompt that has lost `MAX_LOST_LEASES` so may be why, and is given up."""
        for lease_id in sorted(member.lease_ids):
            if self._journal.ledger.status(lease_id) == "generating":
                lease = self._journal.ledger.find(lease_id)
                self._num_lost[lease.prompt_id, lease.epoch] += 1
                if self._num_lost[lease.prompt_id, lease.epoch] == MAX_LOST_LEASES:
                    given_up = Dropped(at=self._journal.now(), lease_id=lease_id, reason=reason, is_final=True)
                    self._end(given_up, "prompt_dropped", f"prompt {lease.prompt_id} was lost with {MAX_LOST_LEASES} actors")
                    self.release(member, lease_id)
        self.give_back_all(member, reason)

    def wait_for_rewards(self, member: Member, extra_s: float) -> None:
        """Give a member's leases whose rewards are unavailable `extra_s` more to be answered, each once."""
        waiting = () if member.reward_trouble is None else member.reward_trouble.lease_ids
        for lease_id in member.lease_ids.intersection(waiting) - self._waiting_for_rewards:
            self._waiting_for_rewards.add(lease_id)
            self.deadlines[lease_id] += extra_s

    def cancel(self, member: Member, lease_ids: Sequence[int]) -> None:
        """Tell a member to stop working on leases."""
        if lease_ids:
            self._send_queue.send(member.peer, Cancel(lease_ids=tuple(lease_ids)))

    def expire_late(self, roster: Roster, now: float) -> None:
        """End the leases whose deadline is over."""
        if self.is_log_full or now <= self._first_expiry:
            return
        late = {lease_id for lease_id, deadline in self.deadlines.items() if deadline < now}
        for member in roster if late else ():
            for lease_id in sorted(member.lease_ids & late):
                reason = f"{LATE} {self._timeout_s:g} s"
                self.cancel(member, [lease_id])
                if self._evaluations.holds(lease_id):
                    # An attempt, because a prompt that is late each time would hold up its round forever.
                    self.release(member, lease_id)
                    self._evaluations.fail(lease_id, reason)
                else:
                    self.give_back(member, lease_id, reason)
        # No deadline is ever moved forward, and leases to come have their whole time.
        self._first_expiry = min([now + self._timeout_s, *self.deadlines.values()])

    def abort(self, roster: Roster, policy_version: int) -> None:
        """Cancel the leases whose groups could not be trained on any more; only a new version or bound brings such."""
        aborted = self._scheduler.abort(policy_version)
        for member in roster if aborted else ():
            mine = sorted(member.lease_ids.intersection(aborted))
            self.cancel(member, mine)
            for lease_id in mine:
                self.release(member, lease_id)
        for lease_id in aborted:
            self._unclaimed.pop(lease_id, None)
            dropped = Dropped(at=self._journal.now(), lease_id=lease_id, reason="aborted", is_final=False)
            self._end(dropped, "lease_aborted", "too stale to be trained on")

    # Agreeing with actors

    def claim(self, member: Member, now: float) -> None:
        """Let a new member keep the leases that an earlier learner process granted it, if it still works on them."""
        held = set(member.hello.lease_ids)
        mine = [lease_id for lease_id, actor in self._unclaimed.items() if actor == member.name]
        for lease_id in mine:
            del self._unclaimed[lease_id]
            if lease_id in held:
                member.lease_ids.add(lease_id)
                self.deadlines[lease_id] = now + self._timeout_s
            else:
                self._expire(lease_id, "the actor no longer has it")

    def give_up_unclaimed(self, now: float) -> None:
        """Expire the leases of actors that did not come back to this learner process in time."""
        if not self._unclaimed or now < self._claims_until or self.is_log_full:
            return
        for lease_id in list(self._unclaimed):
            self._expire(lease_id, "its actor did not come back after the learner's restart")
            del self._unclaimed[lease_id]

    def reconcile(self, member: Member, lease_ids: Sequence[int], seen_lease_id: int | None) -> None:
        """Agree with a member on the leases it holds: those lost on the way go to others, unwanted work is cancelled.

        `seen_lease_id` is the newest lease that the member knows to have been sent; later ones may still be on their way.
        """
        held = set(lease_ids)
        for lease_id in sorted(member.lease_ids - held):
            if seen_lease_id is not None and lease_id <= seen_lease_id:
                self.give_back(member, lease_id, "lost on the way to the actor")
        self.cancel(member, sorted(held - member.lease_ids))

    # The log and the clock

    def stall(self, error: LogFullError) -> None:
        """Close the desk because the log is full."""
        if not self.is_log_full:
            self.is_log_full = True
            detail = f"{error}; no lease is granted and no group acknowledged until there is room again"
            report(self._record, EventRow(event="log_full", detail=detail))

    def look_for_room(self, now: float) -> None:
        """Close the desk while the log is full; when it has room again, all leases get their full time to be answered."""
        try:
            self._journal.require_room()
        except LogFullError as error:
            self.stall(error)
            return
        if self.is_log_full:
            self.is_log_full = False
            # Those that wait for rewards may have more.
            whole = now + self._timeout_s
            self.deadlines = {lease_id: max(deadline, whole) for lease_id, deadline in self.deadlines.items()}
            report(self._record, EventRow(event="log_has_room", detail="leases are granted again"))

    def forgive(self, absent_s: float) -> None:
        """Move every deadline by the time in which the learner itself was stopped."""
        self.deadlines = {lease_id: deadline + absent_s for lease_id, deadline in self.deadlines.items()}
        self._claims_until += absent_s

    def _send(self, member: Member, offer: Offer, now: float) -> None:
        member.lease_ids.add(offer.lease_id)
        member.newest_lease_id = offer.lease_id
        self.deadlines[offer.lease_id] = now + self._timeout_s
        self._send_queue.send(member.peer, offer.lease(self._timeout_s), *offer.arrays())

    def _expire(self, lease_id: int, reason: str) -> None:
        self._end(Expired(at=self._journal.now(), lease_id=lease_id, reason=reason), "lease_expired", reason)

    def _end(self, ended: Expired | Dropped, event: str, detail: str) -> None:
        """End a training lease without a group; its prompt is re-queued unless the drop is final."""
        lease = self._journal.ledger.find(ended.lease_id)
        self._journal.commit_late(ended)
        after_s = ended.at - lease.granted_at
        row = EventRow(event=event, detail=detail, actor=lease.actor, lease_id=ended.lease_id, after_s=after_s)
        report(self._record, row)


@dataclass(eq=False)
class _Grants:
    """One round of granting, as the scheduler sees it: `LeaseTurns` says to whom each lease goes."""

    _desk: LeaseDesk
    _roster: Roster
    _policy_version: int
    _now: float
    _evaluation_turns: LeaseTurns | None = None
    _training_turns: LeaseTurns | None = None
    """Turns of training leases; None until evaluation has taken its share."""

    def lease_evaluation(self, round_: Round) -> bool:
        """Lease a held-out prompt, or return False when no member takes it."""
        self._evaluation_turns = self._evaluation_turns or LeaseTurns(self._desk.with_room(self._roster))
        member = self._evaluation_turns.take(round_.policy_version)
        if member is not None:
            self._desk.lease_evaluation(member, round_, self._now)
        return member is not None

    def lease_training(self, min_policy_version: int) -> bool:
        """Lease a training prompt, or return False when no member takes it."""
        if self._desk.is_log_full:
            return False
        self._training_turns = self._training_turns or LeaseTurns(self._desk.with_room(self._roster))
        member = self._training_turns.take(min_policy_version)
        if member is not None:
            self._desk.lease_training(member, self._policy_version, min_policy_version, self._now)
        return member is not None
