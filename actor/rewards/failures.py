"""Failures of reward functions: their descriptions, and the line between passing troubles and mistakes in the function."""

import errno
import socket
import sys
import traceback
from types import TracebackType
from typing import Any, NamedTuple

from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.common.errors import one_line

TRANSIENT_STATUS = (408, 425, 429)
"""HTTP answers below 500 that ask to try again: request timeout, too early, too many requests."""
_TRANSIENT_ERRNO = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT)
_TRANSIENT_CLASSES = frozenset(
    {
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("anthropic", "APIConnectionError"),
        ("http", "IncompleteRead"),
        ("httpcore", "NetworkError"),
        ("httpcore", "TimeoutException"),
        ("httpcore2", "NetworkError"),
        ("httpcore2", "TimeoutException"),
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("openai", "APIConnectionError"),
        ("requests", "ChunkedEncodingError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("urllib3", "ProtocolError"),
        ("urllib3", "TimeoutError"),
    }
)
"""Classes with which third-party clients report a failed connection or a time limit, by package and name."""


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
    # Text of a model may hold half a character, which no message can.
    text = text.encode(errors="backslashreplace").decode()
    return Failure(is_transient(error), f"{one_line(error)} ({_place(frames, file)})", text)


def file_of(function: Any) -> str | None:
    """Return the file that a function is defined in; None where there is none."""
    return getattr(sys.modules.get(getattr(function, "__module__", "")), "__file__", None)


def is_transient(error: BaseException) -> bool:
    """Return True when the cause may be gone later: no connection, a time limit, HTTP 408, 425, 429 or 5xx.

    `RewardUnavailable` always is. Every other exception is taken for a mistake in the reward function, which repeats itself.
    """
    match error:
        case RewardUnavailable() | ConnectionError() | TimeoutError():
            return True
        case socket.gaierror():
            # A misspelt host name stays wrong; a name server that does not answer may answer later.
            return error.errno == socket.EAI_AGAIN
    # urllib wraps the cause.
    reason = vars(error).get("reason")
    if isinstance(reason, BaseException) and is_transient(reason):
        return True
    status = _http_status(error)
    if status is not None:
        return status in TRANSIENT_STATUS or 500 <= status <= 599
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNO:
        return True
    classes = {(base.__module__.partition(".")[0], base.__name__) for base in type(error).__mro__}
    return not classes.isdisjoint(_TRANSIENT_CLASSES)


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of urllib, aiohttp, openai, requests or httpx; None where there is none."""
    response = getattr(error, "response", None)
    candidates = [getattr(error, "code", None), getattr(error, "status", None), getattr(error, "status_code", None)]
    candidates.append(getattr(response, "status_code", None))
    return next((value for value in candidates if type(value) is int and 100 <= value <= 599), None)


def _place(frames: TracebackType | None, file: str | None) -> str:
    """Return the innermost line of a traceback in the function's own file, or only the file."""
    lines = [frame.lineno for frame in traceback.extract_tb(frames) if frame.filename == file]
    return f"{file}:{lines[-1]}" if lines else str(file)
