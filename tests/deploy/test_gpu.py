"""Runs on GPUs with the code of the CPU tests and another config. Deselected on machines without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deploy.services import SERVICES_S, Services, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]


def test_learner_and_actor_share_one_gpu_with_weights_over_gloo(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    run_to_the_end(services, tmp_path, tiny_model, weights={"backend": "gloo"})


def test_weights_go_over_nccl_between_two_gpus(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one process to a GPU, and there is only one")
    launch = {"num_actors": 1, "learner_gpus": [0], "actor_gpus": [[1]]}
    run_to_the_end(services, tmp_path, tiny_model, weights={"backend": "nccl"}, launch=launch)


def run_to_the_end(services: Services, folder: Path, model: Path, **sections: dict[str, Any]) -> None:
    config = write_config(
        folder,
        model,
        model={"dtype": "bfloat16"},
        actor={"engine_options": {"gpu_memory_utilization": 0.2, "enforce_eager": True}},
        **sections,
    )
    train = services.start("train", config, is_real=True)
    assert services.wait(train, "train") == 0, services.output("train")
    final = services.rows("run", "final")[-1]["ledger"]
    assert final["trained"] == 24
    # bfloat16 on both sides, by different kernels: see engine noise, not equality.
    assert max(row["max_abs_diff"] for row in services.rows("run", "canary")) < 0.3
