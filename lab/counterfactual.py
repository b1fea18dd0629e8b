"""A recorded run under another bound: its rollout log, fed to the production scheduler and ledger again.

    record after record -> the replayed learner's ledger -> scheduler: grant, abort, evict, select -> batches

Recorded events are replayed in the places where they were recorded:

- A lease is admitted if the bound admits one more at the place of its grant; otherwise its group never arrives. Groups of
  admitted leases arrive where they did. Nothing was recorded of leases that only the other bound would have granted, nor of a
  group whose generation the recorded run aborted.
- The replayed learner never runs ahead of the recorded one. It selects a batch where the recorded one did. If the batch is
  not complete there, it selects after the first later record that completes it, and is late from then on: a batch takes as
  long as the median recorded one, and the shortest recorded pause follows, on the log's clock.
- Weights are as late as their learner: what was sampled under the recorded version r was sampled under the version that the
  replayed learner had when the recorded one finished r.
- Events that the bound does not decide (leases that expire, rewards that fail or are equal, quarantine) are taken as
  recorded, and so are changes of settings, except of those that the replay sets. A restart undoes the batches that the
  replayed learner finished after the checkpoint that the recorded one went back to.

With the recorded settings nothing of this is a guess: `differences` is empty when every admission, drop, batch and lag is as
recorded.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import replace_settings
from offbeat.lab.lease_history import LeaseHistories
from offbeat.learner.leases.evaluation import Evaluations, Round
from offbeat.learner.leases.events import Accepted, Dropped, Expired, Granted, LeaseEvent, Started, Trained, Tuned
from offbeat.learner.leases.groups import Group, Rollout, unpack
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.log_reading import Record
from offbeat.learner.leases.scheduler import RolloutScheduler
from offbeat.learner.leases.staleness import StalenessPolicy
from offbeat.protocols.payload import Segment

NEVER_GENERATED = "aborted when recorded"
"""Reason of a drop: the recorded run aborted the lease, so the replayed one has no group to wait for."""
_OWN_REASONS = ("stale", "aborted")
"""Reasons of drops that the policy decides; drops for other reasons are taken as recorded."""
_NO_TOKENS = np.empty(0, np.int32)


class Selected(NamedTuple):
    """A recorded batch."""

    after: int
    """Number of records of the whole log before the selection."""
    place: int
    """Index of `batch` in the whole log."""
    batch: Trained


class Recording(NamedTuple):
    """A rollout log, read once for all replays of it."""

    events: list[LeaseEvent]
    rollouts: dict[int, tuple[Rollout, ...]]
    """Completions by the index of their `Accepted`."""
    selections: list[Selected]
    """Selections whose batch was trained, in order."""
    train_s: float
    """Median seconds between a batch's selection and its `Trained`; 0 without a batch."""
    pause_s: float
    """Fewest seconds between a `Trained` and the next selection; 0 without two batches."""


class TrainedGroup(NamedTuple):
    """A group in a batch."""

    lease_id: int
    policy_lag: int
    """Lag of the group's oldest token when the group was trained on for the last time."""
    is_over_bound: bool
    """True when the lag, measured by `staleness.lag_of`, exceeded `max_staleness`."""


class TrainedBatch(NamedTuple):
    """Optimizer steps on one selection."""

    policy_version: int
    """Policy version before the first of these steps."""
    groups: tuple[TrainedGroup, ...]
    at: float
    """Time of the steps, in seconds since the epoch."""


@dataclass
class LeaseEnds:
    """The ends of the recorded leases."""

    num_recorded: int
    admitted: list[int] = field(default_factory=list)
    """Leases admitted, in the order of their grants."""
    arrived: list[int] = field(default_factory=list)
    """Leases whose group arrived."""
    dropped: list[tuple[int, str]] = field(default_factory=list)
    """Dropped leases with the reasons, in the order of their drops."""
    expired: list[int] = field(default_factory=list)
    trainings: list[TrainedBatch] = field(default_factory=list)
    """All batches in order, including those that a restart undid."""
    batches: list[TrainedBatch] = field(default_factory=list)
    """Batches that are in the weights."""
    num_older: int = 0
    """Admitted leases that began under weights older than the bound allows: a real actor would have waited."""
    num_left: int = 0
    """Leases open in the end: generating, buffered, or being trained on."""
    duration_s: float = 0.0
    """Seconds from the first record to the end of the last batch."""

    @property
    def lags(self) -> list[int]:
        """The lag of every group in the weights, in order."""
        return [group.policy_lag for batch in self.batches for group in batch.groups]


