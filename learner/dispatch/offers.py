"""A lease before it is addressed to an actor."""

from typing import NamedTuple

from offbeat.learner.leases.prompts import Prompt
from offbeat.protocols.messages import Lease, Sampling


class Offer(NamedTuple):
    """One group to generate, under a fresh lease id."""

    lease_id: int
    prompt: Prompt
    group_size: int
    sampling: Sampling
    min_policy_version: int
    """The actor must not start under older weights."""
    is_evaluation: bool = False

    def lease(self, timeout_s: float) -> Lease:
        """Return the message to send; the prompt's token ids are its array."""
        return Lease(
            lease_id=self.lease_id,
            prompt_id=self.prompt.prompt_id,
            group_size=self.group_size,
            sampling=self.sampling,
            min_policy_version=self.min_policy_version,
            timeout_s=timeout_s,
            prompt=self.prompt.text,
            row=self.prompt.row,
            is_evaluation=self.is_evaluation,
        )
