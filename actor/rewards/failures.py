"""Failures of reward functions and environments, described: exception, place, and whether the same call may succeed later."""

import sys
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from offbeat.common.errors import one_line
from offbeat.common.user_code.environment_host.host import is_transient
from offbeat.protocols.text import encodable


class SamplingFailure(NamedTuple):
    """A lease that cannot become a group."""

    lease_id: int
    reason: str
    """A word that the learner counts by. `reward_error`, `environment_error`: the function has a mistake. `reward_timeout`,
    `environment_timeout`: it did not end in time. `reward_unavailable`, `environment_unavailable`: the last attempt failed for
    another cause that may pass."""
    detail: str
    """One line: exception, message, file and line."""


class Failure(NamedTuple):
    """The failure of one call of a reward function."""

    is_transient: bool
    """True when the same call may succeed later: the connection failed, time ran out, or the judge is busy or down."""
    detail: str
    """One line: exception, message, file and line."""
    traceback: str = ""
    """The user's part of the traceback, in several lines; empty where there is none."""
    is_timeout: bool = False
    """True when the call was ended at `task.reward_timeout_s`."""
    was_killed: bool = False
    """True when the call had to be ended by killing its process."""


def failure_of(error: BaseException, file: str | None) -> Failure:
    """Describe an exception that a call of a user's function, which is in `file`, has raised to its caller."""
    # The first frame is the call, in this project.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    return Failure(is_transient(error), f"{one_line(error)} ({_place(frames, file)})", encodable(text))


def file_of(function: Any) -> str | None:
    """Return the file that a function is defined in; None where there is none."""
    return getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)


def _place(frames: TracebackType | None, file: str | None) -> str:
    """Return the innermost line of a traceback in the function's own file, or only the file."""
    lines = [frame.lineno for frame in traceback.extract_tb(frames) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else str(file)
