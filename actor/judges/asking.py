"""The functions with which rewards and environments ask the judge.

`import offbeat` imports this module, so the module imports what it needs only where it is needed.
"""

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offbeat.actor.rewards.samples import JudgePrompt, Verdict

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


async def judge(prompt: JudgePrompt, *, pattern: str | None = None, options: Mapping[str, Any] | None = None) -> Verdict:
    """Ask the judge of `[judge]` and return its answer.

    Args:
        prompt: The user's message, or a list of messages.
        pattern: A regular expression whose first group is the score, such as `r"Score: (\\d+)"`; the last match counts. An
            answer without a match is asked for again.
        options: Fields of the request that replace those of `judge.options`.

    Raises `RewardUnavailable` when the judge is temporarily unavailable, and `JudgeError` when it refuses the request.
    """
    from offbeat.actor.judges.client import client_of_this_loop

    return await client_of_this_loop().ask(prompt, pattern, options or {})


def judge_sync(prompt: JudgePrompt, *, pattern: str | None = None, options: Mapping[str, Any] | None = None) -> Verdict:
    """Do the same as `judge`, for plain functions. Several threads may call it at once."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise RuntimeError("judge_sync() would block the event loop of an async function: write `await judge(...)`")
    return asyncio.run_coroutine_threadsafe(judge(prompt, pattern=pattern, options=options), _loop_of_process()).result()


_lock = threading.Lock()
_loop: "AbstractEventLoop | None" = None


def _loop_of_process() -> "AbstractEventLoop":
    """Return the event loop on which `judge_sync` keeps the connections of this process."""
    import asyncio

    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="judge", daemon=True).start()
        return _loop
