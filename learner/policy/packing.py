"""Packing: completions and their prompts in one row without padding, a prompt shared by its completions."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TokenIds = Sequence[int] | NDArray[np.int32]
"""Token ids of a prompt or a completion."""
LEAST_SHARED = 16
"""Tokens from which on a beginning that sequences have in common is packed once; fewer are not worth a span of their own."""


@dataclass(frozen=True, eq=False)
class PackedImages:
    """The images of all prompts of a pack, one after another.

    A pack of prompts without images has one that replaces no input: every rank must run the vision tower equally often, because
    its gradients are summed over the ranks.
    """

    patches: Tensor
    """`[num_patches, numbers of a patch]` float32."""
    grids: Tensor
    """Frames (1), rows and columns of patches of each image, `[num_images, 3]` int64."""
    inputs: Tensor
    """Inputs that the images' features replace, in their order, `[num_image_tokens]` int64."""

    def to(self, device: torch.device) -> "PackedImages":
        """Return a copy on `device`."""
        return PackedImages(self.patches.to(device), self.grids.to(device), self.inputs.to(device))


class Turns(NamedTuple):
    """A completion of several turns, each with context that is only read and tokens that were sampled after it."""

    token_ids: NDArray[np.int32]
    """Sampled tokens of all turns in their order, `[num_tokens]`."""
    context_ids: NDArray[np.int32]
    """Context of all turns in their order."""
    turns: Sequence[tuple[int, int, int]]
    """Three numbers for each turn: its context tokens, its sampled tokens, and the distance in turns to the turn whose end it
    continues. The distance leads to the prompt if no turn is there; 0 means that the turn continues nothing."""


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
    prefix: tuple[range, ...] = ()
    """Inputs before those of the span in its sequence, each within a span of the same pack."""

    @property
    def prefix_length(self) -> int:
        """Number of the prefix's inputs."""
        return sum(map(len, self.prefix))

    def sequence(self) -> NDArray[np.int64]:
        """Return the inputs of the prefix and the span's own, in order."""
        parts = (*self.prefix, range(self.start, self.start + self.length))
        return np.concatenate([np.arange(part.start, part.stop) for part in parts])


class Pack(NamedTuple):
    """The inputs of one forward pass, and the outputs that predict each completion token.

    For each prompt the inputs are the prompt's tokens, then the tokens of each of its completions except the last, which
    predicts nothing. Where several turns continue one turn, the first of them stays in its span and each of the others begins
    one, which also leaves out its last token: all tokens are there once. Of turns that continue nothing, such as those of an
    agent with a system prompt of its own, the context that several have in common stands once before the completions.
    Completion tokens, those of `Turns` that were sampled, are numbered over all completions in the order given to `pack`.
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
    experts: Tensor | None = None
    """Experts that routers are to choose for each input, `[num_inputs, layers, top_k]` integers; None: let them choose."""
    images: PackedImages | None = None
    """Images of the prompts; None in a run without `data.image_field`. With images there are positions in three dimensions,
    `[3, num_inputs]`."""

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
            experts=None if self.experts is None else self.experts.to(device),
            images=None if self.images is None else self.images.to(device),
        )


class WholeRows(NamedTuple):
    """The inputs of a pack as rows of whole sequences, for a model that cannot be packed.

    A row is a completion with all that is before it, its prompt included; an input that several completions share is in the row
    of each. Rows are padded on the right, which no input sees in a model that only looks back.
    """

    inputs: Tensor
    """Input of the pack in each place, `[num_rows, longest]` int64; padding repeats the row's last."""
    places: Tensor
    """One place of each input among those of all rows, `[num_inputs]` int64. In each of its places an input has the same
    sequence before it, so any will do."""


def whole_rows(spans: Sequence[Span], device: torch.device) -> WholeRows:
    """Arrange the inputs of a pack's spans as rows of whole sequences."""
    places = np.full(sum(span.length for span in spans), -1)
    rows: list[NDArray[np.int64]] = []
    # From the last: a span whose end is part of a later one's prefix needs no row of its own.
    for span in reversed(spans):
        if places[span.start + span.length - 1] < 0:
            rows.append(span.sequence())
            places[rows[-1]] = 0
    longest = max(map(len, rows))
    inputs = np.stack([np.pad(row, (0, longest - len(row)), mode="edge") for row in rows])
    for number, row in enumerate(rows):
        places[row] = number * longest + np.arange(len(row))
    return WholeRows(torch.from_numpy(inputs).to(device), torch.from_numpy(places).to(device))


def num_inputs(completions: Sequence[TokenIds | Turns]) -> int:
    """Count the inputs that `pack` makes of a prompt's completions."""
    total = 0
    for one in completions:
        if isinstance(one, Turns):
            total += len(one.token_ids) + len(one.context_ids) - len(_branches(one.turns))
        else:
            total += max(0, len(one) - 1)
    return total - sum((len(sharing) - 1) * (end - start) for sharing, start, end in _shared(_openings(completions)))


def pack(sequences: Sequence[tuple[TokenIds, Sequence[TokenIds | Turns]]]) -> Pack:
    """Pack prompts, at least one token each, with their completions, which may be empty.

    Without sequences the pack has one input, so that a model can run it, and predicts nothing.
    """
    inputs = _Inputs()
    for prompt, completions in sequences or [([0], [])]:
        assert len(prompt) > 0, "the first token of a completion is predicted by its prompt"
        of_prompt = inputs.add(prompt, ())
        begun = iter(inputs.add_shared(_openings(completions)))
        for completion in completions:
            if isinstance(completion, Turns):
                inputs.add_turns(completion, of_prompt, begun)
            else:
                inputs.add_tokens(completion, of_prompt)
    return Pack(
        _concatenated(inputs.token_ids),
        _concatenated(inputs.position_ids),
        _concatenated(inputs.predictors),
        _concatenated(inputs.targets),
        tuple(inputs.spans),
        tuple(map(len, inputs.targets)),
    )


