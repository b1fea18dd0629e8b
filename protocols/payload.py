"""The arrays of a lease and of a group: completions, images, and the experts that a mixture chose, as bytes.

Experts take a byte for each token, layer and slot, compressed with zstd: the experts of a token in a layer, a set, rise from
slot to slot, and each is written as its distance from the one before. Distances are small numbers, so they take two thirds of
the space. Image files travel in a frame beside the lease, which has their sizes and hashes.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from offbeat.protocols.fields import Checksum, Natural, Positive, RewardParts, Seconds


class CompressionError(ValueError):
    """Bytes that are not compressed, or not so many."""


def compress(content: bytes) -> bytes:
    """Return the bytes compressed."""
    return _codec().compress(content, asbytes=True)


def decompress(compressed: bytes | bytearray | memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """Return exactly `num_bytes` of content, and never hold more; raise `CompressionError` where there are others."""
    try:
        content = _codec().decompress(compressed, decompressed_size=num_bytes, asbytes=True)
    # The codec's errors.
    except (_pyarrow().ArrowException, OSError) as error:
        raise CompressionError(str(error)) from error
    return np.frombuffer(content, dtype=np.uint8)


@cache
def _codec() -> Any:
    return _pyarrow().Codec("zstd", compression_level=1)


def _pyarrow() -> ModuleType:
    # Imported late: its import starts a thread, and the process that services are forked from can have none.
    import pyarrow

    return pyarrow


MAX_IMAGES = 16
"""Most images of one prompt."""


class ImageReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One image of a lease's prompt."""

    num_bytes: Positive
    hash: Checksum
    """`common.models.images.hash_image` of the file's bytes."""


MAX_EXPERTS = 256
"""Most experts in a layer: their numbers are bytes."""


def encode_experts(experts: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Return the bytes of experts `[tokens, layers, top_k]`, each below `MAX_EXPERTS`."""
    rising = np.sort(experts.astype(np.uint8), axis=-1)
    return np.frombuffer(compress(np.diff(rising, axis=-1, prepend=np.uint8(0)).tobytes()), dtype=np.uint8)


def decode_experts(content: bytes | bytearray | memoryview, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Return the experts `[tokens, layers, top_k]` in these bytes, rising; raise `CompressionError` for another number.

    Memory is bounded by the shape, whatever the bytes say. Experts that no layer has are the caller's to find.
    """
    distances = decompress(content, int(np.prod(shape, dtype=np.int64)))
    return np.cumsum(distances.reshape(shape), axis=-1, dtype=np.uint8)


MAX_TURNS = 4096
"""Most turns of a completion."""


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A stretch of one completion sampled under one policy version; it ends where the next one starts."""

    policy_version: Natural
    first_token: Natural
    """Index into the completion of the first token sampled under `policy_version`."""


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """A stretch of sampled tokens in a completion, and the context before it that was not sampled: a tool's answer."""

    num_context: Natural
    """Tokens between what this turn continues and its first sampled token."""
    num_sampled: Positive
    back: Natural = 1
    """Number of turns that this turn goes back to the one whose end it continues. In turn `i`, 1 is the turn before it, `i + 1`
    the lease's prompt (for the first turn the same), and 0 nothing: it begins with its context."""
    reward: float = 0.0
    """Part of the completion's reward that was given when this turn was the last one asked for."""
    branch_reward: float = 0.0
    """Part of the completion's reward that was given to a sequence whose last turn so far was this one."""


def path_lengths(turns: Sequence[Turn]) -> list[int]:
    """Return the tokens of each turn and of all that it continues, without the lease's prompt."""
    lengths: list[int] = []
    for index, turn in enumerate(turns):
        is_continued = 0 < turn.back <= index
        inherited = lengths[index - turn.back] if is_continued else 0
        lengths.append(inherited + turn.num_context + turn.num_sampled)
    return lengths


class ExpertsMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """The experts that a mixture sent a group's tokens to, without their bytes (`protocols.payload`).

    They are those of the prompt's tokens, then of each completion's tokens but its last, which is not an input.
    """

    num_prompt_tokens: Positive
    num_layers: Positive
    """Layers that have experts."""
    top_k: Positive
    """Experts that a token goes to in a layer."""
    num_bytes: Positive

    def shape(self, completions: "Sequence[CompletionMeta]") -> tuple[int, int, int]:
        """Return the tokens, layers and slots of a group's experts."""
        num_inputs = sum(completion.num_tokens - 1 for completion in completions)
        return self.num_prompt_tokens + num_inputs, self.num_layers, self.top_k


class CompletionMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One completion without its arrays."""

    num_tokens: Positive
    """Sampled tokens."""
    finish_reason: Literal["stop", "length"]
    reward: float
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    reward_parts: RewardParts = {}
    """Named parts of the reward, before their weights; empty when the reward is a number."""
    turns: Annotated[tuple[Turn, ...], Meta(max_length=MAX_TURNS)] = ()
    """The turns of a completion with context between its sampled tokens, or with several sequences; empty where it has neither.
    Sampled tokens, log-probs, segments and context are in the order of the turns."""
    environment_s: Seconds = 0.0
    """Seconds in which the episode's function had the word."""
