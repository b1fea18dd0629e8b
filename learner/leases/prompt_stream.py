"""The order in which prompts are leased: endless epochs over the data, each another permutation.

Prompts that were added to the end of the data join at the first epoch that has not begun.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray


class Turn(NamedTuple):
    """A prompt in its place in the order."""

    prompt_id: int
    epoch: int
    """Pass over the data that the turn belongs to."""


class Growth(NamedTuple):
    """Prompts that were added to the end of the data."""

    epoch: int
    """The first pass over the data that has them."""
    num_prompts: int
    """Number of prompts of that pass and of those after it."""


class StreamState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `PromptStream` in a checkpoint."""

    num_prompts: int
    """Number of prompts of the first pass."""
    seed: int
    position: int
    returned: tuple[Turn, ...]
    """Turns given back and not served again yet, oldest first."""
    growths: tuple[Growth, ...] = ()
    """Additions to the data, in the order of their epochs."""


class PromptStream:
    """Endless epochs over the prompts, each another permutation; prompts given back come first.

    The order depends on the seed, the position and the sizes of the epochs, so a resumed run goes on where it stopped.
    """

    def __init__(self, num_prompts: int, seed: int, position: int = 0, growths: Iterable[Growth] = ()) -> None:
        assert num_prompts > 0
        assert position >= 0
        self._sizes = [Growth(0, num_prompts), *growths]
        self._seed = seed
        self._position = position
        self._returned: deque[Turn] = deque()
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @classmethod
    def from_state(cls, state: StreamState) -> PromptStream:
        """Continue a stream."""
        stream = cls(state.num_prompts, state.seed, state.position, state.growths)
        stream._returned.extend(state.returned)
        return stream

    @property
    def position(self) -> int:
        """Prompts served from the epochs since the start; those served again after `give_back` do not count."""
        return self._position

    @property
    def share_served(self) -> float:
        """Share of the current epoch that was served, 0 to 1."""
        epoch, index = self._place(self._position)
        return index / self.size_of(epoch)

    @property
    def epoch(self) -> int:
        """The pass over the data that new prompts come from."""
        return self._place(self._position)[0]

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the epochs to come."""
        return self._sizes[-1].num_prompts

    def size_of(self, epoch: int) -> int:
        """Return the number of prompts of an epoch."""
        return next(size.num_prompts for size in reversed(self._sizes) if size.epoch <= epoch)

    def grow(self, num_prompts: int) -> int:
        """Let each epoch that has not begun have this many prompts; return the first of them."""
        epoch, index = self._place(self._position)
        first = epoch + (index > 0)
        self._sizes = [*(size for size in self._sizes if size.epoch < first), Growth(first, num_prompts)]
        # `peek` may have looked into the epoch that is larger now.
        self._epoch = -1
        return first

    def peek(self) -> Turn:
        """Return the prompt to lease next, and leave it in its place."""
        if self._returned:
            return self._returned[0]
        epoch, index = self._place(self._position)
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._epoch = epoch
        return Turn(int(self._order[index]), epoch)

    def next(self) -> Turn:
        """Return the prompt to lease next, and move on."""
        turn = self.peek()
        if self._returned:
            self._returned.popleft()
        else:
            self._position += 1
        return turn

    def give_back(self, prompt_id: int, epoch: int) -> None:
        """Serve this prompt again before any new one, in the order in which prompts were given back."""
        self._returned.append(Turn(prompt_id, epoch))

    def bring_forward(self, turn: Turn) -> bool:
        """Serve this turn next, as a log with a gap asks; return False when the turn is over, or no turn of its epoch.

        Turns that were served in the gap are given back.
        """
        if turn not in self._returned:
            places = np.flatnonzero(self._order_of(turn.epoch) == turn.prompt_id)
            if not len(places):
                return False
            position = self._begin_of(turn.epoch) + int(places[0])
            if position < self._position:
                return False
            waiting = list(self._returned)
            self._returned.clear()
            overtaken = [self.next() for _ in range(position - self._position)]
            self.next()
            self._returned.extend([*waiting, *overtaken])
        else:
            self._returned.remove(turn)
        self._returned.appendleft(turn)
        return True

    def state(self) -> StreamState:
        """Return what `from_state` needs to serve the same prompts as this stream would."""
        first, *growths = self._sizes
        return StreamState(first.num_prompts, self._seed, self._position, tuple(self._returned), tuple(growths))

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.size_of(epoch))

    def _begin_of(self, epoch: int) -> int:
        """Return the position of the first turn of an epoch."""
        ends = [*(size.epoch for size in self._sizes[1:]), epoch]
        return sum(max(0, min(end, epoch) - size.epoch) * size.num_prompts for size, end in zip(self._sizes, ends, strict=True))

    def _place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the index within it."""
        size = next(size for size in reversed(self._sizes) if self._begin_of(size.epoch) <= position)
        num_epochs, index = divmod(position - self._begin_of(size.epoch), size.num_prompts)
        return size.epoch + num_epochs, index
