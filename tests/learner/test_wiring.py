"""The learner made of its real parts: a resolved transport, a run's folder, and everything in its place."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from offbeat.common.config import Config, HubSection, ModelSection, RunSection, TaskSection, WeightsSection
from offbeat.common.settings import SettingError
from offbeat.learner.run_identity import RunIdentity, read_identity
from offbeat.learner.wiring import _transport, prepare_folder

IDENTITY = RunIdentity({"rollout.temperature": "1.0"}, {})
NO_HASHES = np.empty(0, np.uint64)


def config_with(*, run_dir: str = "run", **weights: str | int) -> Config:
    return Config(
        model=ModelSection(path="model"),
        task=TaskSection(train_data="data.jsonl"),
        run=RunSection(dir=run_dir),
        hub=HubSection(address="tcp://learner:5555", bind="tcp://0.0.0.0:5555"),
        weights=WeightsSection(**weights),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("backend", "device", "resolved"),
    [("auto", "cpu", "gloo"), ("auto", "cuda", "nccl"), ("gloo", "cuda", "gloo"), ("pull", "cpu", "pull")],
)
def test_collective_runs_where_the_learner_trains_unless_the_setting_says_otherwise(
    backend: str, device: str, resolved: str
) -> None:
    assert _transport(config_with(backend=backend), torch.device(device)).backend == resolved


def test_sizes_of_transfers_are_in_bytes_and_hosts_without_ports() -> None:
    transport = _transport(config_with(bucket_mb=3, chunk_mb=5, max_pulls=7, port=9), torch.device("cpu"))
    assert (transport.bucket_bytes, transport.chunk_bytes) == (3 << 20, 5 << 20)
    assert (transport.max_pulls, transport.port, transport.timeout_s) == (7, 9, 60.0)
    assert (transport.host, transport.listen_on) == ("learner", "0.0.0.0")


def test_folder_of_a_run_holds_the_resolved_config(tmp_path: Path) -> None:
    prepare_folder(config_with(run_dir=str(tmp_path), bucket_mb=3), IDENTITY, NO_HASHES)
    assert "bucket_mb = 3" in (tmp_path / "config.toml").read_text()


def test_config_of_a_run_that_has_made_steps_is_not_overwritten_by_a_new_one(tmp_path: Path) -> None:
    prepare_folder(config_with(run_dir=str(tmp_path), bucket_mb=3), IDENTITY, NO_HASHES)
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(SettingError, match="already holds a run"):
        prepare_folder(config_with(run_dir=str(tmp_path), bucket_mb=5), IDENTITY, NO_HASHES)
    assert "bucket_mb = 3" in (tmp_path / "config.toml").read_text()


def test_refused_resume_leaves_config_and_identity_as_they_were(tmp_path: Path) -> None:
    prepare_folder(config_with(run_dir=str(tmp_path), bucket_mb=3), IDENTITY, NO_HASHES)
    config = config_with(run_dir=str(tmp_path), bucket_mb=5)
    config = structs.replace(config, run=structs.replace(config.run, resume=True))
    other = RunIdentity({"rollout.temperature": "0.5"}, {})
    with pytest.raises(SettingError, match=r"rollout\.temperature"):
        prepare_folder(config, other, NO_HASHES)
    assert "bucket_mb = 3" in (tmp_path / "config.toml").read_text()
    assert read_identity(tmp_path) == IDENTITY
    assert prepare_folder(config, IDENTITY, NO_HASHES) == []
    assert "bucket_mb = 5" in (tmp_path / "config.toml").read_text()
