"""Hand-made logs and checkpoints, recovered to states known in advance."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.common.errors import SettingError
from offbeat.learner.leases.events import Dropped, Expired, Started, Tuned
from offbeat.learner.leases.journal import DispatcherState
from offbeat.learner.leases.ledger import UNSEEN_LEASES, needed_position
from offbeat.learner.leases.log_reading import Position, Record, read_history, read_log, read_record
from offbeat.learner.leases.prompt_stream import PromptStream, PromptTurn
from offbeat.learner.leases.prompts import Prompt
from offbeat.learner.leases.recovery import Recovered, RecoveryError, recover
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.dispatch.dispatch_desk import NUM_PROMPTS as DESK_PROMPTS
from tests.learner.dispatch.dispatch_desk import (
    Actor,
    Desk,
    make_prompts,
)
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained
from tests.learner.leases.taped_log import NUM_PROMPTS, PROMPTS

pytestmark = pytest.mark.slow


class Tale:
    """A log written by hand, record after record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = RolloutLog(folder, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 20, min_free_bytes=0)
        self.stream = PromptStream(NUM_PROMPTS, seed=0)
        self.positions: dict[int, Position] = {}
        self.prompt_ids: dict[int, int] = {}

    def start(self, policy_version: int = 0, run_id: str = "run") -> None:
        self.log.append(Started(at=0.0, run_id=run_id, learner_incarnation=1, policy_version=policy_version))

    def grant(self, lease_id: int, turn: PromptTurn | None = None) -> PromptTurn:
        turn = turn or self.stream.next()
        prompt_id, epoch = turn
        self.prompt_ids[lease_id] = prompt_id
        self.log.append(
            make_granted(
                lease_id, prompt_id=prompt_id, epoch=epoch, prompt_hash=PROMPTS[prompt_id].content_hash, epoch_size=NUM_PROMPTS
            )
        )
        return turn

    def accept(self, lease_id: int, ids: tuple[int, ...] = (1, 2)) -> None:
        completions = (CompletionMeta(len(ids), "stop", 0.5, (Segment(0, 0),)),)
        accepted = make_accepted(
            lease_id,
            completions=completions,
            generate_s=1.5,
            prompt_hash=PROMPTS[self.prompt_ids.get(lease_id, 0)].content_hash,
        )
        self.positions[lease_id] = self.log.append(accepted, np.array(ids, np.int32), np.full(len(ids), -1.0, np.float32))

    def train(self, *lease_ids: int, policy_version: int = 0, num_steps: int = 1) -> None:
        self.log.append(make_trained(*lease_ids, policy_version=policy_version, num_steps=num_steps))

    def expire(self, lease_id: int) -> None:
        self.log.append(Expired(at=0.0, lease_id=lease_id, reason="late"))

    def drop(self, lease_id: int, *, is_final: bool) -> None:
        self.log.append(Dropped(at=0.0, lease_id=lease_id, reason="stale", is_final=is_final))

    def tune(self, setting: str, value: str) -> Tuned:
        event = Tuned(at=0.0, settings={setting: value}, who="me", reason="", policy_version=0)
        self.log.append(event)
        return event

    def recover(self, state: DispatcherState | None = None) -> Recovered:
        start = state.log_end if state else None
        return recover(
            state, read_history(self.folder, start), lambda position: read_record(self.folder, position), PROMPTS, seed=0
        )

    def history(self) -> Iterator[Record]:
        """Yield the records."""
        return read_log(self.folder)

    def checkpoint(self) -> DispatcherState:
        """Return the checkpoint of a learner that knows the whole log."""
        recovered = self.recover()
        return DispatcherState(
            recovered.stream.state(), recovered.ledger.state(), self.log.end, recovered.newest_version, recovered.tuned
        )


@pytest.fixture
def tale(tmp_path: Path) -> Iterator[Tale]:
    tale = Tale(tmp_path / "log")
    yield tale
    tale.log.close()


def test_run_that_never_began_begins(tale: Tale) -> None:
    recovered = tale.recover()
    assert (recovered.num_records, recovered.newest_version) == (0, 0)
    assert recovered.stream.next() == PromptStream(NUM_PROMPTS, seed=0).next()
    assert recovered.ledger.num_open == 0


