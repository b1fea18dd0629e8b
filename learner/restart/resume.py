"""A run's state on disk: checkpoints are written and read here, and a restarted learner picks up the rollout log.

checkpoint (model, optimizer, ServiceState) + log records after it -> the run as it was when the last process ended
"""

import logging
import math
import time
import uuid
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from offbeat.common.errors import SettingError
from offbeat.common.processes.files import patiently, replace
from offbeat.common.records.rows import EvalRow, EventRow, Recorder, Row
from offbeat.common.records.run_folder import CHECKPOINTS, CONFIG_FILE, LOG, check_run_folder, set_aside_failed_start
from offbeat.common.settings.checks import least_staleness
from offbeat.common.settings.config import Config, LogSection, RunSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.run_state import Versions
from offbeat.learner.leases import log_reading
from offbeat.learner.leases.auto_bound import AutoBound, Noise
from offbeat.learner.leases.journal import DispatcherState, LeaseJournal
from offbeat.learner.leases.ledger import UNSEEN_LEASES, needed_position
from offbeat.learner.leases.prompts import Prompt
from offbeat.learner.leases.recovery import Recovered, last_evaluated, newest_in_rows, recover
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.restart import run_identity
from offbeat.learner.training import checkpoints
from offbeat.learner.training.ranks import RankedTrainer
from offbeat.learner.training.trainer_state import read_version

logger = logging.getLogger(__name__)

SLOWER = 1.5
"""Factor by which a checkpoint may take longer than the longest so far: a machine that is taken away is often busy."""


class ServiceState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The part of a checkpoint beside model and optimizer."""

    run_id: str
    dispatcher: DispatcherState
    identity: run_identity.RunIdentity
    """Everything that the run is made with."""
    noise: Noise | None = None
    """The automatic bound's; None when it has measured none."""


@dataclass(eq=False)
class Checkpoints:
    """Writes the run's checkpoints, and shortens the log to what the oldest kept one needs."""

    run_folder: Path
    trainer: RankedTrainer
    dispatcher: Dispatcher
    auto_bound: AutoBound
    identity: run_identity.RunIdentity
    keep: int
    """Number of newest checkpoints that are kept."""
    record: Recorder

    def __post_init__(self) -> None:
        self._root = self.run_folder / CHECKPOINTS
        self._longest_s = 0.0
        """Seconds that the longest checkpoint of this process took."""
        self._num_bytes = self.trainer.checkpoint_bytes()

    def newest_version(self) -> int | None:
        """Return the policy version of the newest whole checkpoint; None without one."""
        newest = checkpoints.newest(self._root)
        return None if newest is None else checkpoints.version_of(newest)

    def fits(self, seconds: float) -> bool:
        """Return whether a checkpoint is expected to be written within this time; True before the first one is measured."""
        return SLOWER * self._longest_s <= seconds

    def save(self) -> bool:
        """Write a checkpoint, and return whether it is there.

        A full disk costs this checkpoint, not the run: the log has what happened since the last one.
        """
        self.dispatcher.doing("writing a checkpoint")
        started = time.monotonic()
        folder = checkpoints.checkpoint_folder(self._root, self.trainer.policy_version)
        try:
            checkpoints.require_room(self._root, self._num_bytes)
            state = ServiceState(self.identity.run_id, self.dispatcher.state(), self.identity, self.auto_bound.noise)
            self.trainer.save_checkpoint(folder, msgspec.msgpack.encode(state))
        except (checkpoints.CheckpointFailedError, log_reading.LogFullError) as error:
            detail = f"{folder}: {error}; the run continues, and a restart would begin at the previous checkpoint"
            logger.warning(detail)
            self.record(EventRow(event="checkpoint_failed", detail=detail))
            return False
        self._longest_s = max(self._longest_s, time.monotonic() - started)
        patiently(lambda: checkpoints.prune(self._root, keep=self.keep))
        if state.dispatcher.log_end is not None:
            self.dispatcher.prune_log(patiently(lambda: needed_by_oldest(self._root, self.keep)))
        logger.info("checkpoint %s", folder)
        return True


class OpenedFolder(NamedTuple):
    """The run's folder, ready for this process."""

    identity: run_identity.RunIdentity
    """The identity of the run, including its id."""
    damaged: list[str]
    """A line about each checkpoint that was set aside."""
    changes: list[run_identity.Change]
    """Differences to the run that is resumed, which it may have."""

    def report(self, record: Recorder) -> None:
        """Log and record what was found."""
        for detail in self.damaged:
            logger.warning(detail)
            record(EventRow(event="checkpoint_damaged", detail=detail))
        run_identity.report_changes(self.changes, record)


