"""vLLM on a GPU, with its graphs and kernels: what a reload leaves, and what numerics cost. `./dev test --gpu`."""

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import Engine, EngineSettings
from offbeat.protocols.message_parts import ModelHashes
from offbeat.protocols.messages import Sampling
from tests.gpu_report import MEASURED
from tests.weights import buffer_of

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = [5 + index * 7 % 38 for index in range(64)]
SAME_KERNELS = 0.02
"""Largest difference of log-probs by the same kernels in bfloat16, in nats."""
OTHER_KERNELS = 0.3
"""Largest difference of log-probs by other kernels or in fp8, in nats."""
Tell = Callable[[str, object], None]


@contextmanager
def running(folder: Path, *, sleeps: bool = False, **options: Any) -> Iterator[Engine]:
    """Yield an engine in bfloat16, with CUDA graphs unless an option says otherwise."""
    engine = make_engine(
        "vllm",
        str(folder),
        EngineSettings(
            dtype="bfloat16",
            max_model_len=256,
            hashes=ModelHashes("", "", ""),
            seed=3,
            options={"gpu_memory_utilization": 0.2, **options},
            sleeps=sleeps,
        ),
    )
    yield engine
    engine.close()
    gc.collect()
    torch.cuda.empty_cache()


def moved(folder: Path, seed: int) -> PreTrainedModel:
    """Return the model in a folder, in bfloat16, with weights far enough from its own to change every distribution."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]


def load(engine: Engine, model: PreTrainedModel, policy_version: int) -> None:
    weights = [(name, parameter.data) for name, parameter in model.named_parameters()]
    engine.load_weights(buffer_of(weights), policy_version, recompute_kv=True)


def score(engine: Engine, model: PreTrainedModel, policy_version: int) -> NDArray[np.float32]:
    load(engine, model, policy_version)
    return engine.score(TOKENS).logprobs


@torch.inference_mode()
def forward(model: PreTrainedModel, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the log-probs of tokens 1.. by a plain forward pass on the GPU."""
    ids = torch.tensor([list(tokens)], device="cuda")
    logits = model.to("cuda")(ids).logits[0, :-1].float()  # pyright: ignore[reportCallIssue, reportArgumentType]
    return logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu().numpy()


def generate(engine: Engine, num_completions: int) -> list[tuple[list[int], NDArray[np.float32]]]:
    """Return completions of a short prompt, prompt included, and the log-probs that they were sampled at."""
    for index in range(num_completions):
        engine.submit([str(index)], TOKENS[:4], Sampling(32, 1.0))
    finished = []
    while engine.num_unfinished:
        finished += engine.step()
    return [([*TOKENS[:4], *one.token_ids.tolist()], one.behavior_logprobs) for one in finished]


def largest(difference: NDArray[np.float32]) -> float:
    return float(np.abs(difference).max())


def test_reload_under_cuda_graphs_leaves_what_a_fresh_load_of_the_same_weights_has(
    tiny_model: Path, tmp_path: Path, record_property: Tell
) -> None:
    first, second = moved(tiny_model, 1), moved(tiny_model, 2)
    with running(tiny_model) as engine:
        before = score(engine, first, 0)
        # The graphs replay with the weights of version 0 before these are replaced.
        generate(engine, 16)
        reloaded = score(engine, second, 1)
        back = score(engine, first, 2)
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    second.save_pretrained(folder)
    with running(folder) as engine:
        fresh = engine.score(TOKENS).logprobs
    assert largest(before - reloaded) > 10 * SAME_KERNELS, "the weights differ enough to be seen"
    assert largest(reloaded - fresh) <= SAME_KERNELS
    assert largest(back - before) <= SAME_KERNELS
    record_property(MEASURED, f"reload against fresh load: {largest(reloaded - fresh):.1e} nats at most")


def test_log_probs_under_cuda_graphs_are_those_of_a_forward_pass_after_each_update(
    tiny_model: Path, record_property: Tell
) -> None:
    differences: list[NDArray[np.float32]] = []
    with running(tiny_model) as engine:
        for version in range(3):
            model = moved(tiny_model, version)
            load(engine, model, version)
            for tokens, logprobs in generate(engine, 16):
                differences.append(logprobs - forward(model, tokens)[3:])
    together = np.concatenate(differences)
    assert largest(together) < OTHER_KERNELS
    record_property(
        MEASURED, f"engine against learner, bfloat16: {np.abs(together).mean():.1e} nats, {largest(together):.1e} at most"
    )


def test_engine_that_has_slept_goes_on_exactly_and_had_given_its_memory_back(tiny_model: Path, record_property: Tell) -> None:
    from offbeat.actor.engines.vllm_engine import VllmEngine

    models = [moved(tiny_model, version) for version in range(2)]
    with running(tiny_model, sleeps=True) as engine:
        assert isinstance(engine, VllmEngine)
        load(engine, models[0], 0)
        engine.submit(["a"], TOKENS[:4], Sampling(64, 1.0))
        for _ in range(10):
            assert not engine.step()
        free_bytes = torch.cuda.mem_get_info()[0]
        engine.sleep()
        freed_gib = (torch.cuda.mem_get_info()[0] - free_bytes) / 2**30
        engine.wake()
        load(engine, models[1], 1)
        finished = []
        while engine.num_unfinished:
            finished += engine.step()
    (completion,) = finished
    tokens = [*TOKENS[:4], *completion.token_ids.tolist()]
    for segment, (first, last) in zip(completion.segments, ((0, 10), (10, None)), strict=False):
        expected = forward(models[segment.policy_version], tokens)[3:]
        assert largest(completion.behavior_logprobs[first:last] - expected[first:last]) < OTHER_KERNELS
    assert freed_gib > 1.0, "the KV cache alone is larger"
    record_property(MEASURED, f"a sleeping engine gives back {freed_gib:.1f} GiB")


def test_fp8_engine_takes_bfloat16_weights_again_and_again(tiny_model: Path, record_property: Tell) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 takes compute capability 8.9")
    first, second = moved(tiny_model, 1), moved(tiny_model, 2)
    with running(tiny_model, quantization="fp8") as engine:
        before, other, again = score(engine, first, 0), score(engine, second, 1), score(engine, first, 2)
    assert largest(before - again) <= SAME_KERNELS
    assert largest(before - other) > 10 * SAME_KERNELS, "the weights differ enough to be seen"
    cost = before - forward(first, TOKENS)
    assert np.abs(cost).mean() < OTHER_KERNELS
    record_property(MEASURED, f"fp8 engine against learner: {np.abs(cost).mean():.1e} nats, {largest(cost):.1e} at most")


def test_pinned_copies_are_the_bytes_and_leave_the_device_free(record_property: Tell) -> None:
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    pageable, pinned = torch.empty(1 << 30, dtype=torch.uint8), torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    for name, target in (("pageable", pageable), ("pinned", pinned)):
        target.fill_(0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source, non_blocking=name == "pinned")
        end.record()
        end.synchronize()
        record_property(MEASURED, f"GPU to {name} host memory: {1.0737 / (start.elapsed_time(end) / 1e3):.1f} GB/s")
    assert torch.equal(pageable, pinned)
