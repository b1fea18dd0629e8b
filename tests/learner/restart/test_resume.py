"""A restarted learner continues from its checkpoints and the rollout log."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records.rows import CommitRow, EvalRow, LedgerSums, Row, StepRow, row_fields
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.config import Config, DataSection, LogSection, ModelSection, RunSection
from offbeat.common.settings.learning_sections import LoraSection
from offbeat.learner.dispatch.dispatcher import Dispatcher
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.leases.auto_bound import AutoBound, Noise
from offbeat.learner.leases.events import Expired, Started, Tuned
from offbeat.learner.leases.journal import DispatcherState
from offbeat.learner.leases.ledger import UNSEEN_LEASES, LedgerState, OpenLease
from offbeat.learner.leases.log_reading import LogFullError, Position, read_whole_log
from offbeat.learner.leases.prompt_stream import StreamState
from offbeat.learner.leases.recovery import last_evaluated
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.restart import resume
from offbeat.learner.restart.resume import Checkpoints, ServiceState
from offbeat.learner.restart.run_identity import Change, RunIdentity, write_identity
from offbeat.learner.training import checkpoints
from offbeat.learner.training.ranks import RankedTrainer
from offbeat.learner.training.trainer_state import CheckpointMeta
from tests.learner.leases.taped_log import PROMPTS
from tests.learner.leases.test_recovery import Tale

IDENTITY = RunIdentity({"rollout.temperature": "1.0"}, {"software: torch": "2.0"}, "run")
NO_HASHES = np.empty(0, np.uint64)
NO_FSYNC = LogSection(fsync="off")


def saved_lease(lease_id: int, offset: int | None) -> OpenLease:
    position = None if offset is None else Position(1, offset)
    return OpenLease(lease_id, lease_id, 0, "actor-0", position, is_ready=offset is not None, oldest_version=0, granted_at=0.0)


def state_with(log_end: Position | None, *open_leases: OpenLease) -> DispatcherState:
    counts = LedgerSums(len(open_leases), 0, {}, 0, len(open_leases))
    ledger = LedgerState(counts, next_lease_id=len(open_leases), open=open_leases, epochs={})
    return DispatcherState(StreamState(5, 3, len(open_leases), ()), ledger, log_end, newest_version=0)


class FakeTrainer:
    """Writes and reads the extra part of checkpoints, without a model."""

    def __init__(self) -> None:
        self.policy_version = 0

    def checkpoint_bytes(self) -> int:
        return 1600

    def save_checkpoint(self, folder: Path, extra: bytes) -> None:
        partial = checkpoints.partial_folder(folder)
        partial.mkdir(parents=True)
        checkpoints.write_extra(partial, extra)
        checkpoints.publish(folder)

    def load_checkpoint(self, folder: Path) -> bytes:
        self.policy_version = int(folder.name.rpartition("-")[2])
        return checkpoints.read_extra(folder)


class FakeDispatcher:
    """Returns preset states, and records up to which position its log was pruned."""

    def __init__(self) -> None:
        self.next_state: DispatcherState | LogFullError = state_with(Position(1, 0))
        self.pruned: list[Position] = []

    def doing(self, what: str) -> None:
        assert what == "writing a checkpoint"

    def state(self) -> DispatcherState:
        if isinstance(self.next_state, LogFullError):
            raise self.next_state
        return self.next_state

    def prune_log(self, needed: Position) -> None:
        self.pruned.append(needed)


class Run:
    """Checkpoints of a run in `folder`, the `keep` newest being kept."""

    def __init__(self, folder: Path, *, keep: int, noise: Noise | None = None, run_id: str = "run") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.trainer, self.dispatcher = FakeTrainer(), FakeDispatcher()
        self.rows: list[dict[str, Any]] = []
        self.checkpoints = Checkpoints(
            folder,
            trainer=cast(RankedTrainer, self.trainer),
            dispatcher=cast(Dispatcher, self.dispatcher),
            auto_bound=AutoBound(0, noise),
            identity=msgspec.structs.replace(IDENTITY, run_id=run_id),
            keep=keep,
            record=lambda row: self.rows.append(row_fields(row)),
        )

    def save(self, policy_version: int, state: DispatcherState) -> None:
        self.trainer.policy_version = policy_version
        self.dispatcher.next_state = state
        self.checkpoints.save()

    def names(self) -> list[str]:
        return sorted(folder.name for folder in (self.folder / "checkpoints").iterdir())


def test_log_keeps_what_the_oldest_kept_checkpoint_needs(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    run.save(1, state_with(Position(1, 500), saved_lease(0, 100), saved_lease(1, 300), saved_lease(2, None)))
    run.save(2, state_with(Position(1, 900), saved_lease(3, 700)))
    run.save(3, state_with(Position(2, 50)))
    assert run.dispatcher.pruned == [Position(1, 100), Position(1, 100), Position(1, 700)]
    assert run.names() == ["step-00000002", "step-00000003"]


def test_checkpoint_fits_into_the_time_that_the_longest_took_and_a_half_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, keep=1)
    assert run.checkpoints.fits(0.0), "none was measured yet"
    times = iter([100.0, 110.0, 200.0, 204.0])
    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=lambda: next(times)))
    for version in (1, 2):
        run.save(version, state_with(None))
    assert run.checkpoints.fits(15.0)
    assert not run.checkpoints.fits(14.9)


def test_newest_checkpoint_is_the_whole_one_of_the_highest_version(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    assert run.checkpoints.newest_version() is None
    run.save(9, state_with(None))
    run.save(12, state_with(None))
    checkpoints.set_aside(checkpoints.checkpoint_folder(tmp_path / "checkpoints", 12))
    assert run.checkpoints.newest_version() == 9


def test_run_without_a_log_prunes_none(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    run.save(1, state_with(None))
    assert run.dispatcher.pruned == []
    assert run.names() == ["step-00000001"]


def test_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2, noise=Noise(0.25, 0.5))
    run.save(1, state_with(Position(1, 0)))
    newest = state_with(Position(1, 500), saved_lease(0, 100))
    run.save(12, newest)
    trainer = FakeTrainer()
    state = resume.load_checkpoint(tmp_path, cast(RankedTrainer, trainer), has_log=True)
    assert state == ServiceState("run", newest, IDENTITY, Noise(0.25, 0.5))
    assert trainer.policy_version == 12


def test_older_checkpoint_is_used_when_the_newest_is_damaged_which_is_kept_and_told(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=3)
    states = [state_with(Position(1, version)) for version in range(3)]
    for version, state in enumerate(states):
        run.save(version, state)
    newest, older = [checkpoints.checkpoint_folder(tmp_path / "checkpoints", version) for version in (2, 1)]
    extra = bytearray((newest / "extra.bin").read_bytes())
    extra[5] ^= 1
    (newest / "extra.bin").write_bytes(extra)
    (older / "extra.bin").unlink()
    trainer = FakeTrainer()
    rows: list[dict[str, Any]] = []
    opened = resume.OpenedFolder(IDENTITY, resume.set_damaged_aside(tmp_path, "run"), [])
    opened.report(lambda row: rows.append(row_fields(row)))
    loaded = resume.load_checkpoint(tmp_path, cast(RankedTrainer, trainer), has_log=True)
    assert loaded is not None
    assert (trainer.policy_version, loaded.dispatcher) == (0, states[0])
    assert [row["event"] for row in rows] == ["checkpoint_damaged"] * 2
    assert "extra.bin has other content than was written" in rows[0]["detail"]
    assert "extra.bin is missing" in rows[1]["detail"]
    assert run.names() == ["step-00000000", "step-00000001.damaged", "step-00000002.damaged"]
    run.save(1, states[1])
    run.save(2, states[2])
    assert "step-00000002.damaged" in run.names(), "pruning leaves it to people"


def test_checkpoints_of_another_run_and_renamed_ones_are_set_aside_and_told(tmp_path: Path) -> None:
    own = Run(tmp_path / "own", keep=3)
    own.save(1, state_with(Position(1, 1)))
    other = Run(tmp_path / "other", keep=3, run_id="other")
    other.save(2, state_with(Position(1, 2)))
    root = tmp_path / "own" / "checkpoints"
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000002", root / "step-00000002")
    said = resume.set_damaged_aside(tmp_path / "own", "run")
    assert [line.partition(": ")[2] for line in said] == [
        "it is a checkpoint of run other, and this is run run; it is kept as step-00000002.damaged, and not used"
    ]
    meta = CheckpointMeta(policy_version=7, world_size=1, zero_stage=0, dtype="float32", lora=LoraSection(), has_critic=False)
    own.save(3, state_with(Position(1, 3)))
    (root / "step-00000003" / "trainer.json").write_bytes(msgspec.json.encode(meta))
    (said,) = resume.set_damaged_aside(tmp_path / "own", "run")
    assert "holds policy version 7, so it was renamed" in said
    assert checkpoints.newest(root) == root / "step-00000001"


def write_log(run_folder: Path, *run_ids: str) -> None:
    """Write a log in which learner processes of these runs began one after another."""
    for run_id in run_ids:
        log = resume.open_log(run_folder, run_id, NO_FSYNC, None)
        assert log is not None
        log.append(Started(at=0.0, run_id=run_id, learner_incarnation=1, policy_version=0))
        log.commit()
        log.close()


def test_log_of_another_run_is_refused_with_both_ids(tmp_path: Path) -> None:
    write_log(tmp_path, "run", "run")
    resume.require_own_log(tmp_path, "run")
    write_log(tmp_path, "other")
    with pytest.raises(SettingError, match=r"this is run run, but run other wrote .*00000003\.log.*without it"):
        resume.require_own_log(tmp_path, "run")


def test_rolled_over_segment_of_another_run_is_refused_with_both_ids(tmp_path: Path) -> None:
    write_log(tmp_path / "own", "run")
    write_log(tmp_path / "other", "other")
    rolled = RolloutLog(
        tmp_path / "other" / "log", run_id="other", fsync="off", retain_bytes=1 << 30, min_free_bytes=0, segment_bytes=1
    )
    for lease_id in range(2):
        rolled.append(Expired(at=0.0, lease_id=lease_id, reason="lost"))
    shutil.copy(tmp_path / "other" / "log" / "00000003.log", tmp_path / "own" / "log")
    with pytest.raises(SettingError, match=r"this is run run, but run other wrote .*00000003\.log"):
        resume.require_own_log(tmp_path / "own", "run")


def test_copy_of_a_segment_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_log(tmp_path, "run")
    log = tmp_path / "log"
    shutil.copy(log / "00000001.log", log / "00000002.log")
    resume.require_own_log(tmp_path, "run")
    assert "00000002.log is a copy of 00000001.log and is skipped" in caplog.text
    write_log(tmp_path, "run")
    found = [record.position.segment for record in read_whole_log(log)]
    assert found == [1, 3], "nothing is applied twice, and nothing is missing"


def test_exchanged_segments_are_refused_with_their_names(tmp_path: Path) -> None:
    write_log(tmp_path, "run", "run")
    log = tmp_path / "log"
    (log / "00000001.log").rename(log / "first")
    (log / "00000002.log").rename(log / "00000001.log")
    (log / "first").rename(log / "00000002.log")
    with pytest.raises(SettingError, match=r"00000001\.log is the segment 00000002\.log .*Rename it to 00000002\.log"):
        resume.require_own_log(tmp_path, "run")


def test_id_of_a_run_comes_from_its_identity_else_from_its_log_else_from_its_checkpoint(tmp_path: Path) -> None:
    assert resume.find_run_id(tmp_path) is None
    Run(tmp_path, keep=1, run_id="of checkpoint").save(1, state_with(Position(1, 0)))
    assert resume.find_run_id(tmp_path) == "of checkpoint"
    write_log(tmp_path, "older", "of log")
    assert resume.find_run_id(tmp_path) == "of log"
    write_identity(tmp_path, RunIdentity({}, {}, "of identity"), NO_HASHES)
    assert resume.find_run_id(tmp_path) == "of identity"


def test_best_checkpoint_by_evaluation_is_kept_and_does_not_keep_the_log(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    rows: list[Row] = []
    record = resume.noting_evaluations(tmp_path, rows.append)

    def evaluated(version: int, reward: float | None) -> EvalRow:
        return EvalRow(policy_version=version, reward=reward, length=1.0, num_completions=1, num_failed=0)

    for version, reward in ((1, 0.25), (2, 0.75), (3, math.nan), (4, None)):
        run.save(version, state_with(Position(version, 500)))
        record(evaluated(version, reward))
    assert run.names() == ["evaluations.json", "step-00000002", "step-00000004"]
    assert run.dispatcher.pruned[-1] == Position(4, 500)
    assert len(rows) == 4
    run.save(5, state_with(Position(5, 500)))
    record(evaluated(5, 0.75))
    run.save(6, state_with(Position(6, 500)))
    # The newest of equals.
    assert run.names() == ["evaluations.json", "step-00000005", "step-00000006"]


def test_rewards_of_steps_that_a_resume_undoes_choose_no_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    run.save(2, state_with(None))
    root = tmp_path / "checkpoints"
    for version, reward in ((1, 0.1), (2, 0.5), (4, 0.9)):
        checkpoints.note_evaluation(root, version, reward)
    config = Config(run=RunSection(dir=str(tmp_path), resume=True), log=LogSection(enabled=False))
    resume.restore(config, "run", cast(RankedTrainer, run.trainer), PROMPTS[:5], lambda row: None)
    # The same version is reached again, with other weights that nothing has evaluated yet.
    run.save(4, state_with(None))
    assert checkpoints.best(root) == root / "step-00000002"


def test_last_evaluation_is_the_newest_finished_one_of_no_later_version(tmp_path: Path) -> None:
    assert last_evaluated(tmp_path, 13) == -1
    with MetricsWriter(tmp_path) as writer:
        for version in (0, 20, 10):
            writer.write(EvalRow(policy_version=version, reward=None, length=None, num_completions=0, num_failed=1))
    assert [last_evaluated(tmp_path, version) for version in (0, 9, 13, 20)] == [0, 0, 10, 20]


def test_evaluation_of_a_step_that_was_made_again_is_missing_until_it_is_made_again_too(tmp_path: Path) -> None:
    steps = [StepRow(policy_version=version, metrics={}) for version in (1, 2, 3)]
    evaluations = [
        EvalRow(policy_version=version, reward=None, length=None, num_completions=0, num_failed=1) for version in (1, 2, 3)
    ]
    with MetricsWriter(tmp_path) as writer:
        for row in (*steps, *evaluations, *steps[1:]):
            writer.write(row)
        assert last_evaluated(tmp_path, 3) == 1
        writer.write(evaluations[1])
    assert last_evaluated(tmp_path, 3) == 2


def too_full(root: Path, num_bytes: int) -> None:
    assert num_bytes == 1600
    raise checkpoints.CheckpointFailedError("it takes about 1 MB")


@pytest.mark.parametrize("cause", ["disk", "log"])
def test_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    run = Run(tmp_path, keep=1)
    run.save(1, state_with(Position(1, 0)))
    if cause == "disk":
        monkeypatch.setattr(checkpoints, "require_room", too_full)
    else:
        run.dispatcher.next_state = LogFullError("no space left")
    run.trainer.policy_version = 2
    run.checkpoints.save()
    assert run.names() == ["step-00000001"]
    assert run.dispatcher.pruned == [Position(1, 0)]
    (row,) = run.rows
    assert (row["kind"], row["event"]) == ("event", "checkpoint_failed")
    assert "the run continues" in row["detail"]


@pytest.mark.parametrize(
    ("has_folder", "has_log", "said"),
    [(True, True, "the rollout log's groups"), (True, False, "nothing"), (False, True, "nothing")],
)
def test_run_without_a_checkpoint_begins_again_and_says_what_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_folder: bool, has_log: bool, said: str
) -> None:
    if has_folder:
        (tmp_path / "log").mkdir()
    trainer = FakeTrainer()
    assert resume.load_checkpoint(tmp_path, cast(RankedTrainer, trainer), has_log=has_log) is None
    assert trainer.policy_version == 0
    assert f"restarts at policy version 0, with {said}" in caplog.text


def test_learner_that_died_before_its_first_record_has_nothing_to_recover(tmp_path: Path) -> None:
    log = resume.open_log(tmp_path, "run", NO_FSYNC, None)
    assert log is not None
    log.close()
    recovered = resume.recover_run(tmp_path, None, PROMPTS, 0, has_log=True)
    assert (recovered.num_records, recovered.ledger.counts()) == (0, LedgerSums(0, 0, {}, 0, 0))


def identity_with(temperature: str, torch_version: str) -> RunIdentity:
    return RunIdentity({"rollout.temperature": temperature}, {"software: torch": torch_version})


def test_resumed_run_is_compared_with_the_folder_and_with_the_newest_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=1)
    run.save(1, state_with(Position(1, 0)))
    assert resume.check_identity(tmp_path, IDENTITY, NO_HASHES) == []
    # The folder's file is lost, and the checkpoint has the identity still.
    with pytest.raises(SettingError, match=r"rollout\.temperature = 0\.5: the run was made with 1\.0"):
        resume.check_identity(tmp_path, identity_with("0.5", "2.0"), NO_HASHES)
    write_identity(tmp_path, identity_with("1.0", "2.1"), NO_HASHES)
    changes = resume.check_identity(tmp_path, identity_with("1.0", "2.2"), NO_HASHES)
    assert changes == [Change("software: torch", "2.0", "2.2")]
    # A checkpoint of another run was put into the folder.
    write_identity(tmp_path, identity_with("0.5", "2.0"), NO_HASHES)
    with pytest.raises(SettingError, match=r"rollout\.temperature = 0\.5"):
        resume.check_identity(tmp_path, identity_with("0.5", "2.0"), NO_HASHES)


@pytest.fixture
def killed_run(tmp_path: Path) -> Path:
    """The folder of a killed learner.

    At its checkpoint lease 0 is ready and 1 generating; afterwards 2 is granted, 1 accepted and 0 trained.
    """
    run = Run(tmp_path / "run", keep=1)
    tale = Tale(run.folder / "log")
    tale.start()
    tale.grant(0)
    tale.grant(1)
    tale.accept(0)
    run.save(1, tale.checkpoint())
    tale.grant(2)
    tale.accept(1)
    tale.train(0, policy_version=1)
    tale.log.close()
    return run.folder


def test_run_without_its_checkpoint_begins_again_with_its_groups(killed_run: Path) -> None:
    shutil.rmtree(killed_run / "checkpoints")
    assert resume.find_run_id(killed_run) == "run"
    recovered = resume.recover_run(killed_run, None, PROMPTS, 0, has_log=True)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [0, 1]


def test_log_that_a_resumed_run_was_given_is_read_though_its_checkpoint_knows_of_none(tmp_path: Path) -> None:
    run, tale = Run(tmp_path / "run", keep=1), Tale(tmp_path / "run" / "log")
    run.save(1, msgspec.structs.replace(tale.checkpoint(), log_end=None))
    tale.start(policy_version=1)
    tale.grant(UNSEEN_LEASES)
    tale.accept(UNSEEN_LEASES)
    tale.log.close()
    state = resume.load_checkpoint(run.folder, cast(RankedTrainer, FakeTrainer()), has_log=True)
    recovered = resume.recover_run(run.folder, state, PROMPTS, 0, has_log=True)
    assert [group.lease_id for group in recovered.ledger.ready_groups()] == [UNSEEN_LEASES]


def test_log_is_not_written_on_behind_steps_that_it_has_not(tmp_path: Path) -> None:
    """Otherwise a later restart would take its old records for those after the newest checkpoint."""
    config = Config(run=RunSection(dir=str(tmp_path), resume=True), log=NO_FSYNC)
    without, with_log = (
        msgspec.structs.replace(IDENTITY, settings={**IDENTITY.settings, "log.enabled": text}) for text in ("false", "true")
    )
    write_log(tmp_path, "run")
    run = Run(tmp_path, keep=1)
    run.save(1, state_with(None))
    write_identity(tmp_path, without, NO_HASHES)
    for _ in range(2):
        with pytest.raises(SettingError, match=r"log\.enabled = true: .* Move .*log out of the folder"):
            resume.prepare_folder(config, with_log, NO_HASHES)
    (tmp_path / "log").rename(tmp_path / "old")
    assert [change.name for change in resume.prepare_folder(config, with_log, NO_HASHES)] == ["log.enabled"]
    write_log(tmp_path, "run")
    assert resume.prepare_folder(config, with_log, NO_HASHES) == []


def test_two_restarts_from_one_checkpoint_without_a_log_grant_other_leases(killed_run: Path) -> None:
    """Otherwise an actor's group for a lease of the first would be taken for another prompt's by the second."""
    state = resume.load_checkpoint(killed_run, cast(RankedTrainer, FakeTrainer()), has_log=False)
    first, second = (resume.recover_run(killed_run, state, PROMPTS, 0, has_log=False).ledger.next_lease_id() for _ in range(2))
    assert abs(first - second) >= UNSEEN_LEASES


def test_without_a_log_only_the_checkpoint_counts(killed_run: Path) -> None:
    state = resume.load_checkpoint(killed_run, cast(RankedTrainer, FakeTrainer()), has_log=True)
    recovered = resume.recover_run(killed_run, state, PROMPTS, 0, has_log=False)
    assert recovered.num_records == 0
    assert resume.open_log(killed_run, "run", LogSection(enabled=False), state) is None


@pytest.mark.parametrize("newest", [StepRow(policy_version=9, metrics={}), CommitRow(actor="a", policy_version=9, stall_s=0.0)])
def test_without_a_log_the_rows_tell_what_was_made_after_the_checkpoint(killed_run: Path, newest: StepRow | CommitRow) -> None:
    """Otherwise groups that actors began under those weights are refused, as under weights that nobody has made."""
    with MetricsWriter(killed_run) as writer:
        writer.write(newest)
    state = resume.load_checkpoint(killed_run, cast(RankedTrainer, FakeTrainer()), has_log=False)
    assert resume.recover_run(killed_run, state, PROMPTS, 0, has_log=False).newest_version == 9


def told(tell: Callable[..., None], *arguments: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    tell(*arguments, lambda row: rows.append(row_fields(row)))
    return rows


def test_resumed_run_says_what_it_reuses(killed_run: Path) -> None:
    state = resume.load_checkpoint(killed_run, cast(RankedTrainer, FakeTrainer()), has_log=True)
    recovered = resume.recover_run(killed_run, state, PROMPTS, 0, has_log=True)
    (row,) = told(resume.report_resumed, recovered, 1)
    assert row == {
        "kind": "event",
        "event": "resumed",
        "detail": "at policy version 1; 3 log records applied, 2 groups reused, 1 leases in flight",
        "num_reused": 2,
    }


def test_prompts_that_were_added_are_told_with_both_numbers_and_the_epoch_that_has_them(killed_run: Path) -> None:
    state = resume.load_checkpoint(killed_run, cast(RankedTrainer, FakeTrainer()), has_log=True)
    more = [*PROMPTS, PROMPTS[0]._replace(prompt_id=len(PROMPTS))]
    with pytest.raises(
        SettingError, match=r"data\.appended_data = .refuse.: .* made with 7 prompts, and data\.train_data now has 8"
    ):
        resume.recover_run(killed_run, state, more, 0, has_log=True)
    recovered = resume.recover_run(killed_run, state, more, 0, has_log=True, may_append=True)
    first, _ = told(resume.report_resumed, recovered, 1)
    assert (first["event"], first["setting"], first["before"], first["after"]) == ("data_appended", "data.train_data", "7", "8")
    assert first["detail"].startswith(
        "1 prompts were added to the end of the 7 of data.train_data; they are leased from epoch 1"
    )
    with pytest.raises(SettingError, match=r"made with 7 prompts, and data\.train_data now has 4"):
        resume.recover_run(killed_run, state, PROMPTS[:4], 0, has_log=True, may_append=True)


def test_setting_that_an_operator_changed_before_the_restart_is_told(killed_run: Path) -> None:
    config = Config(model=ModelSection(path="model"), data=DataSection(train_data="data.jsonl"))
    event = Tuned(at=30.0, settings={"staleness.max_staleness": "3"}, who="operator", reason="", policy_version=9)
    (row,) = told(resume.report_kept_settings, LiveSettings(config, {"staleness.max_staleness": event}), killed_run)
    assert (row["event"], row["setting"], row["value"]) == ("setting_kept", "staleness.max_staleness", "3")
    assert f"offbeat set {killed_run} staleness.max_staleness={config.staleness.max_staleness}" in row["detail"]
    assert told(resume.report_kept_settings, LiveSettings(config, {}), killed_run) == []
