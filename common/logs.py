"""Logging to stderr: one line per event, and the console that log lines share with a live display."""

import functools
import logging
import os
import time
from typing import Any

from rich.console import Console
from rich.logging import RichHandler

from offbeat.protocols.text import plain

LEVEL_VARIABLE = "OFFBEAT_LOG_LEVEL"
"""Environment variable with the level that `configure_logs` uses by default."""

OWN_PACKAGE = "offbeat"
"""Package whose loggers follow the chosen level; all others show warnings and errors only."""

MAX_CHARACTERS = 10_000
"""Longest message that is logged whole."""

_LEVELS = ("debug", "info", "warning", "error")


@functools.cache
def console() -> Console:
    """Return the process's only console, on stderr: text printed through it never tears a live display."""
    return Console(stderr=True)


def configure_logs(service: str, *, level: str | None = None) -> None:
    """Send the log to stderr: in color on a terminal, else as plain `time level service message` lines.

    Call this before vLLM is imported, because vLLM configures its logger at import. A second call replaces the first.

    Args:
        service: Name shown in every line: `learner`, `actor-0`, ...
        level: `debug`, `info`, `warning` or `error`. None: the value of `OFFBEAT_LOG_LEVEL`, or `info`.
    """
    source, level = ("level", level) if level else (LEVEL_VARIABLE, os.environ.get(LEVEL_VARIABLE) or "info")
    if level.lower() not in _LEVELS:
        raise ValueError(f"{source} = {level!r} is not a log level; use one of: {', '.join(_LEVELS)}")
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.addHandler(_terminal_handler(service) if console().is_interactive else _plain_handler(service))
    root.setLevel(logging.WARNING)
    logging.getLogger(OWN_PACKAGE).setLevel(level.upper())
    _quiet_vllm()
    # Progress bars of model loaders would tear the log.
    os.environ.setdefault("TQDM_DISABLE", "1")


class _OneLineFormatter(logging.Formatter):
    """Writes each event on one line of printable characters: it may quote a peer, a user's function or a library."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802, the library's name
        record.message = plain(record.message, MAX_CHARACTERS)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802, the library's name
        return "\n".join(plain(line, MAX_CHARACTERS) for line in super().formatException(ei).splitlines())


def _terminal_handler(service: str) -> logging.Handler:
    handler = RichHandler(console=console(), show_path=False, log_time_format="%X", omit_repeated_times=False)
    handler.setFormatter(_OneLineFormatter("%(service)s  %(message)s", defaults={"service": service}))
    return handler


def _plain_handler(service: str) -> logging.Handler:
    handler = logging.StreamHandler()
    formatter = _OneLineFormatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(service)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        defaults={"service": service},
    )
    # UTC: the services of one run may be in different time zones, and their logs are read side by side.
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    return handler


def _quiet_vllm() -> None:
    """Set the environment variables from which vLLM configures its logger at import, in its subprocesses too."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
