"""The learner made of its real parts: a resolved transport, a run's folder, and everything in its place."""

from pathlib import Path

import pytest
import torch

from offbeat.common.config import Config, HubSection, ModelSection, RunSection, TaskSection, WeightsSection
from offbeat.learner.wiring import _transport, prepare_folder


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
    folder = prepare_folder(config_with(run_dir=str(tmp_path / "a" / "run"), bucket_mb=3))
    assert "bucket_mb = 3" in (folder / "config.toml").read_text()
