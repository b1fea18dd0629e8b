import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.policy.packing import Span, Stream, num_inputs, pack, unpack

token_ids = st.integers(1, 99)
groups = st.tuples(
    st.lists(token_ids, min_size=1, max_size=4), st.lists(st.lists(token_ids, min_size=0, max_size=4), max_size=3)
)


def test_a_prompt_is_there_once_and_a_completion_without_its_last_token():
    packed = pack([([1, 2, 3], [[4, 5, 6], [7], []]), ([8], [[9, 10]])])
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed.predictors.tolist() == [2, 3, 4, 2, 5, 6]
    assert packed.targets.tolist() == [4, 5, 6, 7, 9, 10]
    assert packed.spans == (Span(0, 3), Span(3, 2, 0, 3), Span(5, 1), Span(6, 1, 5, 1))
    assert packed.lengths == (3, 1, 0, 2)
    assert {tensor.dtype for tensor in packed[:4]} == {torch.int64}


@settings(max_examples=100)
@given(st.lists(groups, max_size=3))
def test_what_the_predictor_of_a_token_sees_is_the_prompt_and_the_completion_before_the_token(sequences):
    packed = pack(sequences)
    seen = {}
    for span in packed.spans:
        prefix = list(range(span.prefix_start, span.prefix_start + span.prefix_length))
        for index in range(span.start, span.start + span.length):
            seen[index] = [*prefix, *range(span.start, index + 1)]
    assert sorted(seen) == list(range(len(packed.token_ids)))
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


@settings(max_examples=100)
@given(st.lists(groups, max_size=3), st.randoms(use_true_random=False))
def test_only_sampled_tokens_of_a_stream_are_predicted_and_all_are_read(sequences, random):
    sampled = [[[random.random() < 0.5 for _ in one[1:]] + [True] * bool(one) for one in ones] for _, ones in sequences]
    streams = [
        (
            prompt,
            [Stream(np.array(one, dtype=np.int32), np.array(mask, dtype=bool)) for one, mask in zip(ones, masks, strict=True)],
        )
        for (prompt, ones), masks in zip(sequences, sampled, strict=True)
    ]
    whole, packed = pack(sequences), pack(streams)
    keep = torch.tensor([one for masks in sampled for mask in masks for one in mask], dtype=torch.bool)
    assert packed.targets.tolist() == whole.targets[keep].tolist()
    assert packed.predictors.tolist() == whole.predictors[keep].tolist()
    assert packed.lengths == tuple(sum(mask) for masks in sampled for mask in masks)
    for field in ("token_ids", "position_ids"):
        assert getattr(packed, field).tolist() == getattr(whole, field).tolist()
    assert packed.spans == whole.spans


@settings(max_examples=50)
@given(groups)
def test_the_number_of_inputs_is_known_before_packing(group):
    prompt, completions = group
    assert num_inputs(len(prompt), [len(completion) for completion in completions]) == len(pack([group]).token_ids)


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
