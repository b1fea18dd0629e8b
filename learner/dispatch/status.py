"""The state of the run for people: the operator's status report, and how busy the actors are."""

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.common.settings.config import actors_wanted
from offbeat.learner.dispatch.lease_desk import LeaseDesk
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.roster import Member, Roster
from offbeat.learner.dispatch.run_state import Versions
from offbeat.learner.dispatch.watchdog import Watchdog
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.protocols.messages import StatusReport, Vitals


@dataclass(eq=False)
class Status:
    """Owns the training loop's current activity; everything else in a report is read from the other parts."""

    _run_id: str
    _settings: LiveSettings
    _roster: Roster
    _desk: LeaseDesk
    _journal: LeaseJournal
    _watchdog: Watchdog
    _versions: Versions
    _started_at: float
    _activity: str = "starting"

    def __post_init__(self) -> None:
        self._active_since = self._started_at

    def doing(self, activity: str, now: float) -> None:
        """Note what the training loop does from now on."""
        self._activity, self._active_since = activity, now

    def report(
        self,
        now: float,
        vitals: Vitals,
        problems: list[str],
        failure: BaseException | None,
        hub_rejections: dict[str, int],
        *,
        is_over: bool,
    ) -> StatusReport:
        """Return the report for an operator; `failure` is the error that ends the run, `is_over` says whether it has ended."""
        problems = [*problems, *self._roster.reward_problems()]
        if self._desk.is_log_full:
            problems.append("the rollout log's disk is full: no leases, no acknowledgements until there is room")
        if failure is not None:
            problems.append(f"the run is ending: {failure}")
        ledger, stream, published = self._journal.ledger, self._journal.stream, self._versions.published
        return StatusReport(
            run_id=self._run_id,
            policy_version=self._versions.current,
            num_steps=self._settings.config.train.num_steps,
            published_version=-1 if published is None else published,
            doing=self._activity,
            doing_s=now - self._active_since,
            waiting_for=self._watchdog.waiting_for() or "",
            uptime_s=now - self._started_at,
            members=tuple(member.status(now) for member in self._roster),
            ledger=ledger.counts().by_name(),
            num_ready=ledger.num_ready,
            num_generating=ledger.num_open - ledger.num_ready,
            epoch=stream.epoch,
            epoch_position=stream.share_served,
            log_bytes=self._journal.num_bytes,
            problems=tuple(problems),
            rejected=self._roster.rejections.counts() | hub_rejections,
            changed_settings=self._settings.in_force(),
            vitals=vitals,
            actors_wanted=0 if is_over else actors_wanted(self._settings.config),
        )


SAMPLE_S = 0.05
"""Least time between two looks at the slots of all members: under a flood of messages the dispatcher ticks far more often."""


class FleetUse(NamedTuple):
    """Use of the actors since the last question."""

    held_back_s: float
    """Seconds in which staleness alone kept an actor with room from a lease."""
    num_actors: int
    """Actors that take leases now."""
    num_new: int
    """Actors that have no weights yet."""
    slots: float
    """Mean number of lease slots of an actor; 0 without actors."""
    spare: float
    """Share of the lease slots, over time, that held no lease."""
    waits: float
    """Share of the actors' time in which engines idled while leases waited for environments or rewards."""
    is_troubled: bool
    """An actor is in quarantine, or the rollout log is full."""


class FleetMeter:
    """Adds up between ticks; the dispatcher's lock guards it."""

    def __init__(self, roster: Roster, desk: LeaseDesk, now: float) -> None:
        self._roster = roster
        self._desk = desk
        self._ticked_at = now
        self._is_held_back = False
        self._held_back_s = 0.0
        self._sampled_at = now
        self._num_free = self._num_slots = 0
        """Slots at the last look."""
        self._free_s = self._slot_s = 0.0
        self._spent: dict[tuple[str, int], tuple[float, float]] = {}
        """Seconds of waiting for rewards and seconds in all, of each actor process, as of the last question."""

    def tick(self, now: float, is_held_back: bool) -> None:
        """Count the time since the last tick; `is_held_back` says whether staleness alone keeps a lease from an actor now."""
        if self._is_held_back:
            self._held_back_s += now - self._ticked_at
        self._ticked_at = now
        self._is_held_back = is_held_back
        if now - self._sampled_at >= SAMPLE_S:
            self._free_s += self._num_free * (now - self._sampled_at)
            self._slot_s += self._num_slots * (now - self._sampled_at)
            self._sampled_at = now
            members = self._takers()
            self._num_free = sum(max(0, member.free) for member in members)
            self._num_slots = sum(member.capacity for member in members)

    def take(self) -> FleetUse:
        """Return the use since the last call."""
        members = self._takers()
        held_back_s, free_s, slot_s = self._held_back_s, self._free_s, self._slot_s
        self._held_back_s = self._free_s = self._slot_s = 0.0
        return FleetUse(
            held_back_s=held_back_s,
            num_actors=len(members),
            num_new=sum(member.policy_version is None for member in self._roster),
            slots=sum(member.capacity for member in members) / len(members) if members else 0.0,
            spare=free_s / slot_s if slot_s else 0.0,
            waits=self._take_waits(members),
            is_troubled=self._desk.is_log_full or any(member.is_quarantined for member in self._roster),
        )

    def _takers(self) -> list[Member]:
        """Return the members that take leases."""
        return [member for member in self._roster if member.takes_leases and member.capacity]

    def _take_waits(self, members: list[Member]) -> float:
        before, self._spent = self._spent, {}
        waited_s = all_s = 0.0
        for member in members:
            seconds = member.stats.seconds
            key = (member.name, member.hello.incarnation)
            spent = self._spent[key] = (seconds.get("wait_rewards", 0.0), sum(seconds.values()))
            # The first report of a process covers its whole life.
            waited_before, all_before = before.get(key, spent)
            waited_s += spent[0] - waited_before
            all_s += spent[1] - all_before
        return waited_s / all_s if all_s > 0 else 0.0
