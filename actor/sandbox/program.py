"""The program that a sandbox runs, its result, and the protocol that every sandbox meets."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

TIMEOUT_S = 10.0
"""Default of `timeout_s`."""
MEMORY_MB = 512
"""Default of `memory_mb`."""


class Result(NamedTuple):
    """The outcome of a program."""

    exit_code: int
    """0: it ended well. 128 plus the number of a signal: it was killed, by itself or at a limit."""
    stdout: str
    """The output of the program; one longer than the limit is cut, and says so at its end."""
    stderr: str
    """Its errors, with the traceback; cut like `stdout`."""
    is_timeout: bool
    """True when it was ended at `timeout_s`."""
    is_out_of_memory: bool
    """True when it ended because `memory_mb` did not suffice."""
    seconds: float
    """Wall time of the program, without the start of the sandbox."""


class Sandbox(Protocol):
    """Runs programs that nobody has read. `Local` does so on this machine."""

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        memory_mb: int = MEMORY_MB,
    ) -> Result:
        """Run a Python program and return what it did, also when it failed or broke a limit.

        `files` are written into its folder first, by name. Raise `offbeat.RewardUnavailable`, or an error of a connection, when
        the sandbox fails and not the program: the episode or the reward is then tried again.
        """
        ...
