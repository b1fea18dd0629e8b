"""One lease at work: which completions it waits for, and the group they become."""

from dataclasses import dataclass, field

import numpy as np

from offbeat.actor.engine import Completion
from offbeat.protocols.channels import Array
from offbeat.protocols.messages import CompletionMeta, GroupDone, Lease


@dataclass
class Job:
    """A lease between its arrival and its group."""

    lease: Lease
    prompt_token_ids: list[int]
    started_at: float | None = None
    generated_s: float = 0.0
    completions: dict[int, Completion] = field(default_factory=dict)
    """By index in the group."""

    def request_ids(self) -> list[str]:
        """The engine's names for this group's completions."""
        return [request_id(self.lease.lease_id, index) for index in range(self.lease.group_size)]

    @property
    def is_generated(self) -> bool:
        """Every completion is there."""
        return len(self.completions) == self.lease.group_size

    def in_order(self) -> list[Completion]:
        """The completions by index."""
        return [self.completions[index] for index in range(self.lease.group_size)]

    def group(self, rewards: list[float]) -> tuple[GroupDone, tuple[Array, ...]]:
        """The message that answers the lease, and its arrays."""
        completions = self.in_order()
        message = GroupDone(
            lease_id=self.lease.lease_id,
            completions=tuple(
                CompletionMeta(len(completion.token_ids), completion.finish_reason, reward, completion.segments)
                for completion, reward in zip(completions, rewards, strict=True)
            ),
            generate_s=self.generated_s,
        )
        token_ids = np.concatenate([completion.token_ids for completion in completions])
        logprobs = np.concatenate([completion.behavior_logprobs for completion in completions])
        return message, (token_ids, logprobs)


def request_id(lease_id: int, index: int) -> str:
    """The engine's name for one completion."""
    return f"{lease_id}/{index}"


def parse_request_id(name: str) -> tuple[int, int]:
    """Lease and index of an engine's request."""
    lease_id, index = name.split("/")
    return int(lease_id), int(index)
