"""The learner's forward half on an imaginary GPU: a CPU tensor beside one of the GPU is an error here, as on a GPU.

Fake tensors have shape, dtype and device but no values, so nothing is computed, and nothing can be read: backward passes,
optimizer steps and what asks for values are not covered. Each case runs in a forked process, because the guard, once loaded,
stays for the life of a process.
"""

import ctypes
import multiprocessing
import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import AdvantageSection, KlSection
from offbeat.learner.objectives.objective import StepConstants, make_objective
from offbeat.learner.objectives.reward_shaping import RunningMoments
from offbeat.learner.policy import logprobs as logprobs_module
from offbeat.learner.policy import packed_attention
from offbeat.learner.policy.logprobs import CompletionLogprobs
from offbeat.learner.policy.networks import Networks
from offbeat.learner.policy.process_group import LearnerRank
from offbeat.learner.policy.routing_replay import RoutingReplay
from offbeat.learner.training import batching, step_loss
from offbeat.learner.training.preparation import Preparation
from tests.families import make_family
from tests.learner.training.trainer_cases import make_config, make_groups

pytestmark = pytest.mark.slow

GPU = torch.device("cuda", 0)
GUARD = Path(__file__).with_name("cuda_guard.cpp")


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the guard."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the guard with")
    library = tmp_path_factory.mktemp("guard") / "guard.so"
    root = Path(torch.__file__).parent
    folders = [f"-I{root / 'include'}", f"-L{root / 'lib'}"]
    command = [compiler, "-std=c++20", "-fPIC", "-shared", folders[0], str(GUARD), "-o", str(library), folders[1], "-lc10"]
    subprocess.run(command, check=True, timeout=120)
    return library


