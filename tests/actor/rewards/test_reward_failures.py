"""Failures that time may heal are told from mistakes in the function, whatever client has raised them."""

import errno
import http.client
import io
import socket
import urllib.error
from email.message import Message

import pytest

from offbeat.actor.rewards.failures import failure_of
from offbeat.actor.rewards.samples import RewardUnavailable
from offbeat.common.user_code.environment_host.host import is_transient

aiohttp, httpx = pytest.importorskip("aiohttp"), pytest.importorskip("httpx")
openai, requests = pytest.importorskip("openai"), pytest.importorskip("requests")
urllib3, closed = pytest.importorskip("urllib3"), pytest.importorskip("websockets.exceptions")

REQUEST = httpx.Request("POST", "http://judge/v1")


def of_urllib(status: int) -> Exception:
    return urllib.error.HTTPError("http://judge", status, "", Message(), io.BytesIO())


def of_requests(status: int) -> Exception:
    response = requests.Response()
    response.status_code = status
    return requests.HTTPError(response=response)


def of_httpx(status: int) -> Exception:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(status, request=REQUEST))


def of_openai(status: int) -> Exception:
    return openai.APIStatusError("", response=httpx.Response(status, request=REQUEST), body=None)


def of_aiohttp(status: int) -> Exception:
    return aiohttp.ClientResponseError(request_info=None, history=(), status=status)


@pytest.mark.parametrize("make", [of_urllib, of_requests, of_httpx, of_openai, of_aiohttp])
def test_http_status_decides(make) -> None:
    assert all(is_transient(make(status)) for status in (408, 425, 429, 500, 502, 503, 504, 529))
    assert not any(is_transient(make(status)) for status in (400, 401, 403, 404, 422))


@pytest.mark.parametrize(
    "error",
    [
        RewardUnavailable("budget spent"),
        TimeoutError(),
        ConnectionRefusedError(),
        BrokenPipeError(),
        OSError(errno.EHOSTUNREACH, "no route"),
        socket.gaierror(socket.EAI_AGAIN, "name server busy"),
        urllib.error.URLError(ConnectionRefusedError()),
        ConnectionResetError(),
        http.client.IncompleteRead(b""),
        requests.ConnectionError(),
        requests.ReadTimeout(),
        httpx.ConnectError(""),
        httpx.ReadTimeout(""),
        httpx.RemoteProtocolError(""),
        openai.APIConnectionError(request=REQUEST),
        openai.APITimeoutError(request=REQUEST),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ClientPayloadError(),
        requests.exceptions.ChunkedEncodingError(),
        urllib3.exceptions.ProtocolError(),
        urllib3.exceptions.ReadTimeoutError(None, "", ""),
        closed.ConnectionClosedError(None, None),
    ],
    ids=repr,
)
def test_connections_and_time_limits_may_heal(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        KeyError("answer"),
        ValueError(),
        SystemExit(1),
        FileNotFoundError(errno.ENOENT, "no file"),
        socket.gaierror(socket.EAI_NONAME, "no such host"),
        urllib.error.URLError("unknown url type"),
        requests.exceptions.InvalidURL(),
        requests.exceptions.MissingSchema(),
        httpx.InvalidURL(""),
    ],
    ids=repr,
)
def test_everything_else_is_a_mistake(error: BaseException) -> None:
    assert not is_transient(error)


def test_failure_names_the_users_line_and_keeps_the_users_traceback() -> None:
    def reward() -> float:
        return int("x\ny")

    with pytest.raises(ValueError) as raised:
        reward()
    failure = failure_of(raised.value, __file__)
    line = reward.__code__.co_firstlineno + 1
    assert failure.detail == f"ValueError: invalid literal for int() with base 10: 'x\\ny' ({__file__}:{line})"
    assert not failure.is_transient
    assert "in reward" in failure.traceback
    assert "in test_failure" not in failure.traceback, "the caller is no part of the user's code"