def read_recording(records: Iterable[Record]) -> Recording:
    """Read a whole rollout log, from the first record of the run to the last."""
    events: list[LeaseEvent] = []
    rollouts: dict[int, tuple[Rollout, ...]] = {}
    selections: list[Selected] = []
    pauses: list[float] = []
    process_start, trained_at = 0, math.nan
    for index, record in enumerate(records):
        event = record.event
        events.append(event)
        match event:
            case Started():
                process_start, trained_at = index, math.nan
            case Accepted():
                rollouts[index] = unpack(event.completions, record.arrays)
            case Trained():
                selections.append(Selected(process_start + event.selected_after, index, event))
                pauses += [event.selected_at - trained_at] if not math.isnan(trained_at) else []
                trained_at = event.at
    durations = [batch.at - batch.selected_at for _, _, batch in selections]
    return Recording(
        events,
        rollouts,
        selections,
        train_s=max(0.0, statistics.median(durations)) if durations else 0.0,
        pause_s=max(0.0, min(pauses, default=0.0)),
    )


def recorded_ends(recording: Recording, config: Config) -> LeaseEnds:
    """Return the ends of the leases that the log tells of; `config` measures lags and decides nothing."""
    policy = StalenessPolicy(config.staleness, config.train)
    leases = LeaseHistories(recording.events)
    ends = LeaseEnds(_num_granted(recording))
    arrived: dict[int, Group] = {}
    trained: dict[int, TrainedBatch] = {}
    """Batches by the identity of their event, because a step that is repeated after a restart may have an equal event."""
    for index, event in enumerate(recording.events):
        match event:
            case Granted():
                ends.admitted.append(event.lease_id)
            case Accepted():
                arrived[event.lease_id] = _group(event, recording.rollouts[index])
            case Dropped():
                ends.dropped.append((event.lease_id, event.reason))
            case Expired():
                ends.expired.append(event.lease_id)
            case Trained():
                groups = [arrived[lease_id] for lease_id in event.lease_ids]
                trained[id(event)] = _batch(policy, groups, event.policy_version, event.at)
            case Tuned():
                config = replace_settings(config, event.settings)
                policy.bounds = config.staleness
            case _:
                pass
    ends.arrived = list(arrived)
    ends.trainings = list(trained.values())
    ends.batches = [trained[id(batch)] for batch in leases.batches]
    ends.num_left = len(ends.admitted) - len(ends.dropped) - len(ends.expired) - len(ends.lags)
    ends.duration_s = _duration(recording, ends.batches)
    return ends


def replay(recording: Recording, config: Config, changed: Mapping[str, str] | None = None) -> LeaseEnds:
    """Return the ends of the leases in a run with this config: see the module's docstring.

    `changed`: settings of `[staleness]` (`section.key` to TOML) that hold instead, from beginning to end.
    """
    return _ReplayedLearner(recording, config, changed or {}).run()


def differences(recorded: LeaseEnds, replayed: LeaseEnds) -> list[str]:
    """Return the differences between the log and its replay with the recorded settings; empty when there are none."""
    found: list[str] = []
    for name, of_recorded, of_replayed in (
        ("admitted", recorded.admitted, replayed.admitted),
        ("dropped", recorded.dropped, replayed.dropped),
        ("expired", recorded.expired, replayed.expired),
        ("trained", _without_times(recorded.trainings), _without_times(replayed.trainings)),
        ("trained and kept", _without_times(recorded.batches), _without_times(replayed.batches)),
    ):
        if of_recorded != of_replayed:
            found.append(f"{name}: {_first_difference(of_recorded, of_replayed)}")
    return found


class _Training(NamedTuple):
    """The batch that is being trained on."""

    groups: list[Group]
    trained: int | None
    """Index of the recorded `Trained` that ends the batch; None for a late batch, which ends at `ends_at`."""
    ends_at: float


