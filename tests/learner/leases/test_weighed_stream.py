"""The stream leaves out what the shares of tasks say, and a replay of the journal leaves out the same."""

from collections import Counter
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn, StreamState, draws

TASKS: tuple[str, ...] = ("easy", "middle", "hard")
WEIGHTS = st.lists(st.sampled_from([0.0, 0.2, 0.5, 1.0]), min_size=3, max_size=3).filter(lambda shares: 1.0 in shares)
SHARES = st.one_of(st.just({}), WEIGHTS.map(lambda shares: dict(zip(TASKS, shares, strict=True))))


def tasks_of(number: int) -> list[str]:
    return [TASKS[index % 3] for index in range(number)]


def weighed(number: int, seed: int = 0, **shares: float) -> PromptStream:
    stream = PromptStream(number, seed, tasks=tasks_of(number))
    stream.weigh(shares)
    return stream


def epoch_of(stream: PromptStream) -> Iterator[list[int]]:
    """Yield the prompts that the stream serves in each epoch, in its order."""
    served: list[PromptTurn] = []
    while True:
        served.append(stream.next())
        if served[-1].epoch > served[0].epoch:
            *whole, last = served
            yield [turn.prompt_id for turn in whole]
            served = [last]


def test_task_without_a_share_of_its_prompts_is_never_served_and_a_whole_one_in_each_epoch() -> None:
    epochs = epoch_of(weighed(30, easy=1.0, middle=0.0, hard=1.0))
    for _ in range(4):
        assert sorted(next(epochs)) == [index for index in range(30) if index % 3 != 1]


def test_half_of_a_task_is_another_half_in_each_epoch() -> None:
    epochs = epoch_of(weighed(3000, easy=1.0, middle=0.5, hard=0.0))
    halves = [{prompt_id for prompt_id in next(epochs) if prompt_id % 3 == 1} for _ in range(6)]
    for half in halves:
        assert 420 < len(half) < 580
    assert 220 < len(halves[0] & halves[1]) < 280
    assert len(set.union(*halves)) > 950, "after six epochs hardly a prompt was not served"


@given(seed=st.integers(0, 99), low=st.floats(0, 1), high=st.floats(0, 1))
@settings(max_examples=20)
def test_larger_share_adds_prompts_and_takes_none_away(seed: int, low: float, high: float) -> None:
    low, high = sorted((low, high))
    drawn = draws(seed, 0, 30)
    few, many = (set(next(epoch_of(weighed(30, seed, easy=1.0, hard=share)))) for share in (low, high))
    assert few <= many
    assert [prompt_id for prompt_id in sorted(few) if prompt_id % 3 == 2] == [i for i in range(2, 30, 3) if drawn[i] < low]


def test_order_of_the_others_is_that_of_a_stream_without_shares() -> None:
    order = np.random.default_rng([5, 0]).permutation(12).tolist()
    assert next(epoch_of(weighed(12, 5, easy=0.0, middle=1.0, hard=0.0))) == [one for one in order if one % 3 == 1]


def test_shares_hold_from_the_next_turn_on_and_what_was_passed_over_stays_out() -> None:
    stream = weighed(6, easy=1.0, middle=0.0, hard=0.0)
    order = np.random.default_rng([0, 0]).permutation(6).tolist()
    first = stream.next()
    place = order.index(first.prompt_id)
    assert stream.peek() != PromptTurn(order[place + 1], 0)
    stream.weigh({"easy": 1.0, "middle": 1.0, "hard": 1.0})
    assert stream.peek() == PromptTurn(order[place + 1], 0), "a look ahead left nothing out"
    rest = [stream.next().prompt_id for _ in range(6 - place - 1)]
    assert [*order[:place], first.prompt_id, *rest] == order
    assert (stream.take_left_out(), stream.take_left_out()) == (Counter({0: place} if place else {}), Counter())


def test_left_out_turns_are_counted_in_their_epochs() -> None:
    stream = weighed(9, easy=1.0, middle=0.0, hard=0.0)
    served = [stream.next() for _ in range(7)]
    assert [turn.epoch for turn in served] == [0, 0, 0, 1, 1, 1, 2]
    left_out = stream.take_left_out()
    assert (left_out[0], left_out[1]) == (6, 6)
    assert stream.position == len(served) + left_out.total()


