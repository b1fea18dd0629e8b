"""Stand-ins for compute: an engine that sleeps instead of sampling, a dispatcher over meaningless prompts."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from offbeat.actor.engines.engine import CacheUse, Completion, Score
from offbeat.common.models.images import ImagePatches
from offbeat.common.records.rows import Recorder
from offbeat.common.settings.config import Config, HubSection, RolloutSection, RunSection, StalenessSection, TaskSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.weights.flat import WeightBuffer
from offbeat.learner.dispatch.canary import Canary
from offbeat.learner.dispatch.contract import Contract
from offbeat.learner.dispatch.dispatcher import Dispatcher, Listeners
from offbeat.learner.dispatch.live_settings import LiveSettings
from offbeat.learner.dispatch.run_state import Versions
from offbeat.learner.leases.journal import LeaseJournal
from offbeat.learner.leases.ledger import Ledger
from offbeat.learner.leases.prompt_stream import PromptStream
from offbeat.learner.leases.prompts import Prompt, Prompts
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.learner.weights.publisher import WeightPublisher
from offbeat.learner.weights.transport import Transport
from offbeat.protocols.channels import Hub
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import Sampling, TensorSpec, WeightsCommitted, WeightsStaged
from offbeat.protocols.payload import Segment

VOCABULARY_SIZE = 50_000
MAX_LENGTH = 1 << 16
ENGINE = EngineInfo("sleep", "1", "float32", "cpu", MAX_LENGTH, ModelHashes("", "", ""))
CANARY = np.array([1, 2, 3], np.int32)
NUM_PROMPTS = 8192
MAX_ACTORS = 10_000
TOKEN_S = 0.001
"""Seconds per token. A completion of `n` tokens takes `n * TOKEN_S` from its submission, however many others run."""
MAX_MESSAGE_BYTES = 1 << 28
PATIENCE_S = 60.0
LONGEST_STEP_S = 0.01
"""Longest sleep of an engine step, as long as a real step on a small model. Messages and new weights wait for its end."""


@dataclass
class Sleeping:
    """A running completion."""

    started_at: float
    num_tokens: int
    segments: tuple[Segment, ...]

    @property
    def ends_at(self) -> float:
        """The time at which the last token is due."""
        return self.started_at + self.num_tokens * TOKEN_S


class SleepEngine:
    """An `actor.engines.engine.Engine` whose completions take time in proportion to their length, and no CPU."""

    def __init__(self, num_tokens: Callable[[str], int]) -> None:
        """`num_tokens` returns the length of a request's completion."""
        self._num_tokens = num_tokens
        self._running: dict[str, Sleeping] = {}
        self.info = ENGINE
        self.policy_version: int | None = None
        self.num_generated_tokens = 0
        self.num_loads = 0
        self.cache_use = CacheUse(0, 0)

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(
        self,
        request_ids: list[str],
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[ImagePatches] = (),
        *,
        cached_at: int | None = None,
    ) -> None:
        assert self.policy_version is not None
        segments = (Segment(self.policy_version, 0),)
        for request_id in request_ids:
            self._running[request_id] = Sleeping(time.monotonic(), self._num_tokens(request_id), segments)

    def step(self) -> list[Completion]:
        next_end = min((sleeping.ends_at for sleeping in self._running.values()), default=0.0)
        time.sleep(min(max(0.0, next_end - time.monotonic()), LONGEST_STEP_S))
        now = time.monotonic()
        finished = [request_id for request_id, sleeping in self._running.items() if sleeping.ends_at <= now]
        return [self._completion(request_id, self._running.pop(request_id)) for request_id in finished]

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def load_weights(self, weights: WeightBuffer, policy_version: int, *, recompute_kv: bool) -> None:
        self.policy_version = policy_version
        now = time.monotonic()
        for sleeping in self._running.values():
            first_token = int((now - sleeping.started_at) / TOKEN_S)
            if sleeping.segments[-1].first_token < first_token < sleeping.num_tokens:
                sleeping.segments += (Segment(policy_version, first_token),)

    def score(self, token_ids: Sequence[int]) -> Score:
        return Score(np.zeros(len(token_ids) - 1, np.float32), None)

    def close(self) -> None:
        pass

    def _completion(self, request_id: str, sleeping: Sleeping) -> Completion:
        self.num_generated_tokens += sleeping.num_tokens
        token_ids = np.ones(sleeping.num_tokens, np.int32)
        return Completion(request_id, token_ids, np.zeros(sleeping.num_tokens, np.float32), "stop", sleeping.segments)