class _Inputs:
    """The parts of a pack that are there so far."""

    def __init__(self) -> None:
        self.token_ids: list[TokenIds] = []
        self.position_ids: list[NDArray[np.int64]] = []
        self.predictors: list[NDArray[np.int64]] = []
        self.targets: list[TokenIds] = []
        self.spans: list[Span] = []
        self.end = 0
        """Number of inputs."""

    def add(self, token_ids: TokenIds, prefix: tuple[range, ...]) -> range:
        """Add inputs that continue a prefix; return their indices."""
        start, length = self.end, len(token_ids)
        if length > 0:
            span = Span(start, length, prefix)
            self.spans.append(span)
            self.token_ids.append(token_ids)
            self.position_ids.append(np.arange(span.prefix_length, span.prefix_length + length))
            self.end += length
        return range(start, self.end)

    def add_tokens(self, completion: TokenIds, of_prompt: range) -> None:
        """Add a completion all of whose tokens were sampled."""
        before = np.arange(self.end - 1, self.end - 1 + len(completion))
        before[:1] = of_prompt.stop - 1
        self.add(completion[:-1], (of_prompt,))
        self.predictors.append(before)
        self.targets.append(completion)

    def add_shared(self, openings: Sequence[NDArray[np.int32]]) -> list[tuple[range, ...]]:
        """Add what openings have in common; return the inputs that each of them begins with."""
        begun: list[tuple[range, ...]] = [()] * len(openings)
        for sharing, start, end in _shared(openings):
            common = self.add(openings[sharing[0]][start:end], begun[sharing[0]])
            for index in sharing:
                begun[index] = (*begun[index], common)
        return begun

    def add_turns(self, completion: Turns, of_prompt: range, begun: Iterator[tuple[range, ...]]) -> None:
        """Add a completion of several turns; `begun` has the inputs that are there of each opening."""
        token_ids, context_ids, turns = completion
        ends = np.cumsum([num_sampled for _, num_sampled, _ in turns]).tolist()
        context_ends = np.cumsum([num_context for num_context, _, _ in turns]).tolist()
        before = np.empty(len(token_ids), dtype=np.int64)
        paths: list[tuple[range, ...]] = [()] * len(turns)
        """The inputs of each turn and of all that it continues."""
        for branch in _branches(turns):
            continued = branch[0] - turns[branch[0]][2]
            prefix = next(begun) if continued == branch[0] else (of_prompt,) if continued < 0 else paths[continued]
            num_begun = sum(map(len, prefix)) if continued == branch[0] else 0
            start = end = self.end
            # The input that predicts the next token, where it was sampled.
            last = prefix[-1].stop - 1 if prefix else -1
            parts: list[NDArray[np.int32]] = []
            for index in branch:
                num_context, num_sampled, _ = turns[index]
                num_context, num_begun = num_context - num_begun, 0
                parts.append(context_ids[context_ends[index] - num_context : context_ends[index]])
                parts.append(token_ids[ends[index] - num_sampled : ends[index]])
                end += num_context
                of_turn = before[ends[index] - num_sampled : ends[index]]
                of_turn[:] = np.arange(end - 1, end - 1 + num_sampled)
                if end == start:
                    of_turn[0] = last
                end += num_sampled
                paths[index] = (*prefix, range(start, end))
            self.add(np.concatenate(parts)[:-1], prefix)
        self.predictors.append(before)
        self.targets.append(token_ids)


def _openings(completions: Sequence[TokenIds | Turns]) -> list[NDArray[np.int32]]:
    """Return the context that each sequence begins with which continues nothing, not even the prompt."""
    openings: list[NDArray[np.int32]] = []
    for completion in completions:
        if isinstance(completion, Turns):
            ends = np.cumsum([num_context for num_context, _, _ in completion.turns]).tolist()
            for first in (branch[0] for branch in _branches(completion.turns)):
                num_context, _, back = completion.turns[first]
                if back == 0:
                    openings.append(completion.context_ids[ends[first] - num_context : ends[first]])
    return openings


def _shared(
    openings: Sequence[NDArray[np.int32]], among: Iterable[int] | None = None, start: int = 0
) -> Iterator[tuple[list[int], int, int]]:
    """Yield the stretches that several openings have in common: which ones, from where and to where, the earlier ones first."""
    alike: defaultdict[bytes, list[int]] = defaultdict(list)
    for index in range(len(openings)) if among is None else among:
        if len(openings[index]) >= start + LEAST_SHARED:
            alike[openings[index][start : start + LEAST_SHARED].tobytes()].append(index)
    for sharing in alike.values():
        if len(sharing) > 1:
            shortest = min(len(openings[index]) for index in sharing)
            columns = np.stack([openings[index][start:shortest] for index in sharing])
            differing = np.flatnonzero((columns != columns[0]).any(axis=0))
            end = start + int(differing[0]) if len(differing) else shortest
            yield sharing, start, end
            yield from _shared(openings, sharing, end)


def _branches(turns: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Divide turns into runs in which each continues the one before; the first turn that continues another stays with it."""
    branches: list[list[int]] = []
    branch_of: list[list[int]] = []
    for index, (_, _, back) in enumerate(turns):
        if 0 < back <= index and branch_of[index - back][-1] == index - back:
            branch = branch_of[index - back]
            branch.append(index)
        else:
            branch = [index]
            branches.append(branch)
        branch_of.append(branch)
    return branches


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
