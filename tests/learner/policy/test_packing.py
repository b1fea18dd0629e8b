from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.learner.policy.packing import Pack, Span, Turns, num_inputs, pack, unpack, whole_rows
from offbeat.protocols.payload import Turn
from tests.trees import read_by_turns, trees_of_turns

token_ids = st.integers(1, 99)
groups = st.tuples(
    st.lists(token_ids, min_size=1, max_size=4), st.lists(st.lists(token_ids, min_size=0, max_size=4), max_size=3)
)


def ids(*values: int) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def turns_of(turns: Sequence[Turn]) -> list[tuple[int, int, int]]:
    return [(turn.num_context, turn.num_sampled, turn.back) for turn in turns]


def seen_by_inputs(packed: Pack) -> dict[int, list[int]]:
    """Return the inputs that each input attends to, its own last."""
    seen = {}
    for span in packed.spans:
        prefix = [index for part in span.prefix for index in part]
        for index in range(span.start, span.start + span.length):
            seen[index] = [*prefix, *range(span.start, index + 1)]
    assert sorted(seen) == list(range(len(packed.token_ids)))
    return seen


def test_a_prompt_is_there_once_and_a_completion_without_its_last_token():
    packed = pack([([1, 2, 3], [[4, 5, 6], [7], []]), ([8], [[9, 10]])])
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed.predictors.tolist() == [2, 3, 4, 2, 5, 6]
    assert packed.targets.tolist() == [4, 5, 6, 7, 9, 10]
    assert packed.spans == (Span(0, 3), Span(3, 2, (range(3),)), Span(5, 1), Span(6, 1, (range(5, 6),)))
    assert packed.lengths == (3, 1, 0, 2)
    assert {tensor.dtype for tensor in packed[:4]} == {torch.int64}


@settings(max_examples=100)
@given(st.lists(groups, max_size=3))
def test_what_the_predictor_of_a_token_sees_is_the_prompt_and_the_completion_before_the_token(sequences):
    packed = pack(sequences)
    seen = seen_by_inputs(packed)
    tokens = [
        ([*prompt, *completion[:before]], token)
        for prompt, completions in sequences
        for completion in completions
        for before, token in enumerate(completion)
    ]
    assert packed.targets.tolist() == [token for _, token in tokens]
    for (history, _), predictor in zip(tokens, packed.predictors.tolist(), strict=True):
        assert packed.token_ids[seen[predictor]].tolist() == history
        assert packed.position_ids[seen[predictor]].tolist() == list(range(len(history)))
    assert packed.lengths == tuple(len(completion) for _, completions in sequences for completion in completions)
    num_of_completions = sum(num_inputs(completions) for _, completions in sequences)
    assert len(packed.token_ids) == max(1, sum(len(prompt) for prompt, _ in sequences) + num_of_completions)


def test_turns_that_continue_one_turn_share_its_inputs() -> None:
    # Turn 0 reads 20; 1 goes on from it, 2 from there too, 3 from turn 1, 4 from the prompt, and 5 begins with 24 and 25.
    turns = [(1, 2, 1), (0, 1, 1), (1, 1, 2), (1, 1, 2), (0, 2, 5), (2, 1, 0)]
    completion = Turns(ids(1, 2, 3, 4, 5, 6, 7, 8), ids(20, 21, 22, 24, 25), turns)
    packed = pack([([90, 91], [completion])])
    assert packed.token_ids.tolist() == [90, 91, *(20, 1, 2, 3, 22), 21, 6, *(24, 25)]
    assert packed.position_ids.tolist() == [0, 1, *(2, 3, 4, 5, 6), 5, 2, *(0, 1)]
    assert packed.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert packed.predictors.tolist() == [2, 3, 4, 7, 6, 1, 8, 10]
    prompt = range(2)
    assert packed.spans == (
        Span(0, 2),
        Span(2, 5, (prompt,)),
        Span(7, 1, (prompt, range(2, 5))),
        Span(8, 1, (prompt,)),
        Span(9, 2),
    )
    assert packed.lengths == (8,)


