"""Groups into micro-batches: which rows go through the model together, and on which rank."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner.advantages import group_advantages
from learner.groups import Group, Rollout


class Row(NamedTuple):
    """One completion with its prompt and its advantage."""

    prompt_token_ids: NDArray[np.int32]
    rollout: Rollout
    advantage: float

    @property
    def num_tokens(self) -> int:
        """Prompt plus completion."""
        return len(self.prompt_token_ids) + len(self.rollout.token_ids)


class MicroBatch(NamedTuple):
    """The rows of one forward and backward pass: prompt, completion, padding, each row from its first token on.

    Column t is token t of the row: its id, whether it is trained on, and its own log-prob (which the model's output at
    t - 1 predicts). There is no attention mask and there are no position ids: padding is on the right, where a causal
    model does not look, and positions count from 0.
    """

    token_ids: Tensor
    """`[rows, tokens]` int64, 0 where padded."""
    completion_mask: Tensor
    """`[rows, tokens]` bool."""
    behavior_logprobs: Tensor
    """`[rows, tokens]` float32, 0 outside `completion_mask`."""
    advantages: Tensor
    """`[rows]` float32."""

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on `device`."""
        return MicroBatch(*(tensor.to(device) for tensor in self))


def training_rows(groups: Sequence[Group], *, divide_by_std: bool) -> list[Row]:
    """All completions of `groups`, in order, with their advantages within their group."""
    rows: list[Row] = []
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
        advantages = group_advantages(rewards, divide_by_std=divide_by_std).tolist()
        rows += [
            Row(group.prompt_token_ids, rollout, advantage)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        ]
    return rows


def assign_rows(rows: Sequence[Row], *, micro_batch_tokens: int, world_size: int) -> list[list[list[Row]]]:
    """The rows of every micro-batch of every rank, `[rank][micro_batch][row]`: each row once, the same on every rank.

    Rows are dealt to the ranks by falling length, so that ranks have about equal work and rows of one micro-batch about
    equal lengths. A micro-batch holds at most `micro_batch_tokens` tokens, padding included, or one longer row. Every
    rank gets equally many micro-batches, because each is a round of collectives: those short of one get it without rows.
    """
    longest_first = sorted(rows, key=lambda row: -row.num_tokens)
    assigned = [_split(longest_first[rank::world_size], micro_batch_tokens) for rank in range(world_size)]
    num_micro_batches = max(len(micro_batches) for micro_batches in assigned)
    return [micro_batches + [[]] * (num_micro_batches - len(micro_batches)) for micro_batches in assigned]


def _split(longest_first: Sequence[Row], micro_batch_tokens: int) -> list[list[Row]]:
    micro_batches: list[list[Row]] = []
    for row in longest_first:
        current = micro_batches[-1] if micro_batches else []
        if current and (len(current) + 1) * current[0].num_tokens <= micro_batch_tokens:
            current.append(row)
        else:
            micro_batches.append([row])
    return micro_batches


def collate(rows: Sequence[Row]) -> MicroBatch:
    """The tensors of one micro-batch; without rows, a row of padding that adds nothing to loss or gradient."""
    num_rows = max(1, len(rows))
    # At least two tokens: the first one is never predicted, and the model needs an input.
    num_tokens = max([2, *(row.num_tokens for row in rows)])
    token_ids = np.zeros((num_rows, num_tokens), dtype=np.int64)
    completion_mask = np.zeros((num_rows, num_tokens), dtype=np.bool_)
    behavior_logprobs = np.zeros((num_rows, num_tokens), dtype=np.float32)
    advantages = np.zeros(num_rows, dtype=np.float32)
    for index, row in enumerate(rows):
        start, end = len(row.prompt_token_ids), row.num_tokens
        token_ids[index, :start] = row.prompt_token_ids
        token_ids[index, start:end] = row.rollout.token_ids
        completion_mask[index, start:end] = True
        behavior_logprobs[index, start:end] = row.rollout.behavior_logprobs
        advantages[index] = row.advantage
    return MicroBatch(
        torch.from_numpy(token_ids),
        torch.from_numpy(completion_mask),
        torch.from_numpy(behavior_logprobs),
        torch.from_numpy(advantages),
    )
