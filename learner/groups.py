"""One trained-on group as the learner holds it: arrays, rewards and versions, checked when it arrived."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocols.messages import Segment


class Rollout(NamedTuple):
    """One completion of a group."""

    token_ids: NDArray[np.int32]
    """`[num_tokens]`."""
    behavior_logprobs: NDArray[np.float32]
    """`[num_tokens]`, finite and at most 0."""
    reward: float
    finish_reason: str
    segments: tuple[Segment, ...]


class Group(NamedTuple):
    """All completions of one lease."""

    lease_id: int
    prompt_id: int
    prompt_token_ids: NDArray[np.int32]
    rollouts: tuple[Rollout, ...]
    actor: str
    generate_s: float

    @property
    def oldest_version(self) -> int:
        """The oldest policy version in any segment of any completion."""
        return min(segment.policy_version for rollout in self.rollouts for segment in rollout.segments)

    def policy_lag(self, policy_version: int) -> int:
        """Optimizer steps between the oldest token of the group and `policy_version`."""
        return policy_version - self.oldest_version
