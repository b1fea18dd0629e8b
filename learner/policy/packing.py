"""Packing: completions and their prompts in one row without padding, a prompt shared by its completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TokenIds = Sequence[int] | NDArray[np.int32]
"""Token ids of a prompt or a completion."""


class Stream(NamedTuple):
    """A completion of several turns: tokens that were sampled, and context between them that is only read."""

    token_ids: NDArray[np.int32]
    """`[num_tokens]`, the last one sampled."""
    sampled: NDArray[np.bool_]
    """`[num_tokens]`."""


@dataclass(frozen=True)
class Span:
    """Neighboring inputs of a pack; each attends to the span's prefix, to itself, and to the inputs before it in the span.

    A prompt is a span without a prefix; the prefix of a completion is its prompt. A dataclass, so that module wrappers which
    search tuples for tensors skip it.
    """

    start: int
    """Index of its first input."""
    length: int
    """Number of its inputs, at least 1."""
    prefix_start: int = 0
    """Index of the first input of the prefix, which is a whole span of the same pack."""
    prefix_length: int = 0
    """Number of the prefix's inputs; 0 without a prefix."""


class Pack(NamedTuple):
    """The inputs of one forward pass, and the outputs that predict each completion token.

    For each prompt the inputs are the prompt's tokens, then the tokens of each of its completions except the last, which
    predicts nothing. Completion tokens, those of a `Stream` that were sampled, are numbered over all completions in the order
    given to `pack`.
    """

    token_ids: Tensor
    """`[num_inputs]` int64."""
    position_ids: Tensor
    """Positions, from 0 in a prompt; each completion continues its prompt's, `[num_inputs]` int64."""
    predictors: Tensor
    """Input whose output predicts each token, the prompt's last for a first token, `[num_completion_tokens]` int64."""
    targets: Tensor
    """The completion tokens, `[num_completion_tokens]` int64."""
    spans: tuple[Span, ...]
    """Spans that inputs attend within, in order and without gaps; together they cover all inputs."""
    lengths: tuple[int, ...]
    """Number of tokens of each completion."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Span, ...]]:
        """The arguments of `CompletionLogprobs`, in order."""
        return self.token_ids, self.position_ids, self.predictors, self.targets, self.spans

    def to(self, device: torch.device) -> "Pack":
        """Return a copy on `device`."""
        return self._replace(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
        )


def num_inputs(prompt_length: int, completion_lengths: Sequence[int]) -> int:
    """Count the inputs that `pack` makes of one prompt and its completions."""
    return prompt_length + sum(max(0, length - 1) for length in completion_lengths)


def pack(sequences: Sequence[tuple[TokenIds, Sequence[TokenIds | Stream]]]) -> Pack:
    """Pack prompts, at least one token each, with their completions, which may be empty.

    Without sequences the pack has one input, so that a model can run it, and predicts nothing.
    """
    token_ids: list[TokenIds] = []
    position_ids: list[NDArray[np.int64]] = []
    predictors: list[NDArray[np.int64]] = []
    targets: list[TokenIds] = []
    spans: list[Span] = []
    lengths: list[int] = []
    end = 0
    for prompt, completions in sequences or [([0], [])]:
        assert len(prompt) > 0, "the first token of a completion is predicted by its prompt"
        prompt_span = Span(end, len(prompt))
        end += len(prompt)
        spans.append(prompt_span)
        token_ids.append(prompt)
        position_ids.append(np.arange(len(prompt)))
        for one in completions:
            completion, sampled = one if isinstance(one, Stream) else (one, None)
            length = max(0, len(completion) - 1)
            if length > 0:
                spans.append(Span(end, length, prompt_span.start, prompt_span.length))
            token_ids.append(completion[:length])
            position_ids.append(np.arange(len(prompt), len(prompt) + length))
            if len(completion) > 0:
                before = np.arange(end - 1, end + length)
                before[0] = prompt_span.start + prompt_span.length - 1
                predictors.append(before if sampled is None else before[sampled])
            targets.append(completion if sampled is None else np.asarray(completion)[sampled])
            lengths.append(len(targets[-1]))
            end += length
    return Pack(
        _concatenated(token_ids),
        _concatenated(position_ids),
        _concatenated(predictors),
        _concatenated(targets),
        tuple(spans),
        tuple(lengths),
    )


def _concatenated(parts: Sequence[TokenIds | NDArray[np.int64]]) -> Tensor:
    # With an empty part, because there may be no other. Numpy takes empty lists for floats, hence the casting.
    return torch.from_numpy(np.concatenate([[], *parts], dtype=np.int64, casting="unsafe"))


def unpack(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Arrange one value per completion token as `[rows, tokens]`, padded on the right with 0; differentiable.

    `values`: `[num_completion_tokens]`; `lengths`: tokens of each completion, one row each. `tokens` is the longest, at least
    1.
    """
    columns = torch.arange(max([1, *lengths]), device=values.device)
    mask = columns < torch.tensor(lengths, dtype=torch.int64, device=values.device)[:, None]
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
