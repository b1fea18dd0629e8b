"""Experts survive their encoding, whatever they are; other bytes are refused, in bounded memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offbeat.protocols.payload import CompressionError, compress, decode_experts, encode_experts

SHAPES = st.tuples(st.integers(1, 40), st.integers(1, 4), st.integers(1, 8))


@given(SHAPES.flatmap(lambda shape: arrays.arrays(np.int32, shape, elements=st.integers(0, 255))))
def test_experts_come_back_as_sets(experts):
    content = encode_experts(experts)
    assert content.dtype == np.uint8
    assert decode_experts(content.data, experts.shape).tolist() == np.sort(experts, axis=-1).tolist()


@given(SHAPES, st.binary(max_size=200))
def test_other_bytes_are_refused(shape, content):
    with pytest.raises(CompressionError):
        decode_experts(content, shape)


def test_experts_of_more_or_fewer_tokens_are_refused():
    content = encode_experts(np.zeros((4, 2, 2), np.uint8))
    for num_tokens in (3, 5):
        with pytest.raises(CompressionError):
            decode_experts(content.data, (num_tokens, 2, 2))


def test_a_small_message_does_not_become_a_large_array():
    bomb = compress(bytes(1 << 26))
    assert len(bomb) < 1 << 14
    with pytest.raises(CompressionError):
        decode_experts(bomb, (4, 2, 2))


def test_eight_of_128_experts_take_two_thirds_of_a_byte_each():
    random = np.random.default_rng(0)
    experts = np.argsort(random.random((512, 8, 128)), axis=-1)[..., :8]
    assert len(encode_experts(experts)) < 0.7 * experts.size
