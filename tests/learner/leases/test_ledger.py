"""The ledger's sums equal those of a small model in any order of events."""

from collections import Counter
from collections.abc import Collection

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from offbeat.common.records.rows import LedgerSums
from offbeat.learner.leases.events import Dropped, Expired, Started
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.ledger import (
    UNSEEN_LEASES,
    EpochAccount,
    Ledger,
    LedgerState,
    OpenLease,
    needed_position,
)
from offbeat.learner.leases.log_reading import Position
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained


def make_group(lease_id: int, prompt_id: int = 0) -> Group:
    return Group(lease_id, prompt_id, np.zeros(1, np.int32), (), "actor-0", 0.0)


def grant(ledger: Ledger, prompt_id: int = 0, epoch: int = 0) -> int:
    lease_id = ledger.next_lease_id()
    ledger.apply(make_granted(lease_id, prompt_id=prompt_id, epoch=epoch, actor="actor-0"))
    return lease_id


def accept(ledger: Ledger, lease_id: int, position: Position | None = None) -> None:
    accepted = make_accepted(lease_id, actor="actor-0")
    ledger.apply(accepted, make_group(lease_id), position)


def train(ledger: Ledger, *lease_ids: int) -> None:
    ledger.apply(make_trained(*lease_ids))


def drop(ledger: Ledger, lease_id: int, reason: str, *, is_final: bool = False) -> None:
    ledger.apply(Dropped(at=0.0, lease_id=lease_id, reason=reason, is_final=is_final))


def expire(ledger: Ledger, lease_id: int) -> None:
    ledger.apply(Expired(at=0.0, lease_id=lease_id, reason="late"))


def through_a_checkpoint(ledger: Ledger) -> Ledger:
    saved = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.state()), type=LedgerState)
    return Ledger.from_state(saved)


class LedgerMachine(RuleBasedStateMachine):
    """Grants, ends and restarts in any order."""

    generating = Bundle("generating")
    ready = Bundle("ready")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.open: dict[int, int] = {}
        self.arrived: set[int] = set()
        self.used_ids: list[int] = []
        self.ends: Counter[str] = Counter()
        self.num_leased = 0
        self.ended_in: dict[int, Counter[str]] = {}
        """By pass over the data."""

    @rule(target=generating, prompt_id=st.integers(0, 5), epoch=st.integers(0, 2))
    def grant(self, prompt_id: int, epoch: int) -> int:
        lease_id = grant(self.ledger, prompt_id, epoch)
        self._use(lease_id)
        self.open[lease_id] = epoch
        self.num_leased += 1
        self.ended_in.setdefault(epoch, Counter())
        return lease_id

    @rule()
    def take_evaluation_id(self) -> None:
        self._use(self.ledger.next_lease_id())

    @rule(target=ready, lease_id=consumes(generating))
    def accept(self, lease_id: int) -> int:
        accept(self.ledger, lease_id, Position(1, lease_id))
        self.arrived.add(lease_id)
        return lease_id

    @rule(target=ended, lease_id=consumes(ready))
    def train(self, lease_id: int) -> int:
        train(self.ledger, lease_id)
        self.ended_in[self.open[lease_id]]["trained"] += 1
        return self._end(lease_id, "trained")

    @rule(
        target=ended,
        lease_id=st.one_of(consumes(generating), consumes(ready)),
        reason=st.sampled_from("ab"),
        is_final=st.booleans(),
    )
    def drop(self, lease_id: int, reason: str, is_final: bool) -> int:
        drop(self.ledger, lease_id, reason, is_final=is_final)
        self.ended_in[self.open[lease_id]][reason] += is_final
        return self._end(lease_id, reason)

    @rule(target=ended, lease_id=consumes(generating))
    def expire(self, lease_id: int) -> int:
        expire(self.ledger, lease_id)
        return self._end(lease_id, "expired")

    @rule()
    def restart(self) -> None:
        """Restore the ledger in a new process from a checkpoint, with the groups from the log."""
        groups = {group.lease_id: self.ledger.find(group.lease_id) for group in self.ledger.ready_groups()}
        self.ledger = through_a_checkpoint(self.ledger)
        assert self.ledger.num_ready == 0
        for lease_id, lease in groups.items():
            self.ledger.restore(make_group(lease_id), lease.position)
        self.ledger.apply(Started(at=0.0, run_id="r", learner_incarnation=1, policy_version=0))
        self.ledger.skip_lease_ids()
        self.used_ids.append(max(self.used_ids, default=-1) + UNSEEN_LEASES)

    @rule(lease_id=ended)
    def answer_again(self, lease_id: int) -> None:
        assert self.ledger.status(lease_id) == "ended"
        with pytest.raises(KeyError):
            self.ledger.find(lease_id)
        with pytest.raises(KeyError):
            accept(self.ledger, lease_id)
        with pytest.raises(KeyError):
            train(self.ledger, lease_id)

    @rule(lease_id=ready)
    def answer_twice(self, lease_id: int) -> None:
        with pytest.raises(AssertionError):
            accept(self.ledger, lease_id)

    @rule(lease_id=generating)
    def train_what_is_not_there(self, lease_id: int) -> None:
        with pytest.raises(AssertionError):
            train(self.ledger, lease_id)

    @rule(ahead=st.integers(1, 1000))
    def answer_what_was_never_leased(self, ahead: int) -> None:
        assert self.ledger.status(max(self.used_ids, default=-1) + ahead) == "unknown"
        assert self.ledger.status(-ahead) == "unknown"

    @invariant()
    def the_sums_agree(self) -> None:
        counts = self.ledger.counts()
        assert counts.adds_up
        assert counts.leased == self.num_leased
        assert counts.in_flight == self.ledger.num_open == len(self.open)
        assert (counts.trained, counts.expired) == (self.ends["trained"], self.ends["expired"])
        assert counts.dropped == {reason: self.ends[reason] for reason in "ab" if self.ends[reason]}

    @invariant()
    def every_pass_has_its_account(self) -> None:
        assert self.ledger.epochs.keys() == self.ended_in.keys()
        for epoch, ended in self.ended_in.items():
            account = self.ledger.epochs[epoch]
            assert account.num_trained == ended["trained"]
            assert {reason: len(ids) for reason, ids in account.dropped.items()} == +Counter(a=ended["a"], b=ended["b"])
            assert account.num_ended == ended.total()

    @invariant()
    def open_leases_agree_and_are_in_order(self) -> None:
        assert [(lease.lease_id, lease.epoch) for lease in self.ledger.state().open] == list(self.open.items())
        assert [lease.lease_id for lease in self.ledger.generating()] == [id for id in self.open if id not in self.arrived]
        assert [group.lease_id for group in self.ledger.ready_groups()] == [id for id in self.open if id in self.arrived]
        assert self.ledger.num_ready == len(self.arrived)
        oldest = min(self.arrived, default=None)
        end = Position(2, 0)
        assert needed_position(self.ledger.state().open, end) == (end if oldest is None else Position(1, oldest))
        for lease_id in self.open:
            assert self.ledger.status(lease_id) == ("ready" if lease_id in self.arrived else "generating")

    def _use(self, lease_id: int) -> None:
        assert lease_id == max(self.used_ids, default=-1) + 1
        self.used_ids.append(lease_id)

    def _end(self, lease_id: int, how: str) -> int:
        del self.open[lease_id]
        self.arrived.discard(lease_id)
        self.ends[how] += 1
        return lease_id


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_lease_with_a_group_cannot_expire() -> None:
    ledger = Ledger()
    lease_id = grant(ledger)
    accept(ledger, lease_id)
    with pytest.raises(AssertionError):
        expire(ledger, lease_id)
    assert ledger.status(lease_id) == "ready"