def open_folder(config: Config, identity: run_identity.RunIdentity, prompt_hashes: run_identity.PromptHashes) -> OpenedFolder:
    """Prepare the run's folder, which is locked: find the run's id, set damaged checkpoints aside, write config and identity.

    Raises `SettingError` as `prepare_folder` does.
    """
    folder = Path(config.run.dir)
    run_id = (find_run_id(folder) if config.run.resume else None) or uuid.uuid4().hex[:12]
    identity = msgspec.structs.replace(identity, run_id=run_id)
    damaged = set_damaged_aside(folder, run_id) if config.run.resume else []
    return OpenedFolder(identity, damaged, prepare_folder(config, identity, prompt_hashes))


def prepare_folder(
    config: Config, identity: run_identity.RunIdentity, prompt_hashes: run_identity.PromptHashes
) -> list[run_identity.Change]:
    """Write config and identity to the run's folder, which is locked; return what differs from the run that is resumed.

    Before a new run, sets aside what a failed start left there. Raises `SettingError`, and changes nothing, for a folder that
    cannot be used so, and for a difference that a resumed run may not have.
    """
    folder = Path(config.run.dir)
    # Checked again now that no other learner can be at work there.
    check_run_folder(config.run)
    if config.run.resume:
        require_own_log(folder, identity.run_id)
    may_append = config.data.appended_data == "allow"
    changes = check_identity(folder, identity, prompt_hashes, may_append=may_append) if config.run.resume else []
    if config.log.enabled and any(change.name == "log.enabled" for change in changes):
        _require_log_without_gap(folder)
    if not config.run.resume and (aside := set_aside_failed_start(folder)) is not None:
        logger.info("an earlier start made no step: its files are in %s", aside)
    # First, because it tells the run's config from one of the user's.
    run_identity.write_identity(folder, identity, prompt_hashes)
    replace(folder / CONFIG_FILE, resolved_toml(config).encode())
    return changes


class RunState(NamedTuple):
    """The run as the learner process before this one left it, or at its beginning."""

    journal: LeaseJournal
    versions: Versions
    settings: LiveSettings
    auto_bound: AutoBound
    log: RolloutLog | None


def restore(config: Config, run_id: str, trainer: RankedTrainer, prompts: Sequence[Prompt], record: Recorder) -> RunState:
    """Bring trainer, leases and settings to where the run stands; begin it without `run.resume`."""
    folder, has_log = Path(config.run.dir), config.log.enabled
    state = load_checkpoint(folder, trainer, has_log=has_log) if config.run.resume else None
    policy_version = trainer.policy_version
    if config.run.resume:
        checkpoints.forget_evaluations(folder / CHECKPOINTS, after=policy_version)
    log = open_log(folder, run_id, config.log, state)
    may_append = config.data.appended_data == "allow"
    recovered = recover_run(folder, state, prompts, config.run.seed, has_log=has_log, may_append=may_append)
    if config.run.resume:
        report_resumed(recovered, policy_version, record)
    settings = LiveSettings(config, recovered.tuned)
    report_kept_settings(settings, folder, record)
    return RunState(
        journal=LeaseJournal(log, recovered.ledger, recovered.stream),
        versions=Versions(policy_version, recovered.newest_version, evaluated=last_evaluated(folder, policy_version)),
        settings=settings,
        auto_bound=AutoBound(least_staleness(config), state.noise if state else None),
        log=log,
    )


def mirroring(run: RunSection, record: Recorder) -> AbstractContextManager[object]:
    """Return the mirror of the run's folder, to be entered; it does nothing without `run.mirror`."""
    if not run.mirror:
        return nullcontext()
    # fsspec is slow to import.
    from offbeat.learner.restart.mirror import open_mirror

    return open_mirror(Path(run.dir), run.mirror, record, resume=bool(run.resume))


def noting_evaluations(run_folder: Path, record: Recorder) -> Recorder:
    """Return a recorder that keeps the rewards of evaluations beside the checkpoints too, whose best is not deleted."""

    def record_and_note(row: Row) -> None:
        record(row)
        if isinstance(row, EvalRow) and row.reward is not None and math.isfinite(row.reward):
            try:
                checkpoints.note_evaluation(run_folder / CHECKPOINTS, row.policy_version, row.reward)
            except OSError as error:
                logger.warning(
                    "the evaluation of version %d does not count for the best checkpoint: %s", row.policy_version, error
                )

    return record_and_note


def needed_by_oldest(root: Path, keep: int) -> log_reading.Position:
    """Return where the first log record begins that a restart from the oldest of the `keep` newest checkpoints reads.

    An older checkpoint that is kept as the best one is for export, and does not keep the log from being shortened.
    """
    oldest = sorted(checkpoints.whole(root))[-keep:][0]
    dispatcher = _state_in(oldest).dispatcher
    return needed_position(dispatcher.ledger.open, dispatcher.log_end or log_reading.Position(0, 0))


