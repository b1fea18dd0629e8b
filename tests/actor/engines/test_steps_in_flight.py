"""Tokens of a step in flight belong to the weights that the step began with.

vLLM does not schedule asynchronously on a CPU. Here it does: scheduler, queue of batches and model runner are vLLM's own, and
only the CUDA streams and events with which the runner copies tokens to the host are stand-ins. They need not wait for anything,
because on a CPU a step has been computed when it has been started.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offbeat.actor.engines.engine import Completion, Engine
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment
from tests.actor.engines.test_engines import PROMPTS, finish, load, load_reference, reference_logprobs, start, step

pytestmark = [pytest.mark.engine, pytest.mark.vllm]

TOLERANCE = 1e-5
SWAPS = (1, 2, 3, 7, 8, 15, 30)
"""Steps after which weights change: one after another, and apart."""


class Device:
    """A CUDA stream, or an event, without a device."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, _: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    """Yield an engine that schedules asynchronously."""
    import torch
    from vllm.platforms.cpu import CpuPlatform

    check_and_update_config = CpuPlatform.check_and_update_config

    def keep_asynchronous(config) -> None:
        check_and_update_config(config)
        config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_asynchronous))
        patch.setattr(torch.cuda, "Stream", Device)
        patch.setattr(torch.cuda, "Event", Device)
        patch.setattr(torch.cuda, "current_stream", Device)
        patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        engine = start("vllm", tiny_model)
        yield engine
        engine.close()


def num_in_flight(engine: Engine) -> int:
    from offbeat.actor.engines.vllm_engine import VllmEngine

    assert isinstance(engine, VllmEngine)
    batches = engine._core.batch_queue
    assert batches is not None
    return len(batches)


def test_each_segment_has_the_logprobs_of_its_own_weights(engine, tiny_model):
    references = [load_reference(tiny_model, seed) for seed in (None, *range(1, len(SWAPS) + 1))]
    load(engine, references[0], 0)
    for index in range(12):
        engine.submit([str(index)], PROMPTS[index % 4], Sampling(60))
    finished: dict[str, Completion] = {}
    for policy_version, num_steps in enumerate(np.diff((0, *SWAPS)), start=1):
        finished |= step(engine, int(num_steps))
        assert num_in_flight(engine) == 1
        load(engine, references[policy_version], policy_version)
        assert num_in_flight(engine) == 0
    finished |= finish(engine)
    assert len(finished) == 12
    longest = max(finished.values(), key=lambda completion: len(completion.token_ids))
    assert [segment.policy_version for segment in longest.segments][-1] == len(SWAPS)
    for index, completion in ((int(name), completion) for name, completion in finished.items()):
        starts = [segment.first_token for segment in completion.segments]
        assert starts[0] == 0
        assert starts == sorted(set(starts))
        for start_token, end_token, segment in zip(
            starts, [*starts[1:], len(completion.token_ids)], completion.segments, strict=True
        ):
            expected = reference_logprobs(
                references[segment.policy_version], PROMPTS[index % 4], completion.token_ids.tolist()
            )[start_token:end_token]
            np.testing.assert_allclose(completion.behavior_logprobs[start_token:end_token], expected, atol=TOLERANCE)


def test_completions_that_end_as_weights_change_come_back_once(engine, tiny_model):
    references = [load_reference(tiny_model, seed) for seed in (None, 1)]
    load(engine, references[0], 0)
    for index in range(6):
        engine.submit([str(index)], PROMPTS[0], Sampling(1 + index))
    finished = step(engine, 3)
    assert num_in_flight(engine) == 1
    num_tokens_before = engine.num_generated_tokens
    load(engine, references[1], 1, recompute_kv=False)
    assert engine.num_generated_tokens > num_tokens_before
    assert engine.num_unfinished == 6 - len(finished)
    ended_meanwhile = engine.step()
    assert "2" in {*finished, *(completion.request_id for completion in ended_meanwhile)}
    for completion in ended_meanwhile:
        assert completion.request_id not in finished
        assert completion.segments == (Segment(0, 0),)
        finished[completion.request_id] = completion
    later = finish(engine)
    assert finished.keys().isdisjoint(later)
    assert len(finished) + len(later) == 6
    assert all(len(completion.token_ids) >= 3 for completion in later.values())


def test_score_after_a_swap_is_of_the_new_weights(engine, tiny_model):
    references = [load_reference(tiny_model, seed) for seed in (None, 1)]
    tokens = [5, 6, 7, 8, 30, 2, 9]
    load(engine, references[0], 0)
    for index in range(4):
        engine.submit([str(index)], PROMPTS[index], Sampling(40))
    step(engine, 5)
    load(engine, references[1], 1)
    expected = reference_logprobs(references[1], tokens[:1], tokens[1:])
    np.testing.assert_allclose(engine.score(tokens).logprobs, expected, atol=TOLERANCE)
    engine.abort([str(index) for index in range(4)])
    assert engine.num_unfinished == 0
    # The step that is in flight has no completion any more.
    load(engine, references[0], 2)
    assert num_in_flight(engine) == 0
    engine.submit(["next"], PROMPTS[0], Sampling(4))
    assert finish(engine)["next"].segments == (Segment(2, 0),)
