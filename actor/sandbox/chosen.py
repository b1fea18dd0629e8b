"""The sandbox that `run` and `run_sync` use in this process: the one of this machine, unless `use` has named another."""

import asyncio
from collections.abc import Mapping

from offbeat.actor.sandbox.local import Local
from offbeat.actor.sandbox.program import MEMORY_MB, TIMEOUT_S, Result, Sandbox

_chosen: Sandbox = Local()


def use(sandbox: Sandbox) -> None:
    """Make `run` and `run_sync` use this sandbox. Call it in your module, beside its functions."""
    global _chosen
    _chosen = sandbox


def check() -> None:
    """Raise `NoSandboxError` with the cure when the sandbox in use is the one of this machine, and it does not work here."""
    if isinstance(_chosen, Local):
        _chosen.check()


async def run(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
) -> Result:
    """Run a Python program in the sandbox in use: see `Sandbox.run`."""
    return await _chosen.run(code, stdin=stdin, files=files, timeout_s=timeout_s, memory_mb=memory_mb)


def run_sync(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    memory_mb: int = MEMORY_MB,
) -> Result:
    """Do the same in a function that is not async."""
    return asyncio.run(_chosen.run(code, stdin=stdin, files=files, timeout_s=timeout_s, memory_mb=memory_mb))