def test_without_a_checkpoint_all_that_was_trained_is_in_the_buffer_again(tale: Tale) -> None:
    tale.start()
    turns = [tale.grant(lease_id) for lease_id in (10, 11, 12, 13, 14)]
    for lease_id in (11, 10, 12):
        tale.accept(lease_id, ids=(lease_id, 3))
    tale.train(10, 11, policy_version=0, num_steps=2)
    tale.expire(13)
    recovered = tale.recover()
    assert (recovered.num_records, recovered.newest_version) == (11, 2)
    groups = recovered.ledger.ready_groups()
    assert [group.lease_id for group in groups] == [10, 11, 12]
    assert [group.prompt_id for group in groups] == [turn.prompt_id for turn in turns[:3]]
    assert [group.prompt_token_ids.tolist() for group in groups] == [[turn.prompt_id] for turn in turns[:3]]
    assert [group.rollouts[0].token_ids.tolist() for group in groups] == [[10, 3], [11, 3], [12, 3]]
    assert [group.rollouts[0].behavior_logprobs.tolist() for group in groups] == [[-1.0, -1.0]] * 3
    assert (groups[0].actor, groups[0].generate_s, groups[0].rollouts[0].reward) == ("a", 1.5, 0.5)
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [14]
    counts = recovered.ledger.counts()
    assert (counts.leased, counts.trained, counts.expired, counts.in_flight) == (5, 0, 1, 4)
    assert [recovered.stream.next() for _ in range(2)] == [turns[3], tale.stream.next()]
    assert recovered.ledger.epochs[0].num_trained == 0


def test_records_before_the_checkpoint_are_not_applied_again(tale: Tale) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
    tale.accept(1)
    state = tale.checkpoint()
    tale.accept(2)
    tale.grant(3)
    recovered = tale.recover(state)
    assert recovered.num_records == 2
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [1, 2]
    assert recovered.ledger.counts().leased == 3
    assert needed_position(recovered.ledger.state().open, Position(9, 0)) == tale.positions[1]


def test_group_of_a_checkpoint_that_the_log_lost_is_as_if_it_was_being_generated(
    tale: Tale, caplog: pytest.LogCaptureFixture
) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id)
    state = tale.checkpoint()
    records = list(read_log(tale.folder, state.log_end))
    recovered = recover(
        state,
        records,
        lambda position: None if position == tale.positions[1] else read_record(tale.folder, position),
        PROMPTS,
        seed=0,
    )
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [2]
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [1]
    assert "1 finished groups were lost" in caplog.text
    # The actor received an ack and has forgotten the group, so the prompt is leased to another actor.
    desk = Desk(num_prompts=NUM_PROMPTS, recovered=recovered)
    (lost,) = (lease for lease in state.ledger.open if lease.lease_id == 1)
    leases = Actor(desk, "a").join(capacity=1).leases()
    assert [lease.prompt_id for lease in leases] == [lost.prompt_id]
    assert desk.dispatcher.counts().adds_up


def test_group_that_the_log_lost_does_not_keep_what_happened_later_from_being_applied(tale: Tale) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id)
    state = tale.checkpoint()
    tale.train(1)
    tale.start(policy_version=0)
    turn = tale.grant(3)
    tale.drop(1, is_final=False)
    recovered = recover(state, read_log(tale.folder, state.log_end), lambda position: None, PROMPTS, seed=0)
    assert recovered.ledger.status(1) == "ended"
    assert recovered.ledger.find(3).prompt_id == turn.prompt_id
    assert recovered.ledger.counts().adds_up


def test_log_at_another_place_than_the_checkpoint_says_gives_no_other_leases_group(tale: Tale) -> None:
    tale.start()
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id, ids=(lease_id,))
    state = tale.checkpoint()
    swapped = read_record(tale.folder, tale.positions[2])
    recovered = recover(state, (), lambda position: swapped, PROMPTS, seed=0)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [2]


def test_lease_ids_jump_at_every_start_that_the_log_tells_of(tale: Tale) -> None:
    tale.start()
    tale.grant(5)
    tale.start()
    tale.start()
    recovered = tale.recover()
    # The processes may have leased out ids that no record tells of: for evaluation, or in a tail that was cut off.
    assert recovered.ledger.next_lease_id() >= 5 + 1 + 3 * UNSEEN_LEASES
    assert [lease.lease_id for lease in recovered.ledger.generating()] == [5]


def test_groups_trained_by_several_learners_that_died_are_trained_once_more(tale: Tale) -> None:
    tale.start(policy_version=0)
    for lease_id in (1, 2):
        tale.grant(lease_id)
        tale.accept(lease_id)
    state = tale.checkpoint()
    tale.train(1, policy_version=4)
    tale.start(policy_version=4, run_id="run")
    tale.train(1, policy_version=4)
    tale.train(2, policy_version=5, num_steps=3)
    tale.start(policy_version=4)
    recovered = tale.recover(state)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [1, 2]
    assert recovered.ledger.counts().trained == 0
    assert recovered.newest_version == 8, "groups sampled under the weights of a dead learner are not from the future"


def test_prompts_given_back_are_served_in_the_order_in_which_they_were(tale: Tale) -> None:
    tale.start()
    turns = {lease_id: tale.grant(lease_id) for lease_id in (1, 2, 3, 4)}
    tale.drop(4, is_final=True)
    tale.expire(3)
    tale.drop(1, is_final=False)
    recovered = tale.recover()
    assert [recovered.stream.next() for _ in range(2)] == [turns[3], turns[1]]
    assert recovered.ledger.epochs[0].dropped == {"stale": [turns[4].prompt_id]}


