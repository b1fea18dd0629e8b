"""The learner on a GPU: gradients and steps against a CPU's, memory against the plan's sums, and its speed. `./dev test --gpu`.

The CPU's results come from a process without a GPU. Speed and memory are measured with a model of Qwen3-0.6B's shapes and
random weights.
"""

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from offbeat.deploy.local.memory import CONTEXT_BYTES, gib, learner_need
from offbeat.deploy.local.model_sizes import model_sizes
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.learner.policy import logprobs
from offbeat.protocols.payload import Segment
from tests.gpu_report import MEASURED
from tests.learner.training.trainer_cases import SGD, make_config, make_groups

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

Tell = Callable[[str, object], None]


class Results(NamedTuple):
    """Vectors that a learner on a GPU and one on a CPU compute alike."""

    gradient: Tensor
    """Of all matrices, one float32 vector: under ZeRO no others are read."""
    moved: Tensor
    """The change of all weights after three steps of SGD, one float32 vector."""


def compute(model: Path, arguments: dict[str, Any]) -> Results:
    from offbeat.common.weights.flat import WeightBuffer
    from offbeat.learner.training.trainer import Trainer

    def weights() -> Tensor:
        buffer = WeightBuffer(trainer.layout())
        trainer.snapshot(dict(buffer.views()))
        return torch.cat([view.float().flatten() for _, view in buffer.views()])

    with closing(Trainer(make_config(model, deepspeed=SGD, **arguments))) as trainer:
        _, gradient = trainer.gradient(make_groups(3, seed=9))
        if trainer.networks.zero_stage == 0:
            parameters = list(trainer.networks.module.parameters())
            parts = gradient.split([parameter.numel() for parameter in parameters])
            gradient = torch.cat([part for part, parameter in zip(parts, parameters, strict=True) if parameter.ndim > 1])
        before = weights()
        for seed in range(3):
            trainer.train_batch(make_groups(3, seed=seed))
        return Results(gradient, weights() - before)


def compute_without_gpu(model: Path, arguments: dict[str, Any]) -> Results:
    assert not torch.cuda.is_available()
    return compute(model, arguments)