def check_identity(
    run_folder: Path, identity: run_identity.RunIdentity, hashes: run_identity.PromptHashes, *, may_append: bool = False
) -> list[run_identity.Change]:
    """Return the differences to the run in the folder that a resumed run may have; `SettingError` where it has another.

    `hashes` are those of the training prompts, to whose end prompts may be added with `may_append`. Compares with the folder's
    identity and with the newest checkpoint's, which is all that is left where the folder's file is lost.
    """
    newest = checkpoints.newest(run_folder / CHECKPOINTS)
    known = (run_identity.read_identity(run_folder), None if newest is None else _state_in(newest).identity)
    hashes_before = run_identity.read_prompt_hashes(run_folder)
    # Where a setting differs from both, the checkpoint's value counts: the weights were made with it.
    changes = {
        change.name: change
        for before in known
        if before is not None
        for change in run_identity.require_same_run(before, identity, hashes_before, hashes, may_append=may_append)
    }
    return list(changes.values())


def _state_in(checkpoint: Path) -> ServiceState:
    return msgspec.msgpack.decode(checkpoints.read_extra(checkpoint), type=ServiceState)


def _require_log_without_gap(run_folder: Path) -> None:
    """Raise `SettingError` where a run that is given a log has one already, which ends before its newest checkpoint."""
    newest, folder = checkpoints.newest(run_folder / CHECKPOINTS), run_folder / LOG
    if newest is None or not folder.is_dir() or not log_reading.segment_numbers(folder):
        return
    if _state_in(newest).dispatcher.log_end is None:
        problem = f"{newest.name} was made without a log, so {folder} has not what came before it"
        raise SettingError("log.enabled", True, problem, f"Move {folder} out of the folder to begin another log.")


def find_run_id(run_folder: Path) -> str | None:
    """Return the id of the run in a folder, from its identity, its log or its newest checkpoint; None without any."""
    identity = run_identity.read_identity(run_folder)
    if identity is not None and identity.run_id:
        return identity.run_id
    if (run_folder / LOG).is_dir() and (headers := log_reading.read_headers(run_folder / LOG)):
        return list(headers.values())[-1].run_id
    newest = checkpoints.newest(run_folder / CHECKPOINTS)
    return _run_id_in(newest) if newest is not None else None


def require_own_log(run_folder: Path, run_id: str) -> None:
    """Raise `SettingError` when another run wrote a part of the rollout log in this folder, or a segment was renamed.

    A copy of a segment that is there under its own name too is passed over, with a warning.
    """
    folder = run_folder / LOG
    headers = log_reading.read_headers(folder) if folder.is_dir() else {}
    for path, header in headers.items():
        if header.run_id != run_id:
            problem = f"this is run {run_id}, but run {header.run_id} wrote {path}"
            cure = "Give the folder its own log back, or move the folder log out of run.dir to go on without it."
            raise SettingError("run.resume", True, problem, cure)
        own_name = log_reading.segment_name(header.number)
        if path.name == own_name:
            continue
        if headers.get(log_reading.segment_path(folder, header.number)) != header:
            problem = f"{path} is the segment {own_name} of the rollout log under another name"
            raise SettingError("run.resume", True, problem, f"Rename it to {own_name}, or move it out of the folder.")
        logger.warning("%s is a copy of %s and is skipped", path, own_name)


def set_damaged_aside(run_folder: Path, run_id: str) -> list[str]:
    """Rename the newest checkpoints that cannot be resumed from: damaged ones, and those of other runs than `run_id`.

    Stops at the first whole one of this run. Returns a line about each that was renamed.
    """
    said: list[str] = []
    for folder in sorted(checkpoints.whole(run_folder / CHECKPOINTS), reverse=True):
        damage = checkpoints.find_damage(folder) or _find_foreign(folder, run_id)
        if damage is None:
            break
        said.append(f"{folder}: {damage}; it is kept as {checkpoints.set_aside(folder).name}, and not used")
    return said


def _find_foreign(folder: Path, run_id: str) -> str | None:
    """Return in words why a whole checkpoint is not this run's; None for one that is."""
    found, version = _run_id_in(folder), read_version(folder)
    if found not in (None, run_id):
        return f"it is a checkpoint of run {found}, and this is run {run_id}"
    if version not in (None, checkpoints.version_of(folder)):
        return f"it holds policy version {version}, so it was renamed"
    return None


