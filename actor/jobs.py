"""The leases at work: from a lease, through its completions and rewards, to the answer in the outbox."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase

from offbeat.actor.engine import Completion, Engine
from offbeat.actor.outbox import Outbox
from offbeat.actor.reward_values import Reward
from offbeat.actor.rewards import Rewarded, RewardRunner
from offbeat.actor.samples import Sample
from offbeat.protocols.messages import CompletionMeta, GroupDone, Lease, LeaseFailed
from offbeat.protocols.wire import Array


@dataclass
class Job:
    """A lease between its arrival and its group."""

    lease: Lease
    prompt_token_ids: list[int]
    started_at: float | None = None
    """Time at which the completions were submitted; None while the job waits for weights."""
    generated_s: float = 0.0
    """Seconds from submission to the last completion's end."""
    completions: dict[int, Completion] = field(default_factory=dict)
    """Finished completions, by index in the group."""

    def request_ids(self) -> list[str]:
        """Return the engine's names for this group's completions."""
        return [request_id(self.lease.lease_id, index) for index in range(self.lease.group_size)]

    @property
    def is_generated(self) -> bool:
        """True when all completions are finished."""
        return len(self.completions) == self.lease.group_size

    def in_order(self) -> list[Completion]:
        """Return the completions by index."""
        return [self.completions[index] for index in range(self.lease.group_size)]

    def group(self, rewards: Sequence[Reward]) -> tuple[GroupDone, tuple[Array, ...]]:
        """Return the message that answers the lease, and its arrays: token ids and behavior log-probs, concatenated."""
        completions = self.in_order()
        message = GroupDone(
            lease_id=self.lease.lease_id,
            completions=tuple(
                CompletionMeta(
                    len(completion.token_ids), completion.finish_reason, reward.total, completion.segments, reward.parts
                )
                for completion, reward in zip(completions, rewards, strict=True)
            ),
            generate_s=self.generated_s,
        )
        token_ids = np.concatenate([completion.token_ids for completion in completions])
        logprobs = np.concatenate([completion.behavior_logprobs for completion in completions])
        return message, (token_ids, logprobs)


class Jobs:
    """All leases of an actor that are not answered. Each ends in the outbox, or is cancelled."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RewardRunner,
        outbox: Outbox,
        *,
        max_message_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._rewards = rewards
        self._outbox = outbox
        self._clock = clock
        self.max_message_bytes = max_message_bytes
        """Largest array that the learner takes; the service sets it at each welcome."""
        self.num_groups = 0
        """Groups finished since the start."""
        self._jobs: dict[int, Job] = {}
        self._waiting: list[Job] = []
        """Jobs whose weights are not here yet."""

    @property
    def lease_ids(self) -> tuple[int, ...]:
        """The leases at work."""
        return tuple(self._jobs)

    @property
    def are_waiting_for_weights(self) -> bool:
        """True while a lease needs newer weights than the engine has."""
        return bool(self._waiting)

    def add(self, lease: Lease, prompt_token_ids: list[int]) -> None:
        """Take a lease; it starts with the next `start_ready`."""
        job = Job(lease, prompt_token_ids)
        self._waiting.append(job)
        self._jobs[lease.lease_id] = job

    def start_ready(self) -> None:
        """Submit the leases whose weights are here to the engine."""
        version = self._engine.policy_version
        if version is None:
            return
        ready = [job for job in self._waiting if job.lease.min_policy_version <= version]
        self._waiting = [job for job in self._waiting if job.lease.min_policy_version > version]
        for job in ready:
            job.started_at = self._clock()
            for request in job.request_ids():
                self._engine.submit(request, job.prompt_token_ids, job.lease.sampling)

    def step(self) -> None:
        """Advance the engine by one step; hand groups whose completions are finished to the rewards."""
        for completion in self._engine.step():
            self._add_completion(completion)

    def collect_rewards(self) -> None:
        """Put the answers of groups whose rewards are known, or failed, into the outbox."""
        for result in self._rewards.poll():
            job = self._jobs.pop(result.key, None)
            if job is None:
                continue
            if isinstance(result, Rewarded):
                self._finish(job, result.rewards)
            else:
                self._fail(result.key, result.reason, result.detail)

    def cancel(self, lease_ids: Iterable[int]) -> None:
        """Stop working on these leases and forget their answers. Unknown ones are ignored."""
        for lease_id in lease_ids:
            self._abort(lease_id)
            self._outbox.acknowledge(lease_id)

    def return_all(self) -> None:
        """Give every lease at work back to the learner."""
        for lease_id in self.lease_ids:
            self._abort(lease_id)
            self._fail(lease_id, "returned")

    def _add_completion(self, completion: Completion) -> None:
        lease_id, index = parse_request_id(completion.request_id)
        job = self._jobs.get(lease_id)
        if job is None:
            return
        job.completions[index] = completion
        if not job.is_generated:
            return
        assert job.started_at is not None
        job.generated_s = self._clock() - job.started_at
        row = msgspec.json.decode(job.lease.row)
        self._rewards.submit(lease_id, [self._sample(job.lease, row, completion) for completion in job.in_order()])

    def _sample(self, lease: Lease, row: dict[str, Any], completion: Completion) -> Sample:
        return Sample(
            prompt=lease.prompt,
            completion=str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)),
            row=row,
            token_ids=completion.token_ids,
            finish_reason=completion.finish_reason,
            is_evaluation=lease.is_evaluation,
        )

    def _finish(self, job: Job, rewards: Sequence[Reward]) -> None:
        message, arrays = job.group(rewards)
        lease_id = job.lease.lease_id
        largest = max(array.nbytes for array in arrays)
        if largest > self.max_message_bytes:
            # The hub would drop the connection, and the group would be sent again on the next one.
            detail = f"the group has {largest} bytes; the learner's hub.max_message_mb takes {self.max_message_bytes}"
            self._fail(lease_id, "too_large", detail)
            return
        self._outbox.put(lease_id, message, *arrays)
        self.num_groups += 1

    def _fail(self, lease_id: int, reason: str, detail: str = "") -> None:
        self._outbox.put(lease_id, LeaseFailed(lease_id=lease_id, reason=reason, detail=detail))

    def _abort(self, lease_id: int) -> None:
        job = self._jobs.pop(lease_id, None)
        if job is not None:
            self._engine.abort(job.request_ids())
            self._rewards.cancel(lease_id)
            self._waiting = [waiting for waiting in self._waiting if waiting is not job]


def request_id(lease_id: int, index: int) -> str:
    """Return the engine's name for one completion."""
    return f"{lease_id}/{index}"


def parse_request_id(name: str) -> tuple[int, int]:
    """Return the lease and the index in its group of an engine's request."""
    lease_id, index = name.split("/")
    return int(lease_id), int(index)
