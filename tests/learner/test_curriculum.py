"""The curriculum sees the results after each batch, and its shares decide what is leased from then on."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import EpochRow
from offbeat.learner.curriculum import Curriculum, Function
from offbeat.learner.leases.events import Granted, Started, Weighed
from offbeat.learner.leases.groups import TaskResults
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.leases.recovery import Recovered, recover
from tests.learner.dispatch.dispatch_desk import Actor, Desk, WillingLog, make_prompts

TASKS = ("easy", "hard")
NUM_PROMPTS = {"easy": 4, "hard": 4}
EASY, HARD = {"easy": 1.0, "hard": 0.0}, {"easy": 0.0, "hard": 1.0}
SETTINGS = ("train.groups_per_step=1", "staleness.max_staleness=9")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WillingLog]:
    log = WillingLog(tmp_path / "log")
    yield log
    log.close()


class Weigher:
    """The user's function: returns or raises what the test says, and notes what it was called with."""

    def __init__(self, outcome: dict[str, float] | Exception) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Mapping[str, TaskResults], int]] = []
        self.may_return = threading.Event()
        self.may_return.set()

    def __call__(self, results: Mapping[str, TaskResults], policy_version: int) -> dict[str, float]:
        self.calls.append((results, policy_version))
        assert self.may_return.wait(10)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def make_desk(log: WillingLog | None = None, recovered: Recovered | None = None) -> Desk:
    return Desk(*SETTINGS, num_prompts=8, tasks=TASKS, log=log, recovered=recovered)


def make_curriculum(desk: Desk, function: Function | None) -> Curriculum:
    return Curriculum(function, NUM_PROMPTS, desk.dispatcher, desk.rows.append)


def finish(curriculum: Curriculum) -> None:
    assert curriculum._call is not None
    curriculum._call.join(10)
    assert not curriculum._call.is_alive()


def leased(actor: Actor) -> list[str]:
    """Return the tasks of the leases that the next tick brings."""
    return [TASKS[lease.prompt_id % 2] for lease in actor.leases()]


def recover_from(log: WillingLog) -> Recovered:
    return recover(None, read_log(log.folder), lambda _: None, make_prompts(8, "train", TASKS), seed=0)


def test_run_begins_with_the_shares_of_a_function_that_has_seen_nothing(log: WillingLog) -> None:
    desk = make_desk(log)
    weigher = Weigher(EASY)
    curriculum = make_curriculum(desk, weigher)
    curriculum.begin(0)
    assert weigher.calls == [({"easy": TaskResults(4, 1.0), "hard": TaskResults(4, 1.0)}, 0)]
    assert curriculum.shares() == EASY
    assert leased(Actor(desk, "a").join(capacity=9)) == ["easy"] * 9
    first, second, *_ = log.events()
    assert first == Weighed(at=7.0, shares=EASY, policy_version=0)
    assert isinstance(second, Granted)
    assert second.task == "easy"


def test_function_that_fails_at_the_start_ends_it() -> None:
    desk = make_desk()
    with pytest.raises(SettingError, match="no weights"):
        make_curriculum(desk, Weigher(SettingError("data.curriculum", "mine:weigh", "no weights", "Return some."))).begin(0)


def test_results_of_a_batch_change_what_is_leased_after_it(log: WillingLog) -> None:
    desk = make_desk(log)
    weigher = Weigher(EASY)
    curriculum = make_curriculum(desk, weigher)
    curriculum.begin(0)
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    actor.answer(lease.lease_id, rewards=(1.0, 1.0))
    desk.train()
    weigher.outcome = HARD
    curriculum.observe(1)
    finish(curriculum)
    results, version = weigher.calls[1]
    assert (version, results["easy"].num_groups, results["easy"].reward, results["easy"].without_signal) == (1, 1, 1.0, 1.0)
    assert (results["easy"].share, results["hard"].share, results["hard"].reward) == (1.0, 0.0, None)
    actor.credit(6)
    assert leased(actor) == ["hard"] * 6
    curriculum.observe(2)
    finish(curriculum)
    assert [event.shares for event in log.events() if isinstance(event, Weighed)] == [EASY, HARD], "shares as before: no event"


def test_function_that_fails_leaves_the_shares_and_is_told_and_counted() -> None:
    desk = make_desk()
    weigher = Weigher(EASY)
    curriculum = make_curriculum(desk, weigher)
    curriculum.begin(0)
    weigher.outcome = SettingError("data.curriculum", "mine:weigh", "it raised KeyError", "Correct it.")
    for version in (1, 2):
        curriculum.observe(version)
        finish(curriculum)
    assert [row.policy_version for row in desk.events("curriculum_failed")] == [1, 2]
    assert "stay as they are: data.curriculum" in desk.events("curriculum_failed")[0].detail
    assert curriculum.shares() == EASY
    weigher.outcome = HARD
    curriculum.observe(3)
    finish(curriculum)
    assert curriculum.shares() == HARD


