"""Pulls with a real publisher and real receivers: actors join late, are excluded, or die during a pull."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from offbeat.protocols.messages import LearnerMessage
from tests.learner.weight_fleet import (
    LARGE,
    MAX_PULLS,
    PATIENCE_S,
    SMALL,
    Mishap,
    Receiver,
    fleet_of,
    stopped,
)

pytestmark = pytest.mark.slow


def test_joiner_pulls_while_collectives_go_on_for_the_others_and_enters_the_next() -> None:
    with fleet_of(LARGE, "a", "b") as fleet:
        others = list(fleet.receivers)
        fleet.publish(0)
        fleet.wait(0, *others)
        late = fleet.join("late")
        version = 0
        while late.policy_version is None:
            version += 1
            fleet.publish(version)
            fleet.wait(version, *others)
        # It may be in a collective already when this thread looks.
        first_committed = min(late.epochs)
        assert ("late", first_committed) in fleet.pulled
        assert late.epochs[first_committed] == -1
        fleet.publish(version + 1)
        fleet.wait(version + 1, *fleet.receivers)
        assert late.epochs[version + 1] == others[0].epochs[version + 1] >= 0
        assert {name for name, _ in fleet.pulled} == {"late"}
        assert fleet.excluded() == []


def test_actor_that_comes_back_as_its_pull_is_announced_pulls_all_the_same() -> None:
    with fleet_of(SMALL, "a") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        late = Receiver("late", SMALL, "", 0.001)
        # The first announcement is lost with its connection.
        is_lost = threading.Event()

        def come_back(message: LearnerMessage) -> None:
            if not is_lost.is_set():
                is_lost.set()
                fleet.publisher.joined(late.peer)
                return
            late.connection.send(message)

        late.send = come_back
        fleet.receivers.append(late)
        fleet.wait(0, late)
        assert fleet.pulled == [("late", 0), ("late", 0)]
        assert fleet.excluded() == []


def test_no_more_than_max_pulls_actors_pull_at_once() -> None:
    with fleet_of(LARGE, "a") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        joiners = [Receiver(f"late-{index}", LARGE, "", 0.001) for index in range(4)]
        fleet.receivers.extend(joiners)
        fleet.wait(0, *joiners)
        assert fleet.most_pulls == MAX_PULLS
        assert len(fleet.pulled) == 4
        assert fleet.excluded() == []


@pytest.mark.parametrize("mishap", ["SIGKILL", "SIGSTOP"])
def test_puller_that_stalls_or_dies_half_way_is_named_and_its_place_goes_to_another(mishap: Mishap) -> None:
    with fleet_of(LARGE, "a") as fleet:
        fleet.publish(0)
        fleet.wait(0, *fleet.receivers)
        # They take all the places there are.
        victims = [fleet.join(f"victim-{index}", mishap) for index in range(MAX_PULLS)]
        fleet.wait_for(lambda: len(fleet.pulled) == MAX_PULLS)
        late = fleet.join("late")
        fleet.wait(0, late)
        fleet.wait_for(lambda: set(fleet.excluded()) == {victim.name for victim in victims})
        assert any("asked for no chunk of version 0" in row.get("detail", "") for row in fleet.rows)
        if mishap == "SIGSTOP":
            for victim in victims:
                victim.signal(signal.SIGCONT)
            fleet.wait(0, *victims)


def test_receiver_that_has_a_wrong_byte_says_so_and_pulls_while_the_others_have_the_version() -> None:
    with fleet_of(LARGE, "a", "b") as fleet:
        others = list(fleet.receivers)
        victim = fleet.join("victim", "wrong byte")
        fleet.publish(0)
        fleet.wait(0, *others)
        fleet.wait(0, victim)
        assert fleet.excluded() == ["victim"]
        assert "wrong checksum" in next(row["detail"] for row in fleet.rows if row["kind"] == "event")
        assert fleet.pulled == [("victim", 0)]


def test_actor_that_is_distrusted_is_left_out_and_pulls() -> None:
    with fleet_of(SMALL, "honest", "liar") as fleet:
        honest, liar = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, honest, liar)
        liar.policy_version = None
        liar.checksums.clear()
        fleet.publisher.distrust(liar.peer, "liar", "scored the canary otherwise")
        assert fleet.publisher.problems()[0].startswith("liar scored the canary otherwise; no weights for another")
        fleet.publish(1)
        fleet.wait(1, honest)
        assert fleet.pulled == []
        fleet.wait(1, liar)
        assert fleet.excluded() == ["liar"]
        assert fleet.pulled == [("liar", 1)]
        fleet.publish(2)
        fleet.wait(2, honest, liar)
        assert honest.epochs[2] == liar.epochs[2] >= 0


def test_actor_that_is_distrusted_at_the_end_of_a_transfer_is_not_late_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(SMALL, "honest", "liar") as fleet:
        honest, liar = fleet.receivers
        collective = fleet.publisher._collective
        assert collective is not None
        send = collective.send

        def send_and_distrust(*arguments: Any, **options: Any) -> Any:
            transfer = send(*arguments, **options)
            if not fleet.excluded():
                fleet.wait(0, liar)
                liar.policy_version = None
                liar.checksums.clear()
                fleet.publisher.distrust(liar.peer, "liar", "scored the canary otherwise")
            return transfer

        monkeypatch.setattr(collective, "send", send_and_distrust)
        fleet.publish(0)
        # Both have the version for a moment before the liar is distrusted.
        fleet.wait_for(lambda: bool(fleet.excluded()))
        fleet.wait(0, honest, liar)
        assert fleet.excluded() == ["liar"]
        assert fleet.pulled == [("liar", 0)]


def test_with_the_backend_pull_nobody_meets_in_a_store() -> None:
    with fleet_of(SMALL, "a", "b", "c", backend="pull") as fleet:
        for version in range(5):
            fleet.publish(version)
            fleet.wait(version, *fleet.receivers)
        assert fleet.publisher._collective is None
        assert len(fleet.pulled) == 15
        assert fleet.excluded() == []


def test_training_goes_on_while_an_actor_pulls_and_what_it_pulls_does_not_change() -> None:
    with fleet_of(LARGE, "a", timeout_s=PATIENCE_S) as fleet:
        (steady,) = fleet.receivers
        fleet.publish(0)
        fleet.wait(0, steady)
        late = fleet.join("late", "SIGSTOP")
        fleet.wait_for(lambda: stopped(late))
        for version in range(1, 5):
            fleet.publish(version)
            fleet.wait(version, steady)
            assert late.peer in fleet.publisher._pulls
        assert any(line.startswith("late pulls weights 0: asked for") for line in fleet.publisher.problems())
        late.signal(signal.SIGCONT)
        # The bytes of version 0, in spite of everything written since.
        fleet.wait_for(lambda: 0 in late.checksums)
        fleet.wait(4, late)
        assert late.epochs[4] >= 0
        assert fleet.excluded() == []


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert [child for child in multiprocessing.active_children() if child.is_alive()] == []
