"""The dispatcher writes the rollout log, also at the end of a pass over the data."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.common.records.rows import EpochRow
from offbeat.learner.dispatch import run_state
from offbeat.learner.leases.events import Accepted, Expired, Granted, Started, Trained
from offbeat.learner.leases.ledger import needed_position
from offbeat.learner.leases.log_reading import LogFullError, Position, read_log
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.messages import Ack, Cancel, Goodbye, Lease, LeaseFailed
from offbeat.protocols.payload import CompletionMeta, Segment
from offbeat.protocols.wire import token_ids
from tests.learner.dispatch.dispatch_desk import (
    LEASE_TIMEOUT_S,
    NUM_PROMPTS,
    Actor,
    Desk,
    WillingLog,
    make_prompts,
)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[WillingLog]:
    log = WillingLog(tmp_path / "log")
    yield log
    log.close()


def test_everything_that_happens_to_a_lease_is_in_the_log_in_order(log: WillingLog) -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=1", log=log)
    desk.dispatcher.begin()
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    actor.answer(first.lease_id)
    desk.train()
    actor.say(LeaseFailed(lease_id=second.lease_id, reason="returned"))
    prompt_ids = [lease.prompt_id for lease in (first, second)]
    prompts = make_prompts(NUM_PROMPTS, "train")
    hashes = [prompts[prompt_id].content_hash for prompt_id in prompt_ids]
    assert hashes[0] != hashes[1]
    assert log.events() == [
        Started(at=7.0, run_id="run", learner_incarnation=77, policy_version=0),
        *(
            Granted(
                at=7.0,
                lease_id=index,
                prompt_id=prompt_id,
                epoch=0,
                actor="a",
                policy_version=0,
                oldest_version=0,
                prompt_hash=hashes[index],
                epoch_size=20,
            )
            for index, prompt_id in enumerate(prompt_ids)
        ),
        Accepted(
            at=7.0,
            lease_id=first.lease_id,
            actor="a",
            completions=tuple(CompletionMeta(2, "stop", reward, (Segment(0, 0),)) for reward in (0.0, 1.0)),
            generate_s=0.1,
            policy_version=0,
            prompt_hash=hashes[0],
            reward_s=0.0,
        ),
        Trained(
            at=7.0,
            lease_ids=(first.lease_id,),
            policy_version=0,
            num_steps=1,
            selected_at=7.0,
            selected_after=4,
            prompt_hashes=(hashes[0],),
        ),
        Expired(at=7.0, lease_id=second.lease_id, reason="handed back by the actor"),
    ]


def test_shares_from_before_the_start_do_not_count_towards_the_place_of_a_selection(log: WillingLog) -> None:
    desk = Desk("train.groups_per_step=1", log=log, tasks=["sums"])
    desk.dispatcher.weigh({"sums": 1.0})
    desk.dispatcher.begin()
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    actor.answer(lease.lease_id)
    desk.train()
    events = log.events()
    started = next(index for index, event in enumerate(events) if isinstance(event, Started))
    (trained,) = [event for event in events if isinstance(event, Trained)]
    assert started + trained.selected_after == events.index(trained), "readers count from the start of the process"


def test_group_is_in_the_log_when_its_acknowledgement_leaves(log: WillingLog) -> None:
    desk = Desk(log=log)
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    commits = log.num_commits
    actor.answer(lease.lease_id, ids=(8, 9))
    (record,) = [record for record in log.records() if isinstance(record.event, Accepted)]
    assert token_ids(record.arrays[0]).tolist() == [8, 9, 8, 9]
    assert needed_position(desk.ledger.state().open, Position(9, 0)) == record.position
    desk.tick()
    assert log.num_commits == commits + 1, "on disk, if so configured, before the messages of this round are sent"


@pytest.mark.parametrize("how", ["append", "space"])
def test_full_log_no_lease_no_acknowledgement_no_expiry_then_all_goes_on(log: WillingLog, how: str) -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=2", log=log)
    actor = Actor(desk, "a").join(capacity=2)
    first, second = actor.leases()
    log.will_append = False
    log.has_room = how == "append"
    desk.tick()
    actor.send_group(first.lease_id)
    actor.say(LeaseFailed(lease_id=second.lease_id, reason="reward_error"))
    assert actor.heard(Ack) == []
    assert desk.dispatcher.counts().in_flight == 2
    actor.credit(3)
    desk.tick(LEASE_TIMEOUT_S * 2, actor)
    assert actor.heard(Lease) == []
    assert actor.heard(Cancel) == []
    assert desk.batch() is None
    assert len(desk.events("log_full")) >= 1
    assert "disk is full" in desk.status().problems[0]
    log.will_append = log.has_room = True
    desk.tick(1.0, actor)
    assert len(desk.events("log_has_room")) >= 1
    assert desk.status().problems == ()
    assert len(actor.heard(Lease)) == 1
    # The actor keeps what is not acknowledged.
    assert actor.answer(first.lease_id).outcome == "accepted"
    actor.say(LeaseFailed(lease_id=second.lease_id, reason="reward_error"))
    assert len(actor.heard(Ack)) == 1
    assert len(desk.train()) == 1
    counts = desk.dispatcher.counts()
    assert (counts.trained, counts.dropped, counts.expired) == (1, {"reward_error": 1}, 0)


def test_limit_that_the_free_space_does_not_show_is_one_full_log_and_moves_no_deadline(tmp_path: Path) -> None:
    now = 0.0
    log = RolloutLog(tmp_path, run_id="run", fsync="off", retain_bytes=1 << 20, min_free_bytes=0, clock=lambda: now)
    desk = Desk("staleness.max_staleness=8", log=log)
    actor = Actor(desk, "a").join(capacity=1)
    (lease,) = actor.leases()
    deadlines = dict(desk.lease_desk.deadlines)
    actor.credit(2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.end.offset + 10, limits[1]))
    try:
        for _ in range(20):
            now += 1.0
            desk.tick(1.0, actor)
            assert desk.lease_desk.deadlines == deadlines
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (len(desk.events("log_full")), desk.events("log_has_room")) == (1, [])
    now += 1.0
    desk.tick(1.0, actor)
    assert (len(desk.events("log_full")), len(desk.events("log_has_room"))) == (1, 1)
    assert len(actor.heard(Lease)) == 1
    assert actor.answer(lease.lease_id).outcome == "accepted"
    log.close()


def test_what_cannot_wait_for_room_is_logged_later_in_its_order(log: WillingLog) -> None:
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=2", log=log)
    desk.dispatcher.begin()
    leaver = Actor(desk, "leaver").join(capacity=1)
    (left,) = leaver.leases()
    actor = Actor(desk, "a").join(capacity=2)
    trained, failed = actor.leases()
    actor.answer(trained.lease_id)
    log.will_append = False
    leaver.say(Goodbye(reason="x"))
    desk.train()
    # Room comes between two ticks: the failure must not overtake what happened before it.
    log.will_append = True
    actor.say(LeaseFailed(lease_id=failed.lease_id, reason="reward_error"))
    assert actor.heard(Ack) == []
    assert [type(event) for event in log.events()][-1] is Accepted
    desk.tick()
    actor.say(LeaseFailed(lease_id=failed.lease_id, reason="reward_error"))
    assert len(actor.heard(Ack)) == 1
    ends = [event for event in log.events() if not isinstance(event, Started | Granted | Accepted)]
    assert [type(event).__name__ for event in ends] == ["Expired", "Trained", "Dropped"]
    assert desk.stream.state().returned[0].prompt_id != left.prompt_id, "which was leased again meanwhile"


def test_no_checkpoint_rests_on_what_the_log_has_not_taken(log: WillingLog) -> None:
    desk = Desk(log=log)
    actor = Actor(desk, "a").join(capacity=1)
    actor.leases()
    log.will_append = False
    actor.say(Goodbye(reason="x"))
    with pytest.raises(LogFullError):
        desk.dispatcher.state()
    log.will_append = True
    state = desk.dispatcher.state()
    assert state.log_end == log.end
    assert isinstance(log.events()[-1], Expired)


def test_learner_begins_although_the_disk_is_full(log: WillingLog) -> None:
    log.will_append = False
    desk = Desk(log=log)
    desk.dispatcher.begin()
    actor = Actor(desk, "a").join(capacity=1)
    assert actor.leases() == []
    log.will_append = True
    assert len(actor.leases()) == 1
    assert isinstance(log.events()[0], Started)


def test_log_is_cut_short_by_nothing_that_the_oldest_checkpoint_needs(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log", run_id="run", fsync="off", segment_bytes=600, retain_bytes=600, min_free_bytes=0)
    desk = Desk("train.groups_per_step=1", "staleness.max_staleness=9", log=log)
    actor = Actor(desk, "a").join(capacity=9)
    needed = log.end
    for lease in actor.leases():
        actor.answer(lease.lease_id)
    desk.dispatcher.prune_log(needed)
    assert desk.dispatcher.is_log_over()
    assert len(list(read_log(tmp_path / "log", needed))) == 18
    for _ in range(9):
        desk.train()
    desk.dispatcher.prune_log(needed_position(desk.ledger.state().open, log.end))
    assert not desk.dispatcher.is_log_over()
    assert log.num_bytes <= 1200
    log.close()


def test_at_the_end_of_a_pass_each_prompt_was_trained_or_is_listed_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_state, "MAX_LEASE_ATTEMPTS", 2)
    desk = Desk(
        "train.groups_per_step=1",
        "staleness.max_staleness=9",
        "loss.zero_variance=drop",
        num_prompts=4,
    )
    actor = Actor(desk, "a").join(capacity=4)
    good, same, bad, silent = actor.leases()
    actor.answer(good.lease_id)
    desk.train()
    actor.answer(same.lease_id, rewards=(1.0, 1.0))
    actor.say(LeaseFailed(lease_id=bad.lease_id, reason="reward_error"))
    actor.say(LeaseFailed(lease_id=silent.lease_id, reason="returned"))
    actor.commit(1)
    # The others are of the next pass.
    bad_again, silent_again, *_ = actor.leases()
    actor.say(LeaseFailed(lease_id=bad_again.lease_id, reason="reward_error"))
    desk.tick()
    assert desk.rows_of(EpochRow) == [], "one prompt is still on its way"
    actor.heard(Ack)
    actor.answer(silent_again.lease_id)
    desk.train()
    desk.tick()
    (row,) = desk.rows_of(EpochRow)
    assert (row.epoch, row.num_trained) == (0, 2)
    assert row.dropped == {"zero_variance": [same.prompt_id], "reward_error": [bad.prompt_id]}
    desk.tick()
    assert len(desk.rows_of(EpochRow)) == 1


def test_no_training_lease_is_granted_while_the_disk_is_about_to_be_full(log: WillingLog) -> None:
    desk = Desk(log=log)
    actor = Actor(desk, "a").join(capacity=2)
    log.has_room = False
    assert actor.leases() == []
    log.has_room = True
    assert len(actor.leases()) == 2
