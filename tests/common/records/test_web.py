"""The web server answers for its routes only, to this machine only, and no client or failing page harms the service."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.records import web
from offbeat.common.records.web import Response, WebServer

pytestmark = pytest.mark.slow


def fail() -> Response:
    raise ValueError("a mistake")


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer("metrics.bind", "127.0.0.1:0", {"/": lambda: Response(b"hello"), "/fails": fail}) as held:
        yield held


def get(server: WebServer, path: str, host: str = "localhost") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", path, headers={"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_routes_are_answered_and_nothing_else(server: WebServer) -> None:
    status, content, headers = get(server, "/?since=3")
    assert (status, content) == (200, b"hello")
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Python" not in headers["Server"]
    assert get(server, "/../etc/passwd")[0] == 404
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/", body=b"x")
    assert connection.getresponse().status == 501
    connection.close()


def test_page_that_fails_costs_its_own_answer_only(server: WebServer) -> None:
    status, content, _ = get(server, "/fails")
    assert status == 500
    assert b"mistake" not in content
    assert get(server, "/")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:80", 200),
        ("127.0.0.1", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("", 403),
    ],
)
def test_names_of_other_machines_are_refused_at_the_loopback_address(server: WebServer, host: str, status: int) -> None:
    assert get(server, "/", host)[0] == status


def test_names_are_free_where_the_user_has_bound_another_address() -> None:
    with WebServer("metrics.bind", "0.0.0.0:0", {"/": lambda: Response(b"hello")}) as server:
        assert get(server, "/", "learner.cluster")[0] == 200


def trickle(server: WebServer, number: int, until: threading.Event) -> threading.Thread:
    """Open connections that send one byte of a request now and then, and open them again when they are closed."""

    def send() -> None:
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(number)]
        while not until.wait(0.1):
            for index, connection in enumerate(connections):
                try:
                    connection.send(b"G")
                except OSError:
                    connection.close()
                    connections[index] = socket.create_connection(("127.0.0.1", server.port))
        for connection in connections:
            connection.close()

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_clients_that_send_slowly_do_not_keep_a_monitor_from_its_answer(server: WebServer) -> None:
    until = threading.Event()
    thread = trickle(server, web.MAX_CONNECTIONS, until)
    try:
        for _ in range(20):
            assert get(server, "/")[0] == 200
            time.sleep(0.05)
    finally:
        until.set()
        thread.join()


def test_connection_is_closed_at_its_time_limit_however_often_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECTION_S", 0.5)
    with WebServer("metrics.bind", "127.0.0.1:0", {}) as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(0.1)
        for _ in range(100):
            try:
                slow.send(b"G")
                if slow.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the connection was open for 10 s")


def test_client_with_a_slow_line_gets_a_large_answer_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "CONNECTION_S", 0.3)
    # More than the system holds for a client that has not read it yet.
    content = b"x" * (16 << 20)
    with (
        WebServer("metrics.bind", "127.0.0.1:0", {"/plotly.js": lambda: Response(content)}) as server,
        socket.create_connection(("127.0.0.1", server.port)) as slow,
    ):
        slow.sendall(b"GET /plotly.js HTTP/1.0\r\nHost: localhost\r\n\r\n")
        time.sleep(1.0)
        with slow.makefile("rb") as answer:
            assert answer.read().endswith(b"\r\n\r\n" + content)


def test_silent_client_does_not_hold_the_end(server: WebServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server, "/")[0] == 200
        ended = threading.Thread(target=server.close)
        ended.start()
        ended.join(5)
        assert not ended.is_alive()


def test_wanted_port_is_taken_where_it_is_free(server: WebServer) -> None:
    other = WebServer("metrics.bind", "127.0.0.1:0", {}, wanted_port=server.port)
    try:
        assert other.port != server.port
        free = other.port
    finally:
        other.close()
    again = WebServer("metrics.bind", "127.0.0.1:0", {}, wanted_port=free)
    again.close()
    assert again.port == free


@pytest.mark.parametrize("bind", ["203.0.113.7:0", "no.such.host.invalid:0", "127.0.0.1:99999"])
def test_address_that_cannot_be_had_is_told_with_the_setting(bind: str) -> None:
    with pytest.raises(SettingError, match=r"metrics\.bind = .*Give another HOST:PORT"):
        WebServer("metrics.bind", bind, {})
