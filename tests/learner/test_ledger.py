"""The account of leases, against a model of a few lines: whatever the order of events, the sums agree."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from learner.groups import Group
from learner.ledger import Ledger, LedgerCounts


def make_group(lease_id: int, prompt_id: int = 0) -> Group:
    return Group(lease_id, prompt_id, np.zeros(1, np.int32), (), "actor-0", 0.0)


class LedgerMachine(RuleBasedStateMachine):
    """Any order of grants, ends and restarts."""

    generating = Bundle("generating")
    ready = Bundle("ready")
    ended = Bundle("ended")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(first_lease_id=100)
        self.first_lease_id = 100
        self.open: dict[int, int] = {}
        self.arrived: set[int] = set()
        self.used_ids: set[int] = set()
        self.ends: Counter[str] = Counter()
        self.num_leased = 0

    @rule(target=generating, prompt_id=st.integers(0, 5))
    def grant(self, prompt_id: int) -> int:
        lease = self.ledger.grant(prompt_id, "actor-0", 1.0)
        self._use(lease.lease_id)
        self.open[lease.lease_id] = prompt_id
        self.num_leased += 1
        return lease.lease_id

    @rule()
    def take_evaluation_id(self) -> None:
        self._use(self.ledger.next_lease_id())

    @rule(target=ready, lease_id=consumes(generating))
    def accept(self, lease_id: int) -> object:
        if lease_id not in self.open:
            return multiple()
        self.ledger.accept(make_group(lease_id))
        self.arrived.add(lease_id)
        return lease_id

    @rule(target=ended, lease_id=consumes(ready))
    def train(self, lease_id: int) -> object:
        if lease_id not in self.open:
            return multiple()
        self.ledger.train(self._group(lease_id))
        return self._end(lease_id, "trained")

    @rule(target=ended, lease_id=st.one_of(consumes(generating), consumes(ready)), reason=st.sampled_from("ab"))
    def drop(self, lease_id: int, reason: str) -> object:
        if lease_id not in self.open:
            return multiple()
        assert self.ledger.drop(lease_id, reason).prompt_id == self.open[lease_id]
        return self._end(lease_id, reason)

    @rule(target=ended, lease_id=consumes(generating))
    def expire(self, lease_id: int) -> object:
        if lease_id not in self.open:
            return multiple()
        assert self.ledger.expire(lease_id).prompt_id == self.open[lease_id]
        return self._end(lease_id, "expired")

    @rule()
    def restart(self) -> None:
        """A new process, from the counts that a checkpoint kept."""
        saved = msgspec.msgpack.decode(msgspec.msgpack.encode(self.ledger.counts()), type=LedgerCounts)
        self.first_lease_id = max(self.used_ids, default=self.first_lease_id) + 10
        self.ledger = Ledger(first_lease_id=self.first_lease_id, counts=saved)
        self.ends["expired"] += len(self.open)
        self.open.clear()
        self.arrived.clear()

    @rule(lease_id=ended)
    def answer_again(self, lease_id: int) -> None:
        known = lease_id >= self.first_lease_id
        assert self.ledger.status(lease_id) == ("ended" if known else "unknown")
        with pytest.raises(KeyError):
            self.ledger.find(lease_id)
        with pytest.raises(KeyError):
            self.ledger.accept(make_group(lease_id))

    @rule(lease_id=ready)
    def answer_twice(self, lease_id: int) -> None:
        if lease_id in self.open:
            with pytest.raises(AssertionError):
                self.ledger.accept(make_group(lease_id))

    @rule(ahead=st.integers(1, 1000))
    def answer_what_was_never_leased(self, ahead: int) -> None:
        assert self.ledger.status(max(self.used_ids, default=self.first_lease_id) + 20 + ahead) == "unknown"
        assert self.ledger.status(self.first_lease_id - ahead) == "unknown"

    @invariant()
    def the_sums_agree(self) -> None:
        counts = self.ledger.counts()
        assert counts.adds_up
        assert counts.leased == self.num_leased
        assert counts.in_flight == self.ledger.num_open == len(self.open)
        assert (counts.trained, counts.expired) == (self.ends["trained"], self.ends["expired"])
        assert counts.dropped == {reason: self.ends[reason] for reason in "ab" if self.ends[reason]}

    @invariant()
    def open_leases_agree_and_are_in_order(self) -> None:
        assert self.ledger.open_prompts() == list(self.open.values())
        assert [lease.lease_id for lease in self.ledger.generating()] == [id for id in self.open if id not in self.arrived]
        assert [group.lease_id for group in self.ledger.ready_groups()] == [id for id in self.open if id in self.arrived]
        assert self.ledger.num_ready == len(self.arrived)
        for lease_id in self.open:
            assert self.ledger.status(lease_id) == ("ready" if lease_id in self.arrived else "generating")

    def _use(self, lease_id: int) -> None:
        assert lease_id not in self.used_ids
        assert lease_id >= self.first_lease_id
        self.used_ids.add(lease_id)

    def _end(self, lease_id: int, how: str) -> int:
        del self.open[lease_id]
        self.arrived.discard(lease_id)
        self.ends[how] += 1
        return lease_id

    def _group(self, lease_id: int) -> Group:
        return next(group for group in self.ledger.ready_groups() if group.lease_id == lease_id)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_lease_without_a_group_cannot_be_trained_on() -> None:
    ledger = Ledger()
    lease = ledger.grant(0, "actor-0", 1.0)
    with pytest.raises(AssertionError):
        ledger.train(make_group(lease.lease_id))


def test_lease_with_a_group_cannot_expire() -> None:
    ledger = Ledger()
    lease = ledger.grant(0, "actor-0", 1.0)
    ledger.accept(make_group(lease.lease_id))
    with pytest.raises(AssertionError):
        ledger.expire(lease.lease_id)


def test_resumed_ledger_counts_what_was_in_flight_as_expired() -> None:
    saved = LedgerCounts(leased=10, trained=4, dropped={"stale": 1}, expired=2, in_flight=3)
    counts = Ledger(counts=saved).counts()
    assert counts == LedgerCounts(leased=10, trained=4, dropped={"stale": 1}, expired=5, in_flight=0)
    assert counts.adds_up


def test_sums_that_do_not_agree_are_noticed() -> None:
    assert not LedgerCounts(leased=2, trained=1).adds_up
