"""Runs of the real dispatcher, in any order of events: each replays exactly with its own settings, and its audit is clean."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.common.records.rows import FinalRow, GroupRow
from offbeat.common.settings.config import Config
from offbeat.lab.audit import NOTHING_LOST, audit_log
from offbeat.lab.counterfactual import (
    differences,
    read_recording,
    recorded_ends,
    replay,
)
from offbeat.learner.dispatch.quarantine import MAX_MISMATCHES
from offbeat.learner.leases.groups import Group
from offbeat.learner.leases.journal import DispatcherState
from offbeat.learner.leases.log_reading import LogFullError, Position, read_log, read_record
from offbeat.learner.leases.recovery import recover
from offbeat.protocols.messages import Cancel, GroupDone, Lease, LeaseFailed
from offbeat.protocols.payload import CompletionMeta, Segment
from tests.lab.test_counterfactual import adds_up, lease_ids, make_config
from tests.learner.dispatch.dispatch_desk import CONFIG, Actor, Desk, make_prompts
from tests.learner.leases.taped_log import open_log

pytestmark = pytest.mark.slow

NUM_PROMPTS = 7
PROMPTS = make_prompts(NUM_PROMPTS, "train")


class Worker(Actor):
    """An actor that answers when it is told to."""

    def __init__(self, desk: Desk, name: str) -> None:
        super().__init__(desk, name)
        self.jobs: dict[int, int] = {}
        """Leases, with the version that each was begun under."""
        self.version = 0

    def come(self) -> None:
        self.join(capacity=5, policy_version=self.desk.versions.current, lease_ids=list(self.jobs))
        self.version = self.desk.versions.current

    def read(self) -> None:
        for lease in self.heard(Lease):
            self.jobs[lease.lease_id] = max(self.version, lease.min_policy_version)
        for cancel in self.heard(Cancel):
            for lease_id in cancel.lease_ids:
                self.jobs.pop(lease_id, None)

    def finish(self, lease_id: int, rewards: tuple[float, ...]) -> None:
        begun = self.jobs.pop(lease_id)
        segments = (Segment(begun, 0), Segment(self.version, 1)) if self.version > begun else (Segment(begun, 0),)
        completions = tuple(CompletionMeta(3, "stop", reward, segments) for reward in rewards)
        done = GroupDone(lease_id=lease_id, completions=completions, generate_s=0.1)
        self.say(done, np.ones(6, np.int32), np.full(6, -1.0, np.float32))


class Play:
    """A run with two actors, whose learner may die; `act` does whatever the numbers say."""

    def __init__(self, folder: Path, config: Config, *, drop_zero_variance: bool) -> None:
        self.folder = folder
        self.config = config
        self.drop_zero_variance = drop_zero_variance
        self.rows: list[GroupRow] = []
        self.saved: tuple[int, bytes] | None = None
        self.training: list[Group] | None = None
        self.start()
        self.workers = [Worker(self.desk, name) for name in "ab"]
        for worker in self.workers:
            worker.come()

    def start(self) -> None:
        version = self.saved[0] if self.saved else 0
        state = msgspec.msgpack.decode(self.saved[1], type=DispatcherState) if self.saved else None
        after = state.log_end if state else Position(0, 0)
        self.log = open_log(self.folder, [], after=after)
        recovered = recover(
            state, read_log(self.folder, after), lambda position: read_record(self.folder, position), PROMPTS, seed=0
        )
        self.version = version
        self.desk = Desk(
            f"run.max_failed_leases={10**9}",
            f"loss.zero_variance={'drop' if self.drop_zero_variance else 'count'}",
            config=msgspec.structs.replace(CONFIG, staleness=self.config.staleness, train=self.config.train),
            policy_version=version,
            num_prompts=NUM_PROMPTS,
            recovered=recovered,
            log=self.log,
        )
        self.desk.dispatcher.begin()

    def act(self, what: str, who: int, pick: int) -> None:
        with suppress(LogFullError):
            self._act(what, who, pick)

    def _act(self, what: str, who: int, pick: int) -> None:
        worker = self.workers[who]
        match what:
            case "round":
                self.desk.tick()
                for each in self.workers:
                    each.read()
            case "step":
                # One actor works, the other's leases grow old.
                self.act("round", who, pick)
                while worker.jobs:
                    worker.finish(min(worker.jobs), (0.0, 1.0))
                self.act("select", who, pick)
                self.act("train", who, pick)
                self.act("commit", who, pick)
            case "answer":
                for _ in range(min(1 + pick % 3, len(worker.jobs))):
                    rewards = (1.0, 1.0) if pick % 5 == 4 else (0.0, 1.0)
                    worker.finish(list(worker.jobs)[pick % len(worker.jobs)], rewards)
            case "commit":
                worker.version = self.desk.versions.current
                worker.commit(worker.version)
            case "select" if self.training is None and self.version < self.config.train.num_steps:
                self.training = self.desk.batch()
            case "train" if self.training is not None:
                self.version += self.config.train.steps_per_batch * self.config.train.epochs_per_batch
                self.desk.dispatcher.finish_batch(self.training, self.version)
                self.desk.dispatcher.publish(self.version)
                self.training = None
            case "fail" if worker.jobs:
                lease_id = worker.jobs.popitem()[0]
                worker.say(LeaseFailed(lease_id=lease_id, reason="returned" if pick % 2 else "reward_error"))
            case "distrust" if self.training is None:
                member = self.desk.roster.named(worker.name)
                # One more would end the run.
                is_last = member is not None and len(member.mismatches) == MAX_MISMATCHES - 1
                flaw = "wrong" if pick % 2 and not is_last else None
                self.desk.dispatcher.judge_canary(worker.name, worker.version, flaw)
            case "tune":
                least = self.desk.settings.staleness.batch_steps - 1
                self.desk.dispatcher.tune({"staleness.max_staleness": str(least + pick % 4)}, "me")
            case "save" if self.training is None:
                self.saved = (self.version, msgspec.msgpack.encode(self.desk.dispatcher.state()))
            case "disk":
                self.log.is_disk_full = not self.log.is_disk_full
            case "die":
                self.make_room()
                self.end()
                self.training = None
                self.start()
                for each in self.workers:
                    each.desk = self.desk
                    each.come()
            case _:
                pass

    def make_room(self) -> None:
        """The log has all that the learner knows, so that both can be compared."""
        self.log.is_disk_full = False
        self.desk.tick()

    def end(self) -> None:
        self.log.close()
        self.rows += self.desk.rows_of(GroupRow)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    steps, epochs = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2)]))
    policy = draw(st.sampled_from(["gate", "gate", "drop", "abort"]))
    most = steps * epochs - 1 + draw(st.integers(0, 3))
    hard = draw(st.sampled_from([None, most, most + 1])) if policy == "gate" else None
    measured = draw(st.sampled_from(["oldest_token", "token_mean", "last_segment"])) if policy != "abort" else "oldest_token"
    return make_config(
        groups_per_step=draw(st.integers(1, 2)),
        steps_per_batch=steps,
        epochs_per_batch=epochs,
        max_staleness=most,
        staleness_policy=policy,
        # A change of the bound while the run goes on may not go above it.
        hard_max_staleness=hard if hard is None else hard + 4,
        lag_of=measured,
    )


WHAT = st.sampled_from(
    ["step"] * 6
    + ["round", "answer"] * 4
    + ["commit", "select", "train"] * 2
    + ["fail", "distrust", "tune", "save", "die", "disk"]
)


@settings(max_examples=40)
@given(
    config=configs(),
    drop_zero_variance=st.booleans(),
    acts=st.lists(st.tuples(WHAT, st.integers(0, 1), st.integers(0, 9)), min_size=20, max_size=120),
)
def test_every_run_replays_exactly_with_its_own_settings_and_passes_its_audit(
    config: Config, drop_zero_variance: bool, acts: list[tuple[str, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as name:
        play = Play(Path(name) / "log", config, drop_zero_variance=drop_zero_variance)
        for act in acts:
            play.act(*act)
        play.make_room()
        counts = play.desk.dispatcher.counts()
        play.end()
        recording = read_recording(read_log(Path(name) / "log", Position(0, 0)))
        final = FinalRow(policy_version=play.version, wall_s=1.0, ledger=counts, outcome="stopped", detail="")
        assert [check for check in audit_log(Path(name) / "log", config, final, NOTHING_LOST) if check.violations] == []
    ends = replay(recording, config)
    assert differences(recorded_ends(recording, config), ends) == []
    # What the learners themselves said, one after another.
    trained = [(row.lease_id, row.policy_lag) for row in play.rows if row.outcome == "trained"]
    assert trained == [(group.lease_id, group.policy_lag) for batch in ends.trainings for group in batch.groups]
    assert Counter(reason for _, reason in ends.dropped) == counts.dropped
    assert sum(len(batch.groups) for batch in ends.batches) == counts.trained
    assert (len(ends.admitted), len(ends.expired), ends.num_left) == (counts.leased, counts.expired, counts.in_flight)
    for other in others(config):
        changed = replay(recording, config, other)
        assert adds_up(changed)
        ended = [lease_id for lease_id, _ in changed.dropped] + changed.expired
        ended += [lease_id for batch in lease_ids(changed) for lease_id in batch]
        assert len(ended) == len(set(ended))
        assert set(changed.admitted) <= set(ends.admitted)
        if other["staleness.staleness_policy"] != "gate" and config.staleness.lag_of == "oldest_token":
            assert max(changed.lags, default=0) <= int(other["staleness.max_staleness"])


def others(config: Config) -> Iterator[dict[str, str]]:
    """Other settings to replay a run with."""
    least = config.train.steps_per_batch * config.train.epochs_per_batch - 1
    for bound, policy in ((0, "gate"), (1, "drop"), (2, "abort")):
        yield {"staleness.max_staleness": str(least + bound), "staleness.staleness_policy": policy}
