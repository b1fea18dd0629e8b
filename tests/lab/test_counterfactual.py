"""Recorded runs under other bounds: hand-made logs with known outcomes."""

from dataclasses import replace
from typing import Any

import pytest

from offbeat.common.settings.config import Config, DataSection, ModelSection, StalenessSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.lab.counterfactual import (
    NEVER_GENERATED,
    LeaseEnds,
    Recording,
    differences,
    read_recording,
    recorded_ends,
    replay,
)
from offbeat.learner.leases.events import Dropped, Expired, LeaseEvent, Started, Tuned
from offbeat.learner.leases.log_reading import Position, Record
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained

# Hand-made logs


class Tale:
    """A log written by hand: a second for each record and each selection, a completion of two tokens in every group."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.now = 0.0
        self.selected = (0.0, 0)

    def add(self, event: LeaseEvent, *arrays: bytes) -> None:
        self.records.append(Record(Position(1, len(self.records)), event, tuple(map(memoryview, arrays))))
        self.now += 1.0

    def start(self, version: int = 0) -> None:
        self.first = len(self.records)
        self.add(Started(at=self.now, run_id="r", learner_incarnation=1, policy_version=version))

    def grant(self, *lease_ids: int, version: int, oldest: int | None = None) -> None:
        for lease_id in lease_ids:
            self.add(
                make_granted(
                    lease_id,
                    at=self.now,
                    prompt_id=lease_id,
                    policy_version=version,
                    oldest_version=version if oldest is None else oldest,
                )
            )

    def accept(self, *lease_ids: int, versions: tuple[int, ...] = (0,)) -> None:
        for lease_id in lease_ids:
            segments = tuple(Segment(version, token) for token, version in enumerate(versions))
            meta = CompletionMeta(num_tokens=2, finish_reason="stop", reward=1.0, segments=segments)
            event = make_accepted(lease_id, at=self.now, completions=(meta,), generate_s=1.0)
            self.add(event, bytes(8), bytes(8))

    def drop(self, lease_id: int, reason: str) -> None:
        self.add(Dropped(at=self.now, lease_id=lease_id, reason=reason, is_final=False))

    def expire(self, lease_id: int) -> None:
        self.add(Expired(at=self.now, lease_id=lease_id, reason="late"))

    def tune(self, **settings: str) -> None:
        texts = {f"staleness.{name}": text for name, text in settings.items()}
        self.add(Tuned(at=self.now, settings=texts, who="me", reason="", policy_version=0))

    def select(self) -> None:
        self.selected = (self.now, len(self.records) - self.first)
        self.now += 1.0

    def train(self, *lease_ids: int, version: int, num_steps: int = 1) -> None:
        at, after = self.selected
        self.add(
            make_trained(
                *lease_ids, at=self.now, policy_version=version, num_steps=num_steps, selected_at=at, selected_after=after
            )
        )

    @property
    def recording(self) -> Recording:
        return read_recording(self.records)


def make_config(*, groups_per_step: int = 1, steps_per_batch: int = 1, epochs_per_batch: int = 1, **staleness: Any) -> Config:
    return Config(
        model=ModelSection(path="model"),
        data=DataSection(train_data="data.jsonl"),
        staleness=StalenessSection(**staleness),
        train=TrainSection(
            num_steps=40,
            groups_per_step=groups_per_step,
            steps_per_batch=steps_per_batch,
            epochs_per_batch=epochs_per_batch,
        ),
    )


def lease_ids(ends: LeaseEnds) -> list[list[int]]:
    return [[group.lease_id for group in batch.groups] for batch in ends.batches]


def adds_up(ends: LeaseEnds) -> bool:
    num_trained = sum(len(batch.groups) for batch in ends.batches)
    return len(ends.admitted) == num_trained + len(ends.dropped) + len(ends.expired) + ends.num_left


def tell(*, is_ticked_late: bool = False) -> Tale:
    """Bound 2, one group a step: three leases at once, the third is late and lags by 3; `is_ticked_late`: a tick before it."""
    tale = Tale()
    tale.start()
    tale.grant(0, 1, 2, version=0)
    tale.accept(0, versions=(0, 0))
    tale.select()
    tale.train(0, version=0)
    tale.grant(3, version=1)
    tale.accept(1)
    tale.select()
    tale.train(1, version=1)
    tale.grant(4, version=2)
    tale.accept(3, versions=(1,))
    tale.select()
    tale.train(3, version=2)
    if is_ticked_late:
        tale.grant(9, version=3)
    tale.accept(2)
    tale.select()
    tale.train(2, version=3)
    return tale


@pytest.fixture
def tale() -> Tale:
    return tell()


def test_the_recorded_settings_give_what_was_recorded(tale: Tale) -> None:
    config = make_config(max_staleness=2)
    recorded = recorded_ends(tale.recording, config)
    ends = replay(tale.recording, config)
    assert differences(recorded, ends) == []
    assert (ends.admitted, ends.arrived) == ([0, 1, 2, 3, 4], [0, 1, 3, 2])
    assert lease_ids(ends) == [[0], [1], [3], [2]]
    assert ends.lags == [0, 1, 1, 3]
    assert [group.is_over_bound for batch in ends.batches for group in batch.groups] == [False, False, False, True]
    assert (ends.num_left, ends.num_older) == (recorded.num_left, 0) == (1, 0)
    assert ends.duration_s == recorded.duration_s == 17.0


def test_narrower_bound_admits_fewer_leases_and_those_alone_arrive(tale: Tale) -> None:
    ends = replay(tale.recording, make_config(max_staleness=2), {"staleness.max_staleness": "0"})
    # One lease at a time: 1 and 2 were granted while 0 is open, 4 while 3 is.
    assert (ends.num_recorded, ends.admitted, ends.arrived) == (5, [0, 3], [0, 3])
    assert lease_ids(ends) == [[0], [3]]
    assert ends.lags == [0, 0]
    assert adds_up(ends)


def test_late_learner_takes_the_median_time_and_its_weights_are_as_late_as_it_is(tale: Tale) -> None:
    tale.grant(5, version=4, oldest=2)
    tale.accept(5, versions=(2,))
    tale.select()
    tale.train(5, version=4)
    assert (tale.recording.train_s, tale.recording.pause_s) == (1.0, 2.0)
    ends = replay(tale.recording, make_config(max_staleness=2), {"staleness.max_staleness": "0"})
    assert lease_ids(ends) == [[0], [3], [5]]
    # 0 is selected where it was, at 5; 3 arrives at 12 and 5 at 19, after the recorded selections at 9 and 13.
    assert [batch.at for batch in ends.batches] == [6.0, 13.0, 20.0]
    # 5 was sampled under the recorded version 2, of 10, when the replayed learner had made 1; it has made 2 when it takes 5.
    assert ends.lags == [0, 0, 1]
    assert ends.num_older == 1


def test_late_learner_pauses_between_batches_as_the_recorded_one_did_at_least() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, 2, version=0)
    tale.accept(0)
    tale.select()
    tale.train(0, version=0)
    tale.select()
    tale.accept(1)
    tale.train(1, version=1)
    tale.accept(2)
    tale.select()
    tale.train(2, version=2)
    tale.grant(3, 4, 5, 6, version=3)
    recording = tale.recording._replace(train_s=3.0, pause_s=2.0)
    # By an error of this log 1 arrives, at 8, after its selection: the replayed learner is late from there on.
    ends = replay(recording, make_config(max_staleness=2))
    assert [batch.at for batch in ends.batches] == [6.0, 8.0 + 3.0, 11.0 + 2.0 + 3.0]


def test_wider_bound_shows_what_was_recorded_and_no_more(tale: Tale) -> None:
    ends = replay(tale.recording, make_config(max_staleness=2), {"staleness.max_staleness": "9"})
    assert lease_ids(ends) == [[0], [1], [3], [2]]
    assert not any(group.is_over_bound for batch in ends.batches for group in batch.groups)


def test_straggler_is_dropped_under_drop_and_aborted_while_it_is_generated_under_abort(tale: Tale) -> None:
    tale.grant(5, version=4)
    config = make_config(max_staleness=2)
    dropping = replay(tale.recording, config, {"staleness.staleness_policy": '"drop"'})
    assert dropping.dropped == [(2, "stale")]
    assert lease_ids(dropping) == [[0], [1], [3]]
    aborting = replay(tale.recording, config, {"staleness.staleness_policy": '"abort"'})
    # At version 3 lease 2 is too old; the next tick that the log knows of is the grant of 5, and 2 has arrived by then.
    assert aborting.dropped == [(2, "stale")]
    aborting = replay(tell(is_ticked_late=True).recording, config, {"staleness.staleness_policy": '"abort"'})
    assert (aborting.dropped, aborting.arrived) == ([(2, "aborted")], [0, 1, 3])


def test_group_that_only_the_recorded_bound_aborted_never_arrives_and_one_it_dropped_is_trained() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, version=0)
    tale.accept(0)
    tale.select()
    tale.train(0, version=0)
    tale.drop(1, "aborted")
    tale.grant(2, version=1)
    tale.accept(2, versions=(0,))
    tale.drop(2, "stale")
    tale.grant(3, version=1)
    tale.accept(3, versions=(1,))
    tale.select()
    tale.train(3, version=1)
    config = make_config(max_staleness=0, staleness_policy="abort")
    ends = replay(tale.recording, config, {"staleness.max_staleness": "1", "staleness.staleness_policy": '"gate"'})
    assert ends.dropped == [(1, NEVER_GENERATED)]
    assert lease_ids(ends) == [[0], [2]]
    assert ends.lags == [0, 1]
    assert adds_up(ends)


def test_groups_are_selected_in_the_order_of_their_leases() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, 2, version=0)
    tale.accept(2, 0, 1)
    for version, lease_id in enumerate((0, 1, 2)):
        tale.select()
        tale.train(lease_id, version=version)
    config = make_config(max_staleness=2)
    assert lease_ids(replay(tale.recording, config)) == [[0], [1], [2]]


def test_lag_is_of_the_last_of_a_batchs_steps_and_epochs() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, version=0)
    tale.accept(0, 1)
    tale.select()
    tale.train(0, 1, version=0, num_steps=4)
    config = make_config(steps_per_batch=2, epochs_per_batch=2, max_staleness=3)
    ends = replay(tale.recording, config)
    assert differences(recorded_ends(tale.recording, config), ends) == []
    # Steps 0 1 0 1: lease 0 is trained on last at version 2, lease 1 at version 3.
    assert ends.lags == [2, 3]


def test_what_the_bound_does_not_decide_is_taken_as_recorded() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, 2, version=0)
    tale.expire(0)
    tale.accept(1)
    tale.drop(1, "zero_variance")
    tale.drop(2, "reward_error")
    ends = replay(tale.recording, make_config(max_staleness=4))
    assert (ends.expired, ends.dropped, ends.num_left) == ([0], [(1, "zero_variance"), (2, "reward_error")], 0)
    # 1 and 2 were never admitted here, so nothing is to be taken.
    narrow = replay(tale.recording, make_config(max_staleness=4), {"staleness.max_staleness": "0"})
    assert (narrow.admitted, narrow.expired, narrow.dropped) == ([0], [0], [])


def test_late_learner_never_trains_on_a_group_that_its_arrival_got_dropped(tale: Tale) -> None:
    tale.grant(5, version=4)
    tale.accept(5, versions=(4,))
    tale.drop(5, "zero_variance")
    ends = replay(tale.recording, make_config(max_staleness=2), {"staleness.max_staleness": "0"})
    assert lease_ids(ends) == [[0], [3]]
    assert ends.dropped == [(5, "zero_variance")]


def test_restart_undoes_the_batches_after_its_checkpoint_and_their_groups_are_there_again(tale: Tale) -> None:
    tale.start(version=1)
    tale.select()
    tale.train(1, version=1)
    config = make_config(max_staleness=2)
    ends = replay(tale.recording, config)
    assert differences(recorded_ends(tale.recording, config), ends) == []
    assert [batch.groups[0].lease_id for batch in ends.trainings] == [0, 1, 3, 2, 1]
    assert lease_ids(ends) == [[0], [1]]
    assert ends.num_left == 3
    # Under the narrow bound the replayed learner was at version 1, too, when the recorded one was; 3 is undone.
    narrow = replay(tale.recording, config, {"staleness.max_staleness": "0"})
    assert [batch.groups[0].lease_id for batch in narrow.trainings] == [0, 3, 3]
    assert lease_ids(narrow) == [[0], [3]]


def test_group_sampled_under_weights_that_no_record_tells_of_is_as_old_as_it_says() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, 2, version=0)
    # A power failure took the record of the first step, and not the weights from the actor that had them.
    tale.start(version=0)
    tale.accept(2, versions=(1,))
    tale.accept(0, 1)
    for version, lease_id in enumerate((0, 1, 2)):
        tale.select()
        tale.train(lease_id, version=version)
    config = make_config(max_staleness=2)
    ends = replay(tale.recording, config)
    assert differences(recorded_ends(tale.recording, config), ends) == []
    assert ends.lags == [0, 1, 1]


def test_restart_finds_the_replayed_learner_as_late_as_it_was_at_the_checkpoint(tale: Tale) -> None:
    """The recorded learner goes back to its version 3, when the replayed one had made 2."""
    tale.start(version=3)
    tale.grant(5, version=3)
    tale.accept(5, versions=(3,))
    tale.select()
    tale.train(5, version=3)
    ends = replay(tale.recording, make_config(max_staleness=2), {"staleness.max_staleness": "0"})
    assert lease_ids(ends) == [[0], [3], [5]]
    assert ends.lags == [0, 0, 0]
    assert [batch.policy_version for batch in ends.batches] == [0, 1, 2]


def test_restart_undoes_what_a_late_learner_is_at(tale: Tale) -> None:
    tale.start(version=4)
    tale.now = 300.0
    tale.expire(4)
    recording = tale.recording._replace(train_s=100.0)
    ends = replay(recording, make_config(max_staleness=2), {"staleness.max_staleness": "0"})
    # 3 arrives at 12, the restart is at 18.
    assert [batch.at for batch in ends.trainings] == [6.0, 118.0]


def test_nothing_is_dropped_for_its_age_before_a_batch_is_at_hand() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, 1, 2, 3, version=0)
    tale.accept(0, 1)
    tale.select()
    tale.train(0, 1, version=0)
    tale.grant(4, 5, version=1)
    tale.accept(4, 5, versions=(1,))
    tale.select()
    tale.train(4, 5, version=1)
    tale.accept(2)
    tale.select()
    tale.expire(3)
    tale.train(2, version=2)
    config = make_config(groups_per_step=2, max_staleness=1, staleness_policy="drop")
    ends = replay(tale.recording, config)
    # 2 lags by 2, but without another group nobody would train on it.
    assert (lease_ids(ends), ends.dropped, ends.num_left) == ([[0, 1], [4, 5]], [], 1)


def test_settings_changed_while_the_run_went_on_are_followed_but_for_those_of_the_replay() -> None:
    tale = Tale()
    tale.start()
    tale.grant(0, version=0)
    tale.tune(max_staleness="1")
    tale.grant(1, version=0)
    config = make_config(max_staleness=0)
    assert replay(tale.recording, config).admitted == [0, 1]
    assert differences(recorded_ends(tale.recording, config), replay(tale.recording, config)) == []
    assert replay(tale.recording, config, {"staleness.max_staleness": "0"}).admitted == [0]
    assert replay(tale.recording, config, {"staleness.staleness_policy": '"drop"'}).admitted == [0, 1]


def test_leases_that_began_under_older_weights_than_the_bound_lets_begin_are_counted(tale: Tale) -> None:
    tale.grant(5, version=4, oldest=1)
    config = make_config(max_staleness=2)
    # Trained next but one, 4 being open: at version 5, so that weights 3 are the oldest allowed.
    assert replay(tale.recording, config).num_older == 1
    assert replay(tale.recording, config, {"staleness.max_staleness": "4"}).num_older == 0


def test_replay_that_is_not_what_was_recorded_says_where(tale: Tale) -> None:
    recorded = recorded_ends(tale.recording, make_config(max_staleness=2))
    found = differences(recorded, replay(tale.recording, make_config(max_staleness=1)))
    assert found[0] == "admitted: number 2 is 2 in the log, and 3 in the replay"
    assert [text.split(":")[0] for text in found] == ["admitted", "trained", "trained and kept"]
    shorter = replace(recorded, expired=[7])
    assert differences(recorded, shorter) == ["expired: 0 in the log, and 1 in the replay"]


def test_log_without_a_batch_replays_as_nothing() -> None:
    assert replay(read_recording([]), make_config()).batches == []
    assert read_recording([]).train_s == 0.0
