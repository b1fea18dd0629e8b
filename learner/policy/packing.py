"""Completions and their prompts as one row without padding, a prompt that several completions share only once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TokenIds = Sequence[int] | NDArray[np.int32]
"""Token ids of a prompt or of a completion."""


@dataclass(frozen=True)
class Span:
    """Neighboring inputs of a pack, each of which attends to the span's prefix, to itself, and to those before it in the span.

    A prompt is a span without prefix; a completion is one whose prefix is its prompt. Not a tuple: wrappers of modules
    that look for tensors in tuples need not look here.
    """

    start: int
    """Index of its first input."""
    length: int
    """Number of its inputs, at least 1."""
    prefix_start: int = 0
    """Index of the first input of the prefix, which is a whole span of the same pack."""
    prefix_length: int = 0
    """0: no prefix."""


class Pack(NamedTuple):
    """The inputs of one forward pass, and which of its outputs predict which completion tokens.

    Inputs are, prompt by prompt: the prompt's tokens, then those of each of its completions but the last one, which
    predicts nothing. Completion tokens are counted over all completions in the order given to `pack`.
    """

    token_ids: Tensor
    """`[num_inputs]` int64."""
    position_ids: Tensor
    """`[num_inputs]` int64: from 0 in a prompt; those of each completion continue its prompt's."""
    predictors: Tensor
    """`[num_completion_tokens]` int64: the input whose output predicts the token; for a first token the prompt's last."""
    targets: Tensor
    """`[num_completion_tokens]` int64: the tokens themselves."""
    spans: tuple[Span, ...]
    """Who attends to whom. In order and without gaps: together they are all inputs."""
    lengths: tuple[int, ...]
    """Number of tokens of each completion."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Span, ...]]:
        """What `CompletionLogprobs` takes of it, in order."""
        return self.token_ids, self.position_ids, self.predictors, self.targets, self.spans

    def to(self, device: torch.device) -> "Pack":
        """The same on `device`."""
        return self._replace(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            predictors=self.predictors.to(device),
            targets=self.targets.to(device),
        )


def num_inputs(prompt_length: int, completion_lengths: Sequence[int]) -> int:
    """How many inputs `pack` makes of one prompt and its completions."""
    return prompt_length + sum(max(0, length - 1) for length in completion_lengths)


def pack(sequences: Sequence[tuple[TokenIds, Sequence[TokenIds]]]) -> Pack:
    """Pack prompts, at least one token each, with their completions, which may be empty.

    Without sequences the pack has one input, which a model can run, and predicts nothing.
    """
    token_ids: list[TokenIds] = []
    position_ids: list[NDArray[np.int64]] = []
    predictors: list[NDArray[np.int64]] = []
    targets: list[TokenIds] = []
    spans: list[Span] = []
    end = 0
    for prompt, completions in sequences or [([0], [])]:
        assert len(prompt) > 0, "the first token of a completion is predicted by its prompt"
        prompt_span = Span(end, len(prompt))
        end += len(prompt)
        spans.append(prompt_span)
        token_ids.append(prompt)
        position_ids.append(np.arange(len(prompt)))
        for completion in completions:
            length = max(0, len(completion) - 1)
            if length > 0:
                spans.append(Span(end, length, prompt_span.start, prompt_span.length))
            token_ids.append(completion[:length])
            position_ids.append(np.arange(len(prompt), len(prompt) + length))
            if len(completion) > 0:
                predictors += [np.array([prompt_span.start + prompt_span.length - 1]), np.arange(end, end + length)]
            targets.append(completion)
            end += length
    return Pack(
        _concatenated(token_ids),
        _concatenated(position_ids),
        _concatenated(predictors),
        _concatenated(targets),
        tuple(spans),
        tuple(len(completion) for _, completions in sequences for completion in completions),
    )


def _concatenated(parts: Sequence[TokenIds | NDArray[np.int64]]) -> Tensor:
    # With an empty part first: there may be no other, and the parts may be lists, which alone would make floats if empty.
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype=np.int64) for part in ([], *parts)]))


def unpack(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """`[rows, tokens]` from one value per completion token, padded on the right with 0; differentiable.

    `values`: `[num_completion_tokens]`; `lengths`: of the completions, one row each. `tokens` is the longest, at least 1.
    """
    columns = torch.arange(max([1, *lengths]), device=values.device)
    mask = columns < torch.tensor(lengths, dtype=torch.int64, device=values.device)[:, None]
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