@settings(max_examples=100)
@given(st.lists(token_ids, min_size=1, max_size=4), st.lists(trees_of_turns(), max_size=3))
def test_each_turn_is_predicted_from_its_own_sequence_and_no_token_is_there_twice(prompt, trees):
    completions, reads, first = [], [], 100
    for turns in trees:
        num_context, num_sampled = (sum(numbers) for numbers in list(zip(*turns_of(turns), strict=True))[:2])
        context_ids, sampled_ids = (
            np.arange(first, first + num_context),
            np.arange(first + num_context, first + num_context + num_sampled),
        )
        first += num_context + num_sampled
        completions.append(Turns(context_ids=context_ids, token_ids=sampled_ids, turns=turns_of(turns)))
        reads += read_by_turns(prompt, turns, context_ids.tolist(), sampled_ids.tolist())
    packed = pack([(prompt, completions)])
    seen = seen_by_inputs(packed)
    tokens = [([*read, *sampled[:place]], token) for read, sampled in reads for place, token in enumerate(sampled)]
    assert packed.targets.tolist() == [token for _, token in tokens]
    for (history, _), predictor in zip(tokens, packed.predictors.tolist(), strict=True):
        assert packed.token_ids[seen[predictor]].tolist() == history
        assert packed.position_ids[seen[predictor]].tolist() == list(range(len(history)))
    of_completions = packed.token_ids[len(prompt) :].tolist()
    assert len(set(of_completions)) == len(of_completions) == num_inputs(completions)


def test_what_sequences_begin_with_is_there_once_and_each_token_is_predicted_from_its_own() -> None:
    system, other = list(range(100, 120)), list(range(200, 218))
    task = [*system, *range(300, 320)]
    openings = [[*task, 1], [*task, 2], [*system, 3], [*other, 4], other, [5, 6], [5, 6], task]
    completions = [
        # An agent that begins three sequences, one that begins two, and two that begin one each.
        Turns(ids(11, 12, 13), ids(*openings[0], *openings[2], *openings[5]), [(41, 1, 0), (21, 1, 0), (2, 1, 0)]),
        Turns(ids(14, 15, 16), ids(*openings[1], *openings[3]), [(41, 2, 0), (19, 1, 0)]),
        Turns(ids(17), ids(*openings[4]), [(18, 1, 0)]),
        Turns(ids(18, 19), ids(*openings[6]), [(2, 1, 0), (0, 1, 1)]),
        Turns(ids(21), ids(*openings[7]), [(40, 1, 0)]),
    ]
    packed = pack([([7], [*completions, [8, 9]])])
    seen = seen_by_inputs(packed)
    histories = [packed.token_ids[seen[predictor]].tolist() for predictor in packed.predictors.tolist()]
    assert histories[:3] == [openings[0], openings[2], openings[5]]
    assert histories[3:6] == [openings[1], [*openings[1], 14], openings[3]]
    assert histories[6:] == [openings[4], openings[6], [*openings[6], 18], openings[7], [7], [7, 8]]
    for predictor, history in zip(packed.predictors.tolist(), histories, strict=True):
        assert packed.position_ids[seen[predictor]].tolist() == list(range(len(history)))
    # `system`, `task` behind it and `other` are there once; beginnings of two tokens are not worth it.
    sampled_inputs = 1 + 1 + 1
    assert len(packed.token_ids) == 1 + 20 + 20 + 18 + 1 + 1 + 1 + 1 + 2 + 2 + sampled_inputs
    assert len(packed.token_ids) == 1 + num_inputs([*completions, [8, 9]])


def test_nothing_to_pack_is_one_input_that_predicts_nothing():
    packed = pack([])
    assert packed.token_ids.shape == packed.position_ids.shape == (1,)
    assert packed.spans == (Span(0, 1),)
    assert packed.predictors.shape == packed.targets.shape == (0,)
    assert packed.predictors.dtype == torch.int64
    assert packed.lengths == ()


def test_values_come_back_as_rows_padded_with_zero():
    rows = unpack(torch.tensor([1.0, 2.0, 3.0, 4.0]), (1, 0, 3))
    assert rows.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 3.0, 4.0]]
    assert unpack(torch.zeros(0), (0, 0)).tolist() == [[0.0], [0.0]]
    assert unpack(torch.zeros(0), ()).shape == (0, 1)


def test_the_gradient_of_padding_reaches_no_value():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    rows = unpack(values, (2, 1))
    rows.backward(torch.tensor([[5.0, 6.0], [7.0, torch.nan]]))
    assert values.grad is not None
    assert values.grad.tolist() == [5.0, 6.0, 7.0]


def test_whole_rows_hold_each_completion_after_its_prompt_and_place_every_input_once_in_them() -> None:
    # Two completions of three and one input after a prompt of two, and a prompt whose completions have no input of their own.
    packed = pack([([1, 2], [[3, 4, 5, 6], [7, 8]]), ([9, 10, 11], [[12], []])])
    rows = whole_rows(packed.spans, torch.device("cpu"))
    assert packed.token_ids[rows.inputs].tolist() == [[9, 10, 11, 11, 11], [1, 2, 7, 7, 7], [1, 2, 3, 4, 5]]
    assert packed.token_ids[rows.inputs].flatten()[rows.places].tolist() == packed.token_ids.tolist()