def fail_apart(guard: Path, run: Callable[[], None]) -> str | None:
    """Run in a forked process that has the guard; return the traceback of its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child(sender: Connection) -> None:
        error = None
        try:
            ctypes.CDLL(str(guard))
            # That of an H100; transformers asks before it multiplies experts' matrices at once.
            torch.cuda.get_device_capability = lambda device=None: (9, 0)
            run()
        except BaseException:  # noqa: BLE001, the parent fails with it
            error = traceback.format_exc()
        sender.send(error)
        sender.close()
        os._exit(0)

    process = context.Process(target=child, args=(sender,))
    process.start()
    error: str | None = receiver.recv() if receiver.poll(120) else "no answer within two minutes"
    process.kill()
    process.join()
    return error


def on_gpu(folder: Path, dtype: torch.dtype, *, value_head: bool) -> CompletionLogprobs:
    config = AutoConfig.from_pretrained(folder)
    with torch.device(GPU):
        return CompletionLogprobs(AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), value_head=value_head)


def networks_on_gpu(config: Config, folder: Path) -> Networks:
    """Return networks without DeepSpeed, whose engine cannot be made without a GPU."""
    dtype = getattr(torch, config.model.dtype)
    networks = Networks.__new__(Networks)
    networks._config = config
    networks.place = LearnerRank(0, 1, GPU)
    networks.num_alike = 1
    networks.module = on_gpu(folder, dtype, value_head=config.advantage.baseline == "critic")
    networks.engine = networks.module
    networks._replay = RoutingReplay(networks.module.policy if config.loss.routing_replay != "off" else torch.nn.Module())
    networks._has_reference = bool(config.kl.loss_coef or config.kl.reward_coef)
    networks.critic = None
    networks.reference = on_gpu(folder, dtype, value_head=False) if networks._has_reference else None
    return networks


def run_forward_half(config: Config, folder: Path) -> None:
    """Do what a step does before its backward pass; every result is on the GPU, and the loss in float32."""
    objective = make_objective(config.loss)
    preparation = Preparation(config, objective)
    rows, _ = preparation.make_rows(make_groups(3), 0, RunningMoments())
    # Tensors made of arrays are real; they count as fake ones on the CPU.
    with FakeTensorMode(allow_non_fake_inputs=True):
        networks = networks_on_gpu(config, folder)
        for prepared in preparation.prepare(rows, networks, kl_coefficient=0.1):
            loss = step_loss.compute_loss(
                prepared,
                networks.run_trained(prepared.micro_batch.pack),
                objective,
                kl=config.kl,
                kl_coefficient=0.1,
                critic=config.critic,
                constants=StepConstants(float("inf"), 1.0),
            )
            results = [loss.total, loss.table, *loss.sums.values()]
            assert {tensor.device for tensor in results} == {GPU}, [tensor.device for tensor in results]
            assert loss.total.dtype == torch.float32, loss.total.dtype
            assert loss.total.requires_grad


CASES: dict[str, dict[str, Any]] = {
    "gspo": {"kl": KlSection(loss_coef=0.1)},
    "gspo in float32": {"dtype": "float32"},
    "grpo, KL in the reward": {"loss": {"objective": "grpo"}, "kl": KlSection(reward_coef=0.1)},
    "cispo, entropy": {"loss": {"objective": "cispo", "entropy_coef": 0.01}},
    "ppo, critic": {"loss": {"objective": "ppo"}, "advantage": AdvantageSection(baseline="critic")},
    "decoupled": {"loss": {"anchor": "decoupled"}},
    "group anchor": {"loss": {"anchor": "group"}},
}


def config_of(folder: Path, settings: dict[str, Any]) -> Config:
    return make_config(folder, **{"dtype": "bfloat16", **settings})


@pytest.mark.parametrize("case", CASES)
def test_a_step_before_its_backward_pass_stays_on_the_gpu(guard, tiny_model, case):
    config = config_of(tiny_model, CASES[case])
    error = fail_apart(guard, lambda: run_forward_half(config, tiny_model))
    assert error is None, error


@pytest.mark.parametrize("name", ["Qwen3.5-MoE", "DeepSeek V3"])
def test_a_family_stays_on_the_gpu(guard, tiny_model, tmp_path, name):
    make_family(tmp_path, name, tiny_model)
    config = config_of(tmp_path, {})
    error = fail_apart(guard, lambda: run_forward_half(config, tmp_path))
    assert error is None, error


def plant_a_copy_to_the_cpu() -> None:
    """Plant `.cpu()` behind the head."""
    head = logprobs_module.token_logprobs

    def planted(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        logprobs, entropies = head(*args, **kwargs)
        return logprobs.cpu(), entropies

    logprobs_module.token_logprobs = planted


def plant_a_missing_copy_to_the_gpu() -> None:
    """Leave a field of the micro-batch where `collate` has made it."""
    to = batching.MicroBatch.to
    batching.MicroBatch.to = lambda self, device: to(self, device)._replace(behavior_logprobs=self.behavior_logprobs)


def plant_spans_on_the_cpu() -> None:
    """Arrange the keys of packed attention without `.to(device)`."""
    in_line = packed_attention._in_line
    packed_attention._in_line = lambda spans, device: in_line(spans, torch.device("cpu"))


def plant_a_loss_in_float16() -> None:
    """Sum the loss in float16."""
    aggregate = step_loss.aggregate
    step_loss.aggregate = lambda losses, *args, **kwargs: aggregate(losses.half(), *args, **kwargs).half()


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_a_copy_to_the_cpu, "found at least two devices"),
        (plant_a_missing_copy_to_the_gpu, "found at least two devices|found two different devices"),
        (plant_spans_on_the_cpu, "found at least two devices|found two different devices"),
        (plant_a_loss_in_float16, "AssertionError: torch.float16"),
    ],
)
def test_a_planted_mistake_is_an_error(guard, tiny_model, plant, message):
    config = config_of(tiny_model, {})

    def run() -> None:
        plant()
        run_forward_half(config, tiny_model)

    assert re.search(message, fail_apart(guard, run) or "no error")
