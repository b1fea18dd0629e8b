"""A small web server for people and monitors who look at a service: read-only pages from a thread of its own.

    request -> worker thread -> a route's function -> response

It never writes to the service, and a route that fails costs its own answer only. There are no keys: whoever reaches the address
may read it, so it is this machine alone unless the user says otherwise.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from offbeat.common.settings import SettingError
from offbeat.protocols.text import plain

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
"""Longest wait for the rest of a request."""
LOOK_S = 0.1
"""Seconds until the thread sees that it shall end."""
MOST_REQUESTS = 32
"""Requests answered at once; more are refused."""
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'"
"""The browser refuses what does not come from this server. Plotly writes style attributes."""


class Response(NamedTuple):
    """An answer to a GET request."""

    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Route = Callable[[], Response]


class WebServer:
    """Answers GET requests for the paths of `routes` while its context lasts."""

    def __init__(self, setting: str, bind: str, routes: Mapping[str, Route], *, wanted_port: int = 0) -> None:
        """Listen at `bind`, `HOST:PORT`; raise `SettingError` naming `setting` where that cannot be done.

        `wanted_port` is taken for port 0 where it is free.
        """
        host, _, port = bind.rpartition(":")
        self._server = _listen(setting, bind, host, int(port), wanted_port)
        self._server.routes = routes
        self._server.is_local = host in LOOPBACK
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(LOOK_S,), name="web", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; requests under way are answered or dropped."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    # A client that keeps its connection must not keep the service.
    daemon_threads = True
    routes: Mapping[str, Route]
    is_local: bool
    """True where only this machine is answered."""

    def __init__(self, address: tuple[str, int]) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.slots = threading.BoundedSemaphore(MOST_REQUESTS)
        super().__init__((address[0].strip("[]"), address[1]), _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        if not self.slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up as they like."""
        logger.debug("a web client hung up", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = READ_TIMEOUT_S

    def do_GET(self) -> None:
        response = self._respond()
        self.send_response(response.status)
        for name, value in (
            ("Content-Type", response.content_type),
            ("Content-Length", str(len(response.content))),
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", _POLICY),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(response.content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: monitors ask every few seconds."""

    def version_string(self) -> str:
        return "offbeat"

    def _respond(self) -> Response:
        server = self.server
        assert isinstance(server, _Server)
        # A page elsewhere can point a name of its own at this machine, and read what the browser may.
        if server.is_local and _host_of(self.headers.get("Host", "")) not in LOOPBACK:
            return Response(b"this server answers requests to localhost only\n", status=403)
        route = server.routes.get(self.path.partition("?")[0])
        if route is None:
            return Response(b"there is no such page\n", status=404)
        try:
            return route()
        except Exception:
            logger.exception("the page %s could not be made", plain(self.path))
            return Response(b"the page could not be made; the log says why\n", status=500)


def _listen(setting: str, bind: str, host: str, port: int, wanted_port: int) -> _Server:
    if wanted_port and not port:
        with contextlib.suppress(OSError):
            return _Server((host, wanted_port))
    try:
        return _Server((host, port))
    # `OverflowError`: no such port.
    except (OSError, OverflowError) as error:
        problem = f"it cannot be listened at ({getattr(error, 'strerror', None) or error})"
        cure = "Give another HOST:PORT, port 0 for a free one, or an empty text for none."
        raise SettingError(setting, bind, problem, cure) from error


def _host_of(header: str) -> str:
    return header if header.endswith("]") else header.rpartition(":")[0] or header
