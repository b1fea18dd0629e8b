"""Collective updates with a real publisher and real receivers, some of which are killed or stopped."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from offbeat.actor.weights.receiver import WeightReceiver
from offbeat.common.weights import collectives
from offbeat.common.weights.collectives import CollectiveError, Rendezvous
from offbeat.common.weights.flat import make_layout
from offbeat.learner.weights import double_buffer as weight_editions
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import WeightUpdate
from tests.learner.weight_fleet import (
    BUCKET_BYTES,
    LARGE,
    PATIENCE_S,
    SMALL,
    TIMEOUT_S,
    Fleet,
    fleet_of,
    stopped,
)

pytestmark = pytest.mark.slow


def test_every_receiver_gets_the_exact_bytes_of_every_version_in_one_epoch() -> None:
    with fleet_of(SMALL, timeout_s=PATIENCE_S) as fleet:
        # "c" gets its bytes from "a". It looks for the learner's go so seldom that the learner is done long before.
        for name in "abcd":
            fleet.join(name, poll_s=0.1 if name == "c" else 0.001)
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        for version in range(1, 9):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert fleet.excluded() == []
        assert {row["num_members"] for row in fleet.updates()[1:]} <= {4}
        for receiver in fleet.receivers:
            assert len({receiver.epochs[version] for version in range(1, 9)}) == 1


def test_version_larger_than_a_bucket_arrives() -> None:
    with fleet_of(make_layout([("w", (300, 301)), ("b", (3,))], torch.float32), "a", "b", timeout_s=PATIENCE_S) as fleet:
        for version in (0, 1):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert fleet.excluded() == []


def num_keys(fleet: Fleet) -> int:
    assert fleet.publisher._collective is not None
    return fleet.publisher._collective._store.num_keys()


def test_keys_of_past_transfers_do_not_pile_up_in_the_store() -> None:
    with fleet_of(SMALL, "a", "b", timeout_s=PATIENCE_S) as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        fleet.publish(1)
        fleet.wait(1, *fleet.receivers)
        before = num_keys(fleet)
        for version in range(2, 12):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert num_keys(fleet) <= before


def test_late_joiner_gets_the_current_version() -> None:
    with fleet_of(SMALL, "a", timeout_s=PATIENCE_S) as fleet:
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        late = fleet.join("late")
        fleet.wait(3, late)
        fleet.publish(4)
        fleet.wait(4, *fleet.receivers)
        assert fleet.receivers[0].epochs[4] == late.epochs[4]
        assert fleet.excluded() == []


def test_actor_that_joins_again_gets_the_version_that_it_had() -> None:
    with fleet_of(SMALL, "a", "b", timeout_s=PATIENCE_S) as fleet:
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        # Receivers have the weights before the learner's part of the broadcast is over.
        fleet.wait_for(lambda: len(fleet.updates()) == 1)
        again = fleet.receivers[0]
        again.policy_version = None
        again.checksums.clear()
        fleet.publisher.joined(again.peer)
        fleet.wait(3, again)
        assert fleet.excluded() == []


def test_whole_fleet_that_joins_again_gets_the_version_that_it_had() -> None:
    with fleet_of(SMALL, "a", "b", timeout_s=PATIENCE_S) as fleet:
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        fleet.wait_for(lambda: len(fleet.updates()) == 1)
        for receiver in fleet.receivers:
            receiver.policy_version = None
            receiver.checksums.clear()
            fleet.publisher.joined(receiver.peer)
        fleet.wait(3, *fleet.receivers)
        assert fleet.excluded() == []


def test_receiver_killed_in_the_middle_of_a_broadcast_is_named_and_the_others_get_the_version() -> None:
    with fleet_of(LARGE, "survivor-1", "survivor-2") as fleet:
        survivors = list(fleet.receivers)
        victim = fleet.join("victim", "SIGKILL")
        fleet.publish(0)
        fleet.wait(0, *survivors)
        victim.process.join(10)
        assert victim.process.exitcode == -signal.SIGKILL
        # Survivors have the weights before the learner has written its row.
        fleet.wait_for(lambda: "victim" in fleet.excluded())
        assert set(fleet.excluded()) == {"victim"}
        fleet.publish(1)
        fleet.wait(1, *survivors)


def test_receiver_that_leaves_while_the_group_is_made_holds_nobody_up_until_the_deadline() -> None:
    with fleet_of(SMALL, "a", "b", timeout_s=4 * PATIENCE_S) as fleet:
        fleet.join("leaver", "left")
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        assert fleet.excluded() == []


def test_receiver_with_a_newer_update_takes_part_where_the_learner_has_said_go() -> None:
    class Store:
        """The go arrives between the look for it and the look for a newer update."""

        def __init__(self) -> None:
            self.answers = [False, True]

        def check(self, keys: list[str]) -> bool:
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    store: Any = Store()
    Rendezvous(store, epoch=1, policy_version=0).wait_go(PATIENCE_S, lambda: True)
    store.answers = [False]
    with pytest.raises(CollectiveError, match="superseded"):
        Rendezvous(store, epoch=1, policy_version=0).wait_go(PATIENCE_S, lambda: True)


def test_receiver_stopped_in_the_middle_of_a_broadcast_is_named_and_catches_up_when_it_goes_on() -> None:
    with fleet_of(LARGE, "survivor-1", "survivor-2") as fleet:
        survivors = list(fleet.receivers)
        victim = fleet.join("victim", "SIGSTOP")
        fleet.publish(0)
        fleet.wait(0, *survivors)
        fleet.wait_for(lambda: "victim" in fleet.excluded())
        assert set(fleet.excluded()) == {"victim"}
        assert victim.policy_version is None
        victim.signal(signal.SIGCONT)
        fleet.publish(1)
        fleet.wait(1, victim, *survivors)


def test_receiver_that_does_not_get_ready_is_left_out_by_name_and_catches_up_when_it_goes_on() -> None:
    with fleet_of(SMALL, "survivor-1", "survivor-2", "sleeper") as fleet:
        *survivors, sleeper = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        sleeper.signal(signal.SIGSTOP)
        started = time.monotonic()
        fleet.publish(1)
        fleet.wait(1, *survivors)
        assert TIMEOUT_S <= time.monotonic() - started < 2 * TIMEOUT_S
        assert fleet.excluded() == ["sleeper"]
        assert "did not enter epoch" in next(row["detail"] for row in fleet.rows if row["kind"] == "event")
        # Survivors have the weights before the learner has written its row.
        fleet.wait_for(lambda: len(fleet.updates()) == 2)
        assert fleet.updates()[-1]["num_excluded"] == 1
        # While it is left out, nobody waits for it.
        started = time.monotonic()
        fleet.publish(2)
        fleet.wait(2, *survivors)
        assert time.monotonic() - started < TIMEOUT_S
        sleeper.signal(signal.SIGCONT)
        fleet.wait(2, sleeper)
        fleet.publish(3)
        fleet.wait(3, *fleet.receivers)
        assert len({receiver.epochs[3] for receiver in fleet.receivers}) == 1


def test_receiver_that_leaves_while_it_is_awaited_is_no_failure_and_keeps_nobody_waiting() -> None:
    with fleet_of(SMALL, "survivor", "leaver") as fleet:
        survivor, leaver = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, survivor, leaver)
        leaver.signal(signal.SIGSTOP)
        started = time.monotonic()
        fleet.publish(1)
        fleet.wait_for(lambda: ("leaver", 1) in fleet.announced)
        fleet.receivers.remove(leaver)
        fleet.wait(1, survivor)
        assert time.monotonic() - started < TIMEOUT_S
        leaver.end()
        assert fleet.excluded() == []


def test_publisher_that_is_closed_while_it_waits_reports_no_failure() -> None:
    with fleet_of(SMALL, "sleeper") as fleet:
        (sleeper,) = fleet.receivers
        sleeper.signal(signal.SIGSTOP)
        fleet.publish(0)
        fleet.wait_for(lambda: ("sleeper", 0) in fleet.announced)
        fleet.publisher.close()
        assert fleet.excluded() == []


def test_actor_that_does_not_commit_is_left_out_longer_each_time() -> None:
    with fleet_of(SMALL, "a", timeout_s=0.3) as fleet:
        (mute,) = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, mute)
        mute.is_mute = True
        fleet.publish(1)
        fleet.wait_for(lambda: len(fleet.exclusions()) >= 2)
        assert fleet.exclusions()[:2] == [
            "weights 1: a did not commit version 1 within 0.3 s (weights.timeout_s); left out for 2 s",
            # The broadcast has left the version in the buffer: there is nothing to ask for.
            "weights 1: a neither asked for a chunk of version 1 nor committed it within 0.3 s (weights.timeout_s); "
            "left out for 4 s",
        ]


def test_member_whose_broadcast_broke_is_asked_again_before_it_is_blamed() -> None:
    with fleet_of(SMALL, "a", "b") as fleet:
        a, b = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, a, b)
        a.num_breaks = 1
        fleet.publish(1)
        fleet.wait(1, a, b)
        assert fleet.excluded() == []
        assert fleet.pulled == []
        assert a.epochs[1] > b.epochs[1], "a group that broke is not used again"
        a.num_breaks = 2
        fleet.publish(2)
        fleet.wait(2, a, b)
        assert fleet.excluded() == ["a"]
        assert fleet.pulled == [("a", 2)]


def test_training_goes_on_while_a_broadcast_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_editions, "PATIENCE_S", 0.1)
    with fleet_of(LARGE) as fleet:
        stopped_one = fleet.join("victim", "SIGSTOP")
        fleet.publish(0)
        fleet.wait_for(lambda: stopped(stopped_one))
        fleet.publish(1)
        assert fleet.publisher._in_collective
        assert fleet.excluded() == []


def update_from(port: int, timeout_s: float) -> WeightUpdate:
    return WeightUpdate(
        policy_version=1,
        epoch=1,
        rank=1,
        world_size=2,
        store_host="127.0.0.1",
        store_port=port,
        backend="gloo",
        bucket_bytes=BUCKET_BYTES,
        checksum=0,
        timeout_s=timeout_s,
    )


def receiver_threads() -> set[threading.Thread]:
    """Return the receivers' threads, those included that another test has left stuck in a broadcast for good."""
    return {thread for thread in threading.enumerate() if thread.name == "weight-receiver"}


