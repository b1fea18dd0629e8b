"""Batching: assigns the completions of an optimizer step to ranks and micro-batches."""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from torch import Tensor

from offbeat.common.models.images import ImageFile
from offbeat.learner.leases.groups import EngineExperts, Group, Rollout
from offbeat.learner.objectives.objective import group_logprob
from offbeat.learner.policy.images import ImagePacker
from offbeat.learner.policy.packing import Pack, TokenIds, Turns, num_inputs, pack, whole_rows


class TrainingRow(NamedTuple):
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
    """Lag of its group, in optimizer steps; below 0 for a group that is newer than the policy."""
    policy_version: int
    """Version of the policy that is trained on it."""
    images: tuple[ImageFile, ...] = ()
    """The images of its prompt."""
    group_logprob: float = 0.0
    """`objectives.objective.group_logprob` of its group."""
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
    """`[rows]` int64; below 0 for a group that is newer than the policy, so that later epochs count from there."""
    token_lags: Tensor
    """`[rows, tokens]` int64: optimizer steps since each token was sampled, signed like `policy_lags`."""
    turns: Tensor
    """`[rows, tokens]` int64: the turn of each token, counted from 0."""
    groups: Tensor
    """`[rows]` int64: index of each row's group in the step."""
    group_logprobs: Tensor
    """`[rows]` float32: `objectives.objective.group_logprob` of each row's group."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on `device`."""
        return MicroBatch(**{name: value.to(device) for name, value in self._asdict().items()})


def make_rows(
    groups: Sequence[Group],
    rewards: NDArray[np.float64],
    advantages: Sequence[Sequence[float | NDArray[np.float64]]],
    *,
    policy_version: int,
    weigh_by_tokens: bool = False,
) -> list[TrainingRow]:
    """Return all completions of `groups`, in order; `rewards`: `[num_groups, group_size]`, `advantages` likewise.

    With `weigh_by_tokens` the weight of a group is divided by its sampled tokens: see `objectives.aggregation`.
    """
    rows: list[TrainingRow] = []
    for index, (group, of_group, scored) in enumerate(zip(groups, rewards.tolist(), advantages, strict=True)):
        lag, weight = policy_version - group.oldest_version, group.weight
        if weigh_by_tokens:
            weight /= max(1, sum(len(rollout.token_ids) for rollout in group.rollouts))
        likely = group_logprob([rollout.behavior_logprobs for rollout in group.rollouts])
        first_expert = len(group.prompt_token_ids)
        for rollout, reward, advantage in zip(group.rollouts, of_group, scored, strict=True):
            rows.append(
                TrainingRow(
                    group=index,
                    prompt_token_ids=group.prompt_token_ids,
                    rollout=rollout,
                    reward=reward,
                    advantage=advantage,
                    weight=weight,
                    policy_lag=lag,
                    policy_version=policy_version,
                    images=group.images,
                    group_logprob=likely,
                    experts=group.experts,
                    first_expert=first_expert,
                )
            )
            first_expert += len(rollout.token_ids) - 1
    return rows