def test_training_does_not_wait_for_the_function_nor_is_it_called_twice_at_a_time() -> None:
    desk = make_desk()
    weigher = Weigher(EASY)
    curriculum = make_curriculum(desk, weigher)
    curriculum.begin(0)
    weigher.outcome = HARD
    weigher.may_return.clear()
    curriculum.observe(1)
    curriculum.observe(2)
    assert curriculum.shares() == EASY
    weigher.may_return.set()
    finish(curriculum)
    assert [version for _, version in weigher.calls] == [0, 1]
    assert curriculum.shares() == HARD


def test_nothing_is_weighed_after_the_run_has_ended(log: WillingLog) -> None:
    desk = make_desk(log)
    weigher = Weigher(EASY)
    curriculum = make_curriculum(desk, weigher)
    curriculum.begin(0)
    weigher.outcome = HARD
    weigher.may_return.clear()
    curriculum.observe(1)
    curriculum.close()
    weigher.may_return.set()
    finish(curriculum)
    assert (curriculum.shares(), len(log.events())) == (EASY, 1)


def test_learner_that_dies_between_the_event_and_its_effect_has_the_shares_when_it_is_back(log: WillingLog) -> None:
    desk = make_desk(log)
    make_curriculum(desk, Weigher(EASY)).begin(0)
    before = [TASKS[lease.prompt_id % 2] for lease in Actor(desk, "a").join(capacity=2).leases()]
    log.append(Weighed(at=0.0, shares=HARD, policy_version=0))
    desk = make_desk(recovered=recover_from(log))
    weigher = Weigher(EASY)
    curriculum = make_curriculum(desk, weigher)
    curriculum.begin(0)
    assert (before, weigher.calls, curriculum.shares()) == (["easy", "easy"], [], HARD)
    # The two that the actor lost come first.
    desk.tick(100.0)
    assert leased(Actor(desk, "b").join(capacity=6)) == ["easy"] * 2 + ["hard"] * 4


def test_curriculum_that_is_gone_at_a_resume_leaves_all_prompts_to_be_leased(log: WillingLog) -> None:
    desk = make_desk(log)
    make_curriculum(desk, Weigher(EASY)).begin(0)
    desk = make_desk(recovered=recover_from(log), log=log)
    curriculum = make_curriculum(desk, None)
    curriculum.begin(0)
    curriculum.observe(1)
    assert (curriculum.shares(), desk.stream.shares) == ({}, {})
    assert sorted(leased(Actor(desk, "a").join(capacity=8))) == ["easy"] * 4 + ["hard"] * 4
    assert [event.shares for event in log.events() if isinstance(event, Weighed)] == [EASY, {}]


def test_run_without_a_curriculum_writes_no_event(log: WillingLog) -> None:
    desk = make_desk(log)
    make_curriculum(desk, None).begin(0)
    assert log.events() == []


def test_shares_given_while_the_disk_is_full_reach_the_log_before_the_leases_that_follow_them(log: WillingLog) -> None:
    desk = make_desk(log)
    desk.dispatcher.begin()
    log.will_append = False
    desk.dispatcher.weigh(EASY)
    actor = Actor(desk, "a").join(capacity=2)
    assert actor.leases() == []
    log.will_append = True
    assert leased(actor) == ["easy"] * 2
    assert [type(event) for event in log.events()] == [Started, Weighed, Granted, Granted]
    assert recover_from(log).stream.state() == desk.stream.state()


def test_pass_ends_with_the_prompts_that_were_left_out_counted() -> None:
    desk = make_desk()
    make_curriculum(desk, Weigher(EASY)).begin(0)
    actor = Actor(desk, "a").join(capacity=5)
    for lease in actor.leases():
        actor.answer(lease.lease_id)
        desk.train()
    desk.tick()
    (row,) = desk.rows_of(EpochRow)
    assert (row.epoch, row.num_trained, row.num_left_out) == (0, 4, 4)


def test_run_whose_tasks_are_gone_is_not_resumed(log: WillingLog) -> None:
    make_curriculum(make_desk(log), Weigher(EASY)).begin(0)
    with pytest.raises(SettingError, match=r"gave a share to the task 'easy'.*data\.task_field as it was"):
        recover(None, read_log(log.folder), lambda _: None, make_prompts(8, "train", ("other",)), seed=0)
