"""The interface of engines, the values that cross it, and what all engines do alike."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from offbeat.common.errors import SettingError
from offbeat.common.models.images import ImagePatches, ImageReader
from offbeat.common.weights.flat import WeightBuffer
from offbeat.protocols.message_parts import EngineInfo, ModelHashes
from offbeat.protocols.messages import Sampling
from offbeat.protocols.payload import Segment, Turn


class EngineSettings(NamedTuple):
    """Everything besides its model that an engine is made with."""

    dtype: str
    max_model_len: int
    """Tokens of the longest prompt with its completion."""
    hashes: ModelHashes
    seed: int
    """Seed of the process's random state; no two actors may share it."""
    options: Mapping[str, Any]
    """Further options of the library: `actor.engine_options`."""
    images: ImageReader | None = None
    """Reads the images of prompts, of which vLLM alone takes some; None: prompts have none."""
    records_experts: bool = False
    """Completions come with their experts."""
    has_turns: bool = False
    """Prompts go on from earlier ones, as the turns of an episode do."""
    sleeps: bool = False
    """The engine will be asked to give the GPU's memory back, which vLLM alone can."""


class Completion(NamedTuple):
    """One finished completion."""

    request_id: str
    token_ids: NDArray[np.int32]
    """`[num_tokens]`, the end-of-sequence token included when it was sampled."""
    behavior_logprobs: NDArray[np.float32]
    """`[num_tokens]`, of the distribution sampled from (temperature applied)."""
    finish_reason: Literal["stop", "length"]
    segments: tuple[Segment, ...]
    """Policy versions in order; the first one starts at token 0."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode whose environment has added context; empty otherwise."""
    context_ids: NDArray[np.int32] = np.empty(0, dtype=np.int32)
    """The context of all turns, concatenated."""
    environment_s: float = 0.0
    """Seconds in which the episode's function had the word."""
    experts: NDArray[np.integer] | None = None
    """`[num_prompt_tokens + num_tokens - 1, layers, top_k]`, the experts that the prompt and all sampled tokens but the last
    went to, in the layers that have experts. None unless the engine was made to record them."""


class Score(NamedTuple):
    """Log-probs and routing of given tokens under an engine's weights."""

    logprobs: NDArray[np.float32]
    """`[num_tokens - 1]`, of tokens 1.. given those before them, at temperature 1."""
    routed_experts: NDArray[np.int32] | None
    """`[num_tokens - 1, layers, top_k]`, the experts that tokens 0.. but the last went to, in the layers that have experts.

    None for a dense model, and from an engine that does not record routing.
    """


class CacheUse(NamedTuple):
    """The use of an engine's prefix cache by finished completions since it was made."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose keys and values were in the cache."""


class Engine(Protocol):
    """Continuous batching whose caller owns the step loop, so that weights change only between two steps.

    All methods are called from one thread.
    """

    @property
    def info(self) -> EngineInfo:
        """Description of the engine in the actor's hello."""
        ...

    @property
    def policy_version(self) -> int | None:
        """Version of the weights that the next step samples with; None before the first `load_weights`."""
        ...

    @property
    def num_loads(self) -> int:
        """Weights loaded so far."""
        ...

    @property
    def cache_use(self) -> CacheUse:
        """Use of the prefix cache; zeros from an engine without one."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Completions submitted and not yet returned by `step`."""
        ...

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled since the engine was made."""
        ...

    def submit(
        self,
        request_ids: list[str],
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        images: Sequence[ImagePatches] = (),
        *,
        cached_at: int | None = None,
    ) -> None:
        """Queue a completion of the prompt for each id. Weights must have been loaded.

        `images` are those of the prompt, in the order of their tokens; only engines that take images get some.

        The prompt may start on keys and values that are cached from prompts with the same `cached_at`, a value of `num_loads`;
        None is the present one, so that none are of older weights.
        """
        ...

    def step(self) -> list[Completion]:
        """Advance every running completion by a step (or wait briefly for one); return those that finished."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these completions; they are not returned."""
        ...

    def load_weights(self, weights: WeightBuffer, policy_version: int, *, recompute_kv: bool) -> None:
        """Swap in new weights between two steps; running completions go on under them.

        `weights` holds all parameters under their Hugging Face names, and does not change during the call.
        """
        ...

    def score(self, token_ids: Sequence[int]) -> Score:
        """Return the log-probs and the routing of at least two tokens (the canary).

        May step running completions meanwhile; the next `step` returns those that finish.
        """
        ...

    def close(self) -> None:
        """Free the engine and end its processes."""
        ...


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raise `ValueError` unless the prompt has a token and leaves room for one."""
    if not 0 < num_tokens < max_model_len:
        raise ValueError(f"a prompt of {num_tokens} tokens does not fit model.max_length = {max_model_len}")


def check_options(options: Mapping[str, Any], known: Collection[str], own: Mapping[str, str]) -> None:
    """Raise `SettingError` for an option that the engine does not know, or that `own` forbids with a reason."""
    for name, value in options.items():
        setting = f"actor.engine_options.{name}"
        if name in own:
            raise SettingError(setting, value, f"this is not an option, because {own[name]}", "Remove it.")
        if name not in known:
            raise SettingError(setting, value, "the engine has no such option", "Remove it or correct its name.")


@torch.no_grad()
def spoil(model: nn.Module) -> None:
    """Make every weight NaN: one that no update reaches then shows in the first score of the canary."""
    for parameter in model.parameters():
        # Quantized weights are integers or have one byte.
        if parameter.is_floating_point() and parameter.element_size() > 1:
            parameter.fill_(torch.nan)
