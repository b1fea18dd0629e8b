"""Batching: assigns the completions of an optimizer step to ranks and micro-batches."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.common.models.images import ImageFile
from offbeat.learner.diagnostics.turn_metrics import turn_buckets
from offbeat.learner.leases.groups import EngineExperts, Group, Rollout
from offbeat.learner.objectives.anchors import group_logprob
from offbeat.learner.policy.images import ImagePacker
from offbeat.learner.policy.packing import Pack, TokenIds, Turns, num_inputs, pack


class Row(NamedTuple):
    """One completion of an optimizer step."""

    group: int
    """Index of its group in the step; rows of one group share their prompt."""
    prompt_token_ids: NDArray[np.int32]
    rollout: Rollout
    reward: float
    """Shaped reward: penalized, normalized, clipped."""
    advantage: float | NDArray[np.float64]
    """Advantage within its group, or that of each of its tokens `[num_tokens]`; without a critic and without the KL in the
    reward."""
    weight: float
    """Weight in the loss: that of its group, for some aggregations divided by the group's tokens."""
    policy_lag: int
    """Lag of its group, in optimizer steps."""
    policy_version: int
    """Version of the policy that is trained on it."""
    images: tuple[ImageFile, ...] = ()
    """The images of its prompt."""
    group_logprob: float = 0.0
    """`objectives.group_likelihood.group_logprob` of its group."""
    experts: EngineExperts | None = None
    """The engine's experts of its group; None unless they are replayed."""
    first_expert: int = 0
    """Index in them of the completion's first token."""


class MicroBatch(NamedTuple):
    """The completions of one forward and backward pass: packed for the model, one row each for the loss.

    `[rows, tokens]` tensors hold completion tokens from column 0 on, padded on the right with 0; prompts are only in `pack`.
    """

    pack: Pack
    completion_mask: Tensor
    """`[rows, tokens]` bool."""
    behavior_logprobs: Tensor
    """`[rows, tokens]` float32."""
    rewards: Tensor
    """`[rows]` float32."""
    advantages: Tensor
    """`[rows, tokens]` float32."""
    weights: Tensor
    """`[rows]` float32."""
    policy_lags: Tensor
    """`[rows]` int64."""
    token_lags: Tensor
    """`[rows, tokens]` int64: optimizer steps since each token was sampled."""
    turn_buckets: Tensor
    """`[rows, tokens]` int64: `learner.diagnostics.turn_metrics.turn_buckets`."""
    groups: Tensor
    """`[rows]` int64: index of each row's group in the step."""
    group_logprobs: Tensor
    """`[rows]` float32: `objectives.group_likelihood.group_logprob` of each row's group."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        return MicroBatch(self.pack.to(device), *(tensor.to(device) for tensor in self[1:]))


def make_rows(
    groups: Sequence[Group],
    rewards: NDArray[np.float64],
    advantages: Sequence[Sequence[float | NDArray[np.float64]]],
    *,
    policy_version: int,
    weigh_by_tokens: bool = False,
) -> list[Row]:
    """Return all completions of `groups`, in order; `rewards`: `[num_groups, group_size]`, `advantages` likewise.

    With `weigh_by_tokens` the weight of a group is divided by its sampled tokens: see `objectives.aggregation`.
    """
    rows: list[Row] = []
    for index, (group, of_group, scored) in enumerate(zip(groups, rewards.tolist(), advantages, strict=True)):
        lag, weight = group.policy_lag(policy_version), group.weight
        if weigh_by_tokens:
            weight /= max(1, sum(len(rollout.token_ids) for rollout in group.rollouts))
        likely = group_logprob([rollout.behavior_logprobs for rollout in group.rollouts])
        first_expert = len(group.prompt_token_ids)
        for rollout, reward, advantage in zip(group.rollouts, of_group, scored, strict=True):
            of_group_alone = (weight, lag, policy_version, group.images, likely, group.experts)
            rows.append(Row(index, group.prompt_token_ids, rollout, reward, advantage, *of_group_alone, first_expert))
            first_expert += len(rollout.token_ids) - 1
    return rows


def assign_rows(rows: Sequence[Row], *, micro_batch_tokens: int, world_size: int) -> list[list[list[Row]]]:
    """Assign every row to a rank and a micro-batch, `[rank][micro_batch][row]`; the result is the same on every rank.

    Ranks that share their packs count as one.

    A group stays in one micro-batch where possible, because each micro-batch computes the prompts of its rows once. A group is
    split if it has more than `micro_batch_tokens`, or more than a rank's share of all tokens. Ranks get about the same number
    of tokens; a micro-batch gets at most `micro_batch_tokens`, or one longer row. Every rank gets the same number of
    micro-batches, some without rows, because each micro-batch is a round of collectives.
    """
    share = math.ceil(sum(len(row.prompt_token_ids) + _num_inputs([row]) for row in rows) / world_size)
    pieces = sorted(_split(rows, min(micro_batch_tokens, share)), key=_num_tokens, reverse=True)
    of_rank: list[list[list[Row]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for piece in pieces:
        rank = loads.index(min(loads))
        of_rank[rank].append(piece)
        loads[rank] += _num_tokens(piece)
    assigned = [_fill(of_this_rank, micro_batch_tokens) for of_this_rank in of_rank]
    num_micro_batches = max(len(micro_batches) for micro_batches in assigned)
    return [micro_batches + [[]] * (num_micro_batches - len(micro_batches)) for micro_batches in assigned]


def _split(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Split rows into pieces of one group each, of at most `max_tokens` or of one row."""
    pieces: list[list[Row]] = []
    num_tokens = 0
    for row in rows:
        num_tokens += _num_inputs([row])
        if pieces and pieces[-1][0].group == row.group and num_tokens <= max_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
            num_tokens = _num_tokens([row])
    return pieces