class _ReplayedLearner:
    """The learner of a replay: ledger, versions, and the batch in training."""

    def __init__(self, recording: Recording, config: Config, changed: Mapping[str, str]) -> None:
        self._recording = recording
        self._changed = changed
        self._config = replace_settings(config, changed)
        self._policy = StalenessPolicy(self._config.staleness, config.train)
        self._evaluations = Evaluations(interval=0, num_prompts=0)
        """Evaluations that are never due, because the log has no leases for evaluation."""
        self._use_ledger(Ledger())
        self._offered: Granted | None = None
        """The recorded grant that an actor is there to take."""
        self._version = 0
        self._versions = {0: 0}
        """Versions of the replayed learner, by the version that the recorded one finished at that time."""
        self._granted: dict[int, Granted] = {}
        """Every lease admitted, with the replayed versions."""
        self._arrived: dict[int, Group] = {}
        """Every group that arrived, in order."""
        self._ends = LeaseEnds(_num_granted(recording))
        self._training: _Training | None = None
        self._now = recording.events[0].at if recording.events else 0.0
        self._free_at = self._now
        """Time at which a late learner may select again."""
        self._reached = -1
        """Version of the newest batch that this process of the recorded learner has selected."""

    def run(self) -> LeaseEnds:
        """Go through the log, and return the ends of the leases."""
        selections = iter(self._recording.selections)
        selected = next(selections, None)
        before: LeaseEvent | None = None
        for index, event in enumerate(self._recording.events):
            while selected is not None and selected.after <= index:
                self._meet_selection(selected)
                selected = next(selections, None)
            # Nobody trains while the learner is down, and a group that its arrival got dropped was never in the buffer.
            if not isinstance(event, Started) and not _is_dropped_at_once(before, event):
                self._advance(event.at)
            self._take(index, event)
            self._now = max(self._now, event.at)
            before = event
        self._ends.admitted, self._ends.arrived = list(self._granted), list(self._arrived)
        self._ends.num_left = self._ledger.num_open
        self._ends.duration_s = _duration(self._recording, self._ends.batches)
        return self._ends

    # The records

    def _take(self, index: int, event: LeaseEvent) -> None:
        match event:
            case Started():
                self._restart(event)
            case Granted():
                # A lease is granted in a tick, which begins with this.
                self._abort()
                self._offered = event
                self._scheduler.grant(self._version, self)
                self._offered = None
            case Accepted():
                if self._ledger.status(event.lease_id) == "generating":
                    group = _group(event, tuple(map(self._aged, self._recording.rollouts[index])))
                    self._arrived[event.lease_id] = group
                    self._ledger.restore(group, None)
            case Dropped(reason="stale"):
                # The recorded learner looked at its buffer here; the replayed one decides for itself which groups are too old.
                if self._training is None:
                    self._scheduler.evict(self._version, self._drop_stale)
            case Dropped(reason="aborted"):
                self._abort()
                if self._ledger.status(event.lease_id) == "generating":
                    self._drop(event.lease_id, NEVER_GENERATED)
            case Dropped():
                if self._ledger.status(event.lease_id) in ("generating", "ready"):
                    self._drop(event.lease_id, event.reason)
            case Expired():
                if self._ledger.status(event.lease_id) == "generating":
                    self._ledger.apply(event)
                    self._ends.expired.append(event.lease_id)
            case Trained():
                if self._training is not None and self._training.trained == index:
                    self._finish(event.at)
                self._versions[event.policy_version + event.num_steps] = self._version
            case Tuned():
                self._config = replace_settings(self._config, {**event.settings, **self._changed})
                self._policy.bounds = self._config.staleness

    def lease_training(self, min_policy_version: int) -> bool:
        """Take the lease of the recorded grant: at its place in the log an actor took one, and no more."""
        event, self._offered = self._offered, None
        if event is None:
            return False
        granted = msgspec.structs.replace(event, oldest_version=self._version_at(event.oldest_version))
        self._ends.num_older += granted.oldest_version < min_policy_version
        self._granted[event.lease_id] = granted
        self._ledger.apply(granted)
        return True

    def lease_evaluation(self, round_: Round) -> bool:
        """Fail: no evaluation is due in a replay."""
        raise AssertionError(f"evaluation of version {round_.policy_version} in a replay")

    def _abort(self) -> None:
        for lease_id in self._scheduler.abort(self._version):
            self._drop(lease_id, "aborted")

    def _restart(self, started: Started) -> None:
        """Undo the batches after the checkpoint that the recorded learner went back to."""
        self._version = self._version_at(started.policy_version)
        self._training = None
        self._free_at = started.at
        self._reached = started.policy_version - 1
        undone: set[int] = set()
        while self._ends.batches and self._ends.batches[-1].policy_version + self._policy.batch_steps > self._version:
            undone.update(group.lease_id for group in self._ends.batches.pop().groups)
        if not undone:
            return
        # Built anew, as a restarted learner builds its own: leases in the order of their grants, groups in that of arrival.
        before = self._ledger
        self._use_ledger(Ledger())
        status = {lease_id: "ready" if lease_id in undone else before.status(lease_id) for lease_id in self._granted}
        for lease_id, granted in self._granted.items():
            if status[lease_id] in ("generating", "ready"):
                self._ledger.apply(granted)
        for lease_id, group in self._arrived.items():
            if status[lease_id] == "ready":
                self._ledger.restore(group, None)

    def _use_ledger(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._scheduler: RolloutScheduler[Group] = RolloutScheduler(self._policy, self._evaluations, ledger)

    # Batches

    def _meet_selection(self, selected: Selected) -> None:
        """Select a batch where the recorded learner did, unless the replayed one is late."""
        batch = selected.batch
        self._advance(batch.selected_at)
        self._reached = batch.policy_version
        self._now = max(self._now, batch.selected_at)
        if self._training is None and self._version == batch.policy_version and self._free_at <= self._now:
            groups = self._scheduler.select(self._version, self._drop_stale)
            self._training = _Training(groups, selected.place, math.inf) if groups else None

    def _advance(self, at: float) -> None:
        """Let a late learner finish and select batches up to this time."""
        while True:
            if self._training is not None:
                if self._training.ends_at > at:
                    return
                ended_at = self._training.ends_at
                self._finish(ended_at)
                self._free_at = ended_at + self._recording.pause_s
            begins_at = max(self._free_at, self._now)
            if self._version > self._reached or begins_at > at:
                return
            groups = self._scheduler.select(self._version, self._drop_stale)
            if not groups:
                return
            self._training = _Training(groups, None, begins_at + self._recording.train_s)

    def _finish(self, at: float) -> None:
        assert self._training is not None
        batch = _batch(self._policy, self._training.groups, self._version, at)
        # A group may have been dropped while it was trained on.
        lease_ids = [group.lease_id for group in batch.groups if self._ledger.status(group.lease_id) == "ready"]
        self._ledger.apply(
            Trained(
                at=at,
                lease_ids=tuple(lease_ids),
                policy_version=self._version,
                num_steps=self._policy.batch_steps,
                selected_at=at,
                selected_after=0,
                prompt_hashes=(),
            )
        )
        self._ends.trainings.append(batch)
        self._ends.batches.append(batch)
        self._training = None
        self._version += self._policy.batch_steps

    def _drop(self, lease_id: int, reason: str) -> None:
        self._ledger.apply(Dropped(at=self._now, lease_id=lease_id, reason=reason, is_final=False))
        self._ends.dropped.append((lease_id, reason))

    def _drop_stale(self, group: Group) -> None:
        self._drop(group.lease_id, "stale")

    # Versions

    def _version_at(self, recorded: int) -> int:
        """Return the replayed learner's version when the recorded one finished this version."""
        if recorded in self._versions:
            return self._versions[recorded]
        # The log has no end of it: it lies as far above the version before as it did in the recorded run.
        known = max(version for version in self._versions if version <= recorded)
        return self._versions[known] + recorded - known

    def _aged(self, rollout: Rollout) -> Rollout:
        segments = tuple(Segment(self._version_at(each.policy_version), each.first_token) for each in rollout.segments)
        return rollout._replace(segments=segments)


def _num_granted(recording: Recording) -> int:
    return sum(isinstance(event, Granted) for event in recording.events)


def _group(accepted: Accepted, rollouts: tuple[Rollout, ...]) -> Group:
    """Return a group without its prompt, which no policy asks for."""
    return Group(accepted.lease_id, -1, _NO_TOKENS, rollouts, accepted.actor, accepted.generate_s)


def _batch(policy: StalenessPolicy, groups: Sequence[Group], policy_version: int, at: float) -> TrainedBatch:
    trained: list[TrainedGroup] = []
    for index, group in enumerate(groups):
        trained_at = policy.trained_at(policy_version, index)
        is_over = policy.count_over_bound([group], trained_at) > 0
        trained.append(TrainedGroup(group.lease_id, group.policy_lag(trained_at), is_over))
    return TrainedBatch(policy_version, tuple(trained), at)


def _is_dropped_at_once(before: LeaseEvent | None, event: LeaseEvent) -> bool:
    return (
        isinstance(before, Accepted)
        and isinstance(event, Dropped)
        and event.lease_id == before.lease_id
        and event.reason not in _OWN_REASONS
    )


def _duration(recording: Recording, batches: Sequence[TrainedBatch]) -> float:
    return batches[-1].at - recording.events[0].at if batches else 0.0


def _without_times(batches: Sequence[TrainedBatch]) -> list[tuple[int, tuple[TrainedGroup, ...]]]:
    return [(batch.policy_version, batch.groups) for batch in batches]


def _first_difference(recorded: Sequence[object], replayed: Sequence[object]) -> str:
    for index, (of_recorded, of_replayed) in enumerate(zip(recorded, replayed, strict=False)):
        if of_recorded != of_replayed:
            return f"number {index} is {of_recorded} in the log, and {of_replayed} in the replay"
    return f"{len(recorded)} in the log, and {len(replayed)} in the replay"