def _run_id_in(folder: Path) -> str | None:
    try:
        return _state_in(folder).run_id
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def load_checkpoint(run_folder: Path, trainer: RankedTrainer, *, has_log: bool) -> ServiceState | None:
    """Bring the trainer to the newest checkpoint and return the state in it; None when there is no checkpoint.

    A run without `log.enabled` has no log, whatever lies there.
    """
    newest = checkpoints.newest(run_folder / CHECKPOINTS)
    if newest is not None:
        extra = trainer.load_checkpoint(newest)
        logger.info("resumed from %s", newest)
        return msgspec.msgpack.decode(extra, type=ServiceState)
    kept = "the rollout log's groups" if has_log and (run_folder / LOG).is_dir() else "nothing: there is no rollout log either"
    logger.warning(
        "no complete checkpoint in %s: training restarts at policy version 0, with %s", run_folder / CHECKPOINTS, kept
    )
    return None


def open_log(run_folder: Path, run_id: str, settings: LogSection, state: ServiceState | None) -> RolloutLog | None:
    """Open the run's log to append to it; None when the run keeps none."""
    if not settings.enabled:
        return None
    return RolloutLog(
        run_folder / LOG,
        run_id=run_id,
        fsync=settings.fsync,
        retain_bytes=settings.retain_mb << 20,
        min_free_bytes=settings.min_free_mb << 20,
        after=state.dispatcher.log_end if state else None,
    )


def recover_run(
    run_folder: Path,
    state: ServiceState | None,
    prompts: Sequence[Prompt],
    seed: int,
    *,
    has_log: bool,
    may_append: bool = False,
) -> Recovered:
    """Return the ledger, buffer and prompt order as they were when the process before this one ended.

    Raises `SettingError` when there are more prompts than before, unless `may_append`: a run whose identity is not known, which
    `check_identity` lets pass, must have the same number at least.
    """
    folder = run_folder / LOG
    # A run that was given its log after this checkpoint has nothing in it from before.
    log_end = (state.dispatcher.log_end if state else None) or log_reading.Position(0, 0)
    recovered = recover(
        state.dispatcher if state else None,
        log_reading.read_history(folder, log_end) if has_log else (),
        lambda position: log_reading.read_record(folder, position),
        prompts,
        seed,
    )
    if not has_log:
        # Each process since the checkpoint has skipped as many as this one, and nothing tells how many there were.
        recovered.ledger.skip_lease_ids(uuid.uuid4().int % UNSEEN_LEASES * UNSEEN_LEASES)
        recovered = recovered._replace(newest_version=max(recovered.newest_version, newest_in_rows(run_folder)))
    if (appended := recovered.appended) is not None and not may_append:
        problem = f"the run was made with {appended.num_before} prompts, and data.train_data now has {appended.num_prompts}"
        raise SettingError("data.appended_data", "refuse", problem, "Give the data as it was, or set it to allow.")
    return recovered


def report_resumed(recovered: Recovered, policy_version: int, record: Recorder) -> None:
    """Log and record where a resumed run stands, and what damage to the log cost."""
    ledger = recovered.ledger
    for gap in recovered.gaps:
        logger.warning("the rollout log: %s; the records after it are used", gap)
        record(EventRow(event="log_damaged", detail=str(gap)))
    if recovered.num_skipped:
        logger.warning(
            "%d records belong to leases that the damaged log lost; their prompts are re-queued", recovered.num_skipped
        )
    if (appended := recovered.appended) is not None:
        num_new = appended.num_prompts - appended.num_before
        detail = (
            f"{num_new} prompts were added to the end of the {appended.num_before} of data.train_data; they are leased from "
            f"epoch {appended.epoch} on"
        )
        logger.warning(detail)
        record(
            EventRow(
                event="data_appended",
                detail=detail,
                setting="data.train_data",
                before=str(appended.num_before),
                after=str(appended.num_prompts),
            )
        )
    detail = (
        f"at policy version {policy_version}; {recovered.num_records} log records applied, "
        f"{ledger.num_ready} groups reused, {ledger.num_open - ledger.num_ready} leases in flight"
    )
    logger.info("resumed: %s", detail)
    record(EventRow(event="resumed", detail=detail, num_reused=ledger.num_ready))


def report_kept_settings(settings: LiveSettings, run_folder: Path, record: Recorder) -> None:
    """Warn of each setting that an operator changed before the restart: its value is not the config's any more."""
    for change in settings.in_force():
        detail = (
            f"{change.setting} = {change.after}, as {change.who} set it at policy version {change.policy_version} on "
            f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(change.at))}, not {change.before} as in the config; to "
            f"change it back: offbeat set {run_folder} {change.setting}={change.before}"
        )
        logger.warning(detail)
        record(EventRow(event="setting_kept", detail=detail, setting=change.setting, value=change.after))
