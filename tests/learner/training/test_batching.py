import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from offbeat.common.settings.learning_sections import AdvantageSection
from offbeat.learner.leases.groups import EngineExperts, Group, Rollout
from offbeat.learner.training.batching import TrainingRow, assign_rows, collate, make_rows
from offbeat.learner.training.preparation import completion_advantages
from offbeat.protocols.payload import Segment, Turn, encode_experts


def make_row(num_prompt_tokens: int, num_completion_tokens: int, *, group: int = 0, advantage: float = 1.0) -> TrainingRow:
    """Return a row with `num_prompt_tokens + num_completion_tokens - 1` inputs of the model."""
    prompt = np.arange(1, 1 + num_prompt_tokens, dtype=np.int32)
    completion = np.arange(101, 101 + num_completion_tokens, dtype=np.int32)
    logprobs = -np.arange(1, 1 + num_completion_tokens, dtype=np.float32)
    rollout = Rollout(completion, logprobs, 0.0, "stop", (Segment(0, 0),))
    return TrainingRow(
        group, prompt, rollout, reward=2 * advantage, advantage=advantage, weight=0.5, policy_lag=3, policy_version=9
    )


def num_inputs(micro_batch: list[TrainingRow]) -> int:
    return len(collate(micro_batch).pack.token_ids) if micro_batch else 0


