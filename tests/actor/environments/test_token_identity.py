"""An episode trains on the tokens that a real engine saw, at the log-probs it sampled them with, over turns and weights."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offbeat.actor.engines.choice import make_engine
from offbeat.actor.engines.engine import Engine, EngineSettings
from offbeat.actor.environments.episodes import Episodes
from offbeat.actor.environments.messages import PROMPT, Ended, FromWorker, PlayEpisode, SampleTurn, ToWorker, TurnSampled
from offbeat.actor.environments.workers import Workers
from offbeat.actor.sampling import RewardedGroup
from offbeat.common.models.folders import hash_model
from offbeat.common.settings.loading import load
from offbeat.protocols.messages import Lease, Sampling
from tests.trees import read_by_turns
from tests.weights import buffer_of

pytestmark = [pytest.mark.engine, pytest.mark.vllm]

NUM_TURNS = 7
GROUP_SIZE = 4
MAX_LENGTH = 96


class Talk:
    """Stands for the workers: every episode samples two turns at once, then from the end of any turn, the prompt or nothing."""

    def __init__(self) -> None:
        self.arrived: list[FromWorker] = []
        self.num_asked: dict[str, int] = {}
        self.answered: dict[str, list[int]] = {}
        self.random = np.random.default_rng(0)

    def play(self, episode: str, message: PlayEpisode) -> None:
        self.num_asked[episode], self.answered[episode] = 0, []
        for _ in range(2):
            self._ask(episode, PROMPT)

    def send(self, episode: str, message: ToWorker) -> None:
        assert isinstance(message, TurnSampled)
        answered = self.answered[episode]
        answered.append(message.turn)
        if self.num_asked[episode] < NUM_TURNS:
            choice = int(self.random.integers(-2, len(answered)))
            self._ask(episode, None if choice == -2 else PROMPT if choice == -1 else answered[choice])
        elif len(answered) == NUM_TURNS:
            self.arrived.append(Ended(episode=episode, reward=1.0, parts={}, is_out_of_room=False))

    def end(self, episode: str) -> None:
        pass

    def not_begun(self) -> tuple[str, ...]:
        return ()

    def poll(self) -> Iterator[FromWorker]:
        arrived, self.arrived = self.arrived, []
        yield from arrived

    def _ask(self, episode: str, continues: int | None) -> None:
        number = self.num_asked[episode]
        self.num_asked[episode] = number + 1
        back = 0 if continues is None else number - continues
        context = self.random.integers(4, 40, self.random.integers(continues is None, 6)).tolist()
        longest = int(self.random.integers(1, 9))
        self.arrived.append(SampleTurn(episode=episode, back=back, context=context, max_new_tokens=longest))


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    options = {"max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26}
    hashes = hash_model(tiny_model)
    settings = EngineSettings("float32", MAX_LENGTH, hashes, seed=1, options=options, has_turns=True)
    made = make_engine("vllm", str(tiny_model), settings)
    yield made
    made.close()


def weights_of(model: torch.nn.Module, version: int) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a version: another network each time."""
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]


def logprobs(model: Any, read: list[int], sampled: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([[*read, *sampled]])).logits[0, len(read) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)[torch.arange(len(sampled)), torch.tensor(sampled)].numpy()


def test_stored_logprobs_are_those_of_the_stream_under_the_versions_of_its_segments(engine: Engine, tiny_model: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(tiny_model).encode("1+1=")
    versions: dict[int, list[tuple[str, torch.Tensor]]] = {0: weights_of(model, 0)}
    engine.load_weights(buffer_of(versions[0]), 0, recompute_kv=True)
    talk = Talk()
    settings = [f"max_length={MAX_LENGTH}", "micro_batch_tokens=200", "reward_retry_s=0", "on_update=recompute_kv"]
    episodes = Episodes(engine, cast(Workers, talk), load(None, settings))
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
            engine.load_weights(buffer_of(versions[len(versions) - 1]), len(versions) - 1, recompute_kv=True)
    assert isinstance(played[0], RewardedGroup)
    seen, kinds = set[int](), set[int]()
    for completion in played[0].completions:
        reads = read_by_turns(prompt, completion.turns, completion.context_ids, completion.token_ids)
        kinds |= {min(turn.back, 2) for turn in completion.turns}
        ends = [segment.first_token for segment in completion.segments[1:]] + [len(completion.token_ids)]
        for segment, end in zip(completion.segments, ends, strict=True):
            seen.add(segment.policy_version)
            model.load_state_dict(dict(versions[segment.policy_version]), strict=False)
            expected = np.concatenate([logprobs(model, *read) for read in reads])
            of_segment = slice(segment.first_token, end)
            np.testing.assert_allclose(completion.behavior_logprobs[of_segment], expected[of_segment], atol=2e-5)
    assert len(seen) > 2, "the weights did not change within the episodes"
    assert kinds == {0, 1, 2}, "not every way to go on was taken"


def test_turns_start_on_the_cache_of_their_first_weights_and_new_prompts_on_none_of_older_ones(
    engine: Engine, tiny_model: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    prompt = np.random.default_rng(0).integers(4, 40, 80).tolist()

    def cached(at: int | None, length: int = 80) -> int:
        """Return how many of the prompt's first tokens were in the cache; check the log-probs of what shares none of it."""
        before = engine.cache_use.num_cached_tokens
        engine.submit(["turn"], prompt[:length], Sampling(2), cached_at=at)
        completions = [completion for _ in iter(lambda: engine.num_unfinished, 0) for completion in engine.step()]
        num_cached = engine.cache_use.num_cached_tokens - before
        if not num_cached:
            stream = torch.tensor([[*prompt[:length], *completions[0].token_ids.tolist()]])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(stream).logits[0, length - 1 : -1], dim=-1)
            expected = logprobs.gather(-1, stream[0, length:, None])[:, 0].numpy()
            np.testing.assert_allclose(completions[0].behavior_logprobs, expected, atol=2e-5)
        return num_cached

    engine.load_weights(buffer_of(weights_of(model, 0)), 7, recompute_kv=False)
    first = engine.num_loads
    assert [cached(first, 70), cached(first)] == [0, 64], "the second turn starts on the first one's"
    # A learner that went back to an older checkpoint gives other weights the same version.
    for version in (8, 8):
        engine.load_weights(buffer_of(weights_of(model, version)), version, recompute_kv=False)
        assert [cached(None), cached(None), cached(first)] == [0, 64, 64]
    engine.load_weights(buffer_of(weights_of(model, 9)), 9, recompute_kv=True)
    assert cached(first) == 0, "recompute_kv keeps nothing of older weights"