def test_refused_training_changes_nothing() -> None:
    ledger = Ledger()
    first, second = grant(ledger), grant(ledger)
    accept(ledger, first)
    before = ledger.state()
    with pytest.raises(AssertionError):
        train(ledger, first, second)
    assert ledger.state() == before


def test_lease_that_is_open_cannot_be_granted_again() -> None:
    ledger = Ledger()
    granted = make_granted(grant(ledger), prompt_id=1, actor="b")
    with pytest.raises(AssertionError):
        ledger.apply(granted)


def test_ids_go_on_after_the_newest_that_the_log_granted() -> None:
    ledger = Ledger()
    ledger.apply(make_granted(41, prompt_id=1, actor="b"))
    assert ledger.next_lease_id() == 42


def test_new_process_stays_clear_of_the_ids_of_the_one_before() -> None:
    ledger = Ledger()
    last = grant(ledger)
    restarted = through_a_checkpoint(ledger)
    restarted.skip_lease_ids()
    assert restarted.next_lease_id() == last + 1 + UNSEEN_LEASES


def test_state_does_not_change_when_the_ledger_goes_on() -> None:
    # It is written to the checkpoint while the hub thread takes groups.
    ledger = Ledger()
    first, second = grant(ledger, prompt_id=1), grant(ledger, prompt_id=2)
    drop(ledger, first, "stale", is_final=True)
    state = ledger.state()
    before = msgspec.msgpack.encode(state)
    drop(ledger, second, "stale", is_final=True)
    grant(ledger, epoch=1)
    assert msgspec.msgpack.encode(state) == before


def test_ledger_of_a_checkpoint_does_not_change_it() -> None:
    ledger = Ledger()
    lease_id = grant(ledger)
    state = ledger.state()
    before = msgspec.msgpack.encode(state)
    drop(Ledger.from_state(state), lease_id, "stale", is_final=True)
    assert msgspec.msgpack.encode(state) == before


def test_pass_is_told_once_when_all_its_prompts_are_done_with() -> None:
    ledger = Ledger()
    leases = [grant(ledger, prompt_id) for prompt_id in range(3)]
    for lease_id in leases[:2]:
        accept(ledger, lease_id)
    train(ledger, *leases[:2])
    drop(ledger, leases[2], "reward_error")
    assert ledger.end_epoch(lambda epoch: 3) is None, "that prompt is leased again"
    drop(ledger, grant(ledger, 2), "reward_error", is_final=True)
    later = grant(ledger, epoch=1)
    assert ledger.end_epoch(lambda epoch: 3) == (0, EpochAccount(2, {"reward_error": [2]}))
    assert ledger.end_epoch(lambda epoch: 3) is None
    assert ledger.epochs.keys() == {1}
    drop(ledger, later, "x", is_final=True)
    assert ledger.end_epoch(lambda epoch: 3) is None


@pytest.mark.parametrize(
    ("positions", "needed"),
    [([], Position(3, 8)), ([None], Position(3, 8)), ([Position(2, 9), Position(1, 99), None], Position(1, 99))],
)
def test_restart_needs_the_oldest_group_in_the_buffer_or_the_end_of_the_log(
    positions: Collection[Position | None], needed: Position
) -> None:
    leases = [OpenLease(0, 0, 0, "a", position, position is not None, 0, 0.0) for position in positions]
    assert needed_position(leases, Position(3, 8)) == needed


def test_sums_that_do_not_agree_are_noticed() -> None:
    assert not LedgerSums(2, 1, {}, 0, 0).adds_up