def no_link(address: str) -> Link:
    raise AssertionError(f"nobody pulls from {address} here")


def test_receiver_that_waits_for_the_learners_go_ends_when_it_is_closed() -> None:
    others = receiver_threads()
    store = collectives.serve_store("127.0.0.1", 0, PATIENCE_S, listen_on="127.0.0.1")
    receiver = WeightReceiver(SMALL, no_link)
    receiver.announce(update_from(store.port, PATIENCE_S))
    rendezvous = collectives.Rendezvous(store, epoch=1, policy_version=1)
    deadline = time.monotonic() + PATIENCE_S
    while not rendezvous.is_ready(1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    receiver.close()
    assert receiver_threads() == others


def test_receiver_without_a_learner_names_the_setting_of_the_port_and_lives() -> None:
    others = receiver_threads()
    receiver = WeightReceiver(SMALL, no_link)
    try:
        receiver.announce(update_from(9, 0.5))
        deadline = time.monotonic() + PATIENCE_S
        while (outcome := receiver.outcome()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        expected = "weights.port = 9: 127.0.0.1 does not answer there (Connection refused). Open this port"
        assert outcome.error is not None and outcome.error.startswith(expected)
    finally:
        receiver.close()
    assert receiver_threads() == others


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert [child for child in multiprocessing.active_children() if child.is_alive()] == []
