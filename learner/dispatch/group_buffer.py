"""Finished groups between their arrival and the trainer.

accept -> buffer (in the ledger) -> drop what is too stale -> select a batch -> finish
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.common.records.rows import EpochRow, EventRow, GroupRow, Recorder
from offbeat.learner.diagnostics.length_bias import BiasMonitor, ended_group
from offbeat.learner.dispatch.reports import report
from offbeat.learner.dispatch.run_state import LeaseFailures, Versions
from offbeat.learner.leases.events import Accepted, Dropped, Trained
from offbeat.learner.leases.groups import Group, make_group
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.ledger import ZERO_VARIANCE
from offbeat.learner.leases.prompts import Prompt
from offbeat.learner.leases.scheduler import RolloutScheduler
from offbeat.protocols.messages import GroupDone
from offbeat.protocols.wire import Frame


class Selection(NamedTuple):
    """A batch in training: the time of its selection, and its groups."""

    at: float = 0.0
    """Seconds since the epoch."""
    num_events: int = 0
    """Events of this process before the selection: later ones could not be selected."""
    lease_ids: frozenset[int] = frozenset()


@dataclass(eq=False)
class GroupBuffer:
    """Owns the batch in training and the length-bias alarm. The groups themselves are in the journal's ledger."""

    _prompts: Sequence[Prompt]
    _journal: LeaseJournal
    _scheduler: RolloutScheduler[Group]
    _versions: Versions
    _failures: LeaseFailures
    _record: Recorder
    _wake: Callable[[], None]
    """Called when a batch may be complete."""
    _drop_zero_variance: bool
    """Drop groups whose rewards are all equal."""

    def __post_init__(self) -> None:
        self._training = Selection()
        """The batch that was selected and is not finished."""
        self._bias = BiasMonitor()

    def num_prompt_tokens(self, lease_id: int) -> int:
        """Return the length of a training lease's prompt."""
        return len(self._prompts[self._journal.ledger.find(lease_id).prompt_id].token_ids)

    def accept(self, actor: str, done: GroupDone, arrays: Sequence[Frame]) -> None:
        """Take the group of a training lease into the log and the buffer, or raise `LogFullError` and change nothing."""
        prompt = self._prompts[self._journal.ledger.find(done.lease_id).prompt_id]
        accepted = Accepted(
            at=self._journal.now(),
            lease_id=done.lease_id,
            actor=actor,
            completions=done.completions,
            generate_s=done.generate_s,
            reward_s=done.reward_s,
            policy_version=self._versions.current,
            prompt_hash=prompt.content_hash,
            experts=done.experts,
        )
        group = make_group(accepted, arrays, prompt)
        self._journal.commit(accepted, arrays, group)
        self._failures.forget(group.prompt_id)
        if not self._drop_equal(group) and self._scheduler.has_batch():
            self._wake()

    def begin(self) -> None:
        """Drop the groups without variance that an earlier process was killed before it could drop."""
        for group in self._journal.ledger.ready_groups():
            self._drop_equal(group)

    def fail(self, lease_id: int, reason: str) -> None:
        """End a training lease that brought nothing usable, or raise `LogFullError` and change nothing.

        Its prompt is re-queued, up to `MAX_LEASE_ATTEMPTS` in all.
        """
        prompt_id = self._journal.ledger.find(lease_id).prompt_id
        is_final = self._failures.is_last_attempt(prompt_id)
        self._journal.commit(Dropped(at=self._journal.now(), lease_id=lease_id, reason=reason, is_final=is_final))
        num_attempts = self._failures.count_attempt(prompt_id)
        if is_final:
            detail = f"prompt {prompt_id} failed {num_attempts} times: {reason}"
            report(self._record, EventRow(event="prompt_dropped", detail=detail))

    def drop(self, group: Group, reason: str, *, is_final: bool = False) -> None:
        """Take a group out of the buffer untrained; its prompt is re-queued unless the drop is final."""
        dropped = Dropped(at=self._journal.now(), lease_id=group.lease_id, reason=reason, is_final=is_final)
        self._journal.commit_late(dropped)
        self._record_end(group, "dropped", reason, self._versions.current, self._journal.now())

    def drop_doubtful(self, actor: str, good_version: int | None, *, keep: bool) -> None:
        """Drop an actor's groups with tokens newer than its last good weights; with `keep` only report them.

        Groups in training are left alone: it is too late for those.
        """
        doubtful = [
            group
            for group in self._journal.ledger.ready_groups()
            if group.actor == actor
            and (good_version is None or group.newest_version > good_version)
            and group.lease_id not in self._training.lease_ids
        ]
        for group in () if keep else doubtful:
            self.drop(group, "quarantined")
        if doubtful:
            fate = "kept (weights.on_canary_mismatch)" if keep else "dropped"
            leases = ", ".join(str(group.lease_id) for group in doubtful)
            report(self._record, EventRow(event="groups_doubtful", detail=f"{fate}: leases {leases}", actor=actor))

    def select(self) -> list[Group] | None:
        """Return the next batch, first the group to train on first; None while there is none.

        Drops the groups that have become too stale for it.
        """
        groups = self._scheduler.select(self._versions.current, lambda group: self.drop(group, "stale"))
        lease_ids = frozenset(group.lease_id for group in groups)
        self._training = Selection(self._journal.now(), self._journal.num_events, lease_ids)
        return groups or None

    def finish(self, groups: Sequence[Group], num_steps: int) -> Trained:
        """Enter a batch as trained on: it has made `num_steps` optimizer steps from the current version on."""
        trained = Trained(
            at=self._journal.now(),
            lease_ids=tuple(group.lease_id for group in groups),
            policy_version=self._versions.current,
            num_steps=num_steps,
            selected_at=self._training.at,
            selected_after=self._training.num_events,
            prompt_hashes=tuple(self._prompts[group.prompt_id].content_hash for group in groups),
        )
        self._journal.commit_late(trained)
        return trained

    def _drop_equal(self, group: Group) -> bool:
        """Drop a group whose rewards are all equal, where the settings ask for it; return whether it was dropped."""
        is_dropped = self._drop_zero_variance and len({rollout.reward for rollout in group.rollouts}) == 1
        if is_dropped:
            self.drop(group, ZERO_VARIANCE, is_final=True)
        return is_dropped

    def record_trained(self, groups: Sequence[Group], trained: Trained) -> None:
        """Record the rows of a finished batch. Needs no lock."""
        for index, group in enumerate(groups):
            trained_at = self._scheduler.policy.trained_at(trained.policy_version, index)
            self._record_end(group, "trained", "", trained_at, trained.selected_at)

    def record_epochs(self) -> None:
        """Record the passes over the data in which every prompt is trained on or given up."""
        while (ended := self._journal.ledger.end_epoch(self._journal.stream.size_of)) is not None:
            epoch, account = ended
            self._record(
                EpochRow(
                    epoch=epoch, num_trained=account.num_trained, dropped=account.dropped, num_left_out=account.num_left_out
                )
            )

    def _record_end(self, group: Group, outcome: str, reason: str, policy_version: int, taken_at: float) -> None:
        has_environment = group.has_environment
        self._record(
            GroupRow(
                lease_id=group.lease_id,
                prompt_id=group.prompt_id,
                actor=group.actor,
                outcome=outcome,
                reason=reason,
                policy_version=policy_version,
                policy_lag=group.policy_lag(policy_version),
                lengths=[len(rollout.token_ids) for rollout in group.rollouts],
                rewards=[rollout.reward for rollout in group.rollouts],
                generate_s=group.generate_s,
                num_segments=max(len(rollout.segments) for rollout in group.rollouts),
                taken_at=taken_at,
                num_turns=[rollout.num_turns for rollout in group.rollouts] if has_environment else None,
                environment_s=[rollout.environment_s for rollout in group.rollouts] if has_environment else None,
            )
        )
        alarm = self._bias.take(ended_group(group, outcome=outcome, reason=reason, taken_at=taken_at))
        if alarm is not None:
            report(self._record, EventRow(event="bias_alarm", detail=alarm))
