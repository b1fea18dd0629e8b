"""The two ways in which a lease becomes a group: one turn and a reward function, or episodes of an environment."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from transformers import PreTrainedTokenizerBase

from offbeat.actor.engines.engine import Completion, Engine
from offbeat.actor.rewards.failures import SamplingFailure
from offbeat.actor.rewards.functions import Reward
from offbeat.actor.rewards.retries import Retries
from offbeat.actor.rewards.runner import Rewarded, RewardRunner
from offbeat.actor.rewards.samples import Sample
from offbeat.common.models.images import ImagePatches
from offbeat.protocols.messages import Lease


class RewardedGroup(NamedTuple):
    """The completions of a lease with their rewards, in the order of the group."""

    lease_id: int
    completions: tuple[Completion, ...]
    rewards: tuple[Reward, ...]
    generate_s: float
    """Seconds from the submission to the last completion's end; of episodes, with what their environment took."""
    reward_s: float = 0.0
    """Seconds from then on until all rewards were known; episodes come with theirs."""


@dataclass
class _Group:
    lease: Lease
    started_at: float
    generated_s: float = 0.0
    """Seconds from submission to the last completion's end."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """Finished completions, by index in the group."""

    def request_ids(self) -> list[str]:
        """Return the engine's names for this group's completions."""
        return [request_id(self.lease.lease_id, index) for index in range(self.lease.group_size)]

    def in_order(self) -> tuple[Completion, ...]:
        """Return the completions by index."""
        return tuple(self.completions[index] for index in range(self.lease.group_size))


@dataclass(eq=False)
class SingleTurns:
    """Samples the completions of leases and has them rewarded.

    `Episodes` has the same methods. All are called from the engine's thread and never wait.
    """

    _engine: Engine
    _tokenizer: PreTrainedTokenizerBase
    _rewards: RewardRunner
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    _groups: dict[int, _Group] = field(default_factory=dict)

    @property
    def is_waiting(self) -> bool:
        """True while something outside the engine is awaited: a reward, an environment."""
        return self._rewards.num_pending > 0

    def begin(self, lease: Lease, prompt_token_ids: list[int], images: Sequence[ImagePatches] = ()) -> None:
        """Begin a lease whose weights the engine has."""
        group = _Group(lease, self.clock())
        self._groups[lease.lease_id] = group
        self._engine.submit(group.request_ids(), prompt_token_ids, lease.sampling, images)

    def add(self, completion: Completion) -> None:
        """Take a completion from the engine."""
        lease_id, index = map(int, completion.request_id.split("/"))
        group = self._groups.get(lease_id)
        if group is None:
            return
        group.completions[index] = completion
        if len(group.completions) < group.lease.group_size:
            return
        group.generated_s = self.clock() - group.started_at
        row = msgspec.json.decode(group.lease.row)
        self._rewards.submit(lease_id, [self._sample(group.lease, row, completion) for completion in group.in_order()])

    def poll(self) -> list[RewardedGroup | SamplingFailure]:
        """Return the leases that have ended since the last call, each once."""
        outcomes: list[RewardedGroup | SamplingFailure] = []
        for result in self._rewards.poll():
            group = self._groups.pop(result.lease_id, None)
            if group is None:
                continue
            if isinstance(result, Rewarded):
                reward_s = self.clock() - group.started_at - group.generated_s
                outcomes.append(RewardedGroup(result.lease_id, group.in_order(), result.rewards, group.generated_s, reward_s))
            else:
                outcomes.append(result)
        return outcomes

    def cancel(self, lease_id: int) -> None:
        """Forget a lease, if it is here."""
        group = self._groups.pop(lease_id, None)
        if group is not None:
            self._engine.abort(group.request_ids())
            self._rewards.cancel(lease_id)

    @property
    def retries(self) -> Retries[Any]:
        """The rewards, or episodes, that are tried again. While most of them fail, no more leases should be taken."""
        return self._rewards.retries

    def counts(self) -> dict[str, float]:
        """Return the counters of episodes as `ActorRow.environment` explains them; empty without an environment."""
        return {}

    def _sample(self, lease: Lease, row: dict[str, Any], completion: Completion) -> Sample:
        return Sample(
            prompt=lease.prompt,
            completion=str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)),
            row=row,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            is_evaluation=lease.is_evaluation,
        )


def request_id(lease_id: int, index: int) -> str:
    """Return the engine's name for one completion."""
    return f"{lease_id}/{index}"
