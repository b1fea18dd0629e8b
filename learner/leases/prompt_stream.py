"""The order in which prompts are leased: endless epochs over the data, each another permutation.

Prompts that were added to the end of the data join at the first epoch that has not begun. Where tasks have shares
(`data.curriculum`), the stream leaves out turns of their prompts.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

DRAWS = 1
"""The last number of the seeds of `draws`, which keeps them apart from those of the permutations."""


class PromptTurn(NamedTuple):
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
    returned: tuple[PromptTurn, ...]
    """Turns given back and not served again yet, oldest first."""
    growths: tuple[Growth, ...] = ()
    """Additions to the data, in the order of their epochs."""
    shares: dict[str, float] = {}
    """Shares of the tasks; see `PromptStream.weigh`."""


def draws(seed: int, epoch: int, num_prompts: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each prompt of an epoch: its turn is left out where it is not below its task's share."""
    return np.random.default_rng([seed, epoch, DRAWS]).random(num_prompts)


class PromptStream:
    """Endless epochs over the prompts, each another permutation; prompts given back come first.

    The order depends on the seed, the position, the sizes of the epochs, and the shares of tasks in force at each step, so a
    resumed run goes on where it stopped.
    """

    def __init__(
        self, num_prompts: int, seed: int, position: int = 0, growths: Iterable[Growth] = (), tasks: Sequence[str] = ()
    ) -> None:
        """`tasks` are the tasks of all prompts, those to be added by `grow` included; empty where nothing has shares."""
        assert num_prompts > 0
        assert position >= 0
        self._sizes = [Growth(0, num_prompts), *growths]
        self._seed = seed
        self.position = position
        """Turns of the epochs that are over since the start, served or left out; a turn that is served again does not count."""
        self._returned: deque[PromptTurn] = deque()
        self._left_out: Counter[int] = Counter()
        """Turns left out since `take_left_out`, by epoch."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(tasks))}
        self._tasks = tuple(numbers)
        self._task_of = np.fromiter((numbers[name] for name in tasks), np.int64, len(tasks))
        self.shares: Mapping[str, float] = {}
        """The shares of tasks in force; empty where every prompt is served."""
        self._epoch = -1
        """The epoch of `_order` and `_is_kept`; -1 for none."""
        self._begin = 0
        """Position of the first turn of `_order`."""
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._is_kept: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)

    @classmethod
    def from_state(cls, state: StreamState, tasks: Sequence[str] = ()) -> PromptStream:
        """Continue a stream."""
        stream = cls(state.num_prompts, state.seed, state.position, state.growths, tasks)
        stream._returned.extend(state.returned)
        stream.weigh(state.shares)
        return stream

    @property
    def share_served(self) -> float:
        """Share of the current epoch that is over, 0 to 1."""
        epoch, index = self._place(self.position)
        return index / self.size_of(epoch)

    @property
    def epoch(self) -> int:
        """The pass over the data that new prompts come from."""
        return self._place(self.position)[0]

    @property
    def num_prompts(self) -> int:
        """Number of prompts of the epochs to come."""
        return self._sizes[-1].num_prompts

    def size_of(self, epoch: int) -> int:
        """Return the number of prompts of an epoch."""
        return next(size.num_prompts for size in reversed(self._sizes) if size.epoch <= epoch)

    def grow(self, num_prompts: int) -> int:
        """Let each epoch that has not begun have this many prompts; return the first of them."""
        epoch, index = self._place(self.position)
        first = epoch + (index > 0)
        self._sizes = [*(size for size in self._sizes if size.epoch < first), Growth(first, num_prompts)]
        # `peek` may have looked into the epoch that is larger now.
        self._forget_epoch()
        return first

    def weigh(self, shares: Mapping[str, float]) -> None:
        """From here on serve only these shares of the tasks' prompts, 0 to 1; another part of them in each epoch.

        A task that has no share is served whole. The largest share is 1, so that each epoch serves something. Raises
        `ValueError` for a task that no prompt has.
        """
        absent = [name for name in shares if name not in self._tasks]
        if absent:
            raise ValueError(f"it has a share of the task {absent[0]!r}, which no prompt has")
        assert not shares or max(shares.values()) == 1, "an epoch could serve nothing"
        self.shares = dict(shares)
        self._forget_epoch()

    def peek(self) -> PromptTurn:
        """Return the prompt to lease next, and leave it in its place."""
        return self._returned[0] if self._returned else self._turn_at(self._next_kept())

    def next(self) -> PromptTurn:
        """Return the prompt to lease next, and move on."""
        if self._returned:
            return self._returned.popleft()
        position = self._next_kept()
        turn = self._turn_at(position)
        self._pass_to(position)
        self.position = position + 1
        return turn

    def take_left_out(self) -> Counter[int]:
        """Return the number of turns left out since the last call, by epoch."""
        left_out, self._left_out = self._left_out, Counter()
        return left_out

    def give_back(self, prompt_id: int, epoch: int) -> None:
        """Serve this prompt again before any new one, in the order in which prompts were given back."""
        self._returned.append(PromptTurn(prompt_id, epoch))

    def bring_forward(self, turn: PromptTurn) -> bool:
        """Serve this turn next, as a log with a gap asks; return False when the turn is over, or no turn of its epoch.

        Turns that were served in the gap are given back, and the shares in force decide which were.
        """
        if turn not in self._returned:
            places = np.flatnonzero(self._order_of(turn.epoch) == turn.prompt_id)
            if not len(places):
                return False
            position = self._begin_of(turn.epoch) + int(places[0])
            if position < self.position:
                return False
            self._returned.extend(self._pass_to(position))
            self.position = position + 1
        else:
            self._returned.remove(turn)
        self._returned.appendleft(turn)
        return True

    def state(self) -> StreamState:
        """Return what `from_state` needs to serve the same prompts as this stream would."""
        first, *growths = self._sizes
        returned = tuple(self._returned)
        return StreamState(first.num_prompts, self._seed, self.position, returned, tuple(growths), dict(self.shares))

    def _next_kept(self) -> int:
        """Return the position of the next turn that the shares keep."""
        position, index = self.position, self.position - self._begin
        if 0 <= index < len(self._order) and self._is_kept[index]:
            return position
        while True:
            ahead = self._is_kept_from(position)
            # `argmax` stops at the first True.
            offset = int(ahead.argmax())
            if ahead[offset]:
                return position + offset
            position += len(ahead)

    def _pass_to(self, end: int) -> list[PromptTurn]:
        """Move to a position, and return the turns before it that the shares keep; the others count as left out."""
        kept: list[PromptTurn] = []
        while self.position < end:
            is_kept = self._is_kept_from(self.position)[: end - self.position]
            epoch, index = self._place(self.position)
            kept += [PromptTurn(prompt_id, epoch) for prompt_id in self._order[index : index + len(is_kept)][is_kept].tolist()]
            if num_left_out := int(np.count_nonzero(~is_kept)):
                self._left_out[epoch] += num_left_out
            self.position += len(is_kept)
        return kept

    def _is_kept_from(self, position: int) -> NDArray[np.bool_]:
        """Return for each turn of an epoch, from a position on to the epoch's end, whether the shares keep it."""
        epoch, index = self._place(position)
        if epoch != self._epoch:
            self._order = self._order_of(epoch)
            self._is_kept = self._keep(epoch, self._order)
            self._epoch, self._begin = epoch, position - index
        return self._is_kept[index:]

    def _forget_epoch(self) -> None:
        self._epoch, self._order = -1, self._order[:0]

    def _keep(self, epoch: int, order: NDArray[np.int64]) -> NDArray[np.bool_]:
        if not self.shares:
            return np.ones(len(order), np.bool_)
        shares = np.array([self.shares.get(name, 1.0) for name in self._tasks])
        return draws(self._seed, epoch, len(order))[order] < shares[self._task_of[order]]

    def _turn_at(self, position: int) -> PromptTurn:
        epoch, index = self._place(position)
        return PromptTurn(int(self._order[index]), epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.size_of(epoch))

    def _begin_of(self, epoch: int) -> int:
        """Return the position of the first turn of an epoch."""
        ends = [*(size.epoch for size in self._sizes[1:]), epoch]
        return sum(max(0, min(end, epoch) - size.epoch) * size.num_prompts for size, end in zip(self._sizes, ends, strict=True))

    def _place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the index within it."""
        # Asked several times for each lease, nearly always about the epoch at hand.
        if self._begin <= position < self._begin + len(self._order):
            return self._epoch, position - self._begin
        size = next(size for size in reversed(self._sizes) if self._begin_of(size.epoch) <= position)
        num_epochs, index = divmod(position - self._begin_of(size.epoch), size.num_prompts)
        return size.epoch + num_epochs, index