def answer_nobody(tale: Tale) -> None:
    tale.accept(9)


def answer_twice(tale: Tale) -> None:
    for _ in range(2):
        tale.accept(1)


def expire_an_answered_lease(tale: Tale) -> None:
    tale.accept(1)
    tale.expire(1)


def end_a_lease_twice(tale: Tale) -> None:
    for _ in range(2):
        tale.drop(1, is_final=True)


def grant_out_of_turn(tale: Tale) -> None:
    tale.stream.next()
    tale.grant(2)


def grant_an_open_lease(tale: Tale) -> None:
    tale.grant(1)


@pytest.mark.parametrize(
    "contradict",
    [answer_nobody, answer_twice, expire_an_answered_lease, end_a_lease_twice, grant_out_of_turn, grant_an_open_lease],
)
def test_log_that_contradicts_the_checkpoint_is_not_followed(tale: Tale, contradict: Any) -> None:
    tale.start()
    tale.grant(1)
    state = tale.checkpoint()
    contradict(tale)
    with pytest.raises(RecoveryError, match=r"does not continue the checkpoint: record Position\(segment=1, offset="):
        tale.recover(state)


def test_checkpoint_without_a_log_takes_up_what_actors_still_hold() -> None:
    before = Desk(num_prompts=NUM_PROMPTS)
    actor = Actor(before, "a").join(capacity=3)
    finished, *working = actor.leases()
    actor.answer(finished.lease_id)
    state = before.dispatcher.state()
    recovered = recover(state, (), lambda position: None, PROMPTS, seed=0)
    desk = Desk(num_prompts=NUM_PROMPTS, recovered=recovered)
    held = [lease.lease_id for lease in working]
    actor.desk = desk
    actor.join(capacity=4, lease_ids=held)
    assert [actor.answer(lease_id).outcome for lease_id in held] == ["accepted", "accepted"]
    assert [lease.prompt_id for lease in actor.leases()][:1] == [finished.prompt_id]


def test_ledger_of_a_checkpoint_with_other_prompts_is_refused() -> None:
    state = Desk(num_prompts=NUM_PROMPTS).dispatcher.state()
    with pytest.raises(SettingError, match=r"data\.train_data"):
        recover(state, (), lambda position: None, PROMPTS[:-1], seed=0)


def test_settings_that_were_changed_are_known_from_log_and_checkpoint(tale: Tale) -> None:
    tale.start()
    tale.tune("staleness.max_staleness", "6")
    tale.grant(0)
    newest = tale.tune("staleness.max_staleness", "8")
    rate = tale.tune("train.learning_rate", "0.001")
    assert tale.recover().tuned == {"staleness.max_staleness": newest, "train.learning_rate": rate}
    state = tale.checkpoint()
    # The state comes from the checkpoint alone, because the log may have been shortened.
    assert tale.recover(state).tuned == {"staleness.max_staleness": newest, "train.learning_rate": rate}
    later = tale.tune("staleness.max_staleness", "2")
    assert tale.recover(state).tuned == {"staleness.max_staleness": later, "train.learning_rate": rate}


def test_changed_prompt_of_a_logged_lease_or_group_is_refused(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "log", run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 20, min_free_bytes=0)
    desk = Desk("train.groups_per_step=9", log=log)
    desk.dispatcher.begin()
    actor = Actor(desk, "a").join(capacity=2)
    answered, running = actor.leases()
    actor.answer(answered.lease_id)
    state = desk.dispatcher.state()
    log.close()

    def recover_with(prompts: Sequence[Prompt], state: DispatcherState | None) -> Recovered:
        start = state.log_end if state else None
        history = read_history(tmp_path / "log", start)
        return recover(state, history, lambda position: read_record(tmp_path / "log", position), prompts, seed=0)

    whole = make_prompts(DESK_PROMPTS, "train")

    def changed(prompt_id: int) -> list[Prompt]:
        new = whole[prompt_id]._replace(row='{"answer": "another"}')
        return [new if prompt.prompt_id == prompt_id else prompt for prompt in whole]

    assert recover_with(whole, None).ledger.num_open == 2
    assert recover_with(whole, state).ledger.num_ready == 1
    for lease in (answered, running):
        with pytest.raises(RecoveryError, match=f"lease {lease.lease_id} was granted for another prompt than prompt"):
            recover_with(changed(lease.prompt_id), None)
    # After the checkpoint no record grants it: the finished group itself says what it is of.
    with pytest.raises(RecoveryError, match=f"lease {answered.lease_id} was granted for another prompt"):
        recover_with(changed(answered.prompt_id), state)
