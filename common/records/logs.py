"""Logging to stderr and to files: one line per event, and the console that log lines share with a live display."""

import contextlib
import functools
import io
import json
import logging
import os
import re
import select
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, cast

from rich.console import Console
from rich.logging import RichHandler

from offbeat.common.errors import SettingError
from offbeat.protocols.text import plain

REPEAT_S = 60.0
"""Seconds in which a message that was shown is only counted."""
MAX_MESSAGES = 1000
"""Messages remembered at once; the oldest is forgotten first."""
_NUMBERS = re.compile(r"\d+")


class CollapsingHandler(logging.Handler):
    """Hands records to another handler, but of warnings and errors that differ in numbers alone only the first one.

    The number of the others follows once `REPEAT_S` are over and something is logged, or at the end of the process.
    """

    def __init__(self, shown_by: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._shown_by = shown_by
        self._clock = clock
        self._repeated: dict[tuple[str, int, str], _Repeated] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record, or count it."""
        now = self._clock()
        for key in [key for key, repeated in self._repeated.items() if now - repeated.shown_at >= REPEAT_S]:
            self._tell(self._repeated.pop(key))
        if record.levelno >= logging.WARNING:
            key = record.name, record.levelno, _NUMBERS.sub("#", record.getMessage())
            repeated = self._repeated.get(key)
            if repeated is not None:
                repeated.last, repeated.count = record, repeated.count + 1
                return
            if len(self._repeated) >= MAX_MESSAGES:
                self._tell(self._repeated.pop(next(iter(self._repeated))))
            self._repeated[key] = _Repeated(record, now)
        self._shown_by.handle(record)

    def close(self) -> None:
        """Show the counts that are left."""
        while self._repeated:
            _, repeated = self._repeated.popitem()
            self._tell(repeated)
        super().close()

    def _tell(self, repeated: "_Repeated") -> None:
        if not repeated.count:
            return
        last = repeated.last
        counted = logging.makeLogRecord({**last.__dict__, "args": (), "exc_info": None, "exc_text": None})
        counted.msg = f"{repeated.count} more like this, the last one: %s"
        counted.args = (last.getMessage(),)
        self._shown_by.handle(counted)


@dataclass
class _Repeated:
    """A message that was shown, and its repetitions since."""

    last: logging.LogRecord
    shown_at: float
    count: int = 0


LEVEL_VARIABLE = "OFFBEAT_LOG_LEVEL"
"""Environment variable with the level that `configure_logs` uses by default."""
OWN_PACKAGE = "offbeat"
"""Package whose loggers follow the chosen level; all others show warnings and errors only."""
MAX_CHARACTERS = 10_000
"""Longest message that is logged whole."""
MAX_FILE_BYTES = 32 << 20
"""Size of a log file; with its older part it takes twice as much."""
STILL_S = 10.0
"""Seconds between two lines about work that goes on."""
READER_PATIENCE_S = 1.0
"""Seconds for which a line waits for a reader of stderr that is slow; none once a line was lost."""
_LEVELS = ("debug", "info", "warning", "error")
FORMAT_VARIABLE = "OFFBEAT_LOG_FORMAT"
"""Environment variable: `json` writes each event as one JSON object, on stderr and in the log files; `text` is the default."""
_FORMATS = ("text", "json")


class UnblockedStderr(io.TextIOBase):
    """Stderr for the log and the live display. A reader that stops reading (a stuck `tee`, Ctrl-S) costs lines, not time.

    A pipe or a terminal is opened a second time without blocking; any other file is written as it is. The number of lost lines
    is written once somebody reads again.
    """

    def __init__(self) -> None:
        self._opened: tuple[int, int] | None = None
        """Device and inode of the stderr that `_descriptor` belongs to: a forked service may have another one."""
        self._descriptor: int | None = None
        self._rest = b""
        """The end of a text whose beginning was written."""
        self._num_lost = 0
        """Texts lost since the last one that was written."""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The encoding of stderr."""
        return _stderr().encoding

    def isatty(self) -> bool:
        """Return whether stderr is a terminal."""
        return _stderr().isatty()

    def fileno(self) -> int:
        """Return the descriptor of stderr."""
        return _stderr().fileno()

    def write(self, text: str) -> int:
        """Write the text, or count it as lost."""
        descriptor = self._find_descriptor()
        if descriptor is None:
            _stderr().write(text)
            _stderr().flush()
            return len(text)
        patience_s = 0.0 if self._rest or self._num_lost else READER_PATIENCE_S
        self._rest = _put(descriptor, self._rest, patience_s)
        if self._rest:
            self._num_lost += 1
            return len(text)
        notice = f"... {self._num_lost} messages were not shown, because nobody read them\n" if self._num_lost else ""
        content = f"{notice}{text}".encode(self.encoding, "backslashreplace")
        rest = _put(descriptor, content, patience_s)
        is_lost = len(rest) == len(content)
        self._rest, self._num_lost = (b"", self._num_lost + 1) if is_lost else (rest, 0)
        return len(text)

    def _find_descriptor(self) -> int | None:
        """Return a descriptor of stderr that does not block; None where stderr cannot block, or is replaced by a stream."""
        if _stderr() is not sys.__stderr__:
            return None
        status = os.fstat(2)
        if self._opened != (status.st_dev, status.st_ino):
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._opened, self._descriptor = (status.st_dev, status.st_ino), None
            if stat.S_ISFIFO(status.st_mode) or os.isatty(2):
                with contextlib.suppress(OSError):
                    self._descriptor = os.open("/proc/self/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        return self._descriptor


_unblocked_stderr = UnblockedStderr()


def _stderr() -> TextIO:
    # A live display replaces stderr by a proxy of itself.
    return getattr(sys.stderr, "rich_proxied_file", sys.stderr)


class PrintedText(io.TextIOBase):
    """Text that user code prints, as plain lines that begin with `printed: `, so that none passes for a line of the log."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream
        """The stream that the log itself writes to, under the name by which rich knows such a stream."""
        self._line = ""

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The encoding of the stream."""
        return self.rich_proxied_file.encoding

    def fileno(self) -> int:
        """Return the stream's descriptor: what programs write there is not changed."""
        return self.rich_proxied_file.fileno()

    def write(self, text: str) -> int:
        """Write the lines that end here."""
        *lines, rest = (self._line + text).split("\n")
        # Longer than it would be shown.
        self._line = rest[: MAX_CHARACTERS + 1]
        for line in lines:
            self.rich_proxied_file.write(f"printed: {plain(line, MAX_CHARACTERS)}\n")
        if lines:
            self.rich_proxied_file.flush()
        return len(text)


def _put(descriptor: int, content: bytes, patience_s: float) -> bytes:
    """Write to a descriptor that does not block; return what it did not take within this time."""
    deadline = time.monotonic() + patience_s
    while content:
        try:
            # A pipe takes so many bytes whole or not at all.
            content = content[os.write(descriptor, content[: select.PIPE_BUF]) :]
        except BlockingIOError:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([], [descriptor], [], left_s)[1]:
                return content
        except OSError:
            # Nobody can read it any more.
            return b""
    return content


@functools.cache
def console() -> Console:
    """Return the process's only console, on stderr: text printed through it never tears a live display."""
    return Console(file=cast(IO[str], _unblocked_stderr))


def configure_logs(service: str) -> None:
    """Send the log to stderr: in color on a terminal, else as plain `time level service message` lines.

    Call this before vLLM is imported, because vLLM configures its logger at import. A second call replaces the first.
    Every line shows the name `service`: `learner`, `actor-0`, ...
    """
    level = os.environ.get(LEVEL_VARIABLE) or "info"
    if level.lower() not in _LEVELS:
        raise SettingError(LEVEL_VARIABLE, level, "this is not a log level", f"Use one of: {', '.join(_LEVELS)}.")
    if _format() not in _FORMATS:
        raise SettingError(FORMAT_VARIABLE, _format(), "this is not a log format", f"Use one of: {', '.join(_FORMATS)}.")
    root = logging.getLogger()
    root.handlers.clear()
    if console().is_interactive and _format() == "text":
        handler = RichHandler(console=console(), show_path=False, log_time_format="%X", omit_repeated_times=False)
        handler.setFormatter(_OneLineFormatter("%(service)s  %(message)s", defaults={"service": service}))
    else:
        handler = logging.StreamHandler(_unblocked_stderr)
        handler.setFormatter(_plain_formatter(service))
    root.addHandler(CollapsingHandler(handler))
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


class _JsonFormatter(logging.Formatter):
    """Writes each event as one JSON object on one line, for collectors of logs."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        event = {
            "time": f"{at}.{record.msecs:03.0f}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage()[:MAX_CHARACTERS],
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


def _format() -> str:
    return os.environ.get(FORMAT_VARIABLE) or "text"


def log_to_file(path: Path, service: str) -> None:
    """Write the log to this file too, with every repetition; above `MAX_FILE_BYTES` an older part goes to `PATH.1`.

    The file continues that of an earlier process. Its level is that of `configure_logs`. A disk that is full or fails costs
    lines of the file.
    """
    # Imported here: services alone need it.
    from logging.handlers import RotatingFileHandler

    path.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(path, maxBytes=MAX_FILE_BYTES, backupCount=1, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_plain_formatter(service))
    show_error = handler.handleError
    # It would show a traceback for each line. Those of the metrics and the rollout log say that the disk is full.
    handler.handleError = lambda record: None if isinstance(sys.exception(), OSError) else show_error(record)
    logging.getLogger().addHandler(handler)


def bound_log(path: Path, max_bytes: int) -> None:
    """Move the content of a log above this size to `PATH.1`. Processes that append to it go on in the emptied file.

    Leaves a log alone that was deleted or renamed: its processes go on without it. Content that the disk does not take is lost:
    whoever looks after the log must go on, too.
    """
    older = path.with_name(f"{path.name}.1")
    with contextlib.suppress(OSError):
        if path.stat().st_size > max_bytes:
            try:
                shutil.copyfile(path, older)
            except OSError:
                older.unlink(missing_ok=True)
            os.truncate(path, 0)


@contextlib.contextmanager
def doing(logger: logging.Logger, what: str, progress: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Log `what` is begun now, and every `STILL_S` that it is still going on, with the seconds so far and the progress.

    Use it for work of unknown length during which the process says nothing else.
    """
    logger.info("%s ...", what)
    started = time.monotonic()
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(STILL_S):
            logger.info("still %s, %.0f s so far%s", what, time.monotonic() - started, progress())

    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()


def _plain_formatter(service: str) -> logging.Formatter:
    if _format() == "json":
        return _JsonFormatter(service)
    formatter = _OneLineFormatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(service)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        defaults={"service": service},
    )
    # UTC: the services of one run may be in different time zones, and their logs are read side by side.
    formatter.converter = time.gmtime
    return formatter


def _quiet_vllm() -> None:
    """Set the environment variables from which vLLM configures its logger at import, in its subprocesses too."""
    # vLLM's warnings are about its own choices. A terminal shows its errors only; a log file has the warnings too. On a CPU
    # `prepare_environment` silences them: they name libraries that would make it faster.
    if console().is_interactive:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
