"""Runs on GPUs with the code of the CPU tests and another config: `./dev test --gpu`. Deselected on machines without a GPU."""

import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.deploy.services import SERVICES_S, SLOW_REWARD, Services, write_config
from tests.gpu_report import MEASURED

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]

KILLS = 6


@pytest.fixture
def tell_speeds(services: Services, record_property: Callable[[str, object], None]) -> Callable[[], None]:
    """Return a function that puts the speeds of the run into the table of `./dev test --gpu`."""

    def tell() -> None:
        actors = {row["actor"]: row for row in services.rows("run", "actor")}.values()
        tokens, busy_s = sum(row["num_generated_tokens"] for row in actors), sum(row["seconds"]["generate"] for row in actors)
        # The first step compiles and allocates.
        steps = services.rows("run", "step")[1:]
        trained, train_s = sum(row["tokens/trained"] for row in steps), sum(row["time/train_s"] for row in steps)
        record_property(MEASURED, f"actors: {tokens / max(busy_s, 1e-9):,.0f} tokens/s while they generate")
        record_property(MEASURED, f"learner: {trained / max(train_s, 1e-9):,.0f} tokens/s in optimizer steps")
        shares = [row["compute/mfu"] for row in steps if "compute/mfu" in row]
        if shares:
            record_property(MEASURED, f"learner: MFU {statistics.median(shares):.1%}")
        published = [row["publish_s"] for row in services.rows("run", "weights")]
        stalls = [row["stall_s"] for row in services.rows("run", "commit")]
        if published:
            record_property(MEASURED, f"hand-over by collective: {statistics.median(published):.3f} s")
        if stalls:
            record_property(MEASURED, f"engine stands still for new weights: {statistics.median(stalls):.3f} s")

    return tell


@pytest.mark.parametrize("engine", [pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def test_quick_start_shares_one_gpu_among_three_processes(
    services: Services, tell_speeds: Callable[[], None], monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    train = services.start("train", "run.dir=run", f"actor.engine={engine}", is_real=True)
    assert services.wait(train, "train") == 0, services.output("train")
    assert " on cuda" in services.output("train"), "the engines run on the GPU"
    evaluations = [row["reward"] for row in services.rows("run", "eval")]
    assert evaluations[-1] > 0.9 > evaluations[0]
    assert {row["actor"] for row in services.rows("run", "actor")} == {"actor-0", "actor-1"}
    assert not [row for row in services.rows("run", "event") if row["event"] == "actor_quarantined"], "no false alarm"
    tell_speeds()


def test_learner_and_actor_share_one_gpu_with_weights_over_gloo(
    services: Services, tmp_path: Path, tiny_model: Path, tell_speeds: Callable[[], None]
) -> None:
    run_to_the_end(services, tmp_path, tiny_model, weights={"backend": "gloo"})
    tell_speeds()


def test_learner_and_actor_use_one_gpu_in_turns(
    services: Services, tmp_path: Path, tiny_model: Path, tell_speeds: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    run_to_the_end(services, tmp_path, tiny_model, launch={"num_actors": 1, "gpu_sharing": "turns"})
    assert all(row["seconds"]["wait_gpu"] > 0 for row in services.rows("run", "actor")[-1:])
    tell_speeds()


def test_weights_go_over_nccl_between_two_gpus(
    services: Services, tmp_path: Path, tiny_model: Path, tell_speeds: Callable[[], None]
) -> None:
    need_gpus(2)
    launch = {"num_actors": 1, "learner_gpus": [0], "actor_gpus": [[1]]}
    run_to_the_end(services, tmp_path, tiny_model, weights={"backend": "nccl"}, launch=launch)
    assert sum(row["num_members"] for row in services.rows("run", "weights")) >= 5, "by the collective, not by pull"
    tell_speeds()


def test_canary_stays_right_under_cuda_graphs_over_many_updates(
    services: Services, tmp_path: Path, tiny_model: Path, tell_speeds: Callable[[], None]
) -> None:
    graphs = {"engine_options": {"gpu_memory_utilization": 0.2}}
    run_to_the_end(services, tmp_path, tiny_model, actor=graphs, train={"num_steps": 30, "learning_rate": 1e-3})
    versions = {row["policy_version"] for row in services.rows("run", "canary")}
    assert len(versions) >= 20, "new weights were used, not those that the graphs were captured with"
    tell_speeds()


@pytest.mark.parametrize("signal", ["kill", "suspend"])
def test_actor_that_dies_or_stops_in_a_broadcast_costs_only_itself(
    signal: str, services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    need_gpus(3)
    config = write_config(
        tmp_path,
        tiny_model,
        model={"dtype": "bfloat16"},
        task={**SLOW_REWARD},
        train={"num_steps": 60},
        weights={"backend": "nccl", "timeout_s": 10.0},
        launch={"num_actors": 2, "learner_gpus": [0], "actor_gpus": [[1], [2]], "max_restarts": KILLS + 2},
        actor={"engine_options": {"gpu_memory_utilization": 0.2, "enforce_eager": True}},
    )
    train = services.start("train", config, is_real=True)
    learner = None
    moments = random.Random(7)
    for _ in range(KILLS if signal == "kill" else 1):
        updates = len(services.rows("run", "weights"))
        services.wait_for(lambda before=updates: len(services.rows("run", "weights")) >= before + 2, "two updates more")
        learner = learner or process_of(train.pid, "learner")
        # An update takes some tens of milliseconds, and the next one begins as soon as a step is done.
        time.sleep(moments.random() * 0.2)
        getattr(process_of(train.pid, 'actor.name="actor-1"'), signal)()
    services.wait_for(lambda: bool(services.rows("run", "final")), "the end of the training")
    assert services.wait(train, "train") == 0, services.output("train")
    assert services.rows("run", "final")[-1]["ledger"]["trained"] == 240
    assert not [row for row in services.rows("run", "event") if row["event"] == "resumed"], "the learner was never restarted"


def need_gpus(number: int) -> None:
    if torch.cuda.device_count() < number:
        pytest.skip(f"it takes {number} GPUs, and there are {torch.cuda.device_count()}")


def process_of(launcher: int, argument: str) -> psutil.Process:
    """Return the launcher's child that was started with this argument."""
    (found,) = [child for child in psutil.Process(launcher).children() if argument in child.cmdline()]
    return found


def run_to_the_end(services: Services, folder: Path, model: Path, **sections: dict[str, Any]) -> None:
    eager = {"engine_options": {"gpu_memory_utilization": 0.2, "enforce_eager": True}}
    config = write_config(folder, model, **{"model": {"dtype": "bfloat16"}, "actor": eager, **sections})
    train = services.start("train", config, is_real=True)
    assert services.wait(train, "train") == 0, services.output("train")
    final = services.rows("run", "final")[-1]["ledger"]
    assert final["trained"] == 4 * sections.get("train", {}).get("num_steps", 6)
    # bfloat16 on both sides, by different kernels: see engine noise, not equality.
    assert max(row["excess"] for row in services.rows("run", "canary")) < 1