@pytest.fixture(scope="module")
def on_cpu(tiny_model: Path) -> Results:
    """The results of a process that sees no GPU, in float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(compute_without_gpu, tiny_model, {}).result(300)


def cosine(first: Tensor, second: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(first.double(), second.double(), dim=0))


def test_gradient_and_steps_in_float32_are_those_of_a_cpu(tiny_model: Path, on_cpu: Results, record_property: Tell) -> None:
    results = compute(tiny_model, {})
    for name, ours, theirs in zip(("gradient", "three steps"), results, on_cpu, strict=True):
        difference = float((ours - theirs).norm() / theirs.norm())
        record_property(MEASURED, f"{name}, GPU against CPU in float32: relative difference {difference:.1e}")
        assert difference < 1e-4


BFLOAT16: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"zero_stage": 1},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-3": {"zero_stage": 3},
    "not compiled": {"compile": "off"},
    "checkpointed": {"activation_checkpointing": True},
    "offloaded": {"activation_checkpointing": "offload"},
}


@pytest.mark.parametrize("case", BFLOAT16)
def test_gradient_in_bfloat16_points_where_a_cpus_in_float32_does(
    tiny_model: Path, on_cpu: Results, record_property: Tell, case: str
) -> None:
    results = compute(tiny_model, {"dtype": "bfloat16", **BFLOAT16[case]})
    likeness = cosine(results.gradient, on_cpu.gradient)
    record_property(MEASURED, f"gradient in bfloat16 and the CPU's in float32: cosine {likeness:.5f}")
    assert likeness > 0.995
    # Weights in bfloat16 round away most of a small step.
    assert cosine(results.moved, on_cpu.moved) > 0.9


# Shapes of 0.6B

NUM_STEPS = 4
PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE, NUM_GROUPS = 256, 1024, 8, 7
"""A group has 8,448 tokens: one fits into a micro-batch of 16,384, and nearly two."""
VOCABULARY_SIZE = 151_936


@pytest.fixture(scope="module")
def folder_0_6b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model of Qwen3-0.6B's shapes with random weights, in bfloat16."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("model") / "0.6b"
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    free_memory()
    return folder


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def clean_gpu() -> Iterator[None]:
    """Leave no memory of other tests to a test, and none of it to them."""
    free_memory()
    yield
    free_memory()


def long_groups(seed: int) -> list[Group]:
    """Return groups of random tokens, of completions that are half as long to as long as the limit."""
    random = np.random.default_rng(seed)

    def rollout(reward: float) -> Rollout:
        length = int(random.integers(COMPLETION_TOKENS // 2, COMPLETION_TOKENS + 1))
        return Rollout(
            token_ids=random.integers(0, VOCABULARY_SIZE, length, dtype=np.int32),
            behavior_logprobs=np.full(length, -12.0, np.float32),
            reward=reward,
            finish_reason="stop",
            segments=(Segment(0, 0),),
            reward_parts={},
        )

    return [
        Group(
            lease_id=index,
            prompt_id=index,
            prompt_token_ids=random.integers(0, VOCABULARY_SIZE, PROMPT_TOKENS, dtype=np.int32),
            rollouts=tuple(rollout(float(number % 2)) for number in range(GROUP_SIZE)),
            actor="actor-0",
            generate_s=0.1,
        )
        for index in range(NUM_GROUPS)
    ]


AT_0_6B: dict[str, dict[str, Any]] = {
    "checkpointed": {},
    "checkpointed, not compiled": {"compile": "off"},
    "checkpointed, chunks of any size": {"aligned": 1},
    "no checkpoints, 8,448 tokens": {"activation_checkpointing": False, "micro_batch_tokens": 8_448},
    "ZeRO-3": {"zero_stage": 3},
}


@pytest.mark.parametrize("case", AT_0_6B)
def test_a_step_at_0_6b_takes_the_memory_of_the_plan(
    folder_0_6b: Path, clean_gpu: None, record_property: Tell, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    from offbeat.learner.training.trainer import Trainer

    settings = {"activation_checkpointing": True, "micro_batch_tokens": 16_384, "learning_rate": 1e-6, **AT_0_6B[case]}
    monkeypatch.setattr(logprobs, "ALIGNED", settings.pop("aligned", logprobs.ALIGNED))
    # What tests before this one have left behind.
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    config = make_config(folder_0_6b, dtype="bfloat16", groups_per_step=NUM_GROUPS, **settings)
    seconds, speeds, rows = [], [], []
    with closing(Trainer(config)) as trainer:
        for seed in range(NUM_STEPS):
            groups = long_groups(seed)
            started = time.perf_counter()
            rows += trainer.train_batch(groups)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
            speeds.append(sum(len(one.token_ids) for group in groups for one in group.rollouts) / seconds[-1])
        allocated, reserved = torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]
    sizes = model_sizes(str(folder_0_6b))
    assert sizes is not None
    need = learner_need(config, sizes)
    planned = need.num_bytes - CONTEXT_BYTES
    record_property(
        MEASURED,
        f"{case}: {statistics.median(speeds[1:]):,.0f} completion tokens/s, MFU "
        f"{statistics.median(row['compute/mfu'] for row in rows[1:]):.1%}, steps of {', '.join(f'{s:.2f}' for s in seconds)} s",
    )
    record_property(
        MEASURED,
        f"{case}: at most {gib(allocated)} GiB allocated, {gib(reserved)} reserved; the plan without the context has "
        f"{gib(planned)} ({need})",
    )
    assert allocated < 1.1 * planned + 0.5 * (1 << 30)
    assert os.environ.get("TORCHDYNAMO_DISABLE") != "1", "layers are compiled unless a case says otherwise"
