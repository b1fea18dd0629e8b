"""Environments with the methods `reset` and `step`, as Gymnasium's, OpenEnv's and TextArena's.

play = gym(Maze)          task.environment = "my_task:play"
"""

from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from offbeat.actor.environments.chat import Chat
from offbeat.actor.environments.threads import in_thread

Row = dict[str, Any]


def gym(
    make: Callable[[], Any],
    *,
    action: Callable[[str], Any] = str,
    observation: Callable[[Any], str] = str,
    max_turns: int = 1000,
) -> Callable[[Chat, Row], Awaitable[None]]:
    """Return an environment in which each turn of the model is a step.

    Args:
        make: The class of an environment, or a function that makes one: `reset(seed=, options=)` returns an observation and a
            dict, `step(action)` an observation, a reward, whether the episode has terminated, whether it was truncated, and a
            dict. `options` is the prompt's row; `seed` is the row's `seed`, else `chat.seed`. `close()` is called at the end of
            every episode. Methods may be plain, then they run in threads, or async.
        action: Makes an action of a turn's text. What a `ValueError` says is the observation then, and the step is not taken.
        observation: Makes a text of an observation.
        max_turns: Turns of the model after which the episode is truncated.
    """

    async def play(chat: Chat, row: Row) -> None:
        opened: list[Any] = []
        # One thread: its calls come one after the other, `close` behind a `step` that a cancelled episode has left at work.
        thread = ThreadPoolExecutor(1, thread_name_prefix="gym")
        try:
            await in_thread(lambda: opened.append(make()), thread)
            (environment,) = opened
            first, _ = await _in(thread, environment.reset, seed=row.get("seed", chat.seed), options=row)
            if observation(first) != chat.prompt:
                chat.add("user", observation(first))
            for turn in range(1, max_turns + 1):
                reply = await chat.sample()
                chat.metric("turns", turn)
                try:
                    taken = action(reply.text)
                except ValueError as error:
                    chat.add("user", f"Error: {error}")
                    continue
                seen, reward, terminated, truncated, _ = await _in(thread, environment.step, taken)
                chat.reward(reward)
                if terminated or truncated:
                    return
                chat.add("user", observation(seen))
        finally:
            await in_thread(lambda: opened and opened[0].close(), thread)
            thread.shutdown(wait=False)

    return play


async def _in(thread: ThreadPoolExecutor, method: Callable[..., object], *values: object, **named: object) -> Any:
    return await in_thread(partial(method, *values, **named), thread)
