"""The stream serves every prompt once an epoch, in an order that only seed and position decide."""

from collections import Counter

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn, StreamState


def drain(stream: PromptStream, count: int) -> list[int]:
    return [turn.prompt_id for turn in drain_turns(stream, count)]


def drain_turns(stream: PromptStream, count: int) -> list[PromptTurn]:
    return [stream.next() for _ in range(count)]


@given(num_prompts=st.integers(1, 20), seed=st.integers(0, 2**63), epochs=st.integers(1, 4))
def test_every_epoch_serves_every_prompt_once(num_prompts: int, seed: int, epochs: int) -> None:
    stream = PromptStream(num_prompts, seed)
    for _ in range(epochs):
        assert sorted(drain(stream, num_prompts)) == list(range(num_prompts))
    assert stream.position == epochs * num_prompts


def test_epochs_and_seeds_differ_in_their_order() -> None:
    first, second = PromptStream(50, seed=0), PromptStream(50, seed=1)
    orders = [drain(first, 50), drain(first, 50), drain(second, 50)]
    assert len({tuple(order) for order in orders}) == 3


@given(num_prompts=st.integers(1, 9), seed=st.integers(0, 99), position=st.integers(0, 40))
def test_order_is_a_function_of_seed_and_position(num_prompts: int, seed: int, position: int) -> None:
    whole = PromptStream(num_prompts, seed)
    drain(whole, position)
    assert drain(PromptStream(num_prompts, seed, position), 20) == drain(whole, 20)


def test_prompts_given_back_come_first_and_oldest_first() -> None:
    stream = PromptStream(5, seed=0)
    first, second, third = drain(stream, 3)
    stream.give_back(third, 0)
    stream.give_back(first, 0)
    assert drain(stream, 2) == [third, first]
    assert stream.position == 3
    assert sorted([first, second, third, *drain(stream, 2)]) == [0, 1, 2, 3, 4]


@given(position=st.integers(0, 12), num_returned=st.integers(0, 2))
def test_peeking_serves_nothing(position: int, num_returned: int) -> None:
    stream = PromptStream(4, seed=0, position=position)
    for prompt_id in range(num_returned):
        stream.give_back(prompt_id, 0)
    before = stream.state()
    assert stream.peek() == stream.peek()
    assert stream.state() == before
    assert stream.peek() == stream.next()


def test_prompt_keeps_the_pass_it_belongs_to_when_it_is_given_back() -> None:
    stream = PromptStream(3, seed=0)
    turns = drain_turns(stream, 5)
    assert [turn.epoch for turn in turns] == [0, 0, 0, 1, 1]
    stream.give_back(*turns[1])
    stream.give_back(*turns[4])
    rest = ({0, 1, 2} - {turns[3].prompt_id, turns[4].prompt_id}).pop()
    assert drain_turns(stream, 3) == [turns[1], turns[4], PromptTurn(rest, 1)]
    assert stream.epoch == 2
    assert stream.share_served == 0.0


@given(num_prompts=st.integers(1, 8), gives_back=st.lists(st.booleans(), max_size=60))
def test_each_prompt_is_served_once_an_epoch_and_once_more_for_each_return(num_prompts: int, gives_back: list[bool]) -> None:
    stream = PromptStream(num_prompts, seed=3)
    served: Counter[int] = Counter()
    returned: Counter[int] = Counter()
    for is_given_back in gives_back:
        turn = stream.next()
        served[turn.prompt_id] += 1
        if is_given_back:
            stream.give_back(*turn)
            returned[turn.prompt_id] += 1
    served.update(drain(stream, len(stream.state().returned)))
    assert served - returned == Counter(drain(PromptStream(num_prompts, seed=3), stream.position))


@given(served=st.integers(0, 12), returns=st.integers(0, 4), num_prompts=st.integers(1, 6))
def test_restored_stream_goes_on_as_the_saved_one(served: int, returns: int, num_prompts: int) -> None:
    stream = PromptStream(num_prompts, seed=1)
    for turn in drain_turns(stream, served)[:returns]:
        stream.give_back(*turn)
    saved = msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)
    restored = PromptStream.from_state(saved)
    assert drain_turns(restored, 15) == drain_turns(stream, 15)


@given(data=st.data(), num_prompts=st.integers(1, 6), seed=st.integers(0, 9))
def test_prompts_that_were_added_join_at_the_first_epoch_that_has_not_begun(
    data: st.DataObject, num_prompts: int, seed: int
) -> None:
    """No prompt of an epoch is left out or served twice, wherever and however often the data grows."""
    stream = PromptStream(num_prompts, seed)
    sizes: dict[int, int] = {}
    served: list[PromptTurn] = []
    for _ in range(data.draw(st.integers(0, 4))):
        served += drain_turns(stream, data.draw(st.integers(0, 15)))
        if data.draw(st.booleans()):
            stream.peek()
        num_prompts += data.draw(st.integers(1, 4))
        begun = {turn.epoch for turn in served}
        first = stream.grow(num_prompts)
        assert first == max(begun, default=-1) + 1
        assert (stream.num_prompts, stream.size_of(first)) == (num_prompts, num_prompts)
        sizes[first] = num_prompts
        if data.draw(st.booleans()):
            stream = PromptStream.from_state(msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState))
    served += drain_turns(stream, 30)
    assert stream.position == len(served)
    for epoch in range(stream.epoch):
        size = stream.size_of(epoch)
        order = np.random.default_rng([seed, epoch]).permutation(size)
        assert [turn.prompt_id for turn in served if turn.epoch == epoch] == order.tolist()
        assert size == sizes.get(epoch, stream.size_of(epoch - 1) if epoch else size)
    assert [turn.epoch for turn in served] == sorted(turn.epoch for turn in served)


@given(data=st.data(), num_prompts=st.integers(1, 5), position=st.integers(0, 12), added=st.integers(1, 4))
def test_turn_brought_forward_over_a_growth_leaves_none_out(
    data: st.DataObject, num_prompts: int, position: int, added: int
) -> None:
    stream = PromptStream(num_prompts, 2, position)
    stream.grow(num_prompts + added)
    whole = PromptStream.from_state(stream.state())
    turns = drain_turns(whole, 25)
    index = data.draw(st.integers(0, 24))
    assert stream.bring_forward(turns[index])
    assert drain_turns(stream, 25) == [turns[index], *turns[:index], *turns[index + 1 :]]
    # A prompt that no epoch before the growth has.
    assert not stream.bring_forward(PromptTurn(num_prompts + added, stream.epoch))
