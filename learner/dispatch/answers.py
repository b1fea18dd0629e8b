"""Answers of actors to their leases: groups and failures, checked, booked and acknowledged."""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.common.records.rows import EventRow, Recorder
from offbeat.common.settings.config import Config, max_episode_tokens
from offbeat.learner.dispatch.group_buffer import GroupBuffer
from offbeat.learner.dispatch.lease_desk import EvaluationLeases, LeaseDesk
from offbeat.learner.dispatch.reports import Rejections, RepeatedEvents, report
from offbeat.learner.dispatch.roster import Member
from offbeat.learner.dispatch.run_state import LeaseFailures, Versions
from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.learner.leases.groups import ExpertLimits, Limits, expert_flaw, flaw
from offbeat.learner.leases.log_reading import LogFullError
from offbeat.protocols.messages import Ack, GroupDone, LeaseFailed
from offbeat.protocols.wire import Frame

_REPAIR = "Repair task.reward, or raise task.reward_timeout_s."
_CURES = {
    "reward_error": "Repair task.reward.",
    "environment_error": "Repair task.environment.",
    "environment_timeout": "Make task.environment faster, or raise the limits of [environment].",
    "environment_unavailable": "Bring back what task.environment needs, or raise task.reward_retry_s.",
    "reward_unavailable": "Bring the service behind task.reward back, or raise task.reward_retry_s.",
}
"""Advice by the reason for which leases fail."""


class GroupCheck:
    """The limits that every group of the run must keep to."""

    def __init__(self, config: Config, vocabulary_size: int, experts: ExpertLimits | None, versions: Versions) -> None:
        """`experts`: those that training groups must come with; None for none."""
        self._versions = versions
        self._experts = experts
        self._training = Limits(
            group_size=config.rollout.group_size,
            max_new_tokens=config.rollout.max_new_tokens,
            max_length=config.model.max_length if config.task.environment else 0,
            max_episode_tokens=max_episode_tokens(config),
            vocabulary_size=vocabulary_size,
        )
        self._evaluation = self._training._replace(group_size=config.evaluation.group_size)

    def flaw(self, done: GroupDone, arrays: Sequence[Frame], *, num_prompt_tokens: int | None) -> str | None:
        """Return the reason why a group cannot be used; None for a good one.

        `num_prompt_tokens` are those of a training lease's prompt; None for a lease of an evaluation.
        """
        limits = self._evaluation if num_prompt_tokens is None else self._training
        found = flaw(done.completions, arrays, limits, self._versions.newest)
        if found is not None or num_prompt_tokens is None or self._experts is None:
            return found
        return expert_flaw(done, arrays[-1], self._experts, num_prompt_tokens=num_prompt_tokens)


@dataclass(eq=False)
class Answers:
    """Takes answers from the actors that hold the leases, once each; owns nothing.

    An answer that the full log cannot take is not acknowledged: the actor keeps it and sends it again.
    """

    _check: GroupCheck
    _desk: LeaseDesk
    _buffer: GroupBuffer
    _evaluations: EvaluationLeases
    _failures: LeaseFailures
    _rejections: Rejections
    _send_queue: SendQueue
    _record: Recorder

    def __post_init__(self) -> None:
        self._failed_leases = RepeatedEvents(self._record)

    def take_group(self, member: Member, done: GroupDone, arrays: Sequence[Frame]) -> None:
        """Book and acknowledge a group: accepted, or rejected with its flaw."""
        lease_id = done.lease_id
        if lease_id not in member.lease_ids:
            self._answer_stray(member, lease_id)
            return
        is_evaluation = self._evaluations.holds(lease_id)
        account = self._evaluations if is_evaluation else self._buffer
        num_prompt_tokens = None if is_evaluation else self._buffer.num_prompt_tokens(lease_id)
        flaw = self._check.flaw(done, arrays, num_prompt_tokens=num_prompt_tokens)
        try:
            if flaw is None:
                account.accept(member.name, done, arrays)
            else:
                account.fail(lease_id, "rejected")
        except LogFullError as error:
            self._desk.stall(error)
            return
        self._desk.release(member, lease_id)
        outcome = "accepted" if flaw is None else "rejected"
        self._send_queue.send(member.peer, Ack(lease_id=lease_id, outcome=outcome, detail=flaw or ""))
        if flaw is None:
            self._failures.note_good_group()
        else:
            self._rejections.count(member.name, flaw)
            report(self._record, EventRow(event="group_rejected", detail=flaw, actor=member.name, lease_id=lease_id))
            self._failures.count_lease(f"a group of {member.name} that cannot be trained on: {flaw}.")

    def take_failure(self, member: Member, failure: LeaseFailed) -> None:
        """Book and acknowledge a lease that an actor gives back, or has failed on."""
        # An actor reports again when the acknowledgement was late: the failure counts once, or not at all.
        if failure.lease_id in member.lease_ids:
            if failure.reason == "returned":
                self._desk.give_back(member, failure.lease_id, "handed back by the actor")
            elif not self._fail(member, failure):
                return
        self._send_queue.send(member.peer, Ack(lease_id=failure.lease_id, outcome="accepted"))

    def _fail(self, member: Member, failure: LeaseFailed) -> bool:
        """End a lease as failed; return False while the log is full."""
        lease_id = failure.lease_id
        account = self._evaluations if self._evaluations.holds(lease_id) else self._buffer
        try:
            account.fail(lease_id, failure.reason)
        except LogFullError as error:
            self._desk.stall(error)
            return False
        self._desk.release(member, lease_id)
        self._failed_leases.report(EventRow(event=failure.reason, detail=failure.detail, actor=member.name, lease_id=lease_id))
        self._failures.count_lease(f"{failure.reason}: {failure.detail}. {_CURES.get(failure.reason, _REPAIR)}")
        return True

    def _answer_stray(self, member: Member, lease_id: int) -> None:
        """Answer a group for a lease that the sender does not hold."""
        # A late answer to a lease that has ended is nothing unusual.
        if self._desk.has_answer(lease_id):
            self._send_queue.send(member.peer, Ack(lease_id=lease_id, outcome="duplicate"))
            return
        self._rejections.count(member.name, "a lease that is not its own")
        self._send_queue.send(member.peer, Ack(lease_id=lease_id, outcome="unknown"))