def test_completions_are_packed_behind_their_prompt_and_padded_for_the_loss() -> None:
    batch = collate([make_row(2, 3, advantage=0.5), make_row(2, 1, advantage=-1.0), make_row(1, 2, group=1)])
    assert batch.pack.token_ids.tolist() == [1, 2, 101, 102, 1, 101], "without the last token of each, which predicts nothing"
    assert batch.completion_mask.int().tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.behavior_logprobs.tolist() == [[-1, -2, -3], [-1, 0, 0], [-1, -2, 0]]
    assert batch.advantages.tolist() == [[0.5, 0.5, 0.5], [-1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    assert batch.rewards.tolist() == [1.0, -2.0, 2.0]
    assert batch.weights.tolist() == [0.5] * 3
    assert batch.policy_lags.tolist() == [3, 3, 3]
    assert batch.token_lags.tolist() == [[9, 9, 9], [9, 0, 0], [9, 9, 0]]


def test_rows_of_a_group_have_its_likelihood_in_whatever_micro_batch_they_are() -> None:
    def rollout(*logprobs: float) -> Rollout:
        return Rollout(np.ones(len(logprobs), np.int32), np.array(logprobs, np.float32), 0.0, "stop", (Segment(0, 0),))

    sampled = [(rollout(-1.0, -1.0), rollout(-1.0)), (rollout(-2.0), rollout(-2.0))]
    groups = [Group(index, 0, np.ones(1, np.int32), rollouts, "actor", 0.0) for index, rollouts in enumerate(sampled)]
    rows = make_rows(groups, np.zeros((2, 2)), [[0.0] * 2] * 2, policy_version=0)
    for piece in (rows, rows[1:3]):
        assert collate(piece).group_logprobs.tolist() == [-1.0 if row.group == 0 else -2.0 for row in piece]


def test_each_input_of_a_pack_has_its_own_experts_in_whatever_micro_batch_it_is() -> None:
    """The experts are the token's id, which inputs and experts then share."""
    prompt, first, second = np.array([1, 2]), np.array([11, 12, 13]), np.array([21, 22])
    inputs = np.concatenate([prompt, first[:-1], second[:-1]])
    experts = np.stack([inputs, inputs + 100], axis=-1)[:, :, None]
    rollouts = tuple(
        Rollout(ids.astype(np.int32), np.zeros(len(ids), np.float32), 0.0, "stop", (Segment(0, 0),)) for ids in (first, second)
    )
    engine_experts = EngineExperts(encode_experts(experts), (5, 2, 1))
    groups = [Group(index, 0, prompt.astype(np.int32), rollouts, "actor", 0.0, experts=engine_experts) for index in range(2)]
    rows = make_rows(groups, np.zeros((2, 2)), [[0.0] * 2] * 2, policy_version=0)
    for piece in (rows, rows[1:3], rows[1:2], rows[3:]):
        pack = collate(piece).pack
        assert pack.experts is not None
        assert pack.experts[:, 0, 0].tolist() == pack.token_ids.tolist()
        assert pack.experts[:, 1, 0].tolist() == (pack.token_ids + 100).tolist()
    assert collate([make_row(2, 3)]).pack.experts is None
    assert collate([]).pack.experts is None


def test_each_token_lags_behind_the_policy_that_trains_on_it_and_one_from_its_future_is_ahead_of_it() -> None:
    row = make_row(2, 5)
    segments = (Segment(2, 0), Segment(4, 1), Segment(11, 4))
    assert collate([row._replace(rollout=row.rollout._replace(segments=segments))]).token_lags.tolist() == [[7, 5, 5, 5, -2]]


def test_context_of_an_environment_is_read_and_not_trained_on() -> None:
    row = make_row(2, 3)
    turns = (Turn(0, 2), Turn(2, 1))
    row = row._replace(rollout=row.rollout._replace(turns=turns, context_ids=np.array([51, 52], dtype=np.int32)))
    batch = collate([row])
    assert batch.pack.token_ids.tolist() == [1, 2, 101, 102, 51, 52]
    assert batch.pack.targets.tolist() == [101, 102, 103]
    assert batch.pack.predictors.tolist() == [1, 2, 5]
    assert batch.behavior_logprobs.tolist() == [[-1, -2, -3]]
    assert batch.turns.tolist() == [[0, 0, 1]]
    of_two = assign_rows([row, row._replace(group=1)], micro_batch_tokens=6, world_size=1)
    assert [len(micro_batch) for micro_batch in of_two[0]] == [1, 1], "context counts as an input"


def test_inputs_of_forks_are_counted_as_they_are_packed() -> None:
    turns = (Turn(1, 2), Turn(1, 3), Turn(2, 1, 2), Turn(1, 2, 0))
    rollout = make_row(3, 8).rollout._replace(turns=turns, context_ids=np.arange(51, 56, dtype=np.int32))
    rows = [make_row(3, 8)._replace(rollout=rollout, group=group) for group in (0, 0, 1)]
    # 3 of the prompt and, of each completion, 13 without the last token of each of its three sequences.
    assert [num_inputs([row]) for row in rows] == [13, 13, 13]
    for limit, sizes in ((12, [13, 13, 13]), (22, [13, 13, 13]), (23, [23, 13]), (35, [23, 13]), (36, [36])):
        (micro_batches,) = assign_rows(rows, micro_batch_tokens=limit, world_size=1)
        assert sorted(map(num_inputs, micro_batches), reverse=True) == sizes
    behavior = collate(rows[:1]).behavior_logprobs
    assert behavior.tolist() == [[-1, -2, -3, -4, -5, -6, -7, -8]]


def test_a_micro_batch_without_rows_has_an_input_and_nothing_to_learn() -> None:
    batch = collate([])
    assert len(batch.pack.token_ids) == 1
    assert batch.completion_mask.shape == (0, 1)
    assert batch.advantages.shape == (0, 1)


def test_rows_carry_what_belongs_to_their_group_and_place_in_it() -> None:
    def group(*versions: int, weight: float) -> Group:
        rollouts = tuple(make_row(1, 1).rollout._replace(segments=(Segment(version, 0),)) for version in versions)
        return Group(0, 0, np.array([1], dtype=np.int32), rollouts, "actor", 0.0, weight)

    advantages = np.array([[1.0, -1.0], [0.25, 0.5]])
    rows = make_rows([group(3, 5, weight=1.0), group(7, 7, weight=2.0)], 10 * advantages, advantages.tolist(), policy_version=7)
    assert [row.advantage for row in rows] == [1.0, -1.0, 0.25, 0.5]
    assert [row.reward for row in rows] == [10.0, -10.0, 2.5, 5.0]
    assert [(row.group, row.policy_lag, row.weight) for row in rows] == [(0, 4, 1.0), (0, 4, 1.0), (1, 0, 2.0), (1, 0, 2.0)]


def test_a_group_stays_together_so_that_its_prompt_is_computed_once() -> None:
    rows = [make_row(10, 3, group=group) for group in range(3) for _ in range(4)]
    ((first, second),) = assign_rows(rows, micro_batch_tokens=40, world_size=1)
    assert {num_inputs(first), num_inputs(second)} == {36, 18}
    assert {tuple(sorted({row.group for row in micro_batch})) for micro_batch in (first, second)} == {(0, 1), (2,)}


def test_a_group_that_is_too_large_is_split_and_its_prompt_repeated() -> None:
    rows = [make_row(10, 6) for _ in range(4)]
    (micro_batches,) = assign_rows(rows, micro_batch_tokens=20, world_size=1)
    assert [num_inputs(micro_batch) for micro_batch in micro_batches] == [20, 20]


def test_without_packs_rows_of_one_length_share_micro_batches_of_rows_times_the_longest() -> None:
    # 12, 7, 12, 3 and 4 inputs, each with a prompt of its own.
    rows = [make_row(3, length, group=group) for length, group in ((10, 0), (5, 0), (10, 1), (1, 1), (2, 2))]
    (micro_batches,) = assign_rows(rows, micro_batch_tokens=24, world_size=1, packs=False)
    assert [sorted(len(row.rollout.token_ids) for row in micro_batch) for micro_batch in micro_batches] == [[10, 10], [1, 2, 5]]
    of_ranks = assign_rows(rows, micro_batch_tokens=11, world_size=2, packs=False)
    assert [[len(micro_batch) for micro_batch in of_rank] for of_rank in of_ranks] == [[1, 1], [1, 2]]


def test_a_completion_of_forks_is_as_many_whole_rows() -> None:
    turns = (Turn(1, 2), Turn(1, 3), Turn(2, 1, 2), Turn(1, 2, 0))
    rollout = make_row(3, 8).rollout._replace(turns=turns, context_ids=np.arange(51, 56, dtype=np.int32))
    rows = [make_row(3, 8)._replace(rollout=rollout, group=group) for group in (0, 1)]
    # Turns 0 and 1 after the prompt, turn 2 after turn 0, and turn 3 alone: 9, 8 and 2 inputs.
    for limit, sizes in ((53, [1, 1]), (54, [2])):
        (micro_batches,) = assign_rows(rows, micro_batch_tokens=limit, world_size=1, packs=False)
        assert [len(micro_batch) for micro_batch in micro_batches] == sizes


def test_what_episodes_of_a_group_begin_with_takes_room_in_a_micro_batch_once() -> None:
    context_ids = np.arange(51, 91, dtype=np.int32)
    rollout = make_row(1, 5).rollout._replace(turns=(Turn(40, 5, 0),), context_ids=context_ids)
    rows = [make_row(1, 5)._replace(rollout=rollout) for _ in range(4)]
    # A prompt of one, the context, and four of each completion.
    for limit, sizes in ((57, [4]), (56, [3, 1])):
        (micro_batches,) = assign_rows(rows, micro_batch_tokens=limit, world_size=1)
        assert [len(micro_batch) for micro_batch in micro_batches] == sizes
        assert all(num_inputs(micro_batch) <= limit for micro_batch in micro_batches)


def test_one_group_is_shared_by_ranks() -> None:
    of_ranks = assign_rows([make_row(1, 10) for _ in range(4)], micro_batch_tokens=100, world_size=2)
    assert [[len(micro_batch) for micro_batch in of_rank] for of_rank in of_ranks] == [[2], [2]]


rows_of_groups = st.lists(
    st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=8)), min_size=1, max_size=8
)


