"""The live page of a run: its state as the learner tells it, and the report so far.

dispatcher -> status report -> /state.json -> the page's script
rows in the run's folder -> report, made by another process -> /report.html ^
"""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path

import msgspec

from offbeat.common.pages.page import asset
from offbeat.common.processes.files import replace
from offbeat.common.records.exported import health, numbers, readiness
from offbeat.common.records.rows import OtherRow, Row, StepRow
from offbeat.common.records.run_folder import PORT_FILE
from offbeat.common.records.web import Response, Route, WebServer
from offbeat.learner.reporting.exported import families
from offbeat.protocols.messages import StatusReport
from offbeat.protocols.text import plain

logger = logging.getLogger(__name__)

SETTING = "metrics.bind"


@contextmanager
def serving(routes: Mapping[str, Route], bind: str, run_folder: Path) -> Iterator[None]:
    """Serve the page's routes at `bind`, `HOST:PORT`; raise `SettingError` where that cannot be done."""
    with WebServer(SETTING, bind, routes, wanted_port=_former_port(run_folder)) as server:
        replace(run_folder / PORT_FILE, f"{server.port}\n".encode())
        logger.info("live page: %s", server.url)
        yield


def _former_port(run_folder: Path) -> int:
    with suppress(FileNotFoundError, ValueError):
        port = int((run_folder / PORT_FILE).read_text())
        return port if 0 < port < 1 << 16 else 0
    return 0


REPORT_PAUSE_S = 10.0
"""Least seconds from the end of one report to the start of the next."""
REPORT_SHARE = 0.1
"""Largest share of a processor that reports may cost while somebody looks at the page."""
REPORT_TIMEOUT_S = 120.0
"""Time after which the process that makes a report is killed, in seconds."""
REPORT_NICENESS = 10
"""Niceness of the process that makes a report, because training goes first."""


class LiveReport:
    """The report of a run so far. Any thread may ask for it.

    A report reads all rows of the run, so it is made by another process, and only while somebody looks at the page: the next
    one as late as `REPORT_PAUSE_S` and `REPORT_SHARE` demand.
    """

    def __init__(self, command: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        """`command` prints the report as HTML."""
        self._command = command
        self._clock = clock
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._due = clock()
        """Time from which the next report may be made."""
        self._number = 0
        self._content: bytes | None = None

    def number(self) -> int:
        """Return the number of reports that were made, and have the next one made where it is due."""
        with self._lock:
            if self._process is None and not self._is_closed and self._clock() >= self._due:
                started = self._clock()
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    # Ctrl-C asks the learner to stop, not this process.
                    start_new_session=True,
                )
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self._process.pid, REPORT_NICENESS)
                threading.Thread(target=self._take, args=(self._process, started), name="report", daemon=True).start()
            return self._number

    def newest(self) -> Response:
        """Return the newest report; status 404 before the first."""
        content = self._content
        if content is None:
            return Response(b"no report has been made yet\n", status=404)
        return Response(content, "text/html; charset=utf-8")

    def close(self) -> None:
        """Make no more reports, and end the process that makes one."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                self._process.kill()

    def _take(self, process: "subprocess.Popen[bytes]", started: float) -> None:
        """Wait for a process and keep what it printed."""
        try:
            content, errors = process.communicate(timeout=REPORT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            content, errors = process.communicate()
        now = self._clock()
        with self._lock:
            self._process = None
            self._due = now + max(REPORT_PAUSE_S, (now - started) * (1 / REPORT_SHARE - 1))
            if process.returncode == 0:
                self._content = content
                self._number += 1
            elif not self._is_closed:
                reason = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"status {process.returncode}"
                logger.warning("the live page has no new report: %s", plain(reason))


class LivePage:
    """Answers for the page, from any thread."""

    def __init__(self, name: str, report_command: Sequence[str]) -> None:
        """`name` is the page's title; `report_command` prints the run's report as HTML."""
        self._name = name
        self._report = LiveReport(report_command)
        self._step: StepRow | None = None

    def add(self, row: Row | OtherRow) -> None:
        """Take a row that was recorded: monitors get the numbers of the newest step."""
        if isinstance(row, StepRow):
            self._step = row

    def routes(self, status: Callable[[], StatusReport], silence_s: Callable[[], float]) -> dict[str, Route]:
        """Return the paths that the learner's web server answers; `silence_s` tells how long ago the hub's thread turned."""
        return {
            "/": lambda: Response(_asset("live.html"), "text/html; charset=utf-8"),
            "/live.js": lambda: Response(_asset("live.js"), "text/javascript; charset=utf-8"),
            "/figures.js": lambda: Response(asset("figures.js"), "text/javascript; charset=utf-8"),
            "/page.css": lambda: Response(asset("page.css"), "text/css; charset=utf-8"),
            "/live.css": lambda: Response(_asset("live.css"), "text/css; charset=utf-8"),
            "/plotly.js": _plotly,
            "/state.json": lambda: self._state(status()),
            "/report.html": self._report.newest,
            "/metrics": lambda: numbers(families(status(), self._step)),
            "/healthz": lambda: health("the hub", silence_s()),
            "/readyz": lambda: _readiness(status()),
        }

    def close(self) -> None:
        """End what the page has started."""
        self._report.close()

    def _state(self, report: StatusReport) -> Response:
        state = {"name": self._name, "status": report, "report": self._report.number()}
        return Response(msgspec.json.encode(state), "application/json")


def _readiness(report: StatusReport) -> Response:
    """Answer 200 once weights were published, so that actors can work."""
    version = report.published_version
    text = "no weights are published yet" if version < 0 else f"weights {version} are published"
    return readiness(text, is_ready=version >= 0)


def _plotly() -> Response:
    # Imported here: it reads 5 MB, for whoever opens the page.
    from plotly.offline import get_plotlyjs

    return Response(get_plotlyjs().encode(), "text/javascript; charset=utf-8")


def _asset(name: str) -> bytes:
    return resources.files("offbeat.learner.reporting").joinpath(name).read_bytes()
