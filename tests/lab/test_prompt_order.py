"""The audit works out from seed and shares which prompt was due, and sees one that was leased or left out wrongly."""

from collections.abc import Sequence

import msgspec
import pytest

from offbeat.lab.prompt_order import PromptOrder
from offbeat.learner.leases.events import Granted, LeaseEvent, Weighed
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn

TASKS = ("easy", "hard")
SEED, NUM_PROMPTS = 3, 20


def run(*, with_tasks: bool = True) -> list[LeaseEvent]:
    """Return the log of three passes: whole, without the hard prompts, and with half of the easy ones."""
    stream = PromptStream(NUM_PROMPTS, SEED, tasks=[TASKS[index % 2] for index in range(NUM_PROMPTS)])
    events: list[LeaseEvent] = []
    for shares, last in (({}, 0), ({"easy": 1.0, "hard": 0.0}, 1), ({"easy": 0.5, "hard": 1.0}, 2)):
        if shares:
            events.append(Weighed(at=0.0, shares=shares, policy_version=0))
            stream.weigh(shares)
        while stream.peek().epoch <= last:
            prompt_id, epoch = stream.next()
            task = TASKS[prompt_id % 2] if with_tasks else ""
            fields = {"prompt_id": prompt_id, "epoch": epoch, "actor": "a", "policy_version": 0, "oldest_version": 0}
            events.append(Granted(at=0.0, lease_id=len(events), task=task, **fields, prompt_hash=0, epoch_size=20))
    return events


def findings(events: Sequence[LeaseEvent], lost: Sequence[PromptTurn] = ()) -> tuple[str, dict[int, int]]:
    order = PromptOrder()
    for event in events:
        order.take(event)
    violations, num_left_out = order.compare(SEED, [NUM_PROMPTS] * 3, lost)
    return "".join(violations), dict(num_left_out)


def grants_of(events: Sequence[LeaseEvent], epoch: int) -> list[int]:
    return [index for index, event in enumerate(events) if isinstance(event, Granted) and event.epoch == epoch]


@pytest.mark.parametrize("with_tasks", [True, False])
def test_stream_of_a_curriculum_is_in_order_and_what_it_left_out_is_counted(*, with_tasks: bool) -> None:
    events = run(with_tasks=with_tasks)
    numbers = [len(grants_of(events, epoch)) for epoch in range(3)]
    assert findings(events) == ("", {epoch: NUM_PROMPTS - numbers[epoch] for epoch in (1, 2)})
    assert (numbers[0], numbers[1] in (10, 11), 10 < numbers[2] < 20) == (20, True, True)


def test_prompt_left_out_that_its_tasks_share_keeps_is_seen() -> None:
    events = run()
    # In the second pass all easy prompts are due.
    index = grants_of(events, 1)[4]
    missing = events.pop(index)
    assert isinstance(missing, Granted)
    text, _ = findings(events)
    assert text.endswith(f"was leased when it was the turn of prompt {missing.prompt_id} of epoch 1")
    assert findings(events, [PromptTurn(missing.prompt_id, 1)])[0] == ""


def test_prompt_leased_that_its_tasks_share_leaves_out_is_seen() -> None:
    events = run()
    first = PromptStream(NUM_PROMPTS, SEED, position=NUM_PROMPTS)
    hard = next(turn for turn in iter(first.next, None) if turn.prompt_id % 2)
    place = next(index for index in grants_of(events, 1) if comes_after(events[index], hard))
    template = events[place]
    assert isinstance(template, Granted)
    events.insert(place, msgspec.structs.replace(template, prompt_id=hard.prompt_id, task="hard", lease_id=999))
    assert findings(events)[0] == f"prompt {hard.prompt_id} of epoch 1 was leased, but its task's share leaves it out"


def comes_after(event: LeaseEvent, turn: PromptTurn) -> bool:
    """Return whether a grant of epoch 1 is behind this turn in the order."""
    stream = PromptStream(NUM_PROMPTS, SEED, position=NUM_PROMPTS)
    order = [stream.next().prompt_id for _ in range(NUM_PROMPTS)]
    return isinstance(event, Granted) and order.index(event.prompt_id) > order.index(turn.prompt_id)


def test_lease_behind_the_last_pass_is_out_of_turn() -> None:
    order = PromptOrder()
    for event in run():
        order.take(event)
    assert "of epoch 2 was leased when it was the turn of prompt -1 of epoch 2" in "".join(
        order.compare(SEED, [NUM_PROMPTS] * 2, [])[0]
    )
