"""An episode trains on the tokens that a real engine saw, at the log-probs it sampled them with, over turns and weights."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.actor.engine import Engine
from offbeat.actor.engine_choice import make_engine
from offbeat.actor.environments.episodes import Episodes
from offbeat.actor.environments.messages import Ended, FromWorker, Play, Sample, Sampled, ToWorker
from offbeat.actor.environments.workers import Workers
from offbeat.actor.play import Played
from offbeat.common.config import EnvironmentSection
from offbeat.common.models import hash_model
from offbeat.protocols.messages import Lease, Sampling

pytestmark = pytest.mark.engine

NUM_TURNS = 4
GROUP_SIZE = 4
MAX_LENGTH = 96


class Talk:
    """Stands for the workers: every episode adds a few tokens of its own choice before each turn."""

    def __init__(self) -> None:
        self.arrived: list[FromWorker] = []
        self.num_turns: dict[str, int] = {}
        self.random = np.random.default_rng(0)

    def play(self, episode: str, message: Play) -> None:
        self._ask(episode)

    def send(self, episode: str, message: ToWorker) -> None:
        assert isinstance(message, Sampled)
        self._ask(episode)

    def end(self, episode: str) -> None:
        pass

    def not_begun(self) -> tuple[str, ...]:
        return ()

    def poll(self) -> Iterator[FromWorker]:
        arrived, self.arrived = self.arrived, []
        yield from arrived

    def _ask(self, episode: str) -> None:
        turn = self.num_turns[episode] = self.num_turns.get(episode, -1) + 1
        if turn == NUM_TURNS:
            self.arrived.append(Ended(episode=episode, reward=1.0, parts={}, is_out_of_room=False))
            return
        context = self.random.integers(4, 40, self.random.integers(0, 6)).tolist()
        self.arrived.append(Sample(episode=episode, context=context, max_new_tokens=int(self.random.integers(1, 9))))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    made = make_engine(
        "vllm", str(tiny_model), dtype="float32", max_model_len=MAX_LENGTH, hashes=hash_model(tiny_model), seed=1,
        options={"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26, "block_size": 32},
    )  # fmt: skip
    yield made
    made.close()


def weights_of(model: torch.nn.Module, version: int) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a version: another network each time."""
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def test_stored_logprobs_are_those_of_the_stream_under_the_versions_of_its_segments(engine: Engine, tiny_model: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(tiny_model).encode("1+1=")
    versions: dict[int, list[tuple[str, torch.Tensor]]] = {0: weights_of(model, 0)}
    engine.load_weights(versions[0], 0, recompute_kv=True)
    talk = Talk()
    episodes = Episodes(engine, cast(Workers, talk), EnvironmentSection(), max_length=MAX_LENGTH, retry_s=0.0)
    lease = Lease(
        lease_id=3, prompt_id=0, group_size=GROUP_SIZE, sampling=Sampling(8), min_policy_version=0, timeout_s=60.0,
        prompt="1+1=", row="{}",
    )  # fmt: skip
    episodes.begin(lease, prompt)
    played: list[Any] = []
    deadline, num_steps = time.monotonic() + 120, 0
    while not played:
        assert time.monotonic() < deadline
        played += episodes.poll()
        for completion in engine.step() if engine.num_unfinished else ():
            episodes.add(completion)
        num_steps += 1
        if num_steps % 7 == 0:
            versions[len(versions)] = weights_of(model, len(versions))
            engine.load_weights(versions[len(versions) - 1], len(versions) - 1, recompute_kv=True)
    assert isinstance(played[0], Played)
    seen: set[int] = set()
    for completion in played[0].completions:
        lengths = [number for turn in completion.turns for number in (turn.num_context, turn.num_sampled)]
        sampled = np.repeat(np.tile([False, True], len(completion.turns)), lengths)
        stream = np.empty(len(sampled), np.int64)
        stream[sampled], stream[~sampled] = completion.token_ids, completion.context_ids
        ends = [segment.first_token for segment in completion.segments[1:]] + [len(completion.token_ids)]
        for segment, end in zip(completion.segments, ends, strict=True):
            seen.add(segment.policy_version)
            model.load_state_dict(dict(versions[segment.policy_version]), strict=False)
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *stream.tolist()]])).logits[0, len(prompt) - 1 : -1]
            expected = torch.log_softmax(logits, dim=-1)[torch.arange(len(stream)), torch.from_numpy(stream)].numpy()[sampled]
            of_segment = slice(segment.first_token, end)
            np.testing.assert_allclose(completion.behavior_logprobs[of_segment], expected[of_segment], atol=2e-5)
    assert len(seen) > 2, "the weights did not change within the episodes"