def _fill(pieces: Sequence[list[Row]], max_tokens: int) -> list[list[Row]]:
    """Put each piece into the first micro-batch with room for it; a micro-batch has at most `max_tokens`, or one piece."""
    micro_batches: list[list[Row]] = []
    loads: list[int] = []
    groups: list[set[int]] = []
    for piece in pieces:
        group, of_completions, alone = piece[0].group, _num_inputs(piece), _num_tokens(piece)
        for index, load in enumerate(loads):
            added = of_completions if group in groups[index] else alone
            if load + added <= max_tokens:
                micro_batches[index] += piece
                loads[index] += added
                groups[index].add(group)
                break
        else:
            micro_batches.append(list(piece))
            loads.append(alone)
            groups.append({group})
    return [sorted(micro_batch, key=lambda row: row.group) for micro_batch in micro_batches]


def _num_tokens(piece: Sequence[Row]) -> int:
    """Count the inputs of the model for rows of one group, their prompt once."""
    return len(piece[0].prompt_token_ids) + _num_inputs(piece)


def _num_inputs(rows: Sequence[Row]) -> int:
    """Count the inputs of the model for these rows' completions."""
    return sum(num_inputs(_tokens(row.rollout)) for row in rows)


def _tokens(rollout: Rollout) -> TokenIds | Turns:
    if not rollout.turns:
        return rollout.token_ids
    turns = [(turn.num_context, turn.num_sampled, turn.back) for turn in rollout.turns]
    return Turns(rollout.token_ids, rollout.context_ids, turns)


def _experts(groups: Iterable[Sequence[Row]]) -> Tensor | None:
    """Return the engine's experts of each input of a pack, uint8 `[num_inputs, layers, top_k]`; None where rows have none."""
    parts: list[NDArray[np.uint8]] = []
    for rows in groups:
        if rows[0].experts is None:
            return None
        of_group = rows[0].experts.load()
        parts.append(of_group[: len(rows[0].prompt_token_ids)])
        parts += [of_group[row.first_expert : row.first_expert + len(row.rollout.token_ids) - 1] for row in rows]
    return torch.from_numpy(np.concatenate(parts)) if parts else None


def collate(rows: Sequence[Row], images: ImagePacker | None = None) -> MicroBatch:
    """Return the tensors of one micro-batch whose rows of a group are neighbors; without rows it adds nothing to the loss.

    With `images`, the images of the rows' prompts are read and packed.
    """
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row.group, []).append(row)
    packed = pack(
        [(of_group[0].prompt_token_ids, [_tokens(row.rollout) for row in of_group]) for of_group in by_group.values()]
    )
    packed = packed._replace(experts=_experts(by_group.values()))
    if images is not None:
        packed = images.add(packed, [of_group[0].images for of_group in by_group.values()])
    shape = (len(rows), max([1, *packed.lengths]))
    completion_mask = np.zeros(shape, dtype=np.bool_)
    behavior_logprobs = np.zeros(shape, dtype=np.float32)
    advantages = np.zeros(shape, dtype=np.float32)
    token_lags = np.zeros(shape, dtype=np.int64)
    of_turns = np.zeros(shape, dtype=np.int64)
    for index, row in enumerate(rows):
        completion_mask[index, : packed.lengths[index]] = True
        behavior_logprobs[index, : packed.lengths[index]] = row.rollout.behavior_logprobs
        advantages[index, : packed.lengths[index]] = row.advantage
        for segment in row.rollout.segments:
            lag = max(0, row.policy_version - segment.policy_version)
            token_lags[index, segment.first_token : packed.lengths[index]] = lag
        # All tokens of a single turn are in the first bucket.
        if row.rollout.num_turns > 1:
            of_turns[index, : packed.lengths[index]] = turn_buckets(row.rollout)
    return MicroBatch(
        packed,
        torch.from_numpy(completion_mask),
        torch.from_numpy(behavior_logprobs),
        torch.tensor([row.reward for row in rows], dtype=torch.float32),
        torch.from_numpy(advantages),
        torch.tensor([row.weight for row in rows], dtype=torch.float32),
        torch.tensor([row.policy_lag for row in rows], dtype=torch.int64),
        torch.from_numpy(token_lags),
        torch.from_numpy(of_turns),
        torch.tensor([row.group for row in rows], dtype=torch.int64),
        torch.tensor([row.group_logprob for row in rows], dtype=torch.float32),
    )
