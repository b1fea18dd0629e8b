"""The learner made of its real parts: a resolved transport, a run's folder, and everything in its place."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs

from offbeat.common.errors import SettingError
from offbeat.common.models.routing import Routing
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.rows import FinalRow, RoutingRow, Row
from offbeat.common.settings.completion import complete
from offbeat.common.settings.config import (
    Config,
    DataSection,
    HubSection,
    MetricsSection,
    ModelSection,
    RunSection,
    WeightsSection,
)
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.learner.hub import publish_address
from offbeat.learner.inputs import load_inputs
from offbeat.learner.leases.events import Weighed
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.reporting.outlets import HealthWatch
from offbeat.learner.restart.resume import prepare_folder
from offbeat.learner.restart.run_identity import RunIdentity, read_identity
from offbeat.learner.service import Learner
from offbeat.learner.weights import transport as transports
from offbeat.learner.weights.transport import resolve_transport
from offbeat.learner.wiring import open_learner
from offbeat.protocols.addresses import find_address
from offbeat.protocols.channels import Hub

IDENTITY = RunIdentity({"rollout.temperature": "1.0"}, {})
NO_HASHES = np.empty(0, np.uint64)


def config_with(*, run_dir: str = "run", **weights: str | int) -> Config:
    return Config(
        model=ModelSection(path="model"),
        data=DataSection(train_data="data.jsonl"),
        run=RunSection(dir=run_dir),
        hub=HubSection(address="tcp://learner:5555", bind="tcp://0.0.0.0:5555"),
        weights=WeightsSection(**weights),  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize(
    ("backend", "device", "resolved"),
    [("auto", "cpu", "gloo"), ("auto", "cuda:2", "nccl"), ("gloo", "cuda:2", "gloo"), ("pull", "cpu", "pull")],
)
def test_collective_runs_where_the_learner_trains_unless_the_setting_says_otherwise(
    backend: str, device: str, resolved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "gpu_uuid", lambda number: f"GPU-{number}")
    transport = resolve_transport(config_with(backend=backend), torch.device(device), "learner")
    assert (transport.backend, transport.gpu) == (resolved, (2, "GPU-2") if device == "cuda:2" else None)


def test_nccl_is_refused_for_a_learner_on_a_cpu() -> None:
    with pytest.raises(SettingError, match=r'weights\.backend.*"nccl".*trains on a CPU'):
        resolve_transport(config_with(backend="nccl"), torch.device("cpu"), "learner")


def test_sizes_of_transfers_are_in_bytes_and_hosts_without_ports() -> None:
    transport = resolve_transport(config_with(bucket_mb=3, port=9), torch.device("cpu"), "learner")
    assert not transport.delta
    assert resolve_transport(config_with(backend="pull", delta=True), torch.device("cpu"), "learner").delta
    assert transport.bucket_bytes == 3 << 20
    assert (transport.port, transport.timeout_s) == (9, 60.0)
    assert (transport.host, transport.listen_on) == ("learner", "0.0.0.0")


def test_learner_writes_the_address_that_it_bound_where_actors_look_for_it(tmp_path: Path) -> None:
    file = tmp_path / "hub.address"
    file.write_text("tcp://198.18.0.1:5700 is a longer text than what follows")
    assert publish_address(f"file:{file}", "tcp://127.0.0.1:5702") == "127.0.0.1"
    assert find_address(f"file:{file}") == "tcp://127.0.0.1:5702"
    assert publish_address("tcp://learner:5700", "tcp://0.0.0.0:5700") == "learner"
    with pytest.raises(SettingError, match=r"hub\.address.*nowhere.*cannot be written"):
        publish_address(f"file:{tmp_path}/nowhere/hub.address", "tcp://127.0.0.1:5702")


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


@contextmanager
def opened(config: Config) -> Iterator[tuple[Learner, list[Row]]]:
    """Yield the learner of a run whose data are in a file, and the rows that it records."""
    config, rows = complete(structs.replace(config, hub=HubSection(address="tcp://127.0.0.1:5555"))), list[Row]()
    Path(config.run.dir).mkdir()
    inputs = load_inputs(config)
    prepare_folder(config, inputs.identity, inputs.prompt_hashes)
    with Hub("tcp://127.0.0.1:*", max_message_bytes=1 << 20) as hub:
        yield open_learner(config, inputs, hub, HealthWatch(rows.append), time.monotonic(), host="127.0.0.1"), rows


def stopped() -> StopRequest:
    stop = StopRequest()
    stop._event.set()
    return stop


@pytest.mark.engine
def test_learner_is_made_of_its_parts_and_ends_in_order_when_it_is_stopped_at_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wired_levels.py").write_text('def weigh(results, policy_version): return {"low": policy_version, "high": 2}')
    data = tmp_path / "data.jsonl"
    lines = (json.dumps({"prompt": f"{number}+1=", "task": "low" if number < 20 else "high"}) for number in range(40))
    data.write_text("\n".join(lines))
    config = structs.replace(
        config_with(run_dir=str(tmp_path / "run")),
        model=ModelSection(path=str(tiny_model), max_length=32),
        data=DataSection(train_data=str(data), task_field="task", curriculum="wired_levels:weigh"),
    )
    with opened(config) as (learner, rows):
        assert not any(isinstance(row, FinalRow) for row in rows), "nothing runs yet"
        assert learner.run(stopped()) == "stopped"
    (final,) = [row for row in rows if isinstance(row, FinalRow)]
    assert (final.outcome, final.policy_version, final.ledger.leased) == ("stopped", 0, 0)
    first, *_ = (record.event for record in read_log(tmp_path / "run" / "log"))
    assert isinstance(first, Weighed)
    assert first.shares == {"low": 0.0, "high": 1.0}


@pytest.mark.engine
def test_routing_is_recorded_in_each_interval_although_weights_are_published_between_batches(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1="}\n{"prompt": "2+1="}')
    config = structs.replace(
        config_with(run_dir=str(tmp_path / "run"), interval=1),
        model=ModelSection(path=str(tiny_model), max_length=32),
        data=DataSection(train_data=str(data)),
        train=TrainSection(steps_per_batch=2, epochs_per_batch=2, num_steps=40),
        metrics=MetricsSection(routing_interval=10),
    )
    routing = Routing(torch.tensor([[[0]], [[1]]]), torch.ones(2, 1), num_experts=2)
    with opened(config) as (learner, rows):
        for version in range(0, 41, 4):
            learner.loop.routing.add(version, routing)
        learner.run(stopped())
    assert [row.policy_version for row in rows if isinstance(row, RoutingRow)] == [0, 12, 20, 32, 40]
