"""Trust in the actors' weights, by their log-probs of the canary: quarantine, release, and doubt of the learner itself.

An actor in quarantine gets no leases and pulls the weights again, which repairs one that is wrong. An actor that is wrong
again and again, and right in between, would cost its groups each time: after `MAX_QUARANTINES` within `RECENT` comparisons it
is dismissed, and only a new process of the same name may join. When every actor is in quarantine the learner may be wrong, or
the hand-over of its weights: then pulling again changes nothing, and the run ends after `MAX_MISMATCHES` comparisons of each
actor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from offbeat.common.records.rows import EventRow, Recorder
from offbeat.learner.dispatch.group_buffer import GroupBuffer
from offbeat.learner.dispatch.lease_desk import LeaseDesk
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.reports import report
from offbeat.learner.dispatch.roster import Member, Mismatch, Roster
from offbeat.learner.dispatch.run_state import LeaseFailures, RunFailedError

MAX_MISMATCHES = 4
"""Wrong comparisons in a row of every actor after which the run ends."""
MAX_QUARANTINES = 4
"""Quarantines that begin within the last `RECENT` comparisons of an actor after which it is dismissed."""
RECENT = 32
"""Comparisons of an actor that this rule looks back on."""
_MAX_NAMED = 4
"""Most actors that a sentence names."""
_CURE = (
    "Pulling the weights again did not help. The learner or the hand-over of its weights is wrong, or its numerics have grown "
    "beyond the tolerance, as after a learning rate that is too high. Resume from an earlier checkpoint with a lower "
    "train.learning_rate; if the difference is harmless, raise weights.canary_tolerance"
)


@dataclass(eq=False)
class Quarantine:
    """Owns the doubt of the learner; which actors are in quarantine stands in the roster."""

    _roster: Roster
    _desk: LeaseDesk
    _buffer: GroupBuffer
    _failures: LeaseFailures
    _settings: LiveSettings
    _record: Recorder
    _is_doubt_told: bool = False

    def release(self, actor: str, policy_version: int, *, is_certain: bool = True) -> None:
        """Note that an actor's log-probs of the canary are right under this version; a quarantine ends.

        Where it is not certain, the actor is trusted, and its last good version stays the one before.
        """
        member = self._roster.named(actor)
        if member is None:
            return
        if is_certain:
            member.good_version = policy_version
        _note_comparison(member, begins_quarantine=False)
        self._is_doubt_told = False
        if member.is_quarantined:
            member.mismatches.clear()
            detail = f"its log-probs are right under version {policy_version}"
            report(self._record, EventRow(event="actor_released", detail=detail, actor=actor))

    def impose(self, actor: str, mismatch: Mismatch) -> Member | None:
        """Send an actor no leases until its log-probs of the canary are right again; return it, None when it has left.

        Ends the run when every actor has been wrong `MAX_MISMATCHES` times in a row.
        """
        member = self._roster.named(actor)
        if member is None:
            return None
        report(self._record, EventRow(event="actor_quarantined", detail=mismatch.flaw, actor=actor))
        _note_comparison(member, begins_quarantine=not member.is_quarantined)
        member.mismatches = [*member.mismatches, mismatch][-MAX_MISMATCHES:]
        # The publisher then treats the actor as one without weights, and has it pull them.
        member.policy_version = None
        held = sorted(member.lease_ids)
        self._desk.give_back_all(member, "its actor was quarantined")
        self._desk.cancel(member, held)
        keep = self._settings.config.weights.on_canary_mismatch != "drop"
        self._buffer.drop_doubtful(actor, member.good_version, keep=keep)
        self._look_for_doubt()
        return member

    def _look_for_doubt(self) -> None:
        """Tell the doubt of the learner once, and end the run when pulling again has not dispelled it."""
        doubt = doubt_of_learner(list(self._roster))
        if doubt is None:
            return
        if not self._is_doubt_told:
            self._is_doubt_told = True
            report(self._record, EventRow(event="learner_doubted", detail=doubt))
        if all(len(member.mismatches) >= MAX_MISMATCHES for member in self._roster):
            self._failures.end_run(RunFailedError(f"{MAX_MISMATCHES} times in a row {doubt}. {_CURE}"))


def reason_to_dismiss(member: Member) -> str | None:
    """Return the reason why an actor may not stay, with the cure; None for one that may be repaired."""
    if sum(member.quarantines) < MAX_QUARANTINES:
        return None
    num_compared, flaw = len(member.quarantines), member.mismatches[-1].flaw
    return (
        f"quarantined {MAX_QUARANTINES} times within {num_compared} comparisons of the canary, and right in between: {flaw}. "
        "Restart it; if it happens again, look for the cause at its machine and its engine, or, if the difference is harmless, "
        "raise weights.canary_tolerance"
    )


def _note_comparison(member: Member, *, begins_quarantine: bool) -> None:
    member.quarantines = [*member.quarantines, begins_quarantine][-RECENT:]


def doubt_of_learner(members: Sequence[Member]) -> str | None:
    """Return the reason to doubt the learner rather than the actors; None unless every actor is in quarantine."""
    if not members or not all(member.is_quarantined for member in members):
        return None
    shown = "; ".join(f"{member.name}: {member.mismatches[-1].flaw}" for member in members[:_MAX_NAMED])
    more = f"; and {len(members) - _MAX_NAMED} more" if len(members) > _MAX_NAMED else ""
    return f"every actor's log-probs of the canary differ from the learner's ({shown}{more}){_agreement(members)}"


def _agreement(members: Sequence[Member]) -> str:
    """Return the actors that agree with each other in words; empty when none do."""
    for member in members:
        others = member.mismatches[-1].agrees_with
        if others:
            names = [member.name, *others][:_MAX_NAMED]
            return f". {', '.join(names)} agree with each other, so it is the learner that is wrong"
    return ""
