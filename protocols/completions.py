"""One completion on the wire and in the log, without its arrays of tokens and log-probs."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from offbeat.protocols.fields import Natural, Positive, RewardParts, Seconds

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
    the lease's prompt (for the first turn the same), and 0 nothing: it begins with its context. Since minor version 6."""
    reward: float = 0.0
    """Part of the completion's reward that was given when this turn was the last one asked for. Since minor version 8."""


def path_lengths(turns: Sequence[Turn]) -> list[int]:
    """Return the tokens of each turn and of all that it continues, without the lease's prompt."""
    lengths: list[int] = []
    for index, turn in enumerate(turns):
        is_continued = 0 < turn.back <= index
        inherited = lengths[index - turn.back] if is_continued else 0
        lengths.append(inherited + turn.num_context + turn.num_sampled)
    return lengths


class ExpertsMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, gc=False):
    """The experts that a mixture sent a group's tokens to, without their bytes (`protocols.experts`).

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
    """Named parts of the reward, before their weights; empty when the reward is a number. Since minor version 3."""
    turns: Annotated[tuple[Turn, ...], Meta(max_length=MAX_TURNS)] = ()
    """The turns of a completion with context between its sampled tokens, or with several sequences; empty where it has neither.
    Sampled tokens, log-probs, segments and context are in the order of the turns. Since minor version 4."""
    environment_s: Seconds = 0.0
    """Seconds in which the episode's function had the word. Since minor version 6."""
