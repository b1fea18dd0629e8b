"""The state of the run for people: the operator's status report."""

from typing import NamedTuple

from offbeat.common.settings.config import actors_wanted
from offbeat.learner.dispatch.lease_desk import LeaseDesk
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.roster import Roster
from offbeat.learner.dispatch.versions import Versions
from offbeat.learner.dispatch.watchdog import Watchdog
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.protocols.messages import StatusReport, Vitals


class Activity(NamedTuple):
    """The work of the training loop."""

    name: str
    since: float
    """Start of the activity, in seconds on the dispatcher's clock."""


class Status:
    """Owns the training loop's current activity; everything else in a report is read from the other parts."""

    def __init__(
        self,
        run_id: str,
        settings: LiveSettings,
        roster: Roster,
        desk: LeaseDesk,
        journal: LeaseJournal,
        watchdog: Watchdog,
        versions: Versions,
        now: float,
    ) -> None:
        self._run_id = run_id
        self._settings = settings
        self._roster = roster
        self._desk = desk
        self._journal = journal
        self._watchdog = watchdog
        self._versions = versions
        self._started_at = now
        self._activity = Activity("starting", now)

    def doing(self, activity: str, now: float) -> None:
        """Note what the training loop does from now on."""
        self._activity = Activity(activity, now)

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
            doing=self._activity.name,
            doing_s=now - self._activity.since,
            waiting_for=self._watchdog.waiting_for() or "",
            uptime_s=now - self._started_at,
            members=tuple(member.status(now) for member in self._roster),
            ledger=ledger.counts().sums(),
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
