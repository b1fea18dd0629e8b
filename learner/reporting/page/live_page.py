"""The live page of a run: what the report shows, while it goes on, with the members and what the next batch waits for.

rows as they are recorded -> curves, newest samples -> /state.json -> the page's script
dispatcher -> status report ----------------------------^
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offbeat.common.pages.page import asset
from offbeat.common.processes.files import replace
from offbeat.common.records.probes import health, numbers, readiness
from offbeat.common.records.rows import EvalRow, EventRow, OtherRow, Row, SampleRow, StepRow, row_fields
from offbeat.common.records.web import Response, Route, WebServer
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.learner.reporting.page.exported import families
from offbeat.protocols.messages import StatusReport

logger = logging.getLogger(__name__)

SETTING = "metrics.bind"
PORT_FILE = "page.port"
"""The port of the page in the run's folder: whoever has it open sees the resumed run."""


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


MOST_POINTS = 600
"""Most points of a curve: more than a plot has pixels for."""


class Points(NamedTuple):
    """A curve, by rising x."""

    xs: list[float]
    ys: list[float]


class Curve:
    """The means of consecutive values, each over equally many of them but for the last."""

    def __init__(self) -> None:
        self._xs: list[float] = []
        self._ys: list[float] = []
        self._stride = 1
        """Values that each point but the last is a mean of."""
        self._num_in_last = 0

    def add(self, x: float, y: float) -> None:
        """Append a value, merging points in pairs where there would be more than `MOST_POINTS`.

        The points from `x` on are replaced: a resumed run makes their steps again.
        """
        while self._xs and self._xs[-1] >= x:
            self._xs.pop()
            self._ys.pop()
            self._num_in_last = self._stride
        if self._num_in_last and self._num_in_last < self._stride:
            weight = 1 / (self._num_in_last + 1)
            self._xs[-1] += (x - self._xs[-1]) * weight
            self._ys[-1] += (y - self._ys[-1]) * weight
            self._num_in_last += 1
            return
        if len(self._xs) == MOST_POINTS:
            self._xs, self._ys = _halved(self._xs), _halved(self._ys)
            self._stride *= 2
        self._xs.append(x)
        self._ys.append(y)
        self._num_in_last = 1

    def points(self) -> Points:
        """Return the curve so far."""
        return Points(list(self._xs), list(self._ys))


def _halved(values: list[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]


CURVES = (
    "reward/mean",
    "lag/mean",
    "lag/max",
    "staleness/bound",
    "clip/fraction",
    "ratio/log_std",
    "entropy/mean",
    "length/mean",
    "loss/grad_norm",
    "time/step_s",
    "time/wait_rollouts_s",
)
"""Metrics of steps that the page draws."""
HELD_OUT = "eval/reward"
NUM_SAMPLES = 8
NUM_EVENTS = 30


class LivePage:
    """Collects rows, from any thread, and answers for the page."""

    def __init__(self, name: str) -> None:
        """`name` is the page's title."""
        self._name = name
        self._lock = threading.Lock()
        self._curves: dict[str, Curve] = {}
        self._step: StepRow | None = None
        self._samples: deque[dict[str, Any]] = deque(maxlen=NUM_SAMPLES)
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)

    def add(self, row: Row | OtherRow) -> None:
        """Take a row that was recorded."""
        with self._lock:
            match row:
                case StepRow():
                    self._step = row
                    for name in CURVES:
                        self._extend(name, row.policy_version, row.number(name))
                case EvalRow():
                    self._extend(HELD_OUT, row.policy_version, row.reward)
                case SampleRow():
                    self._samples.append(row_fields(row))
                case EventRow():
                    self._events.append(row_fields(row))
                case _:
                    pass

    def add_former(self, run_folder: Path) -> None:
        """Take the rows that former processes of the run have written."""
        for row in read_rows_of(run_folder / ROWS_FILE, StepRow, EvalRow, SampleRow, EventRow):
            self.add(row)

    def routes(self, status: Callable[[], StatusReport], silence_s: Callable[[], float]) -> dict[str, Route]:
        """Return the paths that the learner's web server answers; `silence_s` tells how long ago the hub's thread turned."""
        return {
            "/": lambda: Response(_asset("live.html"), "text/html; charset=utf-8"),
            "/live.js": lambda: Response(_asset("live.js"), "text/javascript; charset=utf-8"),
            "/page.css": lambda: Response(asset("page.css"), "text/css; charset=utf-8"),
            "/live.css": lambda: Response(_asset("live.css"), "text/css; charset=utf-8"),
            "/plotly.js": _plotly,
            "/state.json": lambda: self._state(status()),
            "/metrics": lambda: numbers(families(status(), self._step)),
            "/healthz": lambda: health("the hub", silence_s()),
            "/readyz": lambda: _readiness(status()),
        }

    def _extend(self, name: str, version: int, value: float | None) -> None:
        if value is not None:
            self._curves.setdefault(name, Curve()).add(version, value)

    def _state(self, report: StatusReport) -> Response:
        with self._lock:
            curves: dict[str, Points] = {name: curve.points() for name, curve in self._curves.items()}
            samples, events = list(self._samples), list(self._events)
        state = {
            "name": self._name,
            "time": time.time(),
            "status": report,
            "curves": {name: points._asdict() for name, points in curves.items()},
            "samples": samples[::-1],
            "events": events[::-1],
        }
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
    return resources.files("offbeat.learner.reporting.page").joinpath(name).read_bytes()
