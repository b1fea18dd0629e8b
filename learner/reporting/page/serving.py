"""The web server of a learner's live page, at the address of the run's former processes where that is free."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from offbeat.common.processes.durable_files import replace
from offbeat.common.records.web import Route, WebServer

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
