"""The watchdog of the training loop: the reasons for which the next batch can be late, and the deadline of the wait."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.common.records.rows import EventRow, Recorder
from offbeat.learner.dispatch.lease_desk import EvaluationLeases, LeaseDesk
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.quarantine import doubt_of_learner
from offbeat.learner.dispatch.reports import report
from offbeat.learner.dispatch.roster import OFTEN_LOST, OFTEN_LOST_S, Member, Roster, described
from offbeat.learner.dispatch.run_state import LeaseFailures, RunFailedError, Versions
from offbeat.learner.leases.journal import LeaseJournal

LATE_S = 45.0
"""Seconds of waiting after which a batch is late."""
LATE_FACTOR = 3.0
"""A batch for which actors work as they should is late only after this many times the mean of the last waits."""
NUM_WAITS = 10
"""Waits whose mean says how long a wait usually is."""
FAILING_LEASES = 3
"""Failed leases in a row from which on the rewards are failing."""
LEASE_TIMEOUTS = 6
"""Default of `run.no_group_timeout_s`, in multiples of `rollout.lease_timeout_s`."""
LONGEST_LOOK_S = 5.0
"""Most seconds counted between two looks: a learner that was stopped has not waited."""
_MAX_NAMED = 4


class Cause(NamedTuple):
    """One reason for which a batch can be late, as the documentation has it."""

    condition: str
    hint: str
    is_usual: bool = False
    """True when waits that are no trouble have this reason too."""


CAUSES: dict[str, Cause] = {
    "disk_full": Cause(
        "The disk of the rollout log is full: no lease is granted and no group acknowledged.",
        "Free space, or lower log.min_free_mb.",
    ),
    "no_actor": Cause(
        "No actor is connected.", "Start one with `offbeat actor`. `offbeat status` lists actors that were refused."
    ),
    "actors_lost": Cause(
        f"An actor was lost {OFTEN_LOST} times within {OFTEN_LOST_S / 60:g} minutes because it was silent.",
        "Its machine or network stops for longer than hub.dead_after_s. Read its log, give it more memory or cores, or raise "
        "hub.dead_after_s.",
    ),
    "all_quarantined": Cause(
        "The canary log-probs of every actor differ from the learner's.",
        "Look for the cause in the learner. If the difference is harmless, raise weights.canary_tolerance.",
    ),
    "rewards_failing": Cause(
        f"The last {FAILING_LEASES} or more leases failed, or groups wait for rewards that are unavailable.",
        "Repair task.reward or the service behind it. The run ends after run.max_failed_leases in a row.",
    ),
    "groups_dropped": Cause(
        "At least a batch of groups was dropped during the wait.",
        "`zero_variance`: the prompts are too easy or too hard. `stale`: raise staleness.max_staleness.",
    ),
    "evaluation_first": Cause(
        "Actors work only on held-out prompts, which have priority.",
        "Wait, add actors, or lower evaluation.num_prompts.",
        is_usual=True,
    ),
    "rewards_unavailable": Cause(
        "Completions of the missing groups wait for rewards that are unavailable.",
        "Bring back the service behind task.reward. After task.reward_retry_s these leases fail.",
    ),
    "generating": Cause(
        "Actors work on the missing groups.",
        "Wait, add actors, or lower rollout.max_new_tokens. A stuck actor loses its lease after rollout.lease_timeout_s.",
        is_usual=True,
    ),
    "unclaimed": Cause(
        "Actors that held leases before the learner was restarted have not reconnected.",
        "Wait. After hub.dead_after_s other actors get the prompts.",
    ),
    "unreachable": Cause("The learner cannot reach any actor.", "Check the network."),
    "no_weights": Cause(
        "No actor has weights: all have just joined, or are skipped in updates after failures.",
        "See `offbeat status`, and check that actors can reach the learner at weights.port and weights.pull_port.",
    ),
    "no_credit": Cause("No actor accepts any leases.", "Raise actor.max_inflight_groups."),
    "unable": Cause(
        "No actor can take a lease, for different reasons: quarantine, no connection, no weights, no credit.",
        "`offbeat status` shows the reason for each.",
    ),
    "weights_behind": Cause(
        "The staleness bound, or staleness.target, requires newer weights than the actors with capacity have.",
        "Wait for the update. `offbeat status` shows actors that fail to load it.",
    ),
    "held_back": Cause("The staleness bound allows no more leases.", "Raise staleness.max_staleness.", is_usual=True),
    "granting": Cause("Leases are about to be granted.", "Wait.", is_usual=True),
}
"""Every reason for which a batch can be late. If several apply, the first is reported."""


class Late(NamedTuple):
    """The reason for which the batch is late now."""

    name: str
    """A key of `CAUSES`."""
    detail: str
    """The reason in words, with names and numbers."""


@dataclass(eq=False)
class Watchdog:
    """Measures the wait for a batch. Reports the reason of a long wait, and ends the run when a deadline is over."""

    _settings: LiveSettings
    _roster: Roster
    _desk: LeaseDesk
    _journal: LeaseJournal
    _versions: Versions
    _evaluations: EvaluationLeases
    _failures: LeaseFailures
    _record: Recorder

    def __post_init__(self) -> None:
        self._looked_at: float | None = None
        """Time of the last look; None while no batch is waited for."""
        self._waited_s = 0.0
        self._without_group_s = 0.0
        """Seconds of waiting since the last group arrived, those without any actor left out."""
        self._alone_s = 0.0
        """Seconds since the last actor left."""
        self._produced = 0
        """Groups that had arrived and were not dropped, at the last look; evaluation's included."""
        self._dropped: Counter[str] = Counter()
        """Groups that had been dropped when the wait began, by reason."""
        self._told: list[str] = []
        """Causes of the current wait that were told."""
        self._waits: deque[float] = deque(maxlen=NUM_WAITS)

    def look(self, now: float, weight_problems: Callable[[], list[str]]) -> None:
        """Note that there is no batch: tell the reason when it is late, and end the run when a deadline is over.

        `weight_problems` returns a line for each actor that fails to take weights. Called every few seconds while the training
        loop waits.
        """
        if self._looked_at is None:
            self._looked_at = now
            self._dropped = Counter(self._journal.ledger.counts().dropped)
        elapsed_s = min(now - self._looked_at, LONGEST_LOOK_S)
        self._looked_at = now
        self._waited_s += elapsed_s
        late = self.cause()
        if late.name == "no_actor":
            self._alone_s += elapsed_s
        else:
            self._alone_s = 0.0
            self._without_group_s = 0.0 if self._has_progress() else self._without_group_s + elapsed_s
        if self._is_late(late.name) and late.name not in self._told:
            self._tell(late, weight_problems())
        self._end_if_hopeless(late, weight_problems)

    def rest(self) -> None:
        """Note that a batch is there."""
        if self._looked_at is None:
            return
        for name in self._told:
            detail = f"a batch came after {self._waited_s:.0f} s"
            report(self._record, EventRow(event="health_cleared", rule=name, detail=detail))
        self._told.clear()
        self._waits.append(self._waited_s)
        self._looked_at, self._waited_s, self._without_group_s, self._alone_s = None, 0.0, 0.0, 0.0

    def waiting_for(self) -> str | None:
        """Return one line that says what keeps the next batch; None when it is complete."""
        ledger, num_needed = self._journal.ledger, self._settings.staleness.batch_groups
        if ledger.num_ready >= num_needed:
            return None
        return f"{ledger.num_ready} of {num_needed} groups ready; {self.cause().detail}"

    # The reason

    def cause(self) -> Late:
        """Return the first reason of `CAUSES` that holds now, unless a batch is complete."""
        members = list(self._roster)
        if self._desk.is_log_full:
            return Late("disk_full", "the rollout log's disk is full: no leases, no acknowledgements until there is room")
        if not members:
            address = self._settings.config.hub.address
            return Late("no_actor", f"no actor is connected: start one with `offbeat actor`, hub.address = {address}")
        lost = self._roster.often_lost()
        if lost:
            often = f"{OFTEN_LOST} times within {OFTEN_LOST_S / 60:g} minutes"
            return Late("actors_lost", f"lost {often} for silence, and back each time: {_names(lost)}")
        doubt = doubt_of_learner(members)
        if doubt is not None:
            return Late("all_quarantined", doubt)
        if self._failures.num_in_a_row >= FAILING_LEASES:
            return Late("rewards_failing", f"the last {self._failures.num_in_a_row} leases failed, with {self._failures.last}")
        waiting = self._roster.reward_problems()
        if waiting:
            return Late("rewards_failing", "; ".join(waiting[:_MAX_NAMED]))
        dropped = Counter(self._journal.ledger.counts().dropped) - self._dropped if self._looked_at is not None else Counter()
        if dropped.total() >= self._settings.staleness.batch_groups:
            reasons = ", ".join(f"{reason} {number}" for reason, number in dropped.items())
            return Late("groups_dropped", f"{dropped.total()} groups were dropped during the wait: {reasons}")
        return self._work(members) or self._inability(members) or self._hold()

    def _work(self, members: Sequence[Member]) -> Late | None:
        """Return the leases that are waited for; None when nobody works."""
        generating = self._journal.ledger.generating()
        held = {lease_id: member for member in members for lease_id in member.lease_ids if member.is_reachable}
        trained = [lease for lease in generating if lease.lease_id in held]
        if trained:
            oldest = trained[0]
            holder = held[oldest.lease_id]
            trouble = holder.reward_trouble
            if trouble is not None and oldest.lease_id in trouble.lease_ids:
                return Late("rewards_unavailable", f"{holder.name}: {described(trouble)}")
            seconds = max(0.0, self._journal.now() - oldest.granted_at)
            return Late("generating", f"{len(trained)} being generated, the oldest for {seconds:.0f} s at {holder.name}")
        if held:
            return Late("evaluation_first", f"an evaluation goes first: {len(held)} held-out prompts are being generated")
        unclaimed = {lease.actor for lease in generating} - {member.name for member in members}
        if unclaimed:
            return Late("unclaimed", f"{len(generating)} leases of actors that have not come back: {_names(sorted(unclaimed))}")
        return None

    def _inability(self, members: Sequence[Member]) -> Late | None:
        """Return the reasons why no member can take a lease; None when one can."""
        by_cause: dict[tuple[str, str], list[str]] = {}
        for member in members:
            if member.takes_leases and member.capacity:
                return None
            by_cause.setdefault(_INABILITIES[member.state], []).append(member.name)
        detail = "; ".join(f"{words}: {_names(actors)}" for (_, words), actors in by_cause.items())
        return Late(next(iter(by_cause))[0] if len(by_cause) == 1 else "unable", detail)

    def _hold(self) -> Late:
        """Return the reason why a member that can take leases has none."""
        published, able = self._versions.published, self._desk.with_room(self._roster)
        if published is not None and able and not any(member.has_version(published) for member in able):
            return Late("weights_behind", f"weights {published} not yet at: {_names([member.name for member in able])}")
        if not self._desk.is_held_back(self._roster, self._versions.current):
            return Late("granting", "leases are about to be granted")
        bound = self._settings.config.staleness.max_staleness
        return Late("held_back", f"the staleness bound admits no lease (staleness.max_staleness = {bound})")

    # Deadlines

    def _has_progress(self) -> bool:
        """Return whether a group has arrived since the last look."""
        ledger = self._journal.ledger
        before, self._produced = self._produced, ledger.counts().trained + ledger.num_ready + self._evaluations.num_answered
        return self._produced > before

    def _is_late(self, name: str) -> bool:
        usual_s = sum(self._waits) / len(self._waits) if self._waits else 0.0
        return self._waited_s >= (max(LATE_S, LATE_FACTOR * usual_s) if CAUSES[name].is_usual else LATE_S)

    def _tell(self, late: Late, weight_problems: Sequence[str]) -> None:
        self._told.append(late.name)
        detail = "; ".join([f"no batch for {self._waited_s:.0f} s: {late.detail}", *weight_problems, self._deadline(late.name)])
        report(self._record, EventRow(event="health", rule=late.name, detail=f"{detail}. {CAUSES[late.name].hint}"))

    def _deadline(self, name: str) -> str:
        """Return the end of the wait in words."""
        alone_s, without_group_s = self._limits_s()
        limit_s, setting = (
            (alone_s, "run.no_actor_timeout_s") if name == "no_actor" else (without_group_s, "run.no_group_timeout_s")
        )
        return f"the run ends after {limit_s:g} s of it ({setting})" if limit_s else f"the run waits forever ({setting} = 0)"

    def _end_if_hopeless(self, late: Late, weight_problems: Callable[[], list[str]]) -> None:
        alone_s, without_group_s = self._limits_s()
        if alone_s and self._alone_s > alone_s:
            waited = f"no actor for {self._alone_s:.0f} s (run.no_actor_timeout_s = {alone_s:g})"
            self._failures.end_run(RunFailedError(f"{waited}: {late.detail}"))
        elif without_group_s and self._without_group_s > without_group_s:
            waited = f"no group for {self._without_group_s:.0f} s (run.no_group_timeout_s = {without_group_s:g})"
            why = "; ".join([late.detail, *weight_problems()])
            self._failures.end_run(RunFailedError(f"{waited}: {why}. {CAUSES[late.name].hint}"))

    def _limits_s(self) -> tuple[float, float]:
        """Return the seconds without any actor, and those without a group, that end the run; 0: never."""
        config = self._settings.config
        without_group_s = config.run.no_group_timeout_s
        if without_group_s is None:
            without_group_s = LEASE_TIMEOUTS * config.rollout.lease_timeout_s
        return config.run.no_actor_timeout_s, without_group_s


_INABILITIES = {
    "quarantined": ("all_quarantined", "in quarantine"),
    "unreachable": ("unreachable", "cannot be reached"),
    "new": ("no_weights", "without weights"),
    "working": ("no_credit", "without credit"),
}
"""The cause for which a member in each state can take no lease, and its words."""


def _names(actors: Sequence[str]) -> str:
    more = f" and {len(actors) - _MAX_NAMED} more" if len(actors) > _MAX_NAMED else ""
    return ", ".join(actors[:_MAX_NAMED]) + more