class NoTokenizer:
    """Decodes every completion to an empty text. The actor's loop uses no other part of a tokenizer."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return ""


async def no_reward(prompt: str, completion: str, row: dict[str, Any]) -> float:
    """Return 0. The function is async, so that it runs without a separate process."""
    return 0.0


def make_dispatcher(
    *,
    group_size: int,
    groups_per_step: int,
    num_steps: int,
    max_staleness: int,
    target: Literal["auto", "bound"] = "auto",
    layout: tuple[TensorSpec, ...],
    log: RolloutLog | None = None,
    record: Recorder,
    on_join: Callable[[bytes], None],
    on_weights: Callable[[str, WeightsStaged | WeightsCommitted], None],
) -> Dispatcher:
    """Return the production dispatcher, with ledger and gate, at policy version 0. Lease ids count from 0."""
    prompts = [Prompt(index, "", np.array([1, 2, 3], np.int32), "{}") for index in range(NUM_PROMPTS)]
    config = Config(
        rollout=RolloutSection(group_size=group_size, max_new_tokens=MAX_LENGTH // 2),
        staleness=StalenessSection(max_staleness=max_staleness, target=target),
        train=TrainSection(groups_per_step=groups_per_step, num_steps=num_steps),
        run=RunSection(max_failed_leases=1),
        hub=HubSection(max_actors=MAX_ACTORS),
    )
    contract = Contract(
        run_id="benchmark",
        learner_incarnation=time.time_ns(),
        layout=layout,
        canary_token_ids=CANARY,
        dtype=ENGINE.dtype,
        hashes=ENGINE.hashes,
        max_length=MAX_LENGTH,
        vocabulary_size=VOCABULARY_SIZE,
        temperature=RolloutSection().temperature,
        reward=TaskSection().reward,
        software="0",
        max_message_bytes=HubSection().max_message_mb << 20,
    )
    canary = Canary(
        CANARY,
        dtype=ENGINE.dtype,
        file_logprobs=np.zeros(len(CANARY) - 1, np.float32),
        tolerance=lambda: None,
        record=record,
    )
    return Dispatcher(
        contract,
        LiveSettings(config, {}),
        Prompts(prompts, evaluation=(), decode=str),
        LeaseJournal(log, Ledger(), PromptStream(NUM_PROMPTS, seed=0)),
        Versions(current=0, newest=0),
        canary,
        Listeners(
            joined=on_join,
            introduced=lambda hello: None,
            weights=on_weights,
            distrusted=lambda peer, actor, why: None,
            routed=lambda actor, version, experts: None,
        ),
        record,
    )


def make_publisher(layout: tuple[TensorSpec, ...], *, num_actors: int, max_staleness: int, record: Recorder) -> WeightPublisher:
    """Return the production weight publisher, over gloo and loopback."""
    return WeightPublisher(
        layout=layout,
        transport=Transport(
            host="127.0.0.1",
            listen_on="127.0.0.1",
            backend="gloo",
            port=0,
            timeout_s=PATIENCE_S,
            bucket_bytes=8 << 20,
            chunk_bytes=8 << 20,
            max_pulls=num_actors,
        ),
        open_hub=lambda: Hub("tcp://127.0.0.1:0", max_message_bytes=MAX_MESSAGE_BYTES),
        max_pull_lag=lambda: max_staleness,
        record=record,
    )
