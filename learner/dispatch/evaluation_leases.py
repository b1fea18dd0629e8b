"""Leases of held-out prompts: they go to the same actors as training leases, and end in the rows of an evaluation."""

from collections.abc import Callable, Mapping, Sequence

from offbeat.common.records.rows import EvalRow, Recorder
from offbeat.common.settings.config import EvaluationSection, RolloutSection
from offbeat.learner.diagnostics.sample_rows import Decode, EvaluationSampleRows
from offbeat.learner.dispatch.offers import Offer
from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.groups import Rollout, unpack
from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.messages import GroupDone, Sampling
from offbeat.protocols.wire import Frame

FinishEvaluation = Callable[[EvalRow, Mapping[int, tuple[Rollout, ...]]], None]
"""Records the row of a finished evaluation, now or later; takes its completions by prompt."""


class EvaluationLeases:
    """Owns the evaluation rounds and the leases in them, which are in no ledger and no log."""

    def __init__(
        self,
        evaluation: EvaluationSection,
        rollout: RolloutSection,
        prompts: Sequence[Prompt],
        decode: Decode,
        record: Recorder,
        finish: FinishEvaluation | None,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when a round ends: somebody may wait for that. `finish` None records the row as it is."""
        self.group_size = evaluation.group_size
        self._pass_reward = evaluation.pass_reward
        self._sets = [prompt.data_set for prompt in prompts]
        num_prompts = min(evaluation.num_prompts * len(set(self._sets)), len(prompts))
        self.rounds = Evaluations(
            interval=evaluation.interval, num_prompts=num_prompts, max_attempts=rollout.max_lease_attempts
        )
        self._samples = EvaluationSampleRows(num_prompts, decode, record)
        self.num_answered = 0
        """Leases whose completions have arrived."""
        self._sampling = Sampling(max_new_tokens=rollout.max_new_tokens, temperature=evaluation.temperature)
        self._prompts = prompts
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

    def fail(self, lease_id: int, reason: str) -> None:
        """End a lease that brought nothing usable; its prompt gets another try, up to `rollout.max_lease_attempts`."""
        self._current().fail(lease_id)

    def end_round(self) -> None:
        """Record the current round and end it, if all of its leases have ended."""
        current = self.rounds.current
        if current is None or not current.is_finished:
            return
        self.rounds.end()
        self._finish(current.row(self._sets, self._pass_reward), current.rollouts)
        self._wake()

    def _current(self) -> Round:
        assert self.rounds.current is not None, "the lease is of no round"
        return self.rounds.current
