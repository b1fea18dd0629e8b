import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.batching import Row, assign_rows, collate, training_rows
from learner.groups import Group, Rollout
from protocols.messages import Segment


def make_row(num_prompt_tokens: int, num_completion_tokens: int, advantage: float = 1.0) -> Row:
    prompt = np.arange(1, 1 + num_prompt_tokens, dtype=np.int32)
    completion = np.arange(101, 101 + num_completion_tokens, dtype=np.int32)
    logprobs = -np.arange(1, 1 + num_completion_tokens, dtype=np.float32)
    return Row(prompt, Rollout(completion, logprobs, 0.0, "stop", (Segment(0, 0),)), advantage)


def test_a_micro_batch_is_right_padded_and_aligned_to_the_tokens_themselves():
    batch = collate([make_row(2, 3, advantage=0.5), make_row(1, 2, advantage=-1.0)])
    assert batch.token_ids.tolist() == [[1, 2, 101, 102, 103], [1, 101, 102, 0, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]]
    assert batch.behavior_logprobs.tolist() == [[0, 0, -1, -2, -3], [0, -1, -2, 0, 0]]
    assert batch.advantages.tolist() == [0.5, -1.0]


def test_a_micro_batch_without_rows_is_padding_with_advantage_zero():
    batch = collate([])
    assert batch.token_ids.shape == (1, 2)
    assert not batch.completion_mask.any()
    assert batch.advantages.tolist() == [0.0]


def test_rows_carry_the_advantage_within_their_own_group():
    def group(*rewards: float) -> Group:
        rollouts = tuple(make_row(1, 1).rollout._replace(reward=reward) for reward in rewards)
        return Group(0, 0, np.array([1], dtype=np.int32), rollouts, "actor", 0.0)

    rows = training_rows([group(0.0, 2.0), group(5.0, 5.0, 5.0)], divide_by_std=False)
    assert [row.advantage for row in rows] == [-1.0, 1.0, 0.0, 0.0, 0.0]


def test_rows_of_like_length_go_together_within_the_budget():
    rows = [make_row(1, length) for length in (1, 9, 2, 9, 1, 3)]
    ((first, second),) = assign_rows(rows, micro_batch_tokens=20, world_size=1)
    assert [row.num_tokens for row in first] == [10, 10]
    assert [row.num_tokens for row in second] == [4, 3, 2, 2]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    micro_batch_tokens=st.integers(1, 100),
    world_size=st.integers(1, 5),
)
def test_every_row_is_trained_once_and_every_rank_enters_every_collective(lengths, micro_batch_tokens, world_size):
    rows = [make_row(1, length, advantage=float(index)) for index, length in enumerate(lengths)]
    assigned = assign_rows(rows, micro_batch_tokens=micro_batch_tokens, world_size=world_size)
    assert len(assigned) == world_size
    assert len({len(micro_batches) for micro_batches in assigned}) == 1
    seen = [row.advantage for micro_batches in assigned for micro_batch in micro_batches for row in micro_batch]
    assert sorted(seen) == list(range(len(rows)))
    for micro_batch in (micro_batch for micro_batches in assigned for micro_batch in micro_batches):
        padded = len(micro_batch) * max((row.num_tokens for row in micro_batch), default=0)
        assert padded <= micro_batch_tokens or len(micro_batch) == 1


@given(lengths=st.lists(st.integers(1, 30), min_size=8, max_size=40), world_size=st.integers(2, 4))
def test_ranks_get_about_equal_work(lengths, world_size):
    rows = [make_row(1, length) for length in lengths]
    assigned = assign_rows(rows, micro_batch_tokens=64, world_size=world_size)
    tokens = [sum(row.num_tokens for micro_batch in of_rank for row in micro_batch) for of_rank in assigned]
    # Dealing sorted rows in turn: no rank is ahead of another by more than the longest row.
    assert max(tokens) - min(tokens) <= max(row.num_tokens for row in rows)


def test_the_token_ids_are_what_an_embedding_takes():
    assert collate([make_row(1, 1)]).token_ids.dtype == torch.int64
