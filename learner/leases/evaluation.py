"""Evaluation rounds: held-out prompts leased to the same actors, while training goes on."""

import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from offbeat.common.records.rows import EvalRow
from offbeat.learner.leases.groups import Rollout
from offbeat.learner.leases.prompts import MAX_LEASE_ATTEMPTS

MAX_LOST_LEASES = 10
"""Leases of a prompt, in one round or pass over the data, that are lost with their actors before it is taken to end them."""


class Round:
    """One pass over the held-out prompts under one policy version (or later ones, where weights change meanwhile)."""

    def __init__(self, policy_version: int, prompt_ids: list[int]) -> None:
        self.policy_version = policy_version
        self._waiting = deque((prompt_id, MAX_LEASE_ATTEMPTS) for prompt_id in prompt_ids)
        self._leased: dict[int, tuple[int, int]] = {}
        self._num_lost = Counter[int]()
        """Leases that were lost with their actors, by prompt."""
        self.rollouts: dict[int, tuple[Rollout, ...]] = {}
        """The completions, by prompt."""
        self.num_failed = 0

    @property
    def is_finished(self) -> bool:
        """True when every prompt has its completions, or failed for good."""
        return not self._waiting and not self._leased

    @property
    def has_prompt(self) -> bool:
        """True when prompts are left for `next_prompt`."""
        return bool(self._waiting)

    def next_prompt(self, lease_id: int) -> int:
        """Lease the next prompt under this id and return its index."""
        self._leased[lease_id] = self._waiting.popleft()
        return self._leased[lease_id][0]

    def holds(self, lease_id: int) -> bool:
        """Return whether this lease is one of the round's."""
        return lease_id in self._leased

    def complete(self, lease_id: int, rollouts: tuple[Rollout, ...]) -> int:
        """Add the completions of a lease to the results, and return the index of its prompt."""
        prompt_id, _ = self._leased.pop(lease_id)
        self.rollouts[prompt_id] = rollouts
        return prompt_id

    def give_back(self, lease_id: int) -> None:
        """Queue the prompt of a lease that was lost with its actor again, up to `MAX_LOST_LEASES`; that is no attempt."""
        prompt_id, attempts_left = self._leased.pop(lease_id)
        self._num_lost[prompt_id] += 1
        if self._num_lost[prompt_id] < MAX_LOST_LEASES:
            self._waiting.append((prompt_id, attempts_left))
        else:
            self.num_failed += 1

    def fail(self, lease_id: int) -> None:
        """Queue the prompt of a lease without a result again, until its attempts are used up."""
        prompt_id, attempts_left = self._leased.pop(lease_id)
        if attempts_left > 1:
            self._waiting.append((prompt_id, attempts_left - 1))
        else:
            self.num_failed += 1

    def row(self, sets: Sequence[str], pass_reward: float) -> EvalRow:
        """Return the metrics row of a finished round.

        `sets` has the name of each prompt's set by its id, "" for none; `pass_reward` is the reward of a solved prompt.
        """
        by_prompt = {prompt_id: [one.reward for one in rollouts] for prompt_id, rollouts in self.rollouts.items()}
        rewards = [reward for of_prompt in by_prompt.values() for reward in of_prompt]
        lengths = [len(one.token_ids) for rollouts in self.rollouts.values() for one in rollouts]
        by_set: dict[str, list[float]] = {}
        for prompt_id, of_prompt in by_prompt.items():
            by_set.setdefault(sets[prompt_id], []).extend(of_prompt)
        num_completions = len(rewards)
        return EvalRow(
            policy_version=self.policy_version,
            reward=float(np.mean(rewards)) if num_completions else math.nan,
            length=float(np.mean(lengths)) if num_completions else math.nan,
            num_completions=num_completions,
            num_failed=self.num_failed,
            pass_at=_pass_at(list(by_prompt.values()), pass_reward),
            sets={name: float(np.mean(of_set)) for name, of_set in sorted(by_set.items()) if name},
        )


def _pass_at(rewards: Sequence[Sequence[float]], pass_reward: float) -> dict[str, float]:
    """Return the mean of `pass_at_k` over prompts, by k: the powers of two up to the number of completions of a prompt."""
    num_completions = min((len(of_prompt) for of_prompt in rewards), default=0)
    solved = [(len(of_prompt), sum(reward >= pass_reward for reward in of_prompt)) for of_prompt in rewards]
    ks = [1 << power for power in range(num_completions.bit_length())]
    return {str(k): float(np.mean([pass_at_k(n, num_passed, k) for n, num_passed in solved])) for k in ks}


def pass_at_k(num_completions: int, num_passed: int, k: int) -> float:
    """Estimate the probability that at least one of k completions passes, without bias: `1 - C(n - c, k) / C(n, k)`.

    n completions were sampled and c of them passed (https://arxiv.org/abs/2107.03374, equation 1).
    """
    return 1.0 - math.comb(num_completions - num_passed, k) / math.comb(num_completions, k)


class Evaluations:
    """The rounds of a run, one after another; a round that falls due while one runs waits its turn."""

    def __init__(self, *, interval: int, num_prompts: int, evaluated: int = -1) -> None:
        """`evaluated` is the newest version whose round an earlier process of the run has finished; -1 for none."""
        self._interval = interval
        self._num_prompts = num_prompts
        self._due: deque[int] = deque()
        self._reached = evaluated
        self.current: Round | None = None

    @property
    def is_idle(self) -> bool:
        """True when no round runs or waits."""
        return self.current is None and not self._due

    def reach(self, policy_version: int, *, last: bool = False) -> None:
        """Note a published version: a round is due where one crosses the interval, and for the last one, once."""
        if not self._interval or not self._num_prompts:
            return
        # The version must cross a multiple, not equal one: published versions may be several steps apart.
        previous, self._reached = self._reached, policy_version
        if (last and policy_version > previous) or policy_version // self._interval > previous // self._interval:
            self._due.append(policy_version)

    def begin(self) -> Round | None:
        """Return the current round, after starting the next one that is due; None when none is."""
        if self.current is None and self._due:
            self.current = Round(self._due.popleft(), list(range(self._num_prompts)))
        return self.current

    def end(self) -> None:
        """Remove the finished round."""
        assert self.current is not None and self.current.is_finished
        self.current = None