def test_shares_of_unknown_tasks_are_refused_and_tasks_without_one_are_served_whole() -> None:
    with pytest.raises(ValueError, match="'later'"):
        weighed(6, easy=1.0, later=0.0)
    assert sorted(next(epoch_of(weighed(9, easy=1.0, hard=0.0)))) == [0, 1, 3, 4, 6, 7]


def test_tasks_that_come_with_added_prompts_wait_for_their_epoch() -> None:
    """The share of an added task may be the only one above 0 while no prompt of it is in the current epoch."""
    stream = PromptStream(2, 0, tasks=["old", "old", "new"])
    first = stream.next()
    assert stream.grow(3) == 1
    stream.weigh({"old": 0.0, "new": 1.0})
    assert (first.epoch, stream.next()) == (0, PromptTurn(2, 1))
    assert stream.take_left_out()[0] == 1


def test_turn_brought_forward_gives_back_only_what_the_shares_keep() -> None:
    stream = weighed(12, easy=1.0, middle=0.0, hard=1.0)
    order = [PromptTurn(prompt_id, 0) for prompt_id in np.random.default_rng([0, 0]).permutation(12).tolist()]
    assert stream.bring_forward(order[8])
    kept = [turn for turn in order[:8] if turn.prompt_id % 3 != 1]
    assert [stream.next() for _ in range(1 + len(kept))] == [order[8], *kept]
    assert stream.take_left_out() == Counter({0: 8 - len(kept)})
    assert not stream.bring_forward(order[0])


def test_lifted_shares_leave_no_trace_in_the_state() -> None:
    stream = weighed(6, easy=1.0, middle=0.0, hard=0.0)
    stream.weigh({})
    assert "shares" not in msgspec.json.decode(msgspec.json.encode(stream.state()))


@given(data=st.data(), number=st.integers(1, 8), seed=st.integers(0, 9))
def test_stream_saved_anywhere_and_given_the_same_shares_goes_on_as_the_first(
    data: st.DataObject, number: int, seed: int
) -> None:
    """The journal's part: what happens to the one stream happens to the other, from a checkpoint at any place."""
    tasks = tasks_of(number + 6)
    stream = PromptStream(number, seed, tasks=tasks)
    replayed: PromptStream | None = None
    served: list[PromptTurn] = []
    for _ in range(data.draw(st.integers(1, 25))):
        match data.draw(st.sampled_from(["serve", "serve", "serve", "weigh", "give back", "grow", "save"])):
            case "serve":
                turn = stream.peek() if data.draw(st.booleans()) else None
                served.append(stream.next())
                assert turn in (None, served[-1])
                assert replayed is None or replayed.next() == served[-1]
            case "weigh":
                # As long as no prompt of a task is there, a share of 1 for it alone would serve nothing.
                shares = data.draw(SHARES) if stream.num_prompts >= 3 else {}
                for one in filter(None, (stream, replayed)):
                    one.weigh(shares)
            case "give back" if served:
                turn = served[data.draw(st.integers(0, len(served) - 1))]
                for one in filter(None, (stream, replayed)):
                    one.give_back(*turn)
            case "grow" if stream.num_prompts < number + 6:
                size = stream.num_prompts + 1
                for one in filter(None, (stream, replayed)):
                    one.grow(size)
            case "save":
                stream.take_left_out()
                state = msgspec.json.decode(msgspec.json.encode(stream.state()), type=StreamState)
                replayed = PromptStream.from_state(state, tasks)
    assert replayed is None or replayed.state() == stream.state()
    assert replayed is None or replayed.take_left_out() == stream.take_left_out()


def test_draws_of_an_epoch_do_not_follow_its_order_or_its_size() -> None:
    drawn = draws(7, 3, 2000)
    order = np.random.default_rng([7, 3]).permutation(2000)
    assert abs(np.corrcoef(drawn, order)[0, 1]) < 0.1
    assert np.array_equal(draws(7, 3, 500), drawn[:500])
    assert not np.array_equal(draws(7, 4, 500), drawn[:500])
