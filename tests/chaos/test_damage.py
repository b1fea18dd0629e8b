"""Chaos damages files as bad disks and killed processes do, and says what that destroyed."""

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from offbeat.common.settings.learning_sections import LoraSection
from offbeat.learner.leases.events import Expired, Tuned
from offbeat.learner.leases.log_reading import Position, read_log
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.restart.resume import ServiceState, set_damaged_aside
from offbeat.learner.training import checkpoints
from offbeat.learner.training.trainer_state import CheckpointMeta
from tests.chaos.faults import DAMAGES_AT_THE_END, DAMAGES_IN_THE_MIDDLE, NEAR_RECORDS, corrupt_log, damage_checkpoint
from tests.chaos.test_chaos import detail_of
from tests.learner.restart.test_resume import IDENTITY, state_with

DAMAGES = (*DAMAGES_AT_THE_END, *DAMAGES_IN_THE_MIDDLE)


def log_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.log"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_corrupted_log_loses_one_record_at_most_and_says_which(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "log"
    log = RolloutLog(folder, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    for lease_id in range(5):
        log.append(Expired(at=0.0, lease_id=lease_id, reason="lost"))
    log.close()
    size = log_size(folder)
    corrupted = corrupt_log(folder, damage, random.Random(2))
    assert detail_of(corrupted).startswith(damage)
    is_record_hit = "flipped bit" in damage or damage == "cut"
    lost = [event.lease_id for event in corrupted.lost if isinstance(event, Expired)]
    assert len(lost) == is_record_hit
    assert ("middle" in damage) == (lost not in ([], [4]))
    assert log_size(folder) > size or is_record_hit
    # A learner goes on from there.
    log = RolloutLog(folder, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    log.append(Expired(at=0.0, lease_id=9, reason="lost"))
    log.close()
    left = [record.event.lease_id for record in read_log(folder) if isinstance(record.event, Expired)]
    assert left == [lease_id for lease_id in (0, 1, 2, 3, 4, 9) if lease_id not in lost]


def test_settings_that_were_changed_are_no_record_that_a_corrupted_log_loses(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    for seed in range(40):
        shutil.rmtree(folder, ignore_errors=True)
        log = RolloutLog(folder, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
        log.append(Tuned(at=0.0, settings={"weights.canary_tolerance": "none"}, who="chaos", reason="", policy_version=3))
        log.close()
        corrupted = corrupt_log(folder, DAMAGES[seed % len(DAMAGES)], random.Random(seed))
        assert corrupted.lost == ()
        assert [type(record.event) for record in read_log(folder)] == [Tuned]


def test_log_without_a_record_is_left_alone(tmp_path: Path) -> None:
    assert corrupt_log(tmp_path, "garbage", random.Random(0)).detail is None


@pytest.mark.parametrize("seed", range(16))
def test_damage_to_the_newest_checkpoint_is_one_that_a_restart_finds(tmp_path: Path, seed: int) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    assert damage_checkpoint(root, random.Random(seed)).detail is None
    for version in (1, 2):
        folder = checkpoints.checkpoint_folder(root, version)
        partial = checkpoints.partial_folder(folder)
        partial.mkdir()
        (partial / "weights").write_bytes(bytes(300))
        meta = CheckpointMeta(version, world_size=1, zero_stage=0, dtype="float32", lora=LoraSection(), has_critic=False)
        (partial / "trainer.json").write_bytes(msgspec.json.encode(meta))
        checkpoints.write_extra(partial, msgspec.msgpack.encode(ServiceState("run", state_with(Position(1, 0)), IDENTITY)))
        checkpoints.publish(folder)
    assert "step-00000002" in detail_of(damage_checkpoint(root, random.Random(seed)))
    assert len(set_damaged_aside(tmp_path, "run")) == 1
    assert checkpoints.newest(root) == checkpoints.checkpoint_folder(root, 1)


def test_middle_of_a_long_log_is_damaged_where_a_restart_from_the_newest_checkpoint_reads(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = RolloutLog(folder, run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0)
    for lease_id in range(400):
        log.append(Expired(at=0.0, lease_id=lease_id, reason="lost"))
    log.close()
    corrupted = corrupt_log(folder, *DAMAGES_IN_THE_MIDDLE, random.Random(2))
    (lost,) = [event.lease_id for event in corrupted.lost if isinstance(event, Expired)]
    assert 400 - NEAR_RECORDS <= lost < 399
