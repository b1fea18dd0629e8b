"""A small web server for people and monitors who look at a service: read-only pages from a thread of its own.

    request -> worker thread -> a route's function -> response

It never writes to the service, and a route that fails costs its own answer only. There are no keys: whoever reaches the address
may read it, so it is this machine alone unless the user says otherwise.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple, Self

from offbeat.common.errors import SettingError
from offbeat.protocols.text import plain

logger = logging.getLogger(__name__)

CONNECTION_S = 5.0
"""Longest time from a connection to its answer, in seconds."""
ANSWER_S = 120.0
"""Longest time that a client may take to receive its answer: the largest, of 5 MB, comes through a line of 0.4 Mbit/s."""
LOOK_S = 0.1
"""Seconds between two looks at the time limits of connections, and at the request to end."""
MAX_CONNECTIONS = 32
"""Open connections. One more closes the oldest: clients that send slowly must not keep a monitor from its answer."""
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
        self._lock = threading.Lock()
        self._deadlines: dict[socket.socket, float] = {}
        """End of the time of each open connection, on `time.monotonic`; oldest first."""
        super().__init__((address[0].strip("[]"), address[1]), _Handler)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer a connection in a thread of its own."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._deadlines[request] = time.monotonic() + CONNECTION_S
            while len(self._deadlines) > MAX_CONNECTIONS:
                self._hang_up(next(iter(self._deadlines)))
        super().process_request(request, client_address)

    def allow_answer(self, connection: socket.socket) -> None:
        """Give a connection the time for its answer."""
        with self._lock:
            if connection in self._deadlines:
                self._deadlines[connection] = time.monotonic() + ANSWER_S

    def service_actions(self) -> None:
        """Hang up on connections whose time is over. The server calls this every `LOOK_S`."""
        with self._lock:
            now = time.monotonic()
            for connection in [connection for connection, deadline in self._deadlines.items() if deadline < now]:
                self._hang_up(connection)

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close a connection that its thread has answered, or given up."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._deadlines.pop(request, None)
            super().shutdown_request(request)

    def _hang_up(self, connection: socket.socket) -> None:
        """Wake the thread of a connection, which then closes it. Call this with the lock held: what is listed is open."""
        del self._deadlines[connection]
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up as they like."""
        logger.debug("a web client hung up", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        response = self._respond(server)
        server.allow_answer(self.connection)
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

    def _respond(self, server: _Server) -> Response:
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
