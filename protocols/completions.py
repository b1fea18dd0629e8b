"""One completion on the wire and in the log, without its arrays of tokens and log-probs."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from offbeat.protocols.fields import Natural, Positive, RewardParts

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
    """Tokens between the turn before, or the prompt, and this turn's first sampled token."""
    num_sampled: Positive


class CompletionMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One completion without its arrays."""

    num_tokens: Positive
    """Sampled tokens."""
    finish_reason: Literal["stop", "length"]
    reward: float
    segments: Annotated[tuple[Segment, ...], Meta(min_length=1)]
    reward_parts: RewardParts = {}
    """Named parts of the reward, before their weights; empty when the reward is a number. Since minor version 3."""
    turns: Annotated[tuple[Turn, ...], Meta(max_length=MAX_TURNS)] = ()
    """The turns of a completion with context between its sampled tokens; empty where there is none. Since minor version 4."""
