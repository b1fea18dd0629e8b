"""A log with a damaged record is used as far as the ledger can apply it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Weighed
from offbeat.learner.leases.log_reading import Gap, Position, Record
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn
from offbeat.learner.leases.recovery import Recovered, recover
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.dispatch.dispatch_desk import make_prompts
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained
from tests.learner.leases.log_entries import flip
from tests.learner.leases.taped_log import NUM_PROMPTS, PROMPTS
from tests.learner.leases.test_recovery import Tale

ORDER = [PromptStream(NUM_PROMPTS, seed=0, position=position).next() for position in range(30)]
"""The turns in the order in which a run without a restart leases them."""


def recover_without(folder: Path, write: Callable[[Tale], int]) -> Recovered:
    """Recover a log whose record number `write(tale)` has a flipped bit."""
    tale = Tale(folder)
    damaged = write(tale)
    tale.log.close()
    (path,) = folder.glob("*.log")
    record = list(tale.history())[damaged]
    flip(path, record.position.offset + 20)
    return tale.recover()


def test_lost_grant_makes_its_group_unusable_and_its_prompt_is_leased_again(tmp_path: Path) -> None:
    def write(tale: Tale) -> int:
        for lease_id in range(4):
            tale.grant(lease_id)
        for lease_id in range(4):
            tale.accept(lease_id)
        return 1

    recovered = recover_without(tmp_path, write)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [0, 2, 3]
    assert [group.prompt_id for group in recovered.ledger.ready_groups()] == [ORDER[index].prompt_id for index in (0, 2, 3)]
    assert (recovered.num_records, recovered.num_skipped, len(recovered.gaps)) == (7, 1, 1)
    assert [recovered.stream.next() for _ in range(2)] == [ORDER[1], ORDER[4]]
    assert recovered.ledger.counts().adds_up


def test_lost_group_counts_as_being_generated(tmp_path: Path) -> None:
    def write(tale: Tale) -> int:
        for lease_id in range(2):
            tale.grant(lease_id)
        for lease_id in range(2):
            tale.accept(lease_id)
        tale.train(0, 1)
        return 2

    recovered = recover_without(tmp_path, write)
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [0]
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [1]
    assert (recovered.newest_version, recovered.num_skipped) == (1, 0)


@pytest.mark.parametrize("is_accepted", [False, True])
def test_lease_whose_end_was_lost_ends_when_its_prompt_is_leased_again(tmp_path: Path, is_accepted: bool) -> None:
    def write(tale: Tale) -> int:
        turn = tale.grant(0)
        tale.grant(1)
        if is_accepted:
            tale.accept(0)
            tale.drop(0, is_final=False)
        else:
            tale.expire(0)
        tale.grant(2, turn)
        tale.grant(3)
        return 3 if is_accepted else 2

    recovered = recover_without(tmp_path, write)
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [1, 2, 3]
    counts = recovered.ledger.counts()
    assert (counts.expired, counts.dropped) == ((0, {"log_damaged": 1}) if is_accepted else (1, {}))
    assert counts.adds_up
    assert recovered.stream.next() == ORDER[3]


def test_version_of_a_lost_batch_is_known_from_the_grants_behind_it() -> None:
    def grant(lease_id: int, policy_version: int) -> Granted:
        prompt_id, epoch = ORDER[lease_id]
        return make_granted(
            lease_id,
            prompt_id=prompt_id,
            epoch=epoch,
            policy_version=policy_version,
            prompt_hash=PROMPTS[prompt_id].content_hash,
            epoch_size=NUM_PROMPTS,
        )

    records = [Record(Position(1, 32), grant(0, 0), ()), GAP, Record(Position(1, 320), grant(1, 7), ())]
    assert recover(None, records, lambda position: None, PROMPTS, seed=0).newest_version == 7


TASKS: tuple[str, ...] = ("easy", "middle", "hard")
GAP = Gap(Position(1, 100), Position(1, 200))
HASHES = [prompt.content_hash for prompt in make_prompts(NUM_PROMPTS + 6, "train")]
"""Of the prompts and of those that are added to them."""


class History:
    """Draws events that can follow each other, as a learner would log them."""

    def __init__(self, choose: Callable[[int], int], tasks: Sequence[str] = ()) -> None:
        self.choose = choose
        self.stream = PromptStream(NUM_PROMPTS, seed=0, tasks=tasks)
        self.open: dict[int, tuple[PromptTurn, bool]] = {}
        self.num_leases = 0

    def next_event(self) -> LeaseEvent:
        kind = self.choose(6)
        if kind <= 1 or not self.open:
            return self._grant()
        lease_id = sorted(self.open)[self.choose(len(self.open) - 1)]
        turn, is_ready = self.open[lease_id]
        if not is_ready and kind <= 3:
            self.open[lease_id] = (turn, True)
            completions = (CompletionMeta(1, "stop", 0.0, (Segment(0, 0),)),)
            return make_accepted(lease_id, completions=completions, prompt_hash=HASHES[turn.prompt_id])
        del self.open[lease_id]
        if is_ready and kind <= 4:
            return make_trained(lease_id)
        is_final = kind == 6
        if not is_final:
            self.stream.give_back(*turn)
        if is_ready or is_final:
            return Dropped(at=0.0, lease_id=lease_id, reason="stale", is_final=is_final)
        return Expired(at=0.0, lease_id=lease_id, reason="late")

    def _grant(self) -> Granted:
        turn, lease_id = self.stream.next(), self.num_leases
        self.num_leases += 1
        self.open[lease_id] = (turn, False)
        return make_granted(
            lease_id,
            prompt_id=turn[0],
            epoch=turn[1],
            epoch_size=self.stream.size_of(turn.epoch),
            prompt_hash=HASHES[turn.prompt_id],
        )


@given(st.data(), st.integers(5, 60))
def test_no_prompt_is_lost_wherever_the_log_is_damaged(data: st.DataObject, num_events: int) -> None:
    """Every turn that was served is open, to be served again, or was finally dropped; none is two of these.

    The data grows meanwhile.
    """
    history = History(lambda most: data.draw(st.integers(0, most)))
    grows_at = data.draw(st.sets(st.integers(0, num_events - 1), max_size=2))
    events: list[LeaseEvent] = []
    for index in range(num_events):
        if index in grows_at:
            history.stream.grow(history.stream.num_prompts + 3)
        events.append(history.next_event())
    arrays = (memoryview(bytes(4)), memoryview(bytes(4)))
    records: list[Record | Gap] = [
        Record(Position(1, 32 + index), event, arrays if isinstance(event, Accepted) else ())
        for index, event in enumerate(events)
    ]
    begin = data.draw(st.integers(0, num_events - 1))
    records[begin : data.draw(st.integers(begin + 1, num_events))] = [GAP]
    prompts = make_prompts(history.stream.num_prompts, "train")
    recovered = recover(None, records, lambda position: None, prompts, seed=0)
    ledger, stream = recovered.ledger, recovered.stream
    assert stream.num_prompts == len(prompts)
    assert ledger.counts().adds_up
    dropped = [
        (prompt_id, epoch) for epoch, account in ledger.epochs.items() for ids in account.dropped.values() for prompt_id in ids
    ]
    leases = [*ledger.generating(), *(ledger.find(group.lease_id) for group in ledger.ready_groups())]
    waiting = [tuple(turn) for turn in stream.state().returned]
    found = sorted([*dropped, *((lease.prompt_id, lease.epoch) for lease in leases), *waiting])
    in_order = PromptStream.from_state(replace(stream.state(), position=0, returned=()))
    assert found == sorted(tuple(in_order.next()) for _ in range(stream.position))


@given(st.data(), st.integers(5, 40))
@settings(max_examples=40)
def test_each_turn_is_accounted_for_once_wherever_a_log_with_shares_is_damaged(data: st.DataObject, num_events: int) -> None:
    """Also where shares are lost: a turn that is over is open, to be served again, dropped, or left out."""
    prompts = make_prompts(NUM_PROMPTS, "train", TASKS)
    history = History(lambda most: data.draw(st.integers(0, most)), [prompt.task for prompt in prompts])
    weighs_at = data.draw(st.sets(st.integers(0, num_events - 1), max_size=4))
    events: list[LeaseEvent] = []
    for index in range(num_events):
        if index in weighs_at:
            shares = dict(zip(TASKS, data.draw(st.permutations([1.0, 0.5, 0.0])), strict=True))
            history.stream.weigh(shares)
            events.append(Weighed(at=0.0, shares=shares, policy_version=0))
        events.append(history.next_event())
    arrays = (memoryview(bytes(4)), memoryview(bytes(4)))
    records: list[Record | Gap] = [
        Record(Position(1, 32 + index), event, arrays if isinstance(event, Accepted) else ())
        for index, event in enumerate(events)
    ]
    begin = data.draw(st.integers(0, num_events - 1))
    records[begin : data.draw(st.integers(begin + 1, num_events))] = [GAP]
    recovered = recover(None, records, lambda position: None, prompts, seed=0)
    ledger, stream = recovered.ledger, recovered.stream
    assert ledger.counts().adds_up
    accounts = ledger.epochs.items()
    dropped = [(prompt_id, epoch) for epoch, account in accounts for ids in account.dropped.values() for prompt_id in ids]
    leases = [*ledger.generating(), *(ledger.find(group.lease_id) for group in ledger.ready_groups())]
    found = [*dropped, *((lease.prompt_id, lease.epoch) for lease in leases), *map(tuple, stream.state().returned)]
    assert len(set(found)) == len(found)
    assert len(found) + sum(account.num_left_out for _, account in accounts) == stream.position


def test_log_that_a_learner_goes_on_with_keeps_its_gap_and_all_around_it(tmp_path: Path) -> None:
    def write(tale: Tale) -> int:
        for lease_id in range(3):
            tale.grant(lease_id)
        return 1

    recover_without(tmp_path, write)
    (path,) = tmp_path.glob("*.log")
    before = path.read_bytes()
    log = RolloutLog(tmp_path, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 20, min_free_bytes=0)
    log.append(Expired(at=0.0, lease_id=0, reason="late"))
    log.close()
    assert path.read_bytes() == before
    again = Tale(tmp_path).recover()
    assert (again.num_records, len(again.gaps), again.ledger.counts().expired) == (3, 1, 1)
