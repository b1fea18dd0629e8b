"""The parts of the dispatcher, made in order and handed what they use."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from offbeat.common.records.rows import Recorder
from offbeat.learner.diagnostics.sample_rows import Decode
from offbeat.learner.dispatch.answers import Answers, GroupCheck
from offbeat.learner.dispatch.contract import Contract
from offbeat.learner.dispatch.evaluation_leases import EvaluationLeases, FinishEvaluation
from offbeat.learner.dispatch.failures import Failures
from offbeat.learner.dispatch.group_buffer import GroupBuffer
from offbeat.learner.dispatch.handout import Handout
from offbeat.learner.dispatch.judge_budget import within_budget
from offbeat.learner.dispatch.lease_desk import LeaseDesk
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.quarantine import Quarantine
from offbeat.learner.dispatch.roster import Roster
from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.learner.dispatch.status import Status
from offbeat.learner.dispatch.versions import Versions
from offbeat.learner.dispatch.watchdog import Watchdog
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.prompts import Prompt
from offbeat.learner.leases.scheduler import RolloutScheduler


class Prompts(NamedTuple):
    """The prompts of a run, each at the index that is its `prompt_id`."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]


class Parts(NamedTuple):
    """Everything that the dispatcher's lock guards."""

    clock: Callable[[], float]
    progress: threading.Condition
    """The lock. Notified when a batch may be complete, a round of evaluation has ended, an actor has left, or the run fails."""
    contract: Contract
    settings: LiveSettings
    record: Recorder
    journal: LeaseJournal
    versions: Versions
    send_queue: SendQueue
    failures: Failures
    evaluations: EvaluationLeases
    roster: Roster
    desk: LeaseDesk
    buffer: GroupBuffer
    answers: Answers
    quarantine: Quarantine
    watchdog: Watchdog
    status: Status
    handout: Handout


def make_parts(
    contract: Contract,
    settings: LiveSettings,
    prompts: Prompts,
    decode: Decode,
    journal: LeaseJournal,
    versions: Versions,
    record: Recorder,
    clock: Callable[[], float] = time.monotonic,
    finish_evaluation: FinishEvaluation | None = None,
) -> Parts:
    """Make the parts of one learner process; `clock` gives seconds, as `now` does in every message and tick.

    `decode` is called in the hub's thread, for the samples of evaluations.
    """
    now = clock()
    config, rollout = settings.config, settings.config.rollout
    progress = threading.Condition()
    wake = progress.notify_all
    send_queue = SendQueue()
    failures = Failures(rollout.max_lease_attempts, config.train.max_failed_leases, wake)
    evaluations = EvaluationLeases(config.evaluation, rollout, prompts.evaluation, decode, record, finish_evaluation, wake)
    scheduler = RolloutScheduler(settings.staleness, evaluations.rounds, journal.ledger)
    roster = Roster(contract, config.hub, versions, send_queue, within_budget(config, failures, record))
    claims_until = now + config.hub.dead_after_s
    desk = LeaseDesk(rollout, prompts.train, journal, scheduler, evaluations, send_queue, record, claims_until)
    drop_zero_variance = config.loss.zero_variance == "drop"
    buffer = GroupBuffer(
        prompts.train, journal, scheduler, versions, failures, record, wake, drop_zero_variance=drop_zero_variance
    )
    check = GroupCheck(config, contract.vocabulary_size, contract.experts, versions)
    answers = Answers(check, desk, buffer, evaluations, failures, roster.rejections, send_queue, record)
    quarantine = Quarantine(roster, desk, buffer, failures, settings, record)
    watchdog = Watchdog(settings, roster, desk, journal, versions, evaluations, failures, record)
    status = Status(contract.run_id, settings, roster, desk, journal, watchdog, versions, now)
    return Parts(
        clock=clock,
        progress=progress,
        contract=contract,
        settings=settings,
        record=record,
        journal=journal,
        versions=versions,
        send_queue=send_queue,
        failures=failures,
        evaluations=evaluations,
        roster=roster,
        desk=desk,
        buffer=buffer,
        answers=answers,
        quarantine=quarantine,
        watchdog=watchdog,
        status=status,
        handout=Handout(contract.kit, send_queue),
    )