def assign_rows(
    rows: Sequence[TrainingRow], *, micro_batch_tokens: int, world_size: int, packs: bool = True
) -> list[list[list[TrainingRow]]]:
    """Assign every row to a rank and a micro-batch, `[rank][micro_batch][row]`; the result is the same on every rank.

    Ranks that share their packs count as one.

    A group stays in one micro-batch where possible, because each micro-batch computes the prompts of its rows once. A group is
    split if it has more than `micro_batch_tokens`, or more than a rank's share of all tokens. Ranks get about the same number
    of tokens; a micro-batch gets at most `micro_batch_tokens`, or one longer row. Every rank gets the same number of
    micro-batches, some without rows, because each micro-batch is a round of collectives.

    Without `packs` a micro-batch is computed as whole rows (`learner.policy.packing.whole_rows`): groups are not kept together,
    and the tokens of a micro-batch are its rows times the longest of them.
    """
    if packs:
        share = math.ceil(sum(len(row.prompt_token_ids) + _num_inputs([row]) for row in rows) / world_size)
        sized = [(_num_tokens(piece), piece) for piece in _split(rows, min(micro_batch_tokens, share))]
        sized.sort(key=lambda one: one[0], reverse=True)
    else:
        # Those of one length next to each other: the first of a micro-batch is its longest.
        ordered = sorted(rows, key=lambda row: _whole_shape(row)[1], reverse=True)
        sized = [(math.prod(_whole_shape(row)), [row]) for row in ordered]
    of_rank: list[list[list[TrainingRow]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for size, piece in sized:
        rank = loads.index(min(loads))
        of_rank[rank].append(piece)
        loads[rank] += size
    fill = _fill if packs else _fill_whole
    assigned = [fill(of_this_rank, micro_batch_tokens) for of_this_rank in of_rank]
    num_micro_batches = max(len(micro_batches) for micro_batches in assigned)
    return [micro_batches + [[]] * (num_micro_batches - len(micro_batches)) for micro_batches in assigned]


def _whole_shape(row: TrainingRow) -> tuple[int, int]:
    """Return the number of whole rows of a completion, and the length of the longest."""
    if not row.rollout.turns:
        return 1, len(row.prompt_token_ids) + _num_inputs([row])
    inputs = whole_rows(pack([(row.prompt_token_ids, [_tokens(row.rollout)])]).spans, torch.device("cpu")).inputs
    return len(inputs), inputs.shape[1]


def _fill_whole(pieces: Sequence[list[TrainingRow]], max_tokens: int) -> list[list[TrainingRow]]:
    """Fill micro-batches with rows, the longest first, until rows times the longest exceed `max_tokens`."""
    micro_batches: list[list[TrainingRow]] = []
    longest = num_rows = 0
    for (row,) in pieces:
        added, length = _whole_shape(row)
        if not micro_batches or (num_rows + added) * longest > max_tokens:
            micro_batches.append([])
            longest, num_rows = length, 0
        micro_batches[-1].append(row)
        num_rows += added
    return [sorted(micro_batch, key=lambda row: row.group) for micro_batch in micro_batches]


def _split(rows: Sequence[TrainingRow], max_tokens: int) -> list[list[TrainingRow]]:
    """Split rows into pieces of one group each, of at most `max_tokens` or of one row."""
    pieces: list[list[TrainingRow]] = []
    num_tokens = 0
    for row in rows:
        num_tokens += _num_inputs([row])
        is_next = bool(pieces) and pieces[-1][0].group == row.group
        if is_next and num_tokens > max_tokens and row.rollout.turns:
            # Episodes may have their beginnings in common, which are counted only when it matters.
            num_tokens = _num_tokens([*pieces[-1], row])
        if is_next and num_tokens <= max_tokens:
            pieces[-1].append(row)
        else:
            pieces.append([row])
            num_tokens = _num_tokens([row])
    return pieces


def _fill(pieces: Sequence[list[TrainingRow]], max_tokens: int) -> list[list[TrainingRow]]:
    """Put each piece into the first micro-batch with room for it; a micro-batch has at most `max_tokens`, or one piece."""
    micro_batches: list[list[TrainingRow]] = []
    loads: list[int] = []
    groups: list[set[int]] = []
    for piece in pieces:
        group, of_completions = piece[0].group, _num_inputs(piece)
        alone = len(piece[0].prompt_token_ids) + of_completions
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


def _num_tokens(piece: Sequence[TrainingRow]) -> int:
    """Count the inputs of the model for rows of one group, their prompt once."""
    return len(piece[0].prompt_token_ids) + _num_inputs(piece)


def _num_inputs(rows: Sequence[TrainingRow]) -> int:
    """Count the inputs of the model for the completions of these rows of one group."""
    return num_inputs([_tokens(row.rollout) for row in rows])


def _tokens(rollout: Rollout) -> TokenIds | Turns:
    if not rollout.turns:
        return rollout.token_ids
    turns = [(turn.num_context, turn.num_sampled, turn.back) for turn in rollout.turns]
    return Turns(rollout.token_ids, rollout.context_ids, turns)


def _experts(groups: Iterable[Sequence[TrainingRow]]) -> Tensor | None:
    """Return the engine's experts of each input of a pack, uint8 `[num_inputs, layers, top_k]`; None where rows have none."""
    parts: list[NDArray[np.uint8]] = []
    for rows in groups:
        if rows[0].experts is None:
            return None
        of_group = rows[0].experts.load()
        parts.append(of_group[: len(rows[0].prompt_token_ids)])
        parts += [of_group[row.first_expert : row.first_expert + len(row.rollout.token_ids) - 1] for row in rows]
    return torch.from_numpy(np.concatenate(parts)) if parts else None


def collate(rows: Sequence[TrainingRow], images: ImagePacker | None = None) -> MicroBatch:
    """Return the tensors of one micro-batch whose rows of a group are neighbors; without rows it adds nothing to the loss.

    With `images`, the images of the rows' prompts are read and packed.
    """
    by_group: dict[int, list[TrainingRow]] = {}
    for row in rows:
        by_group.setdefault(row.group, []).append(row)
    packed = pack(
        [(of_group[0].prompt_token_ids, [_tokens(row.rollout) for row in of_group]) for of_group in by_group.values()]
    )
    packed = packed._replace(experts=_experts(by_group.values()))
    if images is not None:
        packed = images.add(packed, [of_group[0].images for of_group in by_group.values()])
    by_token = partial(_padded, lengths=packed.lengths)
    floats, integers = partial(torch.tensor, dtype=torch.float32), partial(torch.tensor, dtype=torch.int64)
    return MicroBatch(
        pack=packed,
        completion_mask=by_token([True] * len(rows), np.bool_),
        behavior_logprobs=by_token([row.rollout.behavior_logprobs for row in rows], np.float32),
        rewards=floats([row.reward for row in rows]),
        advantages=by_token([row.advantage for row in rows], np.float32),
        weights=floats([row.weight for row in rows]),
        policy_lags=integers([row.policy_lag for row in rows]),
        token_lags=by_token([row.rollout.token_lags(row.policy_version) for row in rows], np.int64),
        turns=by_token([row.rollout.token_turns for row in rows], np.int64),
        groups=integers([row.group for row in rows]),
        group_logprobs=floats([row.group_logprob for row in rows]),
    )


def _padded(of_rows: Sequence[ArrayLike], dtype: DTypeLike, *, lengths: Sequence[int]) -> Tensor:
    """Return `[rows, tokens]` from each row's values, one per token or one for all, padded on the right with 0."""
    padded = np.zeros((len(lengths), max([1, *lengths])), dtype)
    for row, length, values in zip(padded, lengths, of_rows, strict=True):
        row[:length] = values
    return torch.from_numpy(padded)
