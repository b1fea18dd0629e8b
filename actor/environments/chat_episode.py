"""The sequences of an episode share its rewards and metrics, the turns that it waits for, and the tokens that it has."""

import asyncio
from collections.abc import Callable
from functools import cached_property

from offbeat.actor.environments.messages import Play, Sample, Sampled, Withdraw


class ChatEpisode:
    """One episode in the process that plays it."""

    def __init__(
        self,
        play: Play,
        *,
        max_length: int,
        max_episode_tokens: int,
        send: Callable[[Sample | Withdraw], None],
        open_url: Callable[["ChatEpisode"], str],
    ) -> None:
        """`max_length` bounds the tokens of each sequence, `max_episode_tokens` those of all; `send` reaches the actor."""
        self.play = play
        self.max_length = max_length
        self.rewards = 0.0
        """The sum of the rewards given so far."""
        self.turn_rewards: dict[int, float] = {}
        """Those of them given after the first turn was asked for, by the number of the turn asked for last."""
        self.metrics: dict[str, float] = {}
        """The metrics given so far."""
        self.num_calls = 0
        """Tool calls so far, in all sequences."""
        self._send = send
        self._open_url = open_url
        self._num_asked = 0
        """Turns asked for, which is the number of the next one."""
        self._replies: dict[int, asyncio.Future[Sampled]] = {}
        self._room = max_episode_tokens - play.num_prompt_tokens
        self._has_ended = False

    @property
    def room(self) -> int:
        """Tokens that still fit into all sequences, without those that turns may get which are being sampled."""
        return self._room

    @cached_property
    def url(self) -> str:
        """The base URL of the episode's endpoint, which is opened for it."""
        return self._open_url(self)

    async def sample(self, continues: int | None, context: list[int], max_new_tokens: int) -> tuple[int, Sampled]:
        """Return the number of a new turn, and its tokens; `continues` is the number of a turn, `PROMPT`, or None for nothing.

        A call that is cancelled leaves no tokens.
        """
        if self._has_ended:
            raise RuntimeError("sample() after the end of the episode: its function has returned, or was cancelled")
        number, taken = self._num_asked, len(context) + max_new_tokens
        back = 0 if continues is None else number - continues
        self._send(Sample(episode=self.play.episode, back=back, context=context, max_new_tokens=max_new_tokens))
        self._num_asked += 1
        self._room -= taken
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            sampled = await reply
        except asyncio.CancelledError:
            self._room += taken
            if not self._has_ended:
                self._send(Withdraw(episode=self.play.episode, turn=number))
            raise
        finally:
            del self._replies[number]
        self._room += max_new_tokens - len(sampled.token_ids)
        return number, sampled

    def reward(self, value: float) -> None:
        """Add to the reward of the episode, and of the turn asked for last: what it depends on was asked for by now."""
        self.rewards += value
        if self._num_asked:
            last = self._num_asked - 1
            self.turn_rewards[last] = self.turn_rewards.get(last, 0.0) + value

    def take(self, sampled: Sampled) -> None:
        """Hand the actor's answer to the call that waits."""
        reply = self._replies.get(sampled.turn)
        if reply is not None and not reply.done():
            reply.set_result(sampled)

    def end(self) -> None:
        """Cancel the calls that still wait: the function has returned without them, or nobody waits for it any more."""
        self._has_ended = True
        for reply in self._replies.values():
            reply.cancel()
