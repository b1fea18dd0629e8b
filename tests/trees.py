"""Trees of turns: random ones, and what each turn has read, by the wire's definition alone."""

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from offbeat.protocols.payload import Turn

Read = tuple[list[int], list[int]]
"""All tokens before a turn's first sampled one, and its sampled tokens."""


def read_by_turns(
    prompt: Sequence[int], turns: Sequence[Turn], context_ids: Iterable[int], token_ids: Iterable[int]
) -> list[Read]:
    """Return the whole input of the model in each turn, and what it sampled."""
    context, sampled = list(map(int, context_ids)), list(map(int, token_ids))
    reads: list[Read] = []
    for index, turn in enumerate(turns):
        if turn.back == 0:
            before: list[int] = []
        elif turn.back == index + 1:
            before = list(prompt)
        else:
            before = [*reads[index - turn.back][0], *reads[index - turn.back][1]]
        reads.append(([*before, *context[: turn.num_context]], sampled[: turn.num_sampled]))
        del context[: turn.num_context], sampled[: turn.num_sampled]
    assert not context and not sampled
    return reads


@st.composite
def trees_of_turns(draw: st.DrawFn, max_turns: int = 6) -> tuple[Turn, ...]:
    """Return turns that continue any earlier one, the prompt or nothing."""
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, max_turns))):
        back = draw(st.integers(0, index + 1))
        turns.append(Turn(draw(st.integers(0 if back else 1, 3)), draw(st.integers(1, 4)), back))
    return tuple(turns)
