"""Plain functions of the user's, called beside the event loop: one that blocks holds up nobody's episode."""

import asyncio
import functools
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

NUM_THREADS = 64
"""Plain functions that run at once in one process."""


async def in_thread(call: Callable[[], object], executor: ThreadPoolExecutor | None = None) -> object:
    """Make a call of a plain function in a thread, that of an async one here; return what it returns."""
    if inspect.iscoroutinefunction(call):
        return await call()
    returned = await asyncio.get_running_loop().run_in_executor(executor or _executor(), call)
    return await returned if inspect.isawaitable(returned) else returned


@functools.cache
def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="environment")
