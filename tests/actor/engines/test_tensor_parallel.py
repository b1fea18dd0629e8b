"""A model over two worker processes is as exact as in one process, also after updates, and ends with the actor."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offbeat.common.errors import LostProcessError
from offbeat.common.processes import process_table as processes

ROOT = Path(__file__).parents[3]
END_S = 180.0
"""Longest time in which workers end: each first finishes what it does, on a busy machine slowly."""

SCRIPT = """
import json, os, sys, time
from offbeat.common.processes.environment import prepare_environment
prepare_environment()

def main(folder):
    import torch
    from transformers import AutoModelForCausalLM
    from offbeat.actor.engines.choice import make_engine
    from offbeat.actor.engines.engine import EngineSettings
    from offbeat.protocols.message_parts import ModelHashes
    from offbeat.protocols.messages import Sampling
    from tests.weights import buffer_of
    settings = EngineSettings("float32", 64, ModelHashes("", "", ""), seed=0, options={"tensor_parallel_size": 2})
    engine = make_engine("vllm", folder, settings)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    differences = []
    for policy_version in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape)
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        weights = ((name, parameter.data) for name, parameter in model.named_parameters())
        engine.load_weights(buffer_of(weights), policy_version, recompute_kv=True)
        differences.append(float(abs(engine.score(ids[0].tolist()).logprobs - logprobs.numpy()).max()))
    engine.submit(["a"], [5, 6, 7], Sampling(5))
    finished = []
    while engine.num_unfinished:
        finished += engine.step()
    print(json.dumps([differences, finished[0].segments[0].policy_version]), flush=True)
    time.sleep(60)

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.vllm
def test_two_workers_sample_exactly_and_do_not_outlive_a_killed_actor(tiny_model, tmp_path):
    script = tmp_path / "actor_like.py"
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, str(script), str(tiny_model)], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        # vLLM prints lines of its own.
        answer = next(line for line in process.stdout if line.startswith("[["))
        workers = _children(process.pid)
        process.kill()
    differences, policy_version = json.loads(answer)
    assert max(differences) < 1e-4
    assert policy_version == 2
    assert len(workers) >= 2
    deadline = time.monotonic() + END_S
    while left := [pid for pid in workers if not processes.has_ended(pid)]:
        assert time.monotonic() < deadline, f"{left} outlive the actor"
        time.sleep(0.1)


@pytest.mark.engine
@pytest.mark.vllm
@pytest.mark.parametrize("is_failed", [True, False])
def test_dead_worker_is_the_end_of_the_actor_in_one_sentence(is_failed):
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from offbeat.actor.engines.vllm_engine import VllmEngine

    def step():
        # vLLM 0.32 after the death of a worker.
        raise RuntimeError("cancelled")

    executor = object.__new__(MultiprocExecutor)
    executor.is_failed, executor.world_size = is_failed, 2
    engine: Any = object.__new__(VllmEngine)
    engine._engine = SimpleNamespace(step=step, has_unfinished_requests=lambda: True)
    engine._core = SimpleNamespace(model_executor=executor)
    engine._finished = []
    expected, words = (LostProcessError, "^one of vLLM's 2 worker processes died.*start the actor again$")
    if not is_failed:
        expected, words = RuntimeError, "^cancelled$"
    with pytest.raises(expected, match=words):
        engine.step()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
