"""The order in which prompts are leased: endless epochs over the data, each another permutation."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.common.settings import SettingError


class Turn(NamedTuple):
    """A prompt in its place in the order."""

    prompt_id: int
    epoch: int
    """Pass over the data that the turn belongs to."""


class StreamState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A `PromptStream` in a checkpoint."""

    num_prompts: int
    seed: int
    position: int
    returned: tuple[Turn, ...]
    """Turns given back and not served again yet, oldest first."""


class PromptStream:
    """Endless epochs over the prompts, each another permutation; prompts given back come first.

    The order depends on the seed and the position alone, so a resumed run goes on where it stopped.
    """

    def __init__(self, num_prompts: int, seed: int, position: int = 0) -> None:
        assert num_prompts > 0
        assert position >= 0
        self._num_prompts = num_prompts
        self._seed = seed
        self._position = position
        self._returned: deque[Turn] = deque()
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @classmethod
    def from_state(cls, state: StreamState, num_prompts: int) -> PromptStream:
        """Continue a stream over the same data; raise `SettingError` when the number of prompts differs."""
        if state.num_prompts != num_prompts:
            raise SettingError(
                "run.resume",
                True,
                f"the checkpoint was made with {state.num_prompts} prompts, and task.train_data now has {num_prompts}",
                "Resume with the same data and prompt settings, or start a new run.",
            )
        stream = cls(num_prompts, state.seed, state.position)
        stream._returned.extend(state.returned)
        return stream

    @property
    def position(self) -> int:
        """Prompts served from the epochs since the start; those served again after `give_back` do not count."""
        return self._position

    @property
    def share_served(self) -> float:
        """Share of the current epoch that was served, 0 to 1."""
        return (self._position % self._num_prompts) / self._num_prompts

    @property
    def epoch(self) -> int:
        """The pass over the data that new prompts come from."""
        return self._position // self._num_prompts

    def peek(self) -> Turn:
        """Return the prompt to lease next, and leave it in its place."""
        if self._returned:
            return self._returned[0]
        epoch, index = divmod(self._position, self._num_prompts)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._num_prompts)
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
        """Serve this turn next, as a log with a gap asks; return False when the turn is over.

        Turns that were served in the gap are given back.
        """
        if turn not in self._returned:
            order = np.random.default_rng([self._seed, turn.epoch]).permutation(self._num_prompts)
            position = turn.epoch * self._num_prompts + int(np.flatnonzero(order == turn.prompt_id)[0])
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
        return StreamState(self._num_prompts, self._seed, self._position, tuple(self._returned))