def as_rows(groups: list[tuple[int, list[int]]]) -> list[TrainingRow]:
    """Return rows whose advantage is their number."""
    rows = [make_row(prompt, length, group=group) for group, (prompt, lengths) in enumerate(groups) for length in lengths]
    return [row._replace(advantage=float(number)) for number, row in enumerate(rows)]


@given(groups=rows_of_groups, micro_batch_tokens=st.integers(1, 200), world_size=st.integers(1, 5))
def test_every_row_is_trained_once_and_every_rank_enters_every_collective(groups, micro_batch_tokens, world_size) -> None:
    rows = as_rows(groups)
    assigned = assign_rows(rows, micro_batch_tokens=micro_batch_tokens, world_size=world_size)
    assert len(assigned) == world_size
    assert len({len(micro_batches) for micro_batches in assigned}) == 1
    every = [micro_batch for micro_batches in assigned for micro_batch in micro_batches]
    assert sorted(row.advantage for micro_batch in every for row in micro_batch) == list(range(len(rows)))
    for micro_batch in every:
        assert num_inputs(micro_batch) <= micro_batch_tokens or len(micro_batch) == 1
        assert [row.group for row in micro_batch] == sorted(row.group for row in micro_batch)


@given(lengths=st.lists(st.integers(1, 30), min_size=8, max_size=40), world_size=st.integers(2, 4))
def test_no_rank_is_ahead_of_another_by_more_than_the_longest_row(lengths, world_size) -> None:
    rows = [make_row(1, length, group=index) for index, length in enumerate(lengths)]
    assigned = assign_rows(rows, micro_batch_tokens=64, world_size=world_size)
    tokens = [sum(num_inputs(micro_batch) for micro_batch in of_rank) for of_rank in assigned]
    assert max(tokens) - min(tokens) <= max(num_inputs([row]) for row in rows)


def test_the_token_ids_are_what_an_embedding_takes() -> None:
    assert collate([make_row(1, 1)]).pack.token_ids.dtype == torch.int64


def test_an_episode_is_one_row_however_many_sequences_it_has() -> None:
    """Two episodes with rewards 1 and 3: their mean is 2, though the first has three sequences."""
    forked = make_row(2, 6).rollout._replace(
        reward=1.0, turns=(Turn(0, 2), Turn(1, 2), Turn(1, 1, 2), Turn(2, 1, 0)), context_ids=np.arange(51, 55, dtype=np.int32)
    )
    plain = make_row(2, 3).rollout._replace(reward=3.0)
    group = Group(0, 0, np.array([1, 2], dtype=np.int32), (forked, plain), "actor", 0.0)
    rewards = np.array([[rollout.reward for rollout in group.rollouts]])
    advantages = completion_advantages(rewards, AdvantageSection(baseline="group", divide_by_std=False))
    batch = collate(make_rows([group], rewards, advantages.tolist(), policy_version=0))
    assert batch.advantages.tolist() == [[-1.0] * 6, [1.0] * 3 + [0.0] * 3]
    assert batch.completion_mask.sum(dim=1).tolist() == [6, 3], "each sampled token once"
    assert batch.pack.targets.tolist() == [101, 102, 103, 104, 105, 106, 101, 102, 103]


def test_an_episode_of_one_turn_is_to_the_bit_what_a_completion_is() -> None:
    row = make_row(2, 5)
    with_turns = row._replace(rollout=row.rollout._replace(turns=(Turn(0, 5),)))
    one, other = collate([row, row]), collate([with_turns, with_turns])
    assert one.pack.spans == other.pack.spans
    assert one.pack.lengths == other.pack.lengths
    for left, right in zip([*one.pack[:4], *one[1:]], [*other.pack[:4], *other[1:]], strict=True):
        assert left.dtype == right.dtype
        assert left.numpy().tobytes() == right.numpy().tobytes()
